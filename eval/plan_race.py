"""From the costs of shapes to a recipe whose drafts race: python -m eval.plan RECIPE --race FILE.

What can be wrong with the recipe or the file is found before anything is measured. `eval.shapes` chooses. Torch loads
only where shapes are timed.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq

from distill.devices import Device
from distill.files import write_text
from distill.mistakes import explain
from distill.recipe import Draft, Recipe
from distill.roofline import predict_costs
from engine.costs import MAX_K, Costs, predicted_speedup
from eval.plan_table import shapes_of as sizes_of
from eval.plan_table import target_sizes
from eval.plan_view import CONTEXTS, PLAUSIBLE_ALPHA
from eval.shapes import Ranked, Shape, control_of, pick, rank, shape_of, shapes_within

log = logging.getLogger(__name__)

ALPHA = PLAUSIBLE_ALPHA[0]
LEAST = 2  # shapes without which there is no race
ROUNDS = 7  # cycles timed for each shape and k; there are many shapes


def check_race(recipe: Recipe, path: Path) -> None:
    """Refuses what can not become a race, and a file that is there already.

    Raises:
        ValueError: what it is, keys that do not go with a race among it.
    """
    if recipe.draft.kind == "race":
        raise ValueError("--race: draft.kind is race already; give a recipe of one draft, whose bounds the shapes keep")
    if path.exists() or path.is_symlink():
        raise ValueError(f"--race {path}: is there already, and nothing is overwritten; give another name or remove it")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--race {path}: {path.parent} is no folder to write to; make it first, or give another one")
    raced(recipe, [recipe.draft] * LEAST, path)


def race_steps(recipe: Recipe) -> int:
    """A quarter of all steps; more where the warm-up takes longer."""
    return max(recipe.distill.max_steps // 4, recipe.distill.warmup_steps + 1)


def raced(recipe: Recipe, drafts: Sequence[Draft], path: Path) -> Recipe:
    """The recipe with these drafts as its race.

    Raises:
        ValueError: keys that do not go with a race, such as several devices.
    """
    stage = Draft.model_construct(kind="race", race_steps=race_steps(recipe), candidates=tuple(drafts))
    data = recipe.model_copy(update={"draft": stage}).model_dump(mode="json")
    try:
        return Recipe.model_validate_json(recipe.model_copy(update={"draft": stage}).model_dump_json())
    except ValidationError as error:
        wrong = "; ".join(explain(error, Recipe.model_json_schema(), data, {}))
        raise ValueError(f"--race {path}: the recipe can not become a race as it is: {wrong}") from error


def find_shapes(recipe: Recipe, target: Mapping[str, Any]) -> list[Shape]:
    """The shapes to be timed: the recipe's own where it is within its bounds, all others, and last the control.

    Raises:
        ValueError: a shape of the recipe's own that can not be cut, too few within the bounds, or no control.
    """
    _, config, _ = sizes_of(recipe, target)[0]
    own = shape_of(recipe.draft, target, config)
    others = shapes_within(recipe, target)
    if own is not None and own.fits:
        others = [Shape(own.draft, own.config, own.stored_frac, own.read_frac, own=True), *others]
    else:
        log.warning("the recipe's own shape is out of draft.size_frac and does not race")
    if len(others) < LEAST:
        low, high = recipe.draft.size_frac
        raise ValueError(
            f"draft.size_frac = [{low}, {high}] leaves {len(others)} of the shapes of 1 to 6 layers (counted by "
            f"draft.size_count = {recipe.draft.size_count}); a race needs {LEAST}; set wider bounds"
            + (", or size_count: read" if recipe.draft.size_count == "stored" else "")
        )
    return [*others, control_of(recipe, target)]


def measure_race(recipe: Recipe) -> tuple[list[Shape], list[Costs], str]:
    """Times the shapes on this device with random weights, at the shortest context and batch 1.

    Returns:
        The shapes, their costs (one target's, see `distill.race.level`) and where they were measured, in words.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from distill.models import load_model
    from distill.race import level
    from distill.shape import blank_factors, draft_config, find_target
    from engine.bench import measure_costs
    from engine.model import Runner
    from eval.setup import device_of

    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    found = find_target(recipe)
    shapes = find_shapes(recipe, found.config.to_dict())
    device, dtype = device_of(recipe), getattr(torch, recipe.target.dtype)
    target = load_model(found.folder, recipe.target.dtype, device)
    context = min(CONTEXTS)
    runner = Runner(target, 1, context + 200)
    costs: list[Costs] = []
    for number, shape in enumerate(shapes):
        head = shape.draft.head
        config = draft_config(recipe.model_copy(update={"draft": shape.draft}), found.config)
        with torch.device(device):
            draft = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        shortlist = None if head.size is None else torch.arange(head.size)
        small = Runner(draft, 1, context + 200, shortlist, factors=blank_factors(config, head.rank))
        costs += measure_costs(runner, small, recipe.eval.k, [context], rounds=ROUNDS)
        log.info("shape %d of %d: t %.2f ms, %s", number + 1, len(shapes), costs[-1].t_ms, flow(shape.draft))
    return shapes, level(costs), f"measured on {device} ({torch.get_num_threads()} threads, {recipe.target.dtype})"


def predict_race(recipe: Recipe, device: Device, factors: tuple[float, float]) -> tuple[list[Shape], list[Costs], str]:
    """The same from a device table: nothing is measured or loaded; see `eval.plan_table.predict_plan`."""
    target = target_sizes(recipe)
    shapes, longest = find_shapes(recipe, target), min(MAX_K, max(recipe.eval.k))
    costs = [
        predict_costs(device, target, s.config, (s.draft.head.size, s.draft.head.rank), longest, min(CONTEXTS), 1,
                      factors=factors)
        for s in shapes
    ]  # fmt: skip
    return shapes, costs, f"predicted for {device.name} from published peaks, not measured"


def write_race(
    recipe: Recipe, path: Path, shapes: Sequence[Shape], costs: Sequence[Costs], where: str
) -> tuple[list[Ranked], Ranked]:
    """Chooses, and writes the recipe.

    Args:
        recipe: of one draft.
        path: a file that is not there.
        shapes, costs: side by side, the control last.
        where: the costs are from, in words.

    Returns:
        The chosen shapes, the fastest first, and the control.
    """
    ranked = rank(shapes[:-1], costs[:-1], recipe.eval.k, ALPHA)
    (control,) = rank(shapes[-1:], costs[-1:], recipe.eval.k, ALPHA)
    chosen = pick(ranked, recipe.draft.head.kind)
    raced(recipe, [one.shape.draft for one in (*chosen, control)], path)
    text = recipe_text(recipe, chosen, control, f"{where}, context {costs[0].context}, batch 1", len(ranked))
    check_race(recipe, path)  # measuring took a while
    write_text(path, text)
    return chosen, control


def recipe_text(recipe: Recipe, chosen: Sequence[Ranked], control: Ranked, where: str, num: int) -> str:
    """The race as YAML: what the recipe says itself, and each candidate under a comment with its figures."""
    given = recipe.model_dump(mode="json", exclude_unset=True, exclude={"draft"})
    before: dict[str, Any] = {key: given.pop(key) for key in ("name", "seed", "output_dir", "target") if key in given}
    ceiling = max(predicted_speedup(control.costs, k, 1.0) for k in recipe.eval.k)
    lines = [
        f"# Drafts that race, of {num} shapes within draft.size_frac, by python -m eval.plan --race.",
        f"# Costs: {where}; T {control.costs.T_ms:.2f} ms.",
        f"# Speedups are what each would reach at acceptance {ALPHA:g}, assumed for all alike: they compare costs, not "
        "drafts.",
        "# A larger draft accepts more, and rankings flip after training: that is what the race is for. So the shapes",
        "# differ in depth (serial time) and width (mostly bytes), and the last is a control: does size buy anything?",
        f"# Even the control, all accepted, would give no more than {ceiling:.2f}x here.",
        _block(before),
        "draft:",
        "  kind: race",
        f"  race_steps: {race_steps(recipe)}  # of {recipe.distill.max_steps}",
        "  candidates:",
    ]
    for one in (*chosen, control):
        note = "; the recipe's own shape" if one.shape.own else "; the control" if one is control else ""
        lines += [f"    # {figures(one)}{note}", f"    - {flow(one.shape.draft)}"]
    return "\n".join([*lines, _block(given)])


def figures(one: Ranked) -> str:
    """A shape's figures in words."""
    shape = one.shape
    return (
        f"t {one.costs.t_ms:.2f} ms, {shape.read_frac:.1%} read ({shape.stored_frac:.1%} stored), "
        f"{one.speedup:.2f}x with k = {one.k} at acceptance {ALPHA:g}"
    )


def flow(draft: Draft) -> str:
    """A draft stage in one line of YAML, defaults left out."""
    yaml = YAML()
    yaml.default_flow_style, yaml.width = True, 1 << 16
    out = io.StringIO()
    yaml.dump(draft.model_dump(mode="json", exclude_defaults=True), out)
    return out.getvalue().strip()


def _block(stages: Mapping[str, Any]) -> str:
    """Stages as YAML, lists in one line each."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(one) for key, one in value.items()}
        if isinstance(value, list):
            found = CommentedSeq(value)
            found.fa.set_flow_style()
            return found
        return value

    if not stages:
        return ""
    yaml = YAML()
    yaml.width = 1 << 16
    out = io.StringIO()
    yaml.dump(shown(stages), out)
    return out.getvalue().rstrip("\n")


def race_table(chosen: Sequence[Ranked], control: Ranked, where: str) -> Table:
    """What races, one line each."""
    table = Table(title=f"Drafts that race ({where}; speedup at acceptance {ALPHA:g} for all)")
    for column in ("draft", "stored", "read", "t ms", "k", "speedup", ""):
        table.add_column(column, justify="left" if column in ("draft", "") else "right", overflow="fold")
    for one in (*chosen, control):
        note = "the recipe's own" if one.shape.own else "control" if one is control else ""
        sizes = f"{one.shape.stored_frac:.1%}", f"{one.shape.read_frac:.1%}"
        table.add_row(flow(one.shape.draft), *sizes, f"{one.costs.t_ms:.2f}", str(one.k), f"{one.speedup:.2f}x", note)
    return table
