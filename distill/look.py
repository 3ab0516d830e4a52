"""--check: what can be said of a recipe before anything is loaded. Files, shapes, memory, disk, time; no torch.

Sizes come from config.json alone. What is not on this machine (a hub id) is named as unknown, never guessed.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distill.counts import count, head_dim, kv_bytes, kv_heads
from distill.fields import sources
from distill.known import BUNDLED, PRE_NORM, PRUNABLE, SUPPORTED, bundled_folder
from distill.readers import TrafficError, is_hub_id
from distill.recipe import Draft, Recipe, rounds_of
from distill.schema_replay import replay_start
from distill.traffic import first_prompts

ROWS = 20
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ADAM = 16  # bytes a trained parameter: float32 weight, gradient and two moments
# recipes/code.yaml on two CPU cores with bf16 products: 380 steps of 1.34 s (6 x parameters read x 4,096 tokens each);
# 68,293 answer tokens of the bundled target in 273 s, 64 rows at a time.
TRAIN_FLOPS, ANSWER_FLOPS = 2.3e11, 6.7e10


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
    problems = [*_traffic(recipe)]
    lines: list[str] = []
    target = _config(recipe.target.model, "target.model", problems, lines)
    source = target  # of a round: what the one before left
    for key, one, draft in _drafts(recipe):
        if draft.kind == "pretrained":
            assert draft.model is not None
            found = _config(draft.model, f"{key}.model", problems, lines)
        else:
            found = None if source is None or target is None else _cut(key, draft, source, problems, target)
        source = found if recipe.draft.rounds else target
        if target is not None and found is not None:
            lines += _estimate(key, one, draft, target, found, problems)
    problems += _teachers(recipe, target)
    if target is not None:
        lines += _answers(recipe, target)
    if problems:
        heading = "a reason" if len(problems) == 1 else f"{len(problems)} reasons"
        raise CheckError("\n".join([f"{name}: {heading} not to start", *(f"  {line}" for line in problems)]))
    return lines


def _drafts(recipe: Recipe) -> list[tuple[str, Recipe, Draft]]:
    """Key, recipe and draft of all that is trained: the candidates of a race, or the rounds and the draft itself."""
    if recipe.draft.candidates is not None:
        return [(f"draft.candidates[{number}]", recipe, one) for number, one in enumerate(recipe.draft.candidates)]
    *rounds, last = rounds_of(recipe)
    return [(f"draft.rounds[{n}]", one, one.draft) for n, one in enumerate(rounds)] + [("draft", last, last.draft)]


def _traffic(recipe: Recipe) -> Iterator[str]:
    """One problem for each split of files whose first rows cannot be used; hub data sets are not opened."""
    for split in ("train", "heldout"):
        named = sources(getattr(recipe.traffic, split))
        here = tuple(name for name in named if name == "bundled" or not is_hub_id(name))
        local = recipe.traffic.model_copy(update={split: here or ("bundled",)})
        try:
            first_prompts(local, "train" if split == "train" else "heldout", ROWS)
        except TrafficError as error:
            yield f"traffic.{split}: {error}"


def _teachers(recipe: Recipe, target: Mapping[str, Any] | None) -> Iterator[str]:
    """What the losses compare the draft with."""
    stage = recipe.distill
    # Path.is_file raises for a very long name.
    if stage.reference is not None and not os.path.isfile(os.path.join(stage.reference, "config.json")):
        yield f"distill.reference {stage.reference}: no config.json: not the folder of a finished draft"
    if target is not None and stage.teacher == "topk" and stage.teacher_topk > target["vocab_size"]:
        rows = target["vocab_size"]
        yield f"distill.teacher_topk = {stage.teacher_topk}: the target's head has {rows} rows; lower it"


def _config(name: str, key: str, problems: list[str], lines: list[str]) -> dict[str, Any] | None:
    """The config.json of a model that lies here, or None; says why not."""
    folder = bundled_folder(name) if name in BUNDLED else Path(name).expanduser()
    path = folder / "config.json"
    if name in BUNDLED and not path.is_file():
        lines.append(f"{key} {name}: not fetched yet, so its sizes are unknown")
        return None
    if folder.suffix.lower() == ".gguf":
        if not folder.is_file():
            problems.append(f"{key} {name}: no such file")
        lines.append(f"{key} {name}: a GGUF file, so its sizes are unknown before it is converted")
        return None
    if not folder.is_dir():
        if folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            problems.append(f"{key} {name}: neither a bundled name ({', '.join(BUNDLED)}) nor a folder nor a hub id")
        else:
            lines.append(f"{key} {name}: a hub id that is not looked up here, so its sizes are unknown")
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {getattr(error, 'strerror', None) or f'not valid JSON: {error}'}")
        return None
    if not isinstance(config, dict) or config.get("model_type") not in SUPPORTED:
        kind = config.get("model_type") if isinstance(config, dict) else None
        problems.append(f"{key} {name}: model type {kind!r} is not supported; supported are {', '.join(SUPPORTED)}")
        return None
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [field for field in needed if not isinstance(config.get(field), int)]:
        problems.append(f"{path}: {', '.join(missing)} missing or no number")
        return None
    return config


def _cut(
    key: str, draft: Draft, source: Mapping[str, Any], problems: list[str], target: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The config of a draft cut from the target or from an earlier round's, or None with what is wrong."""
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
    if len(problems) > before:
        return None
    group = source["num_attention_heads"] // kv_heads(source)
    groups = draft.num_kv_heads or kv_heads(source)
    return {
        **source,
        "num_hidden_layers": len(draft.layers) if draft.layers is not None else draft.num_layers or there,
        "hidden_size": draft.hidden_size or source["hidden_size"],
        "intermediate_size": draft.intermediate_size or source["intermediate_size"],
        "num_key_value_heads": groups,
        "num_attention_heads": groups * group,
        "head_dim": head_dim(source),
    }


def _estimate(
    key: str,
    recipe: Recipe,
    draft: Draft,
    target: Mapping[str, Any],
    config: Mapping[str, Any],
    problems: list[str],
) -> Iterator[str]:
    """Size, training memory, disk and minutes of one draft."""
    head, stage = draft.head, recipe.distill
    if head.size is not None and head.size > config["vocab_size"]:
        problems.append(f"{key}.head.size = {head.size}: the head has {config['vocab_size']} rows")
    stored, read = count(config, head.size)
    if head.rank is not None:
        rows, width = config["vocab_size"], config["hidden_size"]
        stored = count({**config, "tie_word_embeddings": False})[0]
        read = count(config, 0)[1] + head.rank * (rows + width)
    by_stored, by_read = (size / whole for size, whole in zip((stored, read), count(target)))
    frac, (low, high) = by_stored if draft.size_count == "stored" else by_read, draft.size_frac
    if not low <= frac <= high:
        problems.append(
            f"{key}.size_frac = [{low}, {high}]: the draft has {frac:.4f} of the target's parameters by size_count = "
            f"{draft.size_count} (stored {by_stored:.4f}, read {by_read:.4f}); keep "
            f"{'fewer' if frac > high else 'more'} layers, change the widths or the head, or set other bounds"
        )
    trained = stored
    if draft.lora is not None:
        trained = _lora_count(config, draft.lora.rank)
    optimizer = ADAM * trained + 4 * (stored if draft.lora is not None else 0)
    rows = config["vocab_size"] if head.size is None else head.size + stage.outside_rows
    teacher = target["vocab_size"] * target["hidden_size"] * BYTES[recipe.target.dtype]
    chunk = 6 * 4 * min(stage.chunk_tok, stage.tokens_per_step) * rows
    disk = 2 * (4 * stored + 8 * trained) + 4 * stored + BYTES[draft.dtype] * stored
    yield (
        f"{key}: {stored / 1e6:.1f} M parameters stored ({by_stored:.1%} of the target's), {read / 1e6:.1f} M read per "
        f"drafted token ({by_read:.1%})"
    )
    yield (
        f"{key}: training takes about {_gb(optimizer)} for weights, gradients and optimizer, {_gb(teacher)} for the "
        f"target's head and {_gb(chunk)} for logits, activations not counted; on disk {_gb(disk)} of checkpoints and "
        "draft"
    )
    steps = stage.max_steps if recipe.draft.race_steps is None else recipe.draft.race_steps
    if pace := _own_pace(recipe):
        seconds, where = pace
        minutes = steps * seconds / 60
        yield f"{key}: about {minutes:.1f} minutes for {steps} steps at {seconds:.2f} s, measured in {where}"
    elif recipe.trainer.accelerator == "cuda":
        yield f"{key}: minutes unknown: no earlier run of this recipe here; the first 20 steps will tell"
    else:
        spent = 6 * read * stage.tokens_per_step * stage.accumulate * steps
        yield (
            f"{key}: about {spent / TRAIN_FLOPS / 60:.1f} minutes for {steps} steps on a CPU, at the "
            f"{TRAIN_FLOPS / 1e9:.0f} GFLOP/s measured on two cores with bf16 products; a GPU's are unknown"
        )


def _lora_count(config: Mapping[str, Any], rank: int) -> int:
    """Parameters of the updates: rank x (inputs + outputs) of each linear layer."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head_dim(config), kv_heads(config) * head_dim(config)
    one = 2 * (width + queries) + 2 * (width + keys) + 3 * (width + inner)
    return int(config["num_hidden_layers"] * rank * one)


def _answers(recipe: Recipe, target: Mapping[str, Any]) -> Iterator[str]:
    """What writing the answers takes."""
    stage, size = recipe.responses, BYTES[recipe.target.dtype]
    stored, read = count(target)
    prompts = recipe.traffic.num_train
    tokens = prompts * stage.max_new_tok
    longest = min(recipe.traffic.max_prompt_tok, recipe.distill.max_length - 1) + stage.max_new_tok
    cache = min(stage.batch_size, prompts) * longest * kv_bytes(target, size)
    yield (
        f"target: {stored / 1e6:.1f} M parameters, {_gb(stored * size)} as {recipe.target.dtype}; up to {_gb(cache)} "
        "of KV cache while it answers"
    )
    yield from _replay(recipe, target, read)
    # Held-out answers are a few dozen prompts a domain.
    disk = tokens * target["hidden_size"] * 2
    text = f"answers: at most {prompts} x {stage.max_new_tok} tokens, {_gb(disk)} of hidden states on disk"
    if recipe.trainer.accelerator == "cuda":
        yield text
    else:
        minutes = 2 * read * tokens / ANSWER_FLOPS / 60
        yield f"{text}, on a CPU at most about {minutes:.1f} minutes (250 tokens/s measured with 135 M on two cores)"


def _replay(recipe: Recipe, target: Mapping[str, Any], read: int) -> Iterator[str]:
    """What the on-policy stage takes beside its steps, which are the run's: at most, with every proposal refused."""
    stage = recipe.distill.replay
    if stage is None:
        return
    num = min(stage.num_prompts, recipe.traffic.num_train)
    states = num * recipe.responses.max_new_tok * (stage.k + 1)
    total = rounds_of(recipe)[-1].distill.max_steps
    minutes = f", on a CPU at most about {2 * read * states / ANSWER_FLOPS / 60:.1f} minutes to write them"
    yield (
        f"replay: the last {total - replay_start(total, stage.frac)} of {total} steps, on proposals to {num} prompts: "
        f"at most {states / 1e6:.2f} M verified positions, {_gb(2 * states * target['hidden_size'])} of hidden states "
        f"on disk{'' if recipe.trainer.accelerator == 'cuda' else minutes}"
    )


def _own_pace(recipe: Recipe) -> tuple[float, Path] | None:
    """Median seconds of a step in the newest finished run of this name with the same training batch and draft."""
    run = (Path(recipe.output_dir) / recipe.name / "latest").resolve()
    try:
        former = json.loads((run / "recipe.json").read_text())
        rows = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    mine = recipe.model_dump(mode="json")
    for stage, keys in (
        ("distill", ("tokens_per_step", "accumulate", "max_length")),
        ("trainer", None),
        ("draft", None),
    ):
        one, other = (data.get(stage, {}) for data in (former, mine))
        if any(one.get(key) != other.get(key) for key in (keys or other)):
            return None
    spans = [row["step_ms"] for row in rows if "step_ms" in row]
    return (statistics.median(spans) / 1e3, run) if spans else None


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
