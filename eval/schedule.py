"""k by domain, context and batch: made of a report's cells, kept as entries, run as a policy. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.schema_eval import batch_of
from eval.candidates import TIE_FRAC
from eval.cells import Cell, Settings
from eval.records import ALL, is_control

# (domain, largest context in tokens, most rows) -> k, as `engine.policy.Schedule` takes it; "" is any domain.
Table = dict[tuple[str, int, int], int]
Entry = dict[str, Any]
# The longest context measured with a domain and batch holds for as much again, as the cost model does; beyond it
# speculation is off.
BEYOND = 2


@dataclass(frozen=True)
class Scheduled:
    """A schedule for each draft, as it was read.

    Attributes:
        source: the file.
        entries: by draft.
        requests: ids of the requests that it was made of; empty where the file does not say.
    """

    source: str
    entries: Mapping[str, Sequence[Entry]]
    requests: frozenset[str] = frozenset()

    @property
    def tables(self) -> dict[str, Table]:
        """What the policies take."""
        return {draft: table_of(entries) for draft, entries in self.entries.items()}

    def about(self, ids: Iterable[str]) -> dict[str, Any]:
        """What a report says of it; `shared_requests` are measured now and made the table: they flatter it."""
        shared = len(self.requests & set(ids))
        return {"source": self.source, "shared_requests": shared, "entries": dict(self.entries)}


def schedules(cells: Sequence[Cell], settings: Settings) -> dict[str, list[Entry]]:
    """The best k of each draft in every domain, context group and batch that was measured.

    Args:
        cells: of `build_cells`; chains with the recipe's own draft temperature count.
        settings: the objective: a latency goes by the paired speedups of each cell, throughput@B by throughput.

    Returns:
        by draft, entries in the order in which a schedule tries them: domain ("" is any: all requests together),
        group, context_tok (the longest prompt and answer that it holds for), batch, k (0 is off: no k was faster than
        none), value, low, high of the best k, num_requests.
    """
    chains = [
        c for c in cells
        if c["chain"] and c["status"] == "ok" and not is_control(c["draft"]) and c["draft_temperature"] is None
        and not c["simulated"]
    ]  # fmt: skip
    pooled = any(c["group"] != ALL for c in chains)
    found: dict[str, list[Entry]] = {}
    for draft in dict.fromkeys(c["draft"] for c in chains):
        mine = [c for c in chains if c["draft"] == draft and not (pooled and c["group"] == ALL)]
        loads = {(c["domain"], c["group"], c["batch"]): None for c in mine}
        entries = [_entry([c for c in mine if (c["domain"], c["group"], c["batch"]) == load], settings)
                   for load in loads]  # fmt: skip
        for place in {(e["domain"], e["batch"]) for e in entries}:
            last = max((e for e in entries if (e["domain"], e["batch"]) == place), key=lambda e: e["context_tok"])
            last["context_tok"] *= BEYOND
        if not any(e["domain"] == "" for e in entries):  # one domain: it is all that is known of any other
            entries += [entry | {"domain": ""} for entry in entries]
        found[draft] = sorted(entries, key=lambda e: (e["domain"] == "", e["domain"], e["batch"], e["context_tok"]))
    return found


def _end(cell: Cell) -> int:
    return int(cell["context_tok"]["max"] + cell["new_tok"]["max"])


def _entry(cells: Sequence[Cell], settings: Settings) -> Entry:
    """The best of one load's draft lengths."""

    def value(cell: Cell) -> float:
        if batch_of(settings.objective) is not None:
            return float(cell["throughput_speedup"] or 0.0)
        return float(cell["latency_speedup"]["objective"])

    best = max(value(c) for c in cells)
    cell = min((c for c in cells if value(c) >= best * (1 - TIE_FRAC)), key=lambda c: c["k"])
    low, high = cell["latency_speedup"]["objective_low"], cell["latency_speedup"]["objective_high"]
    if batch_of(settings.objective) is not None:
        low, high = cell["throughput_ci"] or (None, None)
    return {
        "domain": "" if cell["domain"] == ALL else cell["domain"],
        "group": cell["group"],
        "context_tok": max(_end(c) for c in cells),
        "batch": cell["batch"],
        "k": cell["k"] if value(cell) >= 1 else 0,
        "value": value(cell),
        "low": low,
        "high": high,
        "num_requests": cell["num_requests"],
    }


def table_of(entries: Iterable[Mapping[str, Any]]) -> Table:
    """Entries as `engine.policy.Schedule` takes them."""
    return {(str(e["domain"]), int(e["context_tok"]), int(e["batch"])): int(e["k"]) for e in entries}


def read_schedule(path: str | Path, drafts: Sequence[str], most: int) -> Scheduled:
    """Reads the schedules of some drafts.

    Args:
        path: report.json, or the draft.json of a release, which is about the one draft.
        drafts: names that are measured now.
        most: largest k that they may take.

    Raises:
        ValueError: neither file, a draft without a schedule, or a k beyond `most`.
    """
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"eval.schedule = {path}: no JSON can be read there ({error})") from error
    given = held.get("schedule") if isinstance(held, dict) else None
    if isinstance(given, list) and len(drafts) == 1:
        given = {drafts[0]: given}
    if not isinstance(given, dict):
        raise ValueError(
            f"eval.schedule = {path}: it holds no schedule; give report.json of an evaluation with real acceptance, "
            "or, for one draft, the draft.json of a release"
        )
    missing = [draft for draft in drafts if not given.get(draft)]
    if missing:
        raise ValueError(f"eval.schedule = {path}: it has schedules of {sorted(given)}, none of {', '.join(missing)}")
    try:
        entries = {draft: [dict(entry) for entry in given[draft]] for draft in drafts}
        largest = max(k for draft in drafts for k in table_of(entries[draft]).values())
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"eval.schedule = {path}: an entry has domain, context_tok, batch and k ({error!r})"
        ) from error
    if largest > most:
        raise ValueError(f"eval.schedule = {path}: it takes k = {largest}; the largest of eval.k is {most}")
    ids = {p["request_id"] for c in held.get("cells", []) for p in c.get("pairs", [])}
    return Scheduled(str(path), entries, frozenset(ids))
