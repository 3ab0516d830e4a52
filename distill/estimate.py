"""What --check says of sizes, memory, disk and time, from config.json and the device table alone. No torch.

Times on a CPU follow from rates that were measured, times on a GPU from published peaks: they are called predicted.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distill.counts import count, kv_bytes
from distill.devices import Device
from distill.footprint import BYTES, Footprint, footprint
from distill.recipe import Draft, Recipe, load_recipe, longest_prompt, rounds_of
from distill.roofline import LAYER_OPS, step_ms
from distill.schema_replay import replay_start

Config = Mapping[str, Any]
# recipes/code.yaml on two CPU cores. With bf16 products: 380 steps of 1.34 s (6 x parameters read x 4,096 tokens each);
# 68,293 answer tokens of the bundled target in 273 s, 64 rows at a time. In float32 on AVX2: 2,000 steps of 0.58 s and
# 1,024 tokens; 170,265 answer tokens in 28 minutes.
TRAIN_FLOPS = {"bf16-mixed": 2.3e11, "32-true": 1.3e11}
BUNDLED = 1.345e8  # parameters of the bundled target
ANSWER_FLOPS = {"bfloat16": 6.7e10, "float16": 6.7e10, "float32": 2.7e10}


def draft_lines(
    key: str, recipe: Recipe, draft: Draft, target: Config, config: Config, reference: Config | None,
    device: Device | None, problems: list[str], spent: list[float | None],
) -> Iterator[str]:  # fmt: skip
    """Size, memory on each device, disk and minutes of one draft.

    Args:
        key: of the draft in the recipe.
        recipe: resolved.
        draft: its stage.
        target, config: contents of config.json of the target and of the draft.
        reference: the same of `distill.reference`, where there is one.
        device: that `trainer.gpu` names; None where it names none.
        problems: gets what is out of bounds.
        spent: gets the minutes, None where they are not known.
    """
    stored, read = count(config, draft.head.size, draft.head.rank)
    by_stored, by_read = (size / whole for size, whole in zip((stored, read), count(target)))
    frac, (low, high) = by_stored if draft.size_count == "stored" else by_read, draft.size_frac
    if not low <= frac <= high:
        problems.append(
            f"{key}.size_frac = [{low}, {high}]: the draft has {frac:.4f} of the target's parameters by size_count = "
            f"{draft.size_count} (stored {by_stored:.4f}, read {by_read:.4f}); keep "
            f"{'fewer' if frac > high else 'more'} layers, change the widths or the head, or set other bounds"
        )
    yield (
        f"{key}: {stored / 1e6:.1f} M parameters stored ({by_stored:.1%} of the target's), {read / 1e6:.1f} M read per "
        f"drafted token ({by_read:.1%})"
    )
    if draft.head.size is not None:
        whole = count(config)[1]
        yield (
            f"{key}: a server that knows no shortlist reads the whole head: {whole / 1e6:.1f} M per drafted token "
            f"({whole / count(target)[1]:.1%})"
        )
    found = footprint(recipe, draft, target, config, reference)
    yield f"{key}: training takes about {gb(found.total)} on each of {_devices(recipe)}: {_parts(recipe, found)}"
    if device is not None and found.total > device.memory_bytes:
        problems.append(
            f"{key}: training takes about {gb(found.total)} on each device, and {device.name} has "
            f"{gb(device.memory_bytes)}; lower distill.tokens_per_step (and raise accumulate), take a smaller draft or "
            "another teacher, or more devices with trainer.strategy: fsdp"
        )
    # A checkpoint is one whole file, of fsdp's parts too.
    held = 4 * stored + found.optimizer * (recipe.trainer.num_processes if recipe.trainer.strategy == "fsdp" else 1)
    disk = 2 * held + 4 * stored + BYTES[draft.dtype] * stored
    yield f"{key}: on disk {gb(disk)} of checkpoints and draft"
    # The pace of a CPU was measured with cached states and every weight trained.
    usual = recipe.model_copy(update={"distill": recipe.distill.model_copy(update={"teacher": "hidden"})})
    work = found.flops / footprint(usual, draft.model_copy(update={"lora": None}), target, config).flops
    minutes, text = _minutes(recipe, config, draft, found, device, work)
    spent.append(minutes)
    yield f"{key}: {text}"


def _parts(recipe: Recipe, found: Footprint) -> str:
    """Memory by what it is for, "weights 1.12 GB, ...", parts that are 0 left out."""
    teacher = {"live": "the target", "topk": "the target's head"}.get(recipe.distill.teacher, "the target's head")
    named = {
        "weights": found.weights,
        "gradients": found.gradients + found.buckets,
        f"optimizer ({recipe.distill.optimizer})": found.optimizer,
        "bf16 copies": found.copies,
        teacher + (" and the reference" if recipe.distill.reference is not None else ""): found.teacher,
        "gathered layers": found.gathered,
        "activations": found.activations,
        "logits": found.logits,
    }
    return ", ".join(f"{name} {gb(size)}" for name, size in named.items() if size)


def _minutes(
    recipe: Recipe, config: Config, draft: Draft, found: Footprint, device: Device | None, work: float
) -> tuple[float | None, str]:
    """Minutes of training, None where they are not known, and what is said of them.

    `work` is the products of a step over those with cached states and every weight trained.
    """
    stage = recipe.distill
    steps = stage.max_steps if recipe.draft.race_steps is None else recipe.draft.race_steps
    if pace := own_pace(recipe):
        seconds, where = pace
        how = f"for {steps} steps at {seconds:.2f} s, measured in {where}"
    elif device is not None:
        seconds = step_s(device, found)
        how = (
            f"for {steps} steps at {seconds:.2f} s, predicted for {device.name} from its published peaks "
            f"({device.train_frac:.0%} of {device.flops / 1e12:.0f} TFLOP/s), not measured; every token is taken for "
            "an answer's, validation is not counted"
        )
    elif recipe.trainer.accelerator == "cuda":
        return None, (
            "minutes unknown: no earlier run of this recipe here, and trainer.gpu names no device; the first 20 steps "
            "will tell"
        )
    else:
        read = count(config, draft.head.size, draft.head.rank)[1]
        rate = TRAIN_FLOPS[recipe.trainer.precision]
        seconds = work * 6 * read * stage.tokens_per_step * stage.accumulate / rate
        how = (
            f"for {steps} steps on a CPU, at the {rate / 1e9:.0f} GFLOP/s measured on two cores in "
            f"{recipe.trainer.precision}; a GPU's are unknown"
        )
    minutes = steps * seconds / 60
    return minutes, f"about {minutes:.1f} minutes {how}"


def step_s(device: Device, found: Footprint) -> float:
    """Seconds of an optimizer step: products, the exchange between processes, the optimizer's reads and writes."""
    products = found.flops / (device.flops * device.train_frac)
    return products + found.sent_bytes / device.link + found.moved_bytes / (device.bandwidth * device.bandwidth_frac)


def answer_lines(
    recipe: Recipe, target: Config, device: Device | None, problems: list[str], spent: list[float | None]
) -> Iterator[str]:
    """Memory, disk and minutes of writing the answers.

    Args:
        recipe: resolved.
        target: content of its config.json.
        device: that `trainer.gpu` names; None where it names none.
        problems: gets what does not fit.
        spent: gets the minutes at most, None where they are not known.
    """
    stage, size = recipe.responses, BYTES[recipe.target.dtype]
    stored, read = count(target)
    prompts = recipe.traffic.num_train
    tokens = prompts * stage.max_new_tok
    rows = min(stage.batch_size, prompts)
    positions = target.get("max_position_embeddings")
    asked = longest_prompt(recipe, positions if type(positions) is int else None)
    if asked < 1:
        problems.append(
            f"responses.max_new_tok = {stage.max_new_tok}: the target has {positions} "
            "positions, which leave none for a prompt; lower it"
        )
        return
    if asked < recipe.traffic.max_prompt_tok:
        yield (
            f"answers: prompts of more than {asked} tokens are left out of training (distill.max_length = "
            f"{recipe.distill.max_length} and the target's positions hold the answer too), though "
            f"traffic.max_prompt_tok = {recipe.traffic.max_prompt_tok}"
        )
    cache = rows * (asked + stage.max_new_tok) * kv_bytes(target, size)
    yield (
        f"target: {stored / 1e6:.1f} M parameters, {gb(stored * size)} as {recipe.target.dtype}; up to {gb(cache)} "
        "of KV cache while it answers"
    )
    if device is not None and stored * size + cache > device.memory_bytes:
        problems.append(
            f"responses.batch_size = {stage.batch_size}: the target and its KV cache take up to "
            f"{gb(stored * size + cache)}, and {device.name} has {gb(device.memory_bytes)}; lower it, or the lengths"
        )
    if recipe.draft.kind != "pretrained":
        yield (
            f"target: {gb(4 * stored * recipe.trainer.devices)} of host memory on each machine while the draft is cut: "
            "a float32 copy in each of its processes"
        )
    yield from _replay(recipe, target, device, spent)
    # Held-out answers are a few dozen prompts a domain. The states are written whatever the teacher reads later.
    disk = tokens * target["hidden_size"] * 2
    text = f"answers: at most {prompts} x {stage.max_new_tok} tokens, {gb(disk)} of hidden states on disk"
    if recipe.distill.teacher == "topk":
        kept = recipe.distill.teacher_topk
        text += f" and {gb(tokens * (8 * kept + 4))} of the {kept} likeliest tokens"
    elif recipe.distill.teacher == "live":
        text += " (a live teacher does not read them)"
    minutes: float | None = None
    if stage.server:
        text += f"; {len(stage.server)} endpoints write them at a pace that is not known here"
    elif device is not None and target["model_type"] in LAYER_OPS:
        decoding = tokens / rows * step_ms(device, target, rows, 1, asked + stage.max_new_tok, eager=True) / 1e3
        reading = 2 * read * asked * prompts / (device.flops * device.compute_frac)
        minutes = (decoding + reading) / 60
        text += (
            f", at most about {minutes:.1f} minutes, predicted for one {device.name} (one process writes them) from "
            "its published peaks, not measured"
        )
    elif recipe.trainer.accelerator != "cuda":
        rate = ANSWER_FLOPS[recipe.target.dtype]
        minutes = 2 * read * tokens / rate / 60
        text += (
            f", on a CPU at most about {minutes:.1f} minutes ({rate / 2 / BUNDLED:.0f} tokens/s of "
            f"{recipe.target.dtype} measured with 135 M on two cores)"
        )
    spent.append(minutes)
    yield text


def _replay(recipe: Recipe, target: Config, device: Device | None, spent: list[float | None]) -> Iterator[str]:
    """What the on-policy stage takes beside its steps, which are the run's: at most, with every proposal refused."""
    stage = recipe.distill.replay
    if stage is None:
        return
    num = min(stage.num_prompts, recipe.traffic.num_train)
    states = num * recipe.responses.max_new_tok * (stage.k + 1)
    total = rounds_of(recipe)[-1].distill.max_steps
    work = 2 * count(target)[1] * states
    minutes: float | None = None
    text = ""
    if device is not None:
        minutes = work / (device.flops * device.compute_frac) / 60
        text = f", at least {minutes:.1f} minutes, predicted, to write them"
    elif recipe.trainer.accelerator != "cuda":
        minutes = work / ANSWER_FLOPS[recipe.target.dtype] / 60
        text = f", on a CPU at most about {minutes:.1f} minutes to write them"
    spent.append(minutes)
    yield (
        f"replay: the last {total - replay_start(total, stage.frac)} of {total} steps, on proposals to {num} prompts: "
        f"at most {states / 1e6:.2f} M verified positions, {gb(2 * states * target['hidden_size'])} of hidden states "
        f"on disk{text}"
    )


# Keys of distill that leave a step as long as it is.
UNTIMED = {"max_steps", "warmup_steps", "lr", "min_lr_frac", "betas", "weight_decay", "grad_clip", "num_validation"}
UNTIMED |= {"validate_every", "checkpoint_every", "objective"}


def own_pace(recipe: Recipe) -> tuple[float, Path] | None:
    """Median seconds of a step in the newest finished run of this name with the same training batch and draft."""
    if recipe.draft.kind == "race":  # the run's steps are those of its winner
        return None
    run = (Path(recipe.output_dir) / recipe.name / "latest").resolve()
    try:
        former = load_recipe(run / "recipe.json").model_dump(mode="json")
        rows = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    mine = recipe.model_dump(mode="json")
    for stage in ("distill", "trainer", "draft", "target"):
        one, other = (data.get(stage, {}) for data in (former, mine))
        if any(one.get(key) != other.get(key) for key in other.keys() - UNTIMED):
            return None
    spans = [row["step_ms"] for row in rows if "step_ms" in row]
    return (statistics.median(spans) / 1e3, run) if spans else None


def _devices(recipe: Recipe) -> str:
    """ "8 processes (ddp)", "1 process"."""
    num, strategy = recipe.trainer.num_processes, recipe.trainer.strategy
    return f"{num} processes ({'ddp' if strategy == 'auto' else strategy})" if num > 1 else "1 process"


def gb(num_bytes: float) -> str:
    """ "1.25 GB", "3.07 MB"."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
