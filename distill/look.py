"""--check: what can be said of a recipe before anything is loaded. Files, shapes, memory, disk, time; no torch.

Sizes come from config.json alone: the model's own, or for some large targets the published one that is kept here
(`distill.published`). What is in neither place is named as unknown, never guessed. The figures: `distill.estimate`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distill.counts import head_dim, kv_heads
from distill.devices import Device, DeviceTableError, find_device, read_devices
from distill.estimate import answer_lines, draft_lines, gb
from distill.fields import matches, sources
from distill.files import read_object
from distill.known import (
    BUNDLED,
    EVEN_WIDTH,
    PRE_NORM,
    PRUNABLE,
    SUPPORTED,
    bundled_folder,
    draft_folder,
    text_settings,
)
from distill.published import published_config
from distill.readers import TrafficError, is_hub_id
from distill.recipe import Draft, Recipe, doubts, round_draft, rounds_of
from distill.traffic import Split, first_prompts, load_prompts

# Files up to this size are read whole, as a run reads them; of larger ones the first rows.
WHOLE_BYTES, ROWS = 1 << 26, 1000

GGUF_MAGIC = b"GGUF"
# Training prompts are compared with the held-out ones, so these are looked at first.
SPLITS: tuple[Split, ...] = ("heldout", "train")


class CheckError(ValueError):
    """A recipe that would fail later; the message lists every reason."""


def look(recipe: Recipe, name: str) -> list[str]:
    """Checks what lies on this machine against the recipe, and estimates what a run takes.

    Args:
        recipe: the resolved recipe.
        name: of the recipe, for messages.

    Returns:
        Lines for a person.

    Raises:
        CheckError: files that are missing or broken, a target or a draft shape that cannot be used.
    """
    lines = doubts(recipe)
    counted: dict[Split, int] = {}
    problems = [*_traffic(recipe, lines, counted)]
    if 0 < (there := counted.get("train", 0)) < recipe.traffic.num_train:  # sizes are of what will be answered
        recipe = recipe.model_copy(update={"traffic": recipe.traffic.model_copy(update={"num_train": there})})
    device = _device(recipe, problems)
    target = find_config(recipe.target.model, "target.model", problems, lines)
    reference = _reference(recipe, problems)
    spent: list[float | None] = []
    rows: list[int] = []
    source = target  # of a round: what the one before left
    for key, one, draft in _drafts(recipe):
        if draft.kind == "pretrained":
            assert draft.model is not None
            found = find_config(draft.model, f"{key}.model", problems, lines)
            lines += _head_lost(key, draft)
        else:
            found = None if source is None or target is None else cut_config(key, draft, source, problems, target)
        source = found if recipe.draft.rounds else target
        if draft.head.size is not None and found is not None and draft.head.size > found["vocab_size"]:
            problems.append(f"{key}.head.size = {draft.head.size}: the head has {found['vocab_size']} rows")
        if draft.head.rank is not None and found is not None and draft.head.rank > found["hidden_size"]:
            problems.append(f"{key}.head.rank = {draft.head.rank}: the head is {found['hidden_size']} wide")
        if target is not None and found is not None:
            rows.append(found["vocab_size"])
            lines += draft_lines(key, one, draft, target, found, reference, device, problems, spent)
        else:
            spent.append(None)
    if target is not None:
        kept, shared = recipe.distill.teacher_topk, min([target["vocab_size"], *rows])
        if recipe.distill.teacher == "topk" and kept > shared:
            problems.append(
                f"distill.teacher_topk = {kept}: target and draft share {shared} rows of the head; lower it"
            )
        lines += answer_lines(recipe, target, device, problems, spent)
    known = [minutes for minutes in spent if minutes is not None]
    if len(known) == len(spent) > 1:
        about = f"{sum(known):.1f}"
        if recipe.draft.race_steps is not None:  # goes on with one of its drafts, which is not known yet
            rest = recipe.distill.max_steps / recipe.draft.race_steps - 1
            raced = known[: len(recipe.draft.candidates or ())]
            about = " to ".join(f"{sum(known) + rest * one:.1f}" for one in (min(raced), max(raced)))
        lines.append(f"in all: about {about} minutes before the evaluation, if every answer is as long as it may be")
    if problems:
        heading = "a reason" if len(problems) == 1 else f"{len(problems)} reasons"
        raise CheckError("\n".join([f"{name}: {heading} not to start", *(f"  {line}" for line in problems)]))
    return lines


def _head_lost(key: str, draft: Draft) -> Iterator[str]:
    """One line where a draft with a shortlist is tuned without it."""
    folder = draft_folder(draft.model)
    rows = None if folder is None else read_object(folder / "draft.json", CheckError).get("shortlist")
    if isinstance(rows, list) and len(rows) != draft.head.size:
        yield (
            f"{key}.model {draft.model}: was trained with a shortlist of {len(rows)} rows, which {key}.head = {{kind: "
            f"shortlist, size: {len(rows)}}} keeps; with {draft.head.model_dump(exclude_none=True)} they are not kept"
        )


def _drafts(recipe: Recipe) -> list[tuple[str, Recipe, Draft]]:
    """Key, recipe and draft of all that is trained: the candidates of a race, or the rounds and the draft itself."""
    if recipe.draft.candidates is not None:
        return [(f"draft.candidates[{number}]", recipe, one) for number, one in enumerate(recipe.draft.candidates)]
    *rounds, last = rounds_of(recipe)
    return [(f"draft.rounds[{n}]", one, one.draft) for n, one in enumerate(rounds)] + [("draft", last, last.draft)]


def _traffic(recipe: Recipe, lines: list[str], found: dict[Split, int]) -> Iterator[str]:
    """One problem for each split of files that cannot be used; `lines` gets what was not read, `found` what was."""
    sizes: dict[Split, int] = {}
    hubs: dict[Split, list[str]] = {}
    for split in SPLITS:
        named = sources(getattr(recipe.traffic, split))
        hubs[split] = [name for name in named if name != "bundled" and is_hub_id(name)]
        lines += [f"traffic.{split} {name}: a data set of the hub, which is not opened here" for name in hubs[split]]
        files = [file for name in named if name not in ("bundled", *hubs[split]) for file in matches(name)]
        sizes[split] = sum(file.stat().st_size for file in files if file.is_file())
    # Training prompts are compared with all held-out ones, so they are read whole only if these can be.
    readable = True
    for split in SPLITS:
        readable = readable and not hubs[split] and sizes[split] <= WHOLE_BYTES
        if sources(getattr(recipe.traffic, split)) == ("bundled",):
            continue  # whole as they are, and up to seconds of work
        try:
            if readable:
                found[split] = len(load_prompts(recipe.traffic, split, recipe.seed, recipe.eval.domains))
            else:
                here = tuple(n for n in sources(getattr(recipe.traffic, split)) if n not in hubs[split])
                first_prompts(recipe.traffic.model_copy(update={split: here or ("bundled",)}), split, ROWS)
                if sizes[split]:
                    lines.append(
                        f"traffic.{split}: of {gb(sizes[split])} the first {ROWS:,} rows of each file were read"
                    )
        except TrafficError as error:
            readable = False
            yield f"traffic.{split}: {str(error).removeprefix(f'traffic.{split}: ')}"


def _device(recipe: Recipe, problems: list[str]) -> Device | None:
    """What `trainer.gpu` names; None where it names nothing."""
    if recipe.trainer.gpu is None:
        return None
    try:
        return find_device(recipe.trainer.gpu, read_devices())
    except DeviceTableError as error:
        problems.append(str(error))
        return None


def _reference(recipe: Recipe, problems: list[str]) -> dict[str, Any] | None:
    """The config.json of the draft that tells which positions to train on, where there is one."""
    name = recipe.distill.reference
    if name is None:
        return None
    # Path.is_file raises for a very long name.
    if not os.path.isfile(os.path.join(name, "config.json")):
        problems.append(f"distill.reference {name}: no config.json: not the folder of a finished draft")
        return None
    return find_config(name, "distill.reference", problems, [])


def find_config(name: str, key: str, problems: list[str], lines: list[str]) -> dict[str, Any] | None:
    """The config.json of a model that lies here or whose numbers are kept here, or None.

    Args:
        name: bundled name, folder or hub id.
        key: of the recipe, for messages.
        problems: gets what is wrong with it.
        lines: gets what is not known, and where published numbers are used.
    """
    folder = bundled_folder(name) if name in BUNDLED else Path(name).expanduser()
    path = folder / "config.json"
    if name in BUNDLED and not path.is_file():
        lines.append(f"{key} {name}: not fetched yet, so its sizes are unknown")
        return None
    if folder.suffix.lower() == ".gguf":
        if not folder.is_file():
            problems.append(f"{key} {name}: no such file")
            return None
        try:
            with folder.open("rb") as file:
                start = file.read(len(GGUF_MAGIC))
        except OSError as error:
            problems.append(f"{key} {name}: cannot be read: {error.strerror}")
            return None
        if start != GGUF_MAGIC:
            problems.append(f"{key} {name}: no GGUF file: it begins with {start!r} where one has {GGUF_MAGIC!r}")
            return None
        lines.append(f"{key} {name}: a GGUF file, so its sizes are unknown before it is converted")
        return None
    if not folder.is_dir():
        if folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            problems.append(f"{key} {name}: neither a bundled name ({', '.join(BUNDLED)}) nor a folder nor a hub id")
        elif (published := published_config(name)) is not None:
            lines.append(f"{key} {name}: sizes by its published config.json; the hub is not asked")
            return published
        else:
            lines.append(f"{key} {name}: a hub id that is not looked up here, so its sizes are unknown")
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {getattr(error, 'strerror', None) or f'not valid JSON: {error}'}")
        return None
    if isinstance(config, dict):
        config = text_settings(config) or config
    if not isinstance(config, dict) or config.get("model_type") not in SUPPORTED:
        kind = config.get("model_type") if isinstance(config, dict) else None
        problems.append(f"{key} {name}: model type {kind!r} is not supported; supported are {', '.join(SUPPORTED)}")
        return None
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [field for field in needed if not isinstance(config.get(field), int)]:
        problems.append(f"{path}: {', '.join(missing)} missing or no number")
        return None
    return config


def cut_config(
    key: str, draft: Draft, source: Mapping[str, Any], problems: list[str], target: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """What the config.json of a pruned draft says of its sizes, or None.

    Args:
        key: of the draft in the recipe, for messages.
        draft: its stage, kind: prune.
        source: content of the config.json that it is cut from: the target's, or an earlier round's.
        problems: gets what can not be cut.
        target: the target's config, whose layers `draft.layers` counts; None: `source` is the target, and all rounds of
            the draft come in between.
    """
    if target is None:
        target = source
        for number, one in enumerate(draft.rounds):
            cut = cut_config(f"{key}.rounds[{number}]", round_draft(draft, one), source, problems, target)
            if cut is None:
                return None
            source = cut
    kind, layers, there = source["model_type"], target["num_hidden_layers"], source["num_hidden_layers"]
    whose = "the target" if source is target else "the round before"
    before = len(problems)
    if kind not in PRUNABLE:
        problems.append(f"{key}: a target of type {kind} cannot be pruned ({', '.join(PRUNABLE)} can); use pretrained")
    if draft.layers is not None and draft.layers[-1] >= layers:
        problems.append(f"{key}.layers {list(draft.layers)}: the target has layers 0..{layers - 1}")
    if draft.num_layers is not None and draft.num_layers > there:
        problems.append(f"{key}.num_layers {draft.num_layers}: {whose} has {there}")
    limits = {"hidden_size": source["hidden_size"], "intermediate_size": source["intermediate_size"]}
    for name, limit in (limits | {"num_kv_heads": kv_heads(source)}).items():
        wish = getattr(draft, name)
        if wish is not None and wish > limit:
            problems.append(f"{key}.{name} {wish}: must be in 1..{limit}, {whose}'s")
    narrower = draft.hidden_size is not None and draft.hidden_size < source["hidden_size"]
    if kind not in PRE_NORM and (narrower or draft.bridge):
        name = "bridge" if draft.bridge else "hidden_size"
        problems.append(f"{key}.{name}: {kind} norms what its layers write; it works for {', '.join(PRE_NORM)}")
    groups = draft.num_kv_heads or kv_heads(source)
    heads = groups * (source["num_attention_heads"] // kv_heads(source))
    width = draft.hidden_size or source["hidden_size"]
    if kind in EVEN_WIDTH and len(problems) == before and heads and width % heads:
        wish = f"hidden_size {width // heads * heads or heads}" if kind in PRE_NORM else "another num_kv_heads"
        problems.append(f"{key}.hidden_size {width}: {kind} needs a multiple of its {heads} query heads; try {wish}")
    if len(problems) > before:
        return None
    return {
        **source,
        "num_hidden_layers": len(draft.layers) if draft.layers is not None else draft.num_layers or there,
        "hidden_size": width,
        "intermediate_size": draft.intermediate_size or source["intermediate_size"],
        "num_key_value_heads": groups,
        "num_attention_heads": heads,
        **({"tie_word_embeddings": False} if draft.untie_head else {}),
        "head_dim": head_dim(source),
    }
