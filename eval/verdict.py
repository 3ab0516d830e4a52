"""GO or NO-GO with the reasons: applies the table of eval.rules to the best draft that was measured. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distill.schema_eval import batch_of
from engine.costs import Costs
from engine.surface import Surface
from eval.cells import Cell, Settings
from eval.choice import judged_pool, rank_key
from eval.facts import Facts
from eval.records import ALL, LOOKUP, PHASES, SELF, arm_name, is_control
from eval.rivals import over_lookup, paying_parts, pays
from eval.rules import DOMAIN_GAP, RULES, apply

# Of fewer requests, or sets, a bootstrap draws nearly the same few again and again: its interval is too narrow.
FEW = 10


def judged_arm(choice: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arm that a verdict is about: the best trained draft's, without one the best control's; None without any."""
    arms = [c for c in choice["ranking"] if c["k"]]
    return next((c for c in arms if not is_control(c["draft"])), arms[0] if arms else None)


def decide(
    cells: Sequence[Cell],
    choice: Mapping[str, Any],
    settings: Settings,
    num_errors: int = 0,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
    surface: Surface | None = None,
    held_out_error: float | None = None,
) -> dict[str, Any]:
    """The verdict on the best trained draft (on the best control, look-up or self-speculation, when none was measured).

    Args:
        cells: of `build_cells`.
        choice: of `choose`.
        settings: of the report.
        num_errors: failed rows.
        sizes: what is known of each draft (layers, head_rows, ...), by name.
        surface: of the judged draft, where the rows gave one.
        held_out_error: of the cost model.

    Returns:
        `go`; `status` ("go", "no-go" or "insufficient"); `headline`; `arm` that was judged; `num_requests` that the
        verdict rests on; `notices`: what the headline must not be read without; `tallest`: the phase with the largest
        share and the remedy for it; `reasons`: every deciding rule, passed or not, then the advice that was triggered,
        the largest predicted gain first. Each reason is what `rules.apply` gives. `domains`: the same arm in each
        domain alone.
    """
    pool = judged_pool(cells, settings.objective, settings.domain)
    baseline = next((c for c in pool if c["k"] == 0), None)
    judged = judged_arm(choice)
    if baseline is None or judged is None:
        return _insufficient(pool, baseline, settings)
    cell = next(c for c in pool if c["arm"] == judged["arm"])
    # A tree, an adaptive policy or a window is no chain of its k on the whole draft's costs: the model has no gains.
    chain = cell["chain"] and bool(cell["costs"]) and cell["draft"] != LOOKUP
    facts = Facts(
        cell=cell,
        baseline=baseline,
        settings=settings,
        domains=[c for c in cells if _like(c, cell, "arm", "group", "batch") and c["domain"] != ALL],
        groups=sorted(
            (c for c in cells if _like(c, cell, "arm", "domain", "batch") and c["group"] != ALL),
            key=lambda c: c["context_tok"]["p50"],
        ),
        siblings=[c for c in pool if c["draft"] == cell["draft"] and c["arm"] != cell["arm"] and c["status"] == "ok"],
        lookup=choice["lookup"],
        value=judged["value"],
        low=judged["low"],
        num_errors=num_errors,
        domain_regret=max((d["regret"] for d in choice["by_domain"].values()), default=None),
        costs=Costs.from_json(cell["costs"]) if chain else None,
        size=(sizes or {}).get(cell["draft"], {}),
        surface=surface if chain else None,
        held_out_error=held_out_error,
    )
    reasons = [r for r in (apply(rule, facts) for rule in RULES) if r and (r["decides"] or not r["passed"])]
    go = all(r["passed"] for r in reasons if r["decides"])
    advice = sorted((r for r in reasons if not r["decides"]), key=lambda r: -(r["predicted_gain"] or 0.0))
    return {
        "go": go,
        "status": "go" if go else "no-go",
        "headline": headline(go, judged, choice, settings),
        "arm": judged["arm"],
        "num_requests": choice["num_requests"],
        "notices": [*notices(judged, choice, cells), *([] if go else in_parts(cells, settings))],
        "tallest": _tallest(cell, advice),
        "domains": {c["domain"]: _domain(c, settings) for c in facts.domains},
        "reasons": [r for r in reasons if r["decides"]] + advice,
    }


def worst_gap(verdict: Mapping[str, Any], cells: Sequence[Cell], judged: Cell | None) -> tuple[str, float] | None:
    """The domain where the judged arm accepts least, and how far under its training domain; None where that passed."""
    figure = next((r["figure"] for r in verdict["reasons"] if r["rule"] == DOMAIN_GAP), None)
    if figure is None or judged is None:
        return None
    apart = [c for c in cells if _like(c, judged, "arm", "group", "batch") and c["domain"] != ALL]
    return min((c for c in apart if c["alpha"] is not None), key=lambda c: c["alpha"])["domain"], figure


def _tallest(cell: Cell, advice: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The phase that takes most of the judged arm's time, and what the table says about it."""
    if not cell["share"]:
        return None
    name, share = max(((n, cell["share"][n]) for n in PHASES), key=lambda found: found[1])
    about = next((r for r in advice if r["bar"] == name), None)
    kept = ("rule", "figure", "threshold", "remedy", "predicted_gain", "unit")
    return {"phase": name, "share": share, "advice": {n: about[n] for n in kept} if about else None}


def _domain(cell: Cell, settings: Settings) -> dict[str, Any]:
    """The judged arm in one domain alone: does it pay there?"""
    speed = cell["latency_speedup"]
    return {
        "pays": pays(cell, settings),
        "value": speed["objective"],
        "low": speed["objective_low"],
        "high": speed["objective_high"],
        "alpha": cell["alpha"],
        "tau": cell["tau"],
        "num_requests": cell["num_requests"],
    }


def _like(one: Cell, other: Cell, *names: str) -> bool:
    """A cell with figures that agrees with another in these."""
    return one["status"] == "ok" and all(one[name] == other[name] for name in names)


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
        "remedies": [{"remedy": "measure more: raise eval.num_requests", "predicted_gain": None}],
        "bar": "",
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
        "num_requests": figure,
        "notices": [],
        "tallest": None,
        "domains": {},
        "reasons": [reason],
    }


def headline(go: bool, judged: Mapping[str, Any], choice: Mapping[str, Any], settings: Settings) -> str:
    """One sentence with the figure that decided and the number of requests that it rests on."""
    gained = {
        "latency@p50": "{:.2f}x faster at the median request",
        "latency@p95": "the p95 request time is {:.2f}x shorter",
    }.get(settings.objective, "{:.2f}x the " + rank_key(settings.objective).removesuffix(" over the baseline's"))
    if judged["value"] < 1:
        gained = "slower than no speculation, {:.2f}x"
    num = choice["num_requests"]
    span = "no interval" if judged["low"] is None else f"95% interval {judged['low']:.2f} to {judged['high']:.2f}"
    interval = f"{span}, {num} request{'s' * (num != 1)}"
    where = "" if choice["domain"] in (None, ALL) else f" on {choice['domain']}"
    what = f"{in_words(judged)}{where}: {gained.format(judged['value'])} ({interval})"
    rival = choice["lookup"]
    if go:
        return f"Speculate with {what}.{_level(rival)}{_ahead(judged, choice)}"
    if choice["ranking"][0]["k"] == 0:
        return f"Serve without speculation. The best was {what}."
    if rival and over_lookup(rival) < 1:
        free = next(c for c in choice["ranking"] if c["arm"] == rival["arm"])
        how = f"is faster ({free['value']:.2f}x) and free"
        if rival["level"]:
            how = f"is free and as fast within the interval ({free['value']:.2f}x; the draft over it {_over(rival)})"
        return f"{in_words(free, True)} {how}; the best draft was {what}."
    return f"Do not ship yet. The best was {what}.{_level(rival)}"


def in_words(arm: Mapping[str, Any], begins: bool = False) -> str:
    """An arm in a sentence."""
    if arm.get("label") and arm["arm"] != arm_name(arm["draft"], arm["k"]):
        return str(arm["label"])
    name = ("Prompt look-up" if begins else "prompt look-up") if arm["draft"] == LOOKUP else arm["draft"]
    return f"{name} at k = {arm['k']}"


def _over(rival: Mapping[str, Any]) -> str:
    return f"{rival['value']:.2f}x, 95% interval {rival['low']:.2f} to {rival['high']:.2f}"


def _level(rival: Mapping[str, Any] | None) -> str:
    """What must be said when a control that costs nothing can not be told from the draft."""
    if rival is None or not rival["level"]:
        return ""
    ratio = f"{rival['lookup_value']:.2f}x; the draft over look-up {_over(rival)}"
    return f" Prompt look-up, which is free, is level with it ({ratio})."


def _own_layers(judged: Mapping[str, Any], choice: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The best arm of self-speculation, beside a draft that is judged."""
    ranked = [] if is_control(judged["draft"]) else choice["ranking"]
    return next((c for c in ranked if c["draft"].startswith(SELF)), None)


def _ahead(judged: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    own = _own_layers(judged, choice)
    if own is None or own["value"] <= judged["value"]:
        return ""
    return f" Self-speculation, which needs no training, was faster ({own['value']:.2f}x)."


def notices(judged: Mapping[str, Any], choice: Mapping[str, Any], cells: Sequence[Cell]) -> list[str]:
    """What the headline must not be read without: on what it rests, and what does as well for free."""
    num, domain = choice["num_requests"], choice["domain"]
    rest = max((c["num_requests"] for c in cells if c["domain"] == ALL and c["k"]), default=num)
    of = f" of {domain}" if domain not in (None, ALL) else ""
    said = [f"The verdict rests on {num} request{'s' * (num != 1)}{of}"
            + (f"; {rest} were measured in all domains together." if rest > num else ".")]  # fmt: skip
    # A throughput's interval is over sets; latencies' is over requests.
    batch = batch_of(choice["objective"])
    sets = max((len(c["sets"]) for c in cells if (c["arm"], c["batch"]) == (judged["arm"], batch)), default=0)
    few, unit = (sets < FEW, "sets (eval.batch_sets)") if sets else (num < FEW, "requests")
    if few:
        said.append(
            f"An interval over so few {unit.split(' ')[0]} says little of others: measure {FEW} {unit} or more."
        )
    rival = choice["lookup"]
    if rival:
        ratio = f"the draft over it is {_over(rival)}"
        apart = f"too few {unit.split(' ')[0]} to tell it from chance" if few else "the difference is more than chance"
        verdict = "no difference was shown" if rival["level"] else apart
        said.append(f"Prompt look-up, the free control, gives {rival['lookup_value']:.2f}x: {ratio}; {verdict}.")
        if choice["arm"] == rival["arm"] and over_lookup(rival) >= 1:
            said.append("The two are tied, and the rule for ties takes look-up: the ranking marks it as chosen.")
    elif not is_control(judged["draft"]):
        said.append("Prompt look-up, the free control, was not measured.")
    own = _own_layers(judged, choice)
    if own is not None:
        who = in_words(own)
        said.append(f"Self-speculation, a control that needs no training, gives {own['value']:.2f}x ({who}).")
    return said


def in_parts(cells: Sequence[Cell], settings: Settings, most: int = 3) -> list[str]:
    """Beside a no-go: the parts of the traffic where a draft does pay, each by its own interval."""
    found, num = paying_parts(cells, settings)
    if num < 2:
        return []
    if not found:
        return [f"No draft pays in any of the {num} parts (domain, context and batch) that were measured."]
    told = [
        f"{part['domain']}, {part['group']}, batch {part['batch']}: {in_words(part)} {part['value']:.2f}x "
        f"({part['low']:.2f} to {part['high']:.2f}"
        + ("" if part["lookup_value"] is None else f"; look-up {part['lookup_value']:.2f}x")
        + ")"
        for part in found[:most]
    ]
    rest = f"; and {len(found) - most} more" if len(found) > most else ""
    return [f"In {len(found)} of {num} parts a draft pays, each by its own interval: {'; '.join(told)}{rest}."]
