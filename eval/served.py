"""Requests to a server: one row each, and the cells that are made of them. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from eval.counters import Counters, from_counters, from_timings, total
from eval.records import ALL
from eval.stats import percentiles

FORMAT = 2
BASELINE, SPECULATIVE = "baseline", "server"


@dataclass(frozen=True)
class ServedRow:
    """What one request to a server took.

    Attributes:
        request_id, domain, group: the request; group is its context class.
        arm: baseline or server.
        load: "closed N" (N in flight at all times) or "open R/s" (R arrivals a second, whatever is in flight).
        warmup: excluded from every figure.
        error: None, or why there is no result; the times are then 0.
        prompt_tok, new_tok: by the server's usage.
        own_prompt_tok: tokens of the prompt by the target's own chat template.
        cached_tok: of the prompt's, those the server did not compute again (0: it does not tell).
        finish: finish_reason.
        ttft_ms, e2e_ms: from the arrival to the first piece of text, and to the end of the stream.
        tpot_ms: (last piece - first piece) / (new_tok - 1); None for a single token or piece.
        start_s, end_s: on one clock for the run; the start is the arrival, so that waiting for a free slot counts.
        retried: connections that failed before the request could be sent.
        text: the answer, so that arms can be compared.
        timings: llama-server's; empty without.
    """

    request_id: str
    domain: str
    group: str
    arm: str
    load: str
    warmup: bool
    error: str | None
    prompt_tok: int
    new_tok: int
    own_prompt_tok: int
    cached_tok: int
    finish: str
    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float
    start_s: float
    end_s: float
    retried: int
    text: str
    timings: dict[str, Any]


def append_served(path: Path, rows: Sequence[ServedRow]) -> None:
    """Appends rows to a JSONL file; a new file first gets the line that names the format."""
    with path.open("a", encoding="utf-8") as file:
        if path.stat().st_size == 0:
            file.write(json.dumps({"format": FORMAT, "holds": "served rows"}) + "\n")
        for row in rows:
            file.write(json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) + "\n")


def build_served(
    rows: Sequence[ServedRow],
    counted: Mapping[tuple[str, str, str], Counters | None],
    report: Mapping[str, Any] | None = None,
    arm: str | None = None,
) -> list[dict[str, Any]]:
    """A cell for each load, domain and arm; domain "all" pools them when there are several.

    Args:
        rows: all, warm-up and failed ones included.
        counted: the server's counters over each (arm, load, domain).
        report: report.json of an evaluation, for the engine's figures; None without.
        arm: of that report; None is its choice.

    Raises:
        ValueError: the report has no such arm.
    """
    kept = [row for row in rows if not row.warmup]
    domains = list(dict.fromkeys(row.domain for row in kept))
    cells = []
    for load in dict.fromkeys(row.load for row in kept):
        for domain in domains + [ALL] * (len(domains) > 1):
            here = [r for r in kept if r.load == load and domain in (ALL, r.domain)]
            base = [r for r in here if r.arm == BASELINE]
            for name in dict.fromkeys(row.arm for row in here):
                mine = [row for row in here if row.arm == name]
                spans = [counted.get((name, load, d)) for d in (domains if domain == ALL else [domain])]
                cell = {"arm": name, "load": load, "domain": domain} | _figures(mine) | _acceptance(mine, spans)
                if name != BASELINE:
                    cell |= _against(base, mine)
                    cell["engine"] = engine_figures(report, arm, domain, load) if report else None
                cells.append(cell)
    return cells


def _figures(rows: Sequence[ServedRow]) -> dict[str, Any]:
    good = [row for row in rows if row.error is None]
    busy_s = sum(_span(good, domain) for domain in dict.fromkeys(row.domain for row in good))
    return {
        "num_requests": len(good),
        "num_errors": len(rows) - len(good),
        "errors": dict(Counter(row.error for row in rows if row.error is not None)),
        "retried": sum(row.retried for row in rows),
        "num_other_prompt": sum(row.prompt_tok != row.own_prompt_tok for row in good),
        "ttft_ms": percentiles([row.ttft_ms for row in good]),
        "tpot_ms": percentiles([row.tpot_ms for row in good if row.tpot_ms is not None]),
        "e2e_ms": percentiles([row.e2e_ms for row in good]),
        "new_tok": sum(row.new_tok for row in good),
        "cached_tok": sum(row.cached_tok for row in good),
        "throughput_tok_s": sum(row.new_tok for row in good) / busy_s if busy_s else None,
        "throughput_requests_s": len(good) / busy_s if busy_s else None,
    }


def _span(rows: Sequence[ServedRow], domain: str) -> float:
    """Seconds in which a domain's requests were under way; domains take turns."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted((row.start_s, row.end_s) for row in rows if row.domain == domain):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def _acceptance(rows: Sequence[ServedRow], spans: Sequence[Counters | None]) -> dict[str, Any]:
    """By the server's counters, else by llama-server's timings, else nothing."""
    found = from_counters(total(spans)) or from_timings([row.timings for row in rows if row.error is None])
    return {"acceptance": found}


def _against(base: Sequence[ServedRow], mine: Sequence[ServedRow]) -> dict[str, Any]:
    """Paired speedup over the baseline's requests, per token where the two wrote different lengths."""
    first = {row.request_id: row for row in base if row.error is None}
    pairs = [(first[row.request_id], row) for row in mine if row.error is None and row.request_id in first]
    if not pairs:
        return {"speedup": None, "slower_frac": None, "same_text_frac": None}
    ratios = [(b.e2e_ms / b.new_tok) / (s.e2e_ms / s.new_tok) for b, s in pairs if b.new_tok and s.new_tok]
    return {
        "speedup": {"gmean": geometric_mean(ratios), "num_pairs": len(ratios)} if ratios else None,
        "slower_frac": sum(ratio < 1 for ratio in ratios) / len(ratios) if ratios else None,
        "same_text_frac": sum(b.text == s.text for b, s in pairs) / len(pairs),
    }


def engine_figures(report: Mapping[str, Any], arm: str | None, domain: str, load: str) -> dict[str, Any] | None:
    """What the engine measured and predicted for the same draft: the cell of this domain and, if it has it, batch.

    Raises:
        ValueError: it is no report, or has no such arm.
    """
    if not isinstance(report.get("cells"), list):
        raise ValueError("the report has no cells; give report.json of eval.run")
    arm = arm or (report.get("choice") or {}).get("arm")
    cells = [c for c in report["cells"] if c["arm"] == arm]
    if not cells:
        known = ", ".join(dict.fromkeys(c["arm"] for c in report["cells"]))
        raise ValueError(f"the report has no arm {arm!r}; it has {known}")
    kind, _, number = load.partition(" ")
    batch = int(number) if kind == "closed" else 1
    here = [c for c in cells if c["domain"] == domain and c.get("status", "ok") == "ok"]
    here.sort(key=lambda c: (c["batch"] != batch, c["batch"], c["group"] != ALL))
    if not here:
        return None
    cell, same = here[0], here[0]["batch"] == batch
    figures = {name: cell.get(name) for name in ("arm", "batch", "alpha", "tau", "accept_by_position")}
    speedup = cell.get("latency_speedup")
    # Times at another batch would be no prediction of these.
    times = {
        "speedup": speedup["gmean"] if speedup else None,
        "predicted_speedup": cell.get("predicted_speedup"),
        **{name: cell.get(name) for name in ("ttft_ms", "tpot_ms", "e2e_ms", "throughput_tok_s")},
    }
    return figures | {name: value if same else None for name, value in times.items()}
