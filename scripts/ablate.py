"""python -m scripts.ablate RECIPE [key=value ...] --arms FILE --out DIR: one change at a time, at equal steps.

Every arm is the recipe with a few keys changed. All arms train on the same number of the target's answers, for
distill.max_steps steps, and are scored once, after the last step, on the same held-out requests: greedy ones (share of
equal argmaxes) and ones sampled at T = 1 (sum min(p, q)). The first arm of a group is what the others are compared
with, request by request. DIR keeps a line for each arm and seed, so the same command goes on where it stopped; with
--minutes 0 it only prints the tables.

FILE is a YAML list, most wanted first:

    - {group: loss, arm: forward_kl, set: ["distill.loss={forward_kl: 1.0}"], seeds: [0, 1, 2]}
    - {group: answers, arm: greedy, keep: {temperature: 0.0}}       # of the recipe's answers, only these
    - {group: answers, arm: T = 1, set: ["responses.temperatures=[1.0]"]}   # the same prompts, answered again
    - {group: prompts, arm: bundled, set: [traffic.train=bundled]}          # other prompts, as many
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from transformers import PreTrainedModel

from distill.models import load_model
from distill.race import check_all
from distill.recipe import Recipe, load_recipe, recipe_hash
from distill.replay import fit_with_replay
from distill.runs import Run, Stop
from distill.shape import Target, find_target
from distill.stages import prepare
from distill.teacher import ResponseDataset
from distill.tokens import eos_ids
from distill.track import NullTracker
from distill.traffic import load_prompts
from eval.entry import guarded
from scripts.ablate_table import tables
from scripts.judged import SAMPLED, answer, judge, only

KEEP = ("temperature", "reference")


class AblateError(ValueError):
    """An arms file that cannot be used."""


@dataclass(frozen=True)
class Arm:
    """One line of the arms file.

    Attributes:
        group: table that it belongs to.
        arm: its name there.
        set: overrides of the recipe.
        seeds: of batches and drawn rows.
        keep: train on these of the recipe's answers: those of one `temperature`, or to prompts with a `reference`.
    """

    group: str
    arm: str
    set: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    keep: Mapping[str, Any] = field(default_factory=dict)


class Meter(NullTracker):
    """CPU seconds of this process from one optimizer step to the next: other processes' load hardly moves them."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self._last = time.process_time()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes the time of a training step."""
        if "train/loss" in values:
            now = time.process_time()
            self.cpu_s.append(now - self._last)
            self._last = now


def load_arms(path: Path) -> list[Arm]:
    """The arms file.

    Raises:
        AblateError: it cannot be read, or an arm has a key that is not known or lacks one.
    """
    try:
        arms = [_arm(one) for one in YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise AblateError(f"{path}: {error.strerror}") from error
    except (TypeError, AttributeError) as error:
        raise AblateError(f"{path}: a list of {{group, arm, set, seeds, keep}} is wanted: {error}") from error
    for arm in arms:
        if unknown := set(arm.keep) - set(KEEP):
            raise AblateError(f"{path}: arm {arm.arm!r}: keep has {min(unknown)!r}; allowed: {', '.join(KEEP)}")
        if not arm.seeds:
            raise AblateError(f"{path}: arm {arm.arm!r} has no seeds; give at least one, or leave the key out")
    return arms


def _arm(keys: dict[str, Any]) -> Arm:
    found: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
    return Arm(**found)


@dataclass(frozen=True)
class Bench:
    """What all arms share.

    Attributes:
        args: the command line.
        base: the recipe before an arm changes it.
        target, model, eos: the target.
        references: ids of the training prompts with a reference answer.
        answers: folder of the recipe's own answers.
        judged: held-out answers, each a domain of its own so that its score is kept.
    """

    args: argparse.Namespace
    base: Recipe
    target: Target
    model: PreTrainedModel
    eos: tuple[int, ...]
    references: frozenset[str]
    answers: Path
    judged: ResponseDataset

    def dataset(self, arm: Arm, recipe: Recipe) -> ResponseDataset:
        """The answers that an arm trains on: at most --num-answers, to the same prompts where it asks for no others."""
        own = ResponseDataset(self.answers, recipe.distill.max_length)
        allowed = {
            row.id
            for row in own.rows
            if arm.keep.get("temperature", row.temperature) == row.temperature
            and (not arm.keep.get("reference") or row.id in self.references)
        }
        ids, others = self._some(allowed), recipe.traffic != self.base.traffic
        if not others and recipe.responses == self.base.responses:
            return only(own, ids)
        prompts = load_prompts(recipe.traffic, "train", self.base.seed)
        ids = self._some({p.id for p in prompts}) if others else ids
        settings = json.dumps([sorted(ids), *(s.model_dump(mode="json") for s in (recipe.responses, recipe.traffic))])
        folder = self.args.out / f"answers-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
        answer(folder, [p for p in prompts if p.id in ids], recipe, self.target, self.model, self.eos)
        return ResponseDataset(folder, recipe.distill.max_length)

    def _some(self, ids: Collection[str]) -> frozenset[str]:
        return frozenset(sorted(ids, key=_shuffled)[: self.args.num_answers])


def arm_recipe(args: argparse.Namespace, arm: Arm, seed: int) -> Recipe:
    """The recipe with an arm's keys; it validates once, after the last step.

    Raises:
        ValueError: as `load_recipe`; or a teacher or rounds that arms do not have.
    """
    recipe = load_recipe(args.recipe, [*args.overrides, *arm.set, f"seed={seed}"])
    if arm.keep and recipe.traffic != load_recipe(args.recipe, args.overrides).traffic:
        raise AblateError(f"arm {arm.arm!r}: keep is of the recipe's own prompts, and this arm has others; drop one")
    if recipe.distill.teacher == "topk":
        raise AblateError(f"arm {arm.arm!r}: distill.teacher = topk reads files that an arm's answers do not have")
    if recipe.draft.rounds or recipe.draft.kind == "race":
        what = "draft.rounds" if recipe.draft.rounds else "draft.kind = race"
        raise AblateError(f"arm {arm.arm!r}: {what}: an arm trains one draft, in one go; give its shape")
    end = recipe.distill.max_steps
    stage = recipe.distill.model_copy(update={"validate_every": end, "checkpoint_every": end})
    return recipe.model_copy(update={"distill": stage})


def key_of(recipe: Recipe, arm: Arm, args: argparse.Namespace) -> str:
    """What decides a line; an arm that stands in two groups under two names is trained once."""
    told = [recipe_hash(recipe), sorted(arm.keep.items()), args.num_answers, str(args.answers)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _shuffled(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def set_up(args: argparse.Namespace) -> Bench:
    """Loads the target, and writes the held-out answers and, without --answers, the training ones."""
    base = load_recipe(args.recipe, args.overrides)
    target = find_target(base)
    model = load_model(target.folder, base.target.dtype, "cpu")
    eos = tuple(eos_ids(target.config, model.generation_config, target.tokenizer))
    prompts = load_prompts(base.traffic, "train", base.seed)
    judge(args.out / "heldout", base, target, model, eos)
    folder = args.answers or args.out / "answers"
    if args.answers is None:
        answer(folder, prompts, base, target, model, eos)
    judged = ResponseDataset(args.out / "heldout", base.distill.max_length)
    judged.rows = [replace(row, domain=row.id) for row in judged.rows]
    references = frozenset(prompt.id for prompt in prompts if prompt.reference is not None)
    return Bench(args, base, target, model, eos, references, folder, judged)


def run_arm(bench: Bench, arm: Arm, recipe: Recipe, key: str) -> dict[str, Any]:
    """Trains one arm and scores it; its line."""
    torch.manual_seed(recipe.seed)
    dataset = bench.dataset(arm, recipe)
    (sizes,) = check_all(recipe, bench.target)
    run, plan = Run(bench.args.out / "run"), bench.args.out / "plan.json"
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir()
    if plan.exists():  # what a cycle costs plays no part here
        shutil.copyfile(plan, run.plan)
    ready = prepare(recipe, run, bench.target, bench.model, dataset, bench.judged, bench.eos)
    shutil.copyfile(run.plan, plan)
    meter = Meter()
    started = time.monotonic()
    rest = ready.validation, Stop(), meter, None, bench.target, bench.eos, "cpu"
    fit_with_replay(recipe, run, ready.module, dataset, *rest)
    seconds = time.monotonic() - started
    rows = [json.loads(line) for line in (run.folder / "train.jsonl").read_text().splitlines()]
    shutil.rmtree(run.folder)
    score = [row for row in rows if "val/speedup" in row][-1]  # a draft that existed before has one at its start too
    rows = [row for row in rows if "loss" in row]
    figures = ("num_tok", "alpha", "alpha_whole", "overlap", "overlap_whole")
    return {
        "key": key,
        "arm": arm.arm,
        "seed": recipe.seed,
        "date": time.strftime("%Y-%m-%d"),
        "steps": len(rows),
        "supervised_tok": sum(int(row["num_tok"]) for row in rows),
        "answers": len(dataset),
        "loss": rows[-1]["loss"],
        "seconds": seconds,  # with what an on-policy arm answers in between
        "cpu_s_per_step": sorted(meter.cpu_s[1:] or meter.cpu_s)[len(meter.cpu_s[1:]) // 2],
        "stored_frac": sizes.stored_frac,
        "read_frac": sizes.read_frac,
        "requests": {row.id: [score[f"val/{row.id}/{name}"] for name in figures] for row in bench.judged.rows},
    }


def ablate(args: argparse.Namespace) -> str:
    """Trains what has no line yet; the tables of all lines."""
    started, arms = time.monotonic(), load_arms(args.arms)
    if unknown := set(args.group) - {arm.group for arm in arms}:
        raise AblateError(f"--group {min(unknown)}: {args.arms} has {', '.join(sorted({arm.group for arm in arms}))}")
    arms = [arm for arm in arms if arm.group in args.group or not args.group]
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "lines.jsonl"
    lines = {line["key"]: line for line in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    bench: Bench | None = None
    keys: dict[tuple[str, str], list[str]] = {}
    recipes = {(n, seed): arm_recipe(args, arm, seed) for n, arm in enumerate(arms) for seed in arm.seeds}
    for number, arm in enumerate(arms):
        for seed in arm.seeds:
            recipe = recipes[number, seed]
            key = key_of(recipe, arm, args)
            keys.setdefault((arm.group, arm.arm), []).append(key)
            if key in lines or time.monotonic() - started >= 60 * args.minutes:
                continue
            bench = bench or set_up(args)
            lines[key] = run_arm(bench, arm, recipe, key)
            with kept.open("a") as file:
                file.write(json.dumps(lines[key]) + "\n")
            sys.stderr.write(f"{arm.group}: {arm.arm}, seed {seed}: loss {lines[key]['loss']:.4f}\n")
    return tables(keys, lines, SAMPLED)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, trains and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every arm")
    parser.add_argument("--arms", type=Path, required=True, help="YAML file")
    parser.add_argument("--group", action="append", default=[], help="only this one; once for each")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument(
        "--answers", type=Path, help="a run's responses/, written with this recipe; default: write them"
    )
    parser.add_argument("--num-answers", type=int, default=400, help="that each arm trains on")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no arm is started")
    args = parser.parse_intermixed_args(argv)
    if args.num_answers < 1:
        parser.error(f"--num-answers {args.num_answers}: must be at least 1")

    def work() -> int:
        sys.stdout.write(ablate(args))
        return 0

    return guarded(work, "finished arms are kept")


if __name__ == "__main__":
    sys.exit(main())
