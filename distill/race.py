"""draft.kind: race. Several drafts are trained for a few steps each; the one predicted to be fastest goes on.

Each candidate trains in a run folder of its own, race/NUMBER, on the same answers in the same order, along the learning
rate of the whole run. The winner's checkpoint then becomes the run's: it is the run that this draft alone would have
had, stopped at race_steps and resumed, so a race costs the losers' steps and nothing else.

Candidates are ranked by the predicted end-to-end speedup on held-out answers, not by loss or acceptance: a draft that
accepts less may well be the faster one. T, V, sampling and host time are the target's, whatever the draft; differences
between the candidates' measurements are chance and would decide close races. All get the medians, and each its own
draft time as a multiple of the T measured together with it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.control import Judged, by_answer, mark, no_control
from distill.files import read_object, write_json
from distill.fit import fit
from distill.module import TrainingDiverged
from distill.recipe import Recipe
from distill.runs import Run, RunError, Stop
from distill.shape import ShapeError, Sizes, Target, blank_factors, check_draft, draft_config
from distill.shortlist import shortlist_of
from distill.stages import find_costs, prepare, read_plan, trained_on, write_plan
from distill.teacher import ResponseDataset
from distill.track import NullTracker
from distill.validation import Score
from engine.costs import Costs

log = logging.getLogger(__name__)

CYCLES = "cycles.json"  # of each candidate, answer by answer
COLUMNS = ("draft", "stored_frac", "read_frac", "t_ms", "loss", "alpha", "overlap", "tau", "k", "speedup", "step")


@dataclass(frozen=True)
class Answers:
    """What every candidate is trained and judged on.

    Attributes:
        training, held_out: the target's answers.
        eos: ids that end an answer.
    """

    training: ResponseDataset
    held_out: ResponseDataset
    eos: tuple[int, ...]


def contenders(recipe: Recipe) -> list[Recipe]:
    """The recipe once for each draft that it may end with: the candidates of a race, or itself."""
    if recipe.draft.candidates is None:
        return [recipe]
    return [recipe.model_copy(update={"draft": draft}) for draft in recipe.draft.candidates]


def check_all(recipe: Recipe, target: Target) -> list[Sizes]:
    """`check_draft` of every draft that the recipe may end with.

    Raises:
        ValueError: as there; of several candidates a ShapeError with the number.
    """
    if recipe.draft.candidates is None:
        return [check_draft(recipe, target)]
    sizes = []
    for number, one in enumerate(contenders(recipe)):
        try:
            sizes.append(check_draft(one, target))
        except ValueError as error:
            raise ShapeError(f"draft.candidates[{number}] ({name_of(one)}): {error}") from error
    return sizes


def run_race(
    recipe: Recipe,
    run: Run,
    target: Target,
    model: PreTrainedModel,
    sizes: Sequence[Sizes],
    answers: Answers,
    stop: Stop,
    tracker: NullTracker,
) -> tuple[Recipe, list[dict[str, Any]]]:
    """Trains every candidate for race_steps, or goes on where that was interrupted, and makes the best one the run's.

    Args:
        recipe: its draft is a race.
        run: gets race/, race.json, and the winner's checkpoints, plan.json and train.jsonl.
        target, model: the target.
        sizes: of each candidate.
        answers: of the target.
        stop: signals.
        tracker: gets the table and the winner's curves.

    Returns:
        The winner's recipe, and the table: one row a candidate whose training ended, the best first.

    Raises:
        TrainingDiverged: every candidate's training did.
        Interrupted: a signal arrived; finished candidates and the checkpoint of the current one are kept.
    """
    steps, runners = recipe.draft.race_steps, contenders(recipe)
    assert steps is not None
    runs = [Run(run.folder / "race" / str(number), run.attempt) for number in range(len(runners))]
    record = run.folder / "race.json"
    rows: list[dict[str, Any]] = json.loads(record.read_text()) if record.exists() else []
    fracs = [size.frac(one.draft.size_count) for one, size in zip(runners, sizes)]
    if (missing := no_control(fracs)) is not None:
        log.warning("race: %s", missing)
    if len(rows) < len(runners):
        _measure(runners, runs, target, model, answers)
    for number in range(len(rows), len(runners)):
        one, own = runners[number], runs[number]
        log.info("race: candidate %d of %d: %s", number + 1, len(runners), name_of(one))
        ready = prepare(one, own, target, model, answers.training, answers.held_out, answers.eos)
        rest = stop, NullTracker(), own.newest_whole(), steps
        try:
            best = fit(one, own, ready.module, trained_on(one.distill, answers.training), ready.validation, *rest)
        except TrainingDiverged as error:
            log.warning("race: candidate %d is out, its training diverged: %s", number + 1, error)
            rows.append({"candidate": number, "draft": name_of(one), "diverged": str(error)})
            write_json(record, rows)
            stop.check()
            continue
        stop.check()
        write_json(own.folder / CYCLES, _cycles(one, ready.module.validate(ready.validation), int(best["val/best_k"])))
        rows.append({"candidate": number, **_row(one, own, sizes[number], best)})
        write_json(record, rows)
        del ready
    out = [row for row in rows if "diverged" in row]
    if len(out) == len(rows):
        raise TrainingDiverged(f"every candidate of the race diverged, the last one so: {rows[-1]['diverged']}")
    ranked = sorted((row for row in rows if row not in out), key=lambda row: (-row["speedup"], row["candidate"]))
    winner = ranked[0]["candidate"]
    log.info("race of %d steps, by predicted end-to-end speedup:\n%s", steps, table(ranked))
    for shown, text in mark(ranked, fracs, lambda number: _judged(runners[number], runs[number]), recipe.seed):
        (log.info if shown else log.warning)("race: %s", text)
    write_json(record, sorted([*ranked, *out], key=lambda row: row["candidate"]))
    if not run.last.exists():
        tracker.table(steps, "race", COLUMNS, [[row[name] for name in COLUMNS] for row in ranked])
        _adopt(run, runs[winner], tracker)
    for loser in runs:
        shutil.rmtree(loser.folder / "checkpoints", ignore_errors=True)
    log.info("%s goes on", ranked[0]["draft"])
    return runners[winner], ranked


def name_of(recipe: Recipe) -> str:
    """A candidate in a few words."""
    draft = recipe.draft
    if draft.kind == "pretrained":
        words = [str(draft.model)]
    else:
        layers = list(draft.layers) if draft.layers is not None else f"{draft.num_layers} {draft.choose}"
        words = [f"layers {layers}"]
        words += [
            f"{key} {value}"
            for key, value in (
                ("hidden", draft.hidden_size),
                ("ffn", draft.intermediate_size),
                ("kv", draft.num_kv_heads),
            )
            if value is not None
        ]
        words += ["bridge"] * draft.bridge + ["own head"] * draft.untie_head
    head = draft.head.size or draft.head.rank
    words += [f"{draft.head.kind} {head}"] if head else []
    words += [f"lora {draft.lora.rank}"] if draft.lora else []
    return ", ".join(words)


def level(costs: Sequence[Costs]) -> list[Costs]:
    """The same target costs for all, and each its own draft time relative to the T measured beside it.

    Args:
        costs: one for each candidate, of one target, context and batch.

    Returns:
        In the same order.
    """

    def middle(key: str) -> float:
        return statistics.median(getattr(one, key) / one.T_ms for one in costs)

    T = statistics.median(one.T_ms for one in costs)
    verify = {k: T * statistics.median(one.V_ms[k] / one.T_ms for one in costs) for k in costs[0].V_ms}
    return [
        replace(
            one,
            T_ms=T,
            V_ms=verify,
            S_ms=T * middle("S_ms"),
            H_ms=T * middle("H_ms"),
            t_ms=T * one.t_ms / one.T_ms,
            d0_ms=T * one.d0_ms / one.T_ms,
        )
        for one in costs
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a race as lines of text."""
    width = max(len(row["draft"]) for row in rows)
    lines = [
        f"{'draft':<{width}}{'stored':>8}{'read':>7}{'t ms':>8}{'loss':>8}{'alpha':>7}{'tau':>6}{'k':>4}{'speedup':>9}"
    ]
    for row in rows:
        tau = "n/a" if row["tau"] is None else f"{row['tau']:.2f}"
        lines.append(
            f"{row['draft']:<{width}}{row['stored_frac']:>8.1%}{row['read_frac']:>7.1%}{row['t_ms']:>8.2f}"
            f"{row['loss']:>8.3f}{row['alpha']:>7.3f}{tau:>6}{row['k']:>4}{row['speedup']:>8.3f}x"
        )
    return "\n".join(lines)


def _measure(
    runners: Sequence[Recipe], runs: Sequence[Run], target: Target, model: PreTrainedModel, answers: Answers
) -> None:
    """plan.json of every candidate, measured before any is trained, with levelled costs. Weights do not matter."""
    if all(own.plan.exists() for own in runs):
        return
    for one, own in zip(runners, runs):
        own.folder.mkdir(parents=True, exist_ok=True)
        draft = AutoModelForCausalLM.from_config(draft_config(one, target.config), dtype=model.dtype)
        shortlist = shortlist_of(one, target.config, answers.training.rows, answers.eos)
        own.plan.unlink(missing_ok=True)
        factors = blank_factors(draft.config, one.draft.head.rank)
        find_costs(one, own, model, draft, shortlist, answers.held_out, factors)
    plans = [read_plan(own) for own in runs]
    levelled = level([Costs.from_json(plan["costs"][0]) for plan in plans])
    prefill = statistics.median(plan["prefill_ms"] for plan in plans)
    for own, plan, costs in zip(runs, plans, levelled):
        drafted = plan["draft_prefill_ms"] / plan["prefill_ms"] * prefill
        write_plan(own, plan | {"costs": [costs.to_json()], "prefill_ms": prefill, "draft_prefill_ms": drafted})


def _row(recipe: Recipe, run: Run, sizes: Sizes, best: dict[str, Any]) -> dict[str, Any]:
    """A candidate's line of the table: figures of its best validation, on the domain that is trained for."""
    losses = [json.loads(line) for line in (run.folder / "train.jsonl").read_text().splitlines()]
    tail = [row["loss"] for row in losses if "loss" in row][-10:]
    domains = sorted({key.split("/")[1] for key in best if key.count("/") == 2})
    own = [recipe.traffic.domain] if recipe.traffic.domain in domains else domains
    k = best["val/best_k"]

    def mean(figure: str) -> float | None:
        found = [best[f"val/{domain}/{figure}"] for domain in own if f"val/{domain}/{figure}" in best]
        return statistics.fmean(found) if found else None

    return {
        "draft": name_of(recipe),
        "stored_frac": sizes.stored_frac,
        "read_frac": sizes.read_frac,
        "t_ms": Costs.from_json(read_plan(run)["costs"][0]).t_ms,
        "loss": statistics.fmean(tail),
        "alpha": mean("alpha"),
        "overlap": mean("overlap"),
        "tau": mean(f"tau_{k}"),
        "k": k,
        "speedup": best["val/speedup"],
        "step": best["step"],
    }


def _cycles(recipe: Recipe, scores: Sequence[Score], k: int) -> dict[str, Any]:
    """What the kept weights would have done on each held-out answer that they are judged on."""
    judged = [score for score in scores if score.domain == recipe.traffic.domain] or scores
    return {"k": k, "domains": {score.domain: by_answer(score.accepted, k) for score in judged}}


def _judged(recipe: Recipe, run: Run) -> Judged:
    plan = read_plan(run)
    remedy = "; delete race.json and the race is judged again"
    found = read_object(run.folder / CYCLES, RunError, "list of cycles", remedy=remedy)
    prefills = plan["prefill_ms"], plan["draft_prefill_ms"]
    return Judged(Costs.from_json(plan["costs"][0]), *prefills, recipe.eval.max_new_tok, found["k"], found["domains"])


def _adopt(run: Run, winner: Run, tracker: NullTracker) -> None:
    """Makes the winner's files the run's own; the last checkpoint comes last, and marks that it is done."""
    run.last.parent.mkdir(parents=True, exist_ok=True)
    for path in (winner.plan, winner.folder / "train.jsonl"):
        staging = run.folder / f".{path.name}.tmp"
        shutil.copyfile(path, staging)
        os.replace(staging, run.folder / path.name)
    for line in (run.folder / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        values = {name if "/" in name else f"train/{name}": value for name, value in row.items()}
        tracker.log(row["step"], {name: value for name, value in values.items() if "/step" not in name})
    shutil.copyfile(winner.best, run.best)
    os.replace(winner.last, run.last)
