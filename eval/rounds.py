"""The rounds of an evaluation: batch after batch, all arms on all requests, rows and progress written as they come."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)

from distill.recipe import Recipe
from eval.arms import Arm, grid
from eval.budget import Budget
from eval.cells import Settings
from eval.decoders import EvalRequest
from eval.measure import Bench
from eval.pauses import Watch, notice
from eval.race import Race
from eval.records import BASELINE, RequestRow
from eval.resume import ROWS, Progress, Stopped
from eval.rowfile import append_rows
from eval.setup import Traffic, sets_of
from eval.trees import find_tree

log = logging.getLogger(__name__)

# Sets of a cell that are measured whatever the budget: fewer have no interval.
MIN_SETS = 2
SAY_EVERY_S = 10.0


def arms_of(
    recipe: Recipe, bench: Bench, traffic: Traffic, drafts: Sequence[str]
) -> tuple[list[Arm], list[dict[str, Any]]]:
    """All arms, the trees that win among them, and what was found out about trees."""
    arms, stage, about = grid(recipe.eval, drafts), recipe.eval, []
    if stage.tree_nodes is not None:
        typical = median(len(r.ids) for r in traffic.requests) + stage.max_new_tok / 2
        for name in drafts:
            costs = [c for c in bench.costs if (c.draft, c.batch) == (name, 1)]
            nearest = min(costs, key=lambda c: abs(c.context - typical))
            found = find_tree(bench, name, traffic.spare, nearest, stage.k, stage.tree_nodes)
            arms += [] if found.arm is None else [found.arm]
            about.append(found.about)
    return arms, about


def measure_all(
    recipe: Recipe,
    bench: Bench,
    requests: Sequence[EvalRequest],
    arms: Sequence[Arm],
    folder: Path,
    stopped: Stopped | None,
    console: Console,
) -> dict[str, Any]:
    """All rows of all arms, batch by batch, with a progress bar.

    Args:
        recipe: its eval stage counts.
        bench, requests, arms: what is measured.
        folder: gets the rows, and after each request how far it is.
        stopped: what an earlier attempt left there; None is a fresh start.
        console: for the bar.

    Returns:
        what became of the budget and of the race, and whether it stood still.
    """
    stage = recipe.eval
    before = stopped or Stopped({}, Progress(), [])
    budget = Budget(stage.budget_min, len(stage.batches), used_s=before.progress.used_s)
    race = Race(len(requests)) if stage.race else None
    watch = Watch(before.progress.paused_s, before.progress.slept_s)
    book = _Book(folder, bench, budget, race, watch, before.rows)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with watch, Bar(*columns, TimeRemainingColumn(), console=console) as bar:
        for batch in sorted(stage.batches):
            # Trees are known to win at batch 1 alone.
            mine = [arm for arm in arms if batch == 1 or arm.tree is None]
            budget.open()
            total, rows = _batch(recipe, bench, requests, mine, batch, budget, race, before)
            task = bar.add_task(f"batch {batch}: {len(mine)} arms", total=total + stage.warmup)
            said = time.perf_counter()
            for measured, _ in enumerate(book.keep(rows), 1):
                bar.advance(task)
                # A log file shows no bar.
                if not console.is_terminal and time.perf_counter() - said >= SAY_EVERY_S:
                    said = time.perf_counter()
                    log.info("batch %d, %d arms: %d of %d measured", batch, len(mine), measured, total + stage.warmup)
    if budget.skipped:
        left = ", ".join(f"{num} of {cell}" for cell, num in budget.skipped.items())
        log.warning("eval.budget_min = %s is used; not measured: %s", stage.budget_min, left)
    elif stage.budget_min is not None and budget.to_json()["used_min"] > stage.budget_min:
        log.warning("eval.budget_min = %s did not hold the requests that every cell needs", stage.budget_min)
    if race is not None and race.dropped:
        log.info("clearly behind and dropped within %d requests: %s", race.looks[-1], ", ".join(race.dropped))
    paused = watch.to_json()
    for warning in notice(paused):
        log.warning("%s", warning)
    return {"budget": budget.to_json(), "raced": None if race is None else race.to_json(), "paused": paused}


def _batch(
    recipe: Recipe,
    bench: Bench,
    requests: Sequence[EvalRequest],
    arms: Sequence[Arm],
    batch: int,
    budget: Budget,
    race: Race | None,
    before: Stopped,
) -> tuple[int, Iterator[RequestRow]]:
    """How many requests or sets a batch has, and the rows of those that are not measured yet."""
    stage, done = recipe.eval, before.done(batch)
    times = stage.warmup, stage.phased_every
    if done:
        bench.recall(arms, batch, before.progress.policies)

    def takes(name: object, request: EvalRequest, least: int) -> bool:
        if name in done:
            budget.took(request.domain, request.group)
            return True
        return budget.takes(request.domain, request.group, least)

    if batch == 1:
        if {r.id for r in requests} == done:
            return len(requests), iter(())
        least = Settings.of(stage.model_dump()).needed
        keeps = None if race is None else lambda arm: race.keeps(arm.name)
        found = bench.measure(requests, arms, *times, lambda r: takes(r.id, r, least), keeps, done)
        return len(requests), found
    sets = sets_of(requests, batch, stage.batch_sets)
    if {each.index for each in sets} == done:
        return len(sets), iter(())
    found = bench.measure_sets(sets, arms, batch, *times, lambda s: takes(s.index, s.requests[0], MIN_SETS), done)
    return len(sets), found


@dataclass
class _Book:
    """Where rows are written down: each as it comes, and after each whole request how far the evaluation is.

    Numbers and times of rows go on where those of an earlier attempt ended.
    """

    folder: Path
    bench: Bench
    budget: Budget
    race: Race | None
    watch: Watch
    rows: Sequence[RequestRow]

    def __post_init__(self) -> None:
        self._num, self._order, self._later_s = len(self.rows), 0, 0.0
        if self.rows:
            self._order = self.rows[-1].order
            # One clock for the run: a machine that was started again counts from zero.
            ended = max(row.start_s + row.e2e_ms / 1e3 for row in self.rows)
            self._later_s = max(0.0, ended - time.perf_counter())
        for first, row in _marked(self.rows):
            if first and not row.warmup and row.batch == 1 and self.race is not None:
                self.race.keeps(BASELINE)  # it decides when it is asked, before a request
            self._race(row)
        if not self.rows:
            Progress().save(self.folder)

    def keep(self, rows: Iterator[RequestRow]) -> Iterator[None]:
        """Writes rows down; yields after each whole request or set."""
        last = False
        for first, found in _marked(rows):
            if first and last:
                self._whole()
                yield
            row = replace(found, order=found.order + self._order, start_s=found.start_s + self._later_s)
            append_rows(self.folder / ROWS, [row])
            self._num, last = self._num + 1, True
            self._race(row)
        if last:
            self._whole()
            yield

    def _race(self, row: RequestRow) -> None:
        if self.race is not None and row.batch == 1:
            self.race.add(row)

    def _whole(self) -> None:
        pauses = tuple(self.watch.paused_s), tuple(self.watch.slept_s)
        Progress(self._num, self.budget.used_s, self.bench.learnt(), *pauses).save(self.folder)


def _marked(rows: Sequence[RequestRow] | Iterator[RequestRow]) -> Iterator[tuple[bool, RequestRow]]:
    """Rows, each with whether it is the first one of a request or set."""
    seen: tuple[object, ...] = ()
    for row in rows:
        key = row.warmup, row.batch, row.request_id if row.batch == 1 else row.set
        yield key != seen, row
        seen = key
