"""GO or NO-GO with the reasons: applies the table of eval.rules to the best draft that was measured. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.costs import Costs
from eval.cells import Cell, Settings, overall
from eval.records import ALL, LOOKUP
from eval.rules import RULES, Facts, Rule, lookup_value


def decide(cells: Sequence[Cell], choice: Mapping[str, Any], settings: Settings, num_errors: int = 0) -> dict[str, Any]:
    """The verdict on the best trained draft (on look-up when no draft was measured).

    Args:
        cells: of `build_cells`.
        choice: of `choose`.
        settings: of the report.
        num_errors: failed rows.

    Returns:
        `go`; `status` ("go", "no-go" or "insufficient"); `headline`; `arm` that was judged; `reasons`: every deciding
        rule, passed or not, then the advice that was triggered, the largest predicted gain first. Each reason has
        {rule, figure, threshold, remedy, predicted_gain} and passes, decides, passed, unit. `domains`: the same arm in
        each domain alone.
    """
    pool = overall(cells, settings.domain)
    baseline = next((c for c in pool if c["k"] == 0), None)
    arms = [c for c in choice["ranking"] if c["k"]]
    judged = next((c for c in arms if c["draft"] != LOOKUP), arms[0] if arms else None)
    if baseline is None or judged is None:
        return _insufficient(pool, baseline, settings)
    cell = next(c for c in pool if c["arm"] == judged["arm"])
    facts = Facts(
        cell,
        baseline,
        settings,
        [c for c in cells if _same_arm(c, cell) and c["domain"] != ALL and c["status"] == "ok"],
        lookup_value(choice["ranking"]) if judged["draft"] != LOOKUP else None,
        judged["value"],
        judged["low"],
        num_errors,
        max((d["regret"] for d in choice["by_domain"].values()), default=None),
        Costs.from_json(cell["costs"]) if cell["costs"] and cell["draft"] != LOOKUP else None,
    )
    reasons = [r for r in (_apply(rule, facts) for rule in RULES) if r and (r["decides"] or not r["passed"])]
    go = all(r["passed"] for r in reasons if r["decides"])
    advice = sorted((r for r in reasons if not r["decides"]), key=lambda r: -(r["predicted_gain"] or 0.0))
    return {
        "go": go,
        "status": "go" if go else "no-go",
        "headline": _headline(go, judged, choice, settings),
        "arm": judged["arm"],
        "domains": {c["domain"]: _domain(c, settings) for c in facts.domains},
        "reasons": [r for r in reasons if r["decides"]] + advice,
    }


def _domain(cell: Cell, settings: Settings) -> dict[str, Any]:
    """The judged arm in one domain alone: does it pay there?"""
    speed = cell["latency_speedup"]
    value, low = speed["objective"], speed["objective_low"]
    return {
        "pays": value >= settings.min_speedup and low is not None and low >= 1.0,
        "value": value,
        "low": low,
        "high": speed["objective_high"],
        "alpha": cell["alpha"],
        "tau": cell["tau"],
        "num_requests": cell["num_requests"],
    }


def _same_arm(one: Cell, other: Cell) -> bool:
    return all(one[name] == other[name] for name in ("arm", "group", "batch"))


def _apply(rule: Rule, facts: Facts) -> dict[str, Any] | None:
    """The reason that a rule gives; None where its figure was not measured."""
    figure = rule.figure(facts)
    if figure is None:
        return None
    threshold = getattr(facts.settings, rule.threshold) if isinstance(rule.threshold, str) else rule.threshold
    passed = figure >= threshold if rule.passes == ">=" else figure <= threshold
    return {
        "rule": rule.name,
        "figure": figure,
        "threshold": threshold,
        "remedy": "" if passed else rule.remedy,
        "predicted_gain": None if passed else rule.gain(facts),
        "passes": rule.passes,
        "decides": rule.decides,
        "passed": passed,
        "unit": rule.unit,
    }


def _insufficient(pool: Sequence[Cell], baseline: Cell | None, settings: Settings) -> dict[str, Any]:
    """The verdict where there is not enough to judge."""
    figure = max((c["num_requests"] for c in pool if c["k"]), default=0)
    needed = settings.needed
    why = f"{figure} requests were measured under both the baseline and a draft; {settings.objective} needs {needed}"
    if baseline is None:
        why = "no baseline (k = 0) was measured"
    reason = {
        "rule": "requests measured",
        "figure": figure,
        "threshold": needed,
        "remedy": "measure more: raise eval.num_requests",
        "predicted_gain": None,
        "passes": ">=",
        "decides": True,
        "passed": False,
        "unit": "",
    }
    return {
        "go": False,
        "status": "insufficient",
        "headline": f"Insufficient: {why}.",
        "arm": None,
        "domains": {},
        "reasons": [reason],
    }


def _headline(go: bool, judged: Mapping[str, Any], choice: Mapping[str, Any], settings: Settings) -> str:
    """One sentence with the figure that decided."""
    name = "prompt look-up" if judged["draft"] == LOOKUP else judged["draft"]
    gained = {
        "latency@p50": "the median request is {:.2f}x faster",
        "latency@p95": "the p95 request time is {:.2f}x shorter",
    }[settings.objective]
    if judged["value"] < 1:
        gained = "slower than no speculation, {:.2f}x"
    interval = f"95% interval {judged['low']:.2f} to {judged['high']:.2f}"
    where = "" if choice["domain"] in (None, ALL) else f" on {choice['domain']}"
    what = f"{name} at k = {judged['k']}{where}: {gained.format(judged['value'])} ({interval})"
    if go:
        return f"Speculate with {what}."
    best = choice["ranking"][0]
    if best["draft"] == LOOKUP and judged["draft"] != LOOKUP:
        return f"Prompt look-up at k = {best['k']} is faster ({best['value']:.2f}x) than the best draft, {what}."
    if best["k"] == 0:
        return f"Serve without speculation. The best was {what}."
    return f"Do not ship yet. The best was {what}."
