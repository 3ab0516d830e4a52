"""A plan for a device that is not here: every cost predicted from a device table and the models' sizes. No torch.

The roofline (`distill.roofline`) gives a baseline step; verify passes and draft steps are that roofline times how far
it was off for them, against the baseline step, on the device where both were measured (`eval.calibrate`). What a GPU
reaches of its own peaks is the table's: this project has measured none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from distill.counts import count
from distill.devices import Device
from distill.look import cut_config, find_config
from distill.recipe import Draft, Recipe
from distill.roofline import Head, predict_costs, serving_bytes
from engine import costs as model
from engine.costs import MAX_K, Costs
from eval.plan_view import CONTEXTS, PLAUSIBLE_ALPHA

CALIBRATION = Path(__file__).with_name("calibration.json")
# Loads of the recipe's own shape, beside the short contexts at batch 1.
LOAD_CONTEXTS = (128, 512, 2048, 8192)
LOAD_BATCHES = (1, 4, 16, 64)


def read_factors(path: Path = CALIBRATION) -> tuple[float, float]:
    """(verify, draft): measured over predicted on the calibration's device, each over that of the baseline step.

    A verify pass of several tokens is not cheaper than a step of one, whatever noise says.

    Raises:
        ValueError: no calibration.
    """
    try:
        factors = json.loads(Path(path).read_text(encoding="utf-8"))["factors"]
        found = max(1.0, float(factors["verify"])), float(factors["draft"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"calibration {path}: {reason}; write one: python -m eval.calibrate RECIPE --to FILE"
        ) from error
    return found


def predict_plan(recipe: Recipe, device: Device, factors: tuple[float, float] = (1.0, 1.0)) -> dict[str, Any]:
    """The plan of a recipe on a device of the table, in the form of a measured plan.json, with `predicted: true`.

    Args:
        recipe: its target, draft shape and draft lengths.
        device: of the table.
        factors: of `read_factors`.

    Returns:
        plan.json: device, target, shapes with both sizes, costs; `fits_bytes` is what weights and KV take at batch 1.

    Raises:
        ValueError: sizes that are not known here, a shape that can not be cut or a type that is not described.
    """
    target = target_sizes(recipe)
    found = shapes_of(recipe, target)
    longest = min(MAX_K, max(recipe.eval.k))
    whole = count(target)
    costs: list[Costs] = []
    shapes: list[dict[str, Any]] = []
    for name, config, head in found:
        loads = [(context, 1) for context in CONTEXTS]
        if not shapes:
            room = int(target.get("max_position_embeddings") or max(LOAD_CONTEXTS) + longest + 1) - longest - 1
            batches = sorted({*LOAD_BATCHES, *recipe.eval.batches})
            loads = [(c, b) for c in sorted({min(c, room) for c in LOAD_CONTEXTS}) for b in batches]
            loads = [load for load in loads if _fits(device, target, config, *load) or load == loads[0]]
        costs += [
            predict_costs(device, target, config, head, longest, context, batch, name, factors)
            for context, batch in loads
        ]
        stored, read = count(config, *head)
        shapes.append(
            {
                "name": name,
                "stored_frac": stored / whole[0],
                "read_frac": read / whole[1],
                "layers": config["num_hidden_layers"],
                "hidden_size": config["hidden_size"],
                "intermediate_size": config["intermediate_size"],
                "head_rows": head[0] or config["vocab_size"],
            }
        )
    return {
        "format": 1,
        "predicted": True,
        "device": device.name,
        "source": device.source,
        "factors": {"verify": factors[0], "draft": factors[1]},
        "dtype": "bfloat16",
        "target": recipe.target.model,
        "memory_bytes": device.memory_bytes,
        "fits_bytes": serving_bytes((target, found[0][1]), 1, min(CONTEXTS)),
        "bandwidth_bytes_per_s": device.bandwidth * device.bandwidth_frac,
        "shapes": shapes,
        "costs": [c.to_json() for c in costs],
    }


def _fits(device: Device, target: Mapping[str, Any], draft: Mapping[str, Any], context: int, batch: int) -> bool:
    return serving_bytes((target, draft), batch, context) <= device.memory_bytes


def shapes_of(recipe: Recipe, target: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Head]]:
    """(name, sizes, head) of the recipe's draft and of its neighbours in depth and head, as `eval.plan.shapes_of`.

    Args:
        recipe: its draft stage.
        target: content of the target's config.json.

    Raises:
        ValueError: a shape that can not be cut.
    """
    stage = recipe.draft
    if stage.candidates is not None:
        return [(f"candidate {n}", *_shape(draft, target)) for n, draft in enumerate(stage.candidates)]
    own, head = _shape(stage, target)
    found = [("recipe", own, head)]
    if stage.kind == "pretrained":
        return found
    for depth in sorted({1, 2, 4, target["num_hidden_layers"] // 2} - {own["num_hidden_layers"]}):
        found.append((f"{depth} layer{'s' * (depth > 1)}", {**own, "num_hidden_layers": depth}, head))
    if head != (None, None):
        found.append(("whole head", own, (None, None)))
    return found


def _shape(draft: Draft, target: Mapping[str, Any]) -> tuple[Mapping[str, Any], Head]:
    problems: list[str] = []
    if draft.kind == "pretrained":
        assert draft.model is not None
        return _sizes(draft.model, "draft.model"), (draft.head.size, draft.head.rank)
    config = cut_config("draft", draft, target, problems)
    if config is None:
        raise ValueError("\n".join(problems))
    return config, (draft.head.size, draft.head.rank)


def target_sizes(recipe: Recipe) -> dict[str, Any]:
    """The target's config.json: its own, or the published one.

    Raises:
        ValueError: neither is here.
    """
    return _sizes(recipe.target.model, "target.model")


def _sizes(name: str, key: str) -> dict[str, Any]:
    problems: list[str] = []
    lines: list[str] = []
    config = find_config(name, key, problems, lines)
    if config is None:
        raise ValueError("\n".join(problems or lines) + "; nothing can be predicted without its config.json")
    return config


def table_of(plans: Sequence[Mapping[str, Any]], min_speedup: float) -> Table:
    """The recipe's shape on several devices, one line each.

    Args:
        plans: of `predict_plan`.
        min_speedup: below it, even for a perfect draft, the answer is not to train.
    """
    context = min(CONTEXTS)
    table = Table(title=f"Predicted, not measured: {plans[0]['target']}, context {context}, batch 1")
    for column in ("device", "T ms", "V(k) ms", "t ms", "k", "break-even alpha", "ceiling", *_alphas(), "answer"):
        table.add_column(column, justify="left" if column in ("device", "answer") else "right")
    for plan in plans:
        if plan["fits_bytes"] > plan["memory_bytes"]:
            need, have = plan["fits_bytes"] / 1e9, plan["memory_bytes"] / 1e9
            blank = ["n/a"] * (6 + len(PLAUSIBLE_ALPHA))
            table.add_row(plan["device"], *blank, f"does not fit: {need:.0f} of {have:.0f} GB")
            continue
        # Of a race its first candidate.
        first = Costs.from_json(plan["costs"][0])
        k = model.best_k(first, PLAUSIBLE_ALPHA[-1])[0] or min(first.ks)
        even = model.break_even_alpha(first, k)
        perfect = model.best_k(first, 1.0)[1]
        likely = [model.best_k(first, alpha)[1] for alpha in PLAUSIBLE_ALPHA]
        answer = "do not train" if perfect < min_speedup else "train" if likely[0] >= min_speedup else "doubtful"
        table.add_row(
            plan["device"],
            f"{first.T_ms:.2f}",
            f"{model.verify_ms(first, k):.2f}",
            f"{first.t_ms:.2f}",
            str(k),
            "none pays" if even is None else f"{even:.2f}",
            f"{model.ceiling(first).speedup:.2f}x",
            *(f"{gain:.2f}x" for gain in likely),
            answer,
        )
    return table


def _alphas() -> list[str]:
    return [f"at alpha {alpha:g}" for alpha in PLAUSIBLE_ALPHA]
