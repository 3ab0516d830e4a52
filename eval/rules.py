"""The one table of rules: what is looked at, the threshold, the remedy, and what the remedy is predicted to give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine import costs as model
from engine.costs import Costs
from eval.cells import Cell, Settings
from eval.records import LOOKUP


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        cell: the arm under judgement, over all requests.
        baseline: k = 0 on the same requests.
        domains: the same arm by domain.
        settings: of the report.
        lookup: objective of the best look-up arm; None when none was measured.
        value, low: objective of the arm under judgement and its interval's low end.
        num_errors: failed rows.
        domain_regret: the most that the common choice loses in any domain against that domain's best arm.
        costs: of the arm, for "what if"; None for look-up, whose proposals the model does not describe.
    """

    cell: Cell
    baseline: Cell
    settings: Settings
    domains: Sequence[Cell] = ()
    lookup: float | None = None
    value: float | None = None
    low: float | None = None
    num_errors: int = 0
    domain_regret: float | None = None
    costs: Costs | None = None

    def share(self, name: str) -> float | None:
        """A phase's share, None where it was not measured."""
        return (self.cell["share"] or {}).get(name)

    def predicted(
        self, costs: Costs | None = None, accept: Sequence[float] | None = None, k: int | None = None
    ) -> float:
        """Speedup of this cell's mean request, with some part of the model replaced."""
        used, kept = costs or self.costs, accept or positions(self.cell)
        assert used is not None
        return model.predicted_speedup(used, self.cell["k"] if k is None else k, kept, **self.cell["request"])


def positions(cell: Cell) -> list[float]:
    """Measured conditional acceptances of a cell."""
    return [p["c"] for p in cell["accept_by_position"] if p["c"] is not None]


def _gain(facts: Facts, **change: Any) -> float | None:
    """Predicted speedup after the change over that before, minus 1."""
    if facts.costs is None or not positions(facts.cell):
        return None
    return facts.predicted(**change) / facts.predicted() - 1


def _cheaper(**parts: float) -> Callable[[Facts], float | None]:
    return lambda f: _gain(f, costs=model.scaled(f.costs, **parts)) if f.costs else None


def _more_accepted(step: float) -> Callable[[Facts], float | None]:
    return lambda f: _gain(f, accept=[min(1.0, c + step) for c in positions(f.cell)])


def _best_k(facts: Facts) -> float | None:
    if facts.costs is None or not positions(facts.cell):
        return None
    _, best = model.best_k(facts.costs, positions(facts.cell), **facts.cell["request"])
    return max(0.0, best / facts.predicted() - 1)


def _captured(facts: Facts) -> float | None:
    eager, graph = facts.cell["t_eager_ms"], facts.cell["t_graph_ms"]
    return _cheaper(draft=graph / eager)(facts) if eager and graph else None


def _launch_bound(facts: Facts) -> float | None:
    eager, graph = facts.cell["t_eager_ms"], facts.cell["t_graph_ms"]
    return 1 - graph / eager if eager and graph else None


def _less_prefix(facts: Facts) -> float | None:
    prefix, verify = facts.share("prefix_kv"), facts.share("verify")
    return _cheaper(verify=1 - 0.5 * min(1.0, prefix / verify))(facts) if prefix and verify else None


def _trained(facts: Facts) -> Cell | None:
    return next((c for c in facts.domains if c["domain"] == facts.settings.domain and c["alpha"] is not None), None)


def _worst(facts: Facts) -> Cell | None:
    return min((c for c in facts.domains if c["alpha"] is not None), key=lambda c: c["alpha"], default=None)


def _domain_gap(facts: Facts) -> float | None:
    trained, worst = _trained(facts), _worst(facts)
    return trained["alpha"] - worst["alpha"] if trained and worst else None


def _domain_gain(facts: Facts) -> float | None:
    trained, worst = _trained(facts), _worst(facts)
    if not trained or not worst or not worst["costs"] or not positions(worst):
        return None
    there = Facts(worst, facts.baseline, facts.settings, costs=Costs.from_json(worst["costs"]))
    return _gain(there, accept=positions(trained))


def _own_choice(facts: Facts) -> float | None:
    return 1 / (1 - facts.domain_regret) - 1 if facts.domain_regret is not None else None


def _margin(facts: Facts) -> float | None:
    alpha, needed = facts.cell["alpha"], facts.cell["alpha_break_even"]
    return alpha - needed if alpha is not None and needed is not None else None


def _first(facts: Facts) -> float | None:
    """A_1: unlike the pooled alpha it does not fall with k, so one threshold serves every k."""
    return next((p["A"] for p in facts.cell["accept_by_position"]), None)


def _perfect(facts: Facts) -> float | None:
    return facts.predicted(accept=[1.0]) if facts.costs else None


def _tail(facts: Facts) -> float | None:
    ours, base = facts.cell["e2e_ms"], facts.baseline["e2e_ms"]
    return base["p95"] / ours["p95"] if ours and base else None


def _exact(facts: Facts) -> float | None:
    greedy_fp32 = facts.cell["dtype"] == "float32" and facts.cell["temperature"] == [0.0]
    return facts.cell["same_text_frac"] if greedy_fp32 else None


def _nearly_exact(facts: Facts) -> float | None:
    greedy_low = facts.cell["dtype"] != "float32" and facts.cell["temperature"] == [0.0]
    return facts.cell["same_text_frac"] if greedy_low else None


def _of_cell(name: str) -> Callable[[Facts], float | None]:
    return lambda f: f.cell[name]


def _none(facts: Facts) -> float | None:
    return None


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
        name: what is asked.
        figure: what is looked at; None where it was not measured (the rule is then silent).
        passes: ">=" or "<=" threshold.
        threshold: a number, or the name of a setting.
        remedy: what to do when it does not pass.
        gain: predicted change of the speedup by the remedy, as a fraction; None where the model can not say.
        decides: a failure means no-go; else it is advice.
        unit: how to print the figure: "x", "%", or "" for a plain number.
    """

    name: str
    figure: Callable[[Facts], float | None]
    passes: str
    threshold: float | str
    remedy: str
    gain: Callable[[Facts], float | None] = _none
    decides: bool = False
    unit: str = "%"


RULES: tuple[Rule, ...] = (
    # -- go or no-go --
    Rule("requests measured", lambda f: float(f.cell["num_requests"]), ">=", "needed",
         "measure more: raise eval.num_requests", decides=True, unit=""),
    Rule("end-to-end speedup by the objective", lambda f: f.value, ">=", "min_speedup",
         "do not serve with this draft and k; the causes are named below", decides=True, unit="x"),
    Rule("low end of its 95% interval, against no speculation", lambda f: f.low, ">=", 1.0,
         "not surely faster: measure more requests, or do not serve with it", decides=True, unit="x"),
    Rule("draft against prompt look-up", lambda f: f.value / f.lookup if f.lookup and f.value else None, ">=", 1.0,
         "serve prompt look-up instead: it needs no training and no memory", decides=True, unit="x"),
    Rule("same text as the baseline (greedy, float32)", _exact, ">=", 1.0,
         "a bug: greedy speculation must not change the text; do not ship", decides=True),
    # -- what holds it back --
    Rule("ceiling of a perfect, free draft", _of_cell("ceiling"), ">=", "min_speedup",
         "do not train for this load: verifying k + 1 tokens costs too much here whatever the draft", unit="x"),
    Rule("speedup if every token were accepted at this draft's cost", _perfect, ">=", "min_speedup",
         "no acceptance can pay for this draft: make it smaller or faster", _cheaper(draft=0.5), unit="x"),
    Rule("acceptance above break-even", _margin, ">=", 0.0,
         "retrain on this traffic, or do not speculate (gain for +0.10 acceptance)", _more_accepted(0.1), unit=""),
    Rule("acceptance of the first proposed token", _first, ">=", 0.40,
         "retrain on this domain's traffic (gain for +0.10 acceptance)", _more_accepted(0.1), unit=""),
    Rule("draft share of time", lambda f: f.share("draft"), "<=", 0.25,
         "fewer layers, a smaller head (shortlist), or a tree (gain for half the draft time)", _cheaper(draft=0.5)),
    Rule("launch-bound index of the draft", _launch_bound, "<=", 0.50,
         "capture the draft's steps as a CUDA graph", _captured),
    Rule("prefix KV share of time", lambda f: f.share("prefix_kv"), "<=", 0.20,
         "window the draft's cache, use a smaller k, or switch off here (gain for half of it)", _less_prefix),
    Rule("sampling share of time", lambda f: f.share("sampling"), "<=", 0.10,
         "sample on the device, in one kernel (gain for half of it)", _cheaper(sampling=0.5)),
    Rule("host share of time", lambda f: f.share("host"), "<=", 0.10,
         "batch requests or capture the cycle (gain for half the host gap)", _cheaper(host=0.5)),
    Rule("share of time wasted on rejected tokens", lambda f: f.share("waste"), "<=", 0.25,
         "a smaller k, or one that shrinks after rejections (gain for the best fixed k, or none)", _best_k),
    Rule("bandwidth use at a batch above 1",
         lambda f: f.cell["bandwidth_frac"] if f.cell["batch"] > 1 else None, "<=", 0.95,
         "switch speculation off at this load"),
    Rule("acceptance lost from the training domain to the worst", _domain_gap, "<=", 0.15,
         "a draft for each domain (gain there at the training domain's acceptance)", _domain_gain, unit=""),
    Rule("speed lost in a domain by one choice for all", lambda f: f.domain_regret, "<=", 0.05,
         "choose for each domain: the table of domains names its best arm (gain there)", _own_choice),
    Rule("requests made slower", _of_cell("slower_frac"), "<=", 0.10,
         "a smaller k, or switch off for such requests (gain for the best fixed k, or none)", _best_k),
    Rule("p95 end-to-end time, baseline over speculation", _tail, ">=", 1.0,
         "the slowest requests get slower: judge by latency@p95", unit="x"),
    # -- how far the figures can be trusted --
    Rule("same text as the baseline (greedy, low precision)", _nearly_exact, ">=", 1.0,
         "ties in low precision or a bug: repeat in float32, where texts must be equal"),
    Rule("failed rows", lambda f: float(f.num_errors), "<=", 0.0, "see the list of errors", unit=""),
    Rule("spread of repeated baselines", lambda f: f.baseline["noise_frac"], "<=", 0.05,
         "the machine is noisy: free it, or measure more repeats"),
    Rule("phase closure error", _of_cell("closure_frac"), "<=", 0.02, "phase shares are unreliable"),
    Rule("bare against phased time", _of_cell("clocks_differ_frac"), "<=", 0.02, "phase shares are unreliable"),
    Rule("spread of the prefix KV estimates", _of_cell("prefix_kv_spread_frac"), "<=", 0.15,
         "the prefix KV share is unreliable"),
    Rule("error of the predicted speedup",
         lambda f: abs(f.cell["prediction_error_frac"]) if f.cell["prediction_error_frac"] is not None else None,
         "<=", 0.05, "do not rely on the predicted gains; run eval.plan again on this machine"),
)  # fmt: skip


def lookup_value(ranking: Sequence[dict[str, Any]]) -> float | None:
    """Objective of the best look-up arm in a ranking."""
    return max((c["value"] for c in ranking if c["draft"] == LOOKUP), default=None)
