"""Rows -> cells: every metric of one (draft, k, domain, group, batch), as report.json holds it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

import numpy as np

from distill.schema_eval import batch_of
from engine import costs as model
from engine.costs import Costs
from eval import stats
from eval.cell_parts import (
    Cell,
    all_shares,
    eager_ms,
    launch_bound_frac,
    limits,
    mean_request,
    measured_verify_ms,
    policy_words,
    prediction,
    prefix_spread_frac,
    waterfall,
)
from eval.clocks import compare_clocks
from eval.records import ALL, BASELINE, LOOKUP, RequestRow, is_chain, is_fixed
from eval.speedup import OBJECTIVES, latency_speedup, pair
from eval.throughput import equal_memory, memory_bytes, throughput


@dataclass(frozen=True)
class Settings:
    """What the figures and the verdict depend on besides the rows.

    Attributes:
        objective: what the choice goes by, "latency@p50", "latency@p95" or "throughput@B".
        min_speedup: of the objective, for a go.
        min_requests: fewer give "insufficient".
        bootstrap: resamples.
        seed: of the bootstrap.
        domain: what the draft is for and was trained on: the verdict and the choice are about it. "" or one that was
            not measured judges all domains together.

    Raises:
        ValueError: an unknown objective, or a number out of range.
    """

    objective: str = "latency@p50"
    min_speedup: float = 1.05
    min_requests: int = 5
    bootstrap: int = 2000
    seed: int = 0
    domain: str = ""

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES and batch_of(self.objective) is None:
            allowed = ", ".join((*OBJECTIVES, "throughput@B"))
            raise ValueError(f"objective is {self.objective!r}; allowed are {allowed}")
        if self.min_requests < 1 or self.bootstrap < 1 or not self.min_speedup > 0:
            raise ValueError(
                f"min_requests {self.min_requests}, bootstrap {self.bootstrap} and min_speedup {self.min_speedup} "
                "must be above 0"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Settings:
        """Takes what it knows out of a larger mapping."""
        return cls(**{f.name: settings[f.name] for f in fields(cls) if f.name in settings})

    @property
    def latency(self) -> str:
        """The latency that cells show beside a throughput objective."""
        return self.objective if self.objective in OBJECTIVES else OBJECTIVES[0]

    @property
    def needed(self) -> int:
        """Requests below which the objective is not a number."""
        return max(self.min_requests, stats.MIN_REQUESTS_P95) if self.objective == "latency@p95" else self.min_requests


def select(
    rows: Iterable[RequestRow], domain: str = ALL, group: str = ALL, batch: int | None = None
) -> list[RequestRow]:
    """Rows of one domain, group and batch; "all" takes every one."""
    return [
        r for r in rows if domain in (ALL, r.domain) and group in (ALL, r.group) and (batch is None or r.batch == batch)
    ]


def build_cells(rows: Sequence[RequestRow], plan: Mapping[str, Any] | None, settings: Settings) -> list[Cell]:
    """All cells, the pooled ones (domain or group "all") included.

    Args:
        rows: measured rows of every arm.
        plan: plan.json, for predictions, prefix KV and memory; None without.
        settings: of the report.

    Returns:
        cells in the order batch, group, domain, arm; the baseline is an arm.
    """
    domains = list(dict.fromkeys(r.domain for r in rows))
    groups = list(dict.fromkeys(r.group for r in rows))
    domains = domains + [ALL] * (len(domains) > 1)
    groups = groups + [ALL] * (len(groups) > 1)
    cells = []
    for batch in sorted({r.batch for r in rows}):
        for group in groups:
            for domain in domains:
                here = select(rows, domain, group, batch)
                everywhere = [] if domain == ALL else select(rows, ALL, group, batch)
                other = [r for r in everywhere if r.domain != domain]
                cells += _cells_here(here, other, domain, group, plan, settings)
    for cell in cells:
        if cell["status"] == "ok":
            cell["throughput_speedup_equal_memory"] = equal_memory(cell, cells)
    return cells


def overall(cells: Sequence[Cell], domain: str = "") -> list[Cell]:
    """What latency is judged by: the cells at the smallest batch of the domain that the draft is for.

    Args:
        cells: of `build_cells`.
        domain: where nothing of it was measured (a draft for mixed traffic, say), all domains together.
    """
    if not cells:
        return []
    batch = min(c["batch"] for c in cells)
    here = [c for c in cells if c["batch"] == batch]
    if not any(c["domain"] == domain for c in here):
        domain = ALL if any(c["domain"] == ALL for c in here) else here[0]["domain"]
    group = ALL if any(c["group"] == ALL for c in here) else here[0]["group"]
    return [c for c in here if c["domain"] == domain and c["group"] == group]


def _cells_here(
    rows: list[RequestRow],
    other: list[RequestRow],
    domain: str,
    group: str,
    plan: Mapping[str, Any] | None,
    settings: Settings,
) -> list[Cell]:
    """Cells of one domain, group and batch."""
    arms: dict[str, list[RequestRow]] = {}
    for row in rows:
        arms.setdefault(row.arm, []).append(row)
    baseline = arms.get(BASELINE, [])
    away = [r for r in other if r.arm == BASELINE]
    runners = {r.runner for r in rows if is_fixed(r)}
    fitted = {name: stats.fit_costs(baseline, _ladder(rows, name), name) for name in runners}
    moved = {name: stats.fit_costs(away, _ladder(other, name), name) for name in runners}
    made = []
    for arm, mine in sorted(arms.items(), key=lambda item: (item[1][0].draft, item[1][0].k, item[0])):
        runner = mine[0].runner
        cell = _cell(mine, baseline, fitted.get(runner), plan, moved.get(runner), settings)
        made.append({"arm": arm, "domain": domain, "group": group} | cell)
    return made


def _ladder(rows: Iterable[RequestRow], runner: str) -> list[list[RequestRow]]:
    """Rows of one draft, or of one with its window, with chains of fixed length, a list for each k."""
    found: dict[int, list[RequestRow]] = {}
    for row in rows:
        if row.runner == runner and is_fixed(row):
            found.setdefault(row.k, []).append(row)
    return [found[k] for k in sorted(found)]


def _cell(
    rows: list[RequestRow],
    baseline: list[RequestRow],
    costs: Costs | None,
    plan: Mapping[str, Any] | None,
    moved: Costs | None,
    settings: Settings,
) -> Cell:
    """Every metric of one arm in one place."""
    one, pairs = rows[0], pair(baseline, rows)
    speedup = latency_speedup(pairs, settings.latency, settings.bootstrap, settings.seed) if one.k else None
    # A tree's passes are none of the measured chains, a cycle of an adaptive policy may be longer than all of them.
    costs = None if one.tree or (costs is not None and one.k > max(costs.V_ms)) else costs
    accepted = stats.acceptance(rows, settings.bootstrap, settings.seed)
    share, closure = stats.shares(rows)
    # Repeats would weigh their requests more.
    each = [found[0] for found in stats.by_request(rows).values()]
    contexts, lengths = [r.context_tok for r in each], [r.new_tok for r in each]
    planned = model.costs_for(plan, one.runner, round(fmean(contexts)), one.batch) if plan and one.k else None
    flow = throughput(rows, baseline, settings.bootstrap, settings.seed)
    plain = [found[0] for found in stats.by_request(baseline).values()]
    request, judged = mean_request(each, plain), mean_request(each, plain, batch_of(settings.objective) == one.batch)
    cell: Cell = {
        "draft": one.draft,
        "label": one.label or one.arm,
        "policy": policy_words(one),
        "k": one.k,
        "chain": is_chain(one),
        "rule": one.rule,
        "tree": list(one.tree),
        "draft_temperature": one.draft_temperature,
        "recent": one.recent,
        "simulated": list(one.simulated),
        "batch": one.batch,
        "device": one.device,
        "dtype": one.dtype,
        "temperature": sorted({r.temperature for r in rows}),
        "context_tok": {"p50": float(np.median(contexts)), "max": max(contexts)},
        "new_tok": {"p50": float(np.median(lengths)), "max": max(lengths)},
        "num_requests": len(pairs) if one.k else len(stats.by_request(stats.bare(rows))),
        "status": "ok",
        **accepted,
        "T_ms": stats.token_ms(baseline),
        "decode_ms_per_tok": stats.token_ms(rows),
        "t_ms": costs.t_ms if costs and one.draft != LOOKUP else None,
        "t_eager_ms": eager_ms(one, planned, costs),
        "t_graph_ms": planned.t_graph_ms if planned else None,
        "launch_bound_frac": launch_bound_frac(planned),
        "V_ms": model.verify_ms(costs, one.k) if costs and one.policy == "fixed" else measured_verify_ms(rows, share),
        "costs": costs.to_json() if costs else None,
        "share": all_shares(rows, share, costs, planned),
        "prefix_kv_spread_frac": prefix_spread_frac(planned),
        "closure_frac": closure,
        "clocks": compare_clocks(rows, settings.bootstrap, settings.seed),
        "noise_frac": stats.noise_frac(rows),
        "latency_speedup": speedup,
        "slower_frac": speedup["slower_frac"] if speedup else None,
        **flow,
        "throughput_speedup_equal_memory": None,
        "memory_bytes": memory_bytes(one, contexts, lengths, (plan or {}).get("memory")),
        "same_text_frac": fmean(p.same_text for p in pairs) if pairs and one.k and not one.simulated else None,
        "bandwidth_frac": planned.bandwidth_frac if planned else None,
        "request": judged,
        "pairs": [asdict(p) for p in pairs] if one.k else [],
        **stats.timing(rows),
        **limits(one, costs, judged, speedup),
        **prediction(one, planned, moved, accepted, request, speedup),
    }
    cell["waterfall"] = waterfall(cell, costs, rows)
    return cell if cell["num_requests"] >= settings.min_requests else _insufficient(cell)


def _insufficient(cell: Cell) -> Cell:
    """Keeps the counts and the load; no figure that a handful of requests can not carry."""
    kept = (
        "draft",
        "label",
        "policy",
        "k",
        "chain",
        "rule",
        "tree",
        "draft_temperature",
        "recent",
        "simulated",
        "batch",
        "device",
        "dtype",
        "temperature",
        "context_tok",
        "new_tok",
        "num_requests",
    )
    counts = ("num_cycles", "num_cut", "num_plain", "drafted", "accepted", "request")
    empty: Cell = {"accept_by_position": [], "histogram": [], "pairs": [], "waterfall": [], "sets": []}
    blank = {name: None for name in cell} | empty
    return blank | {name: cell[name] for name in kept + counts} | {"status": "insufficient"}
