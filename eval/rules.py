"""The one table of rules: what is looked at, the threshold, the remedies, and what each is predicted to give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from eval import facts as of
from eval import remedies as to
from eval.clocks import BAR_FRAC, enough_pairs_frac, surely_apart_frac
from eval.facts import Facts
from eval.remedies import Gain, cheaper, half_of, more_accepted
from eval.rivals import over_lookup

Figure = Callable[[Facts], float | None]


def _unknown(facts: Facts) -> float | None:
    """The model can not say."""
    return None


class Remedy(NamedTuple):
    """What to do, and its predicted change of the speedup as a fraction (None: the model can not say)."""

    text: str
    gain: Gain = _unknown


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
        name: what is asked.
        figure: what is looked at; None where it was not measured (the rule is then silent).
        passes: ">=" or "<=" threshold.
        threshold: a number, or the name of a setting.
        remedies: what to do when it does not pass, at least one.
        decides: a failure means no-go; else it is advice.
        unit: how to print the figure: "x", "%", or "" for a plain number.
        bar: the phase whose bar this is about, "" for none.
    """

    name: str
    figure: Figure
    passes: str
    threshold: float | str
    remedies: tuple[Remedy, ...]
    decides: bool = False
    unit: str = "%"
    bar: str = ""


def _cell(name: str) -> Figure:
    return lambda f: f.cell[name]


def _share(name: str) -> Figure:
    return lambda f: f.share(name)


def _at_load(facts: Facts) -> float | None:
    """Bandwidth use above batch 1; at batch 1 a busy memory bus is what speculation feeds on."""
    return facts.cell["bandwidth_frac"] if facts.cell["batch"] > 1 else None


OFF = Remedy("switch speculation off at this load", to.off)
RULES: tuple[Rule, ...] = (
    # -- go or no-go --
    Rule("requests measured", lambda f: float(f.cell["num_requests"]), ">=", "needed",
         (Remedy("measure more: raise eval.num_requests"),), decides=True, unit=""),
    Rule("end-to-end speedup by the objective", lambda f: f.value, ">=", "min_speedup",
         (Remedy("do not serve with this draft and k; the causes are named below", to.off),), decides=True, unit="x"),
    Rule("low end of its 95% interval, against no speculation", lambda f: f.low, ">=", 1.0,
         (Remedy("not surely faster: measure more requests, or do not serve with it"),), decides=True, unit="x"),
    Rule("draft against prompt look-up", lambda f: over_lookup(f.lookup) if f.lookup else None, ">=", 1.0,
         (Remedy("serve prompt look-up instead: it needs no training and no memory",
                 lambda f: 1 / f.lookup["value"] - 1 if f.lookup else None),), decides=True, unit="x"),
    Rule("same text as the baseline (greedy, float32)", of.exact, ">=", 1.0,
         (Remedy("a bug: greedy speculation must not change the text; do not ship"),), decides=True),
    # -- what holds it back --
    Rule("low end of the draft's 95% interval against prompt look-up",
         lambda f: f.lookup["low"] if f.lookup and f.lookup["value"] >= 1 else None, ">=", 1.0,
         (Remedy("look-up, which is free, is as good within the interval: measure more requests, or serve look-up"),),
         unit="x"),
    Rule("ceiling of a perfect, free draft", _cell("ceiling"), ">=", "min_speedup",
         (Remedy("do not train for this load: verifying k + 1 tokens costs too much here whatever the draft", to.off),),
         unit="x", bar="verify"),
    Rule("speedup if every token were accepted at this draft's cost", of.perfect, ">=", "min_speedup",
         (Remedy("no acceptance gives the speedup that is wanted with this draft: one of half its time",
                 cheaper(0.5, draft=0.5)),),
         unit="x", bar="draft"),
    Rule("prefill's share of all request time without speculation", of.prompt_share, "<=", 0.50,
         (Remedy("a draft speeds up decoding alone: keep the keys of shared prompts (for no prefill at all)",
                 to.no_prefill),
          OFF)),
    Rule("share of all request time in which the draft reads the prompts too", of.draft_prompt_share, "<=", 0.05,
         (Remedy("fewer layers: they read prompts faster (for half of that time)", cheaper(reading=0.5)), OFF)),
    Rule("acceptance above break-even", of.margin, ">=", 0.0,
         (Remedy("retrain on this traffic (for 0.10 more acceptance)", more_accepted(0.1)),
          Remedy("do not use it here", to.off)), unit=""),
    Rule("acceptance of the first proposed token", of.first, ">=", 0.40,
         (Remedy("retrain on this domain's traffic (for 0.10 more acceptance)", more_accepted(0.1)),
          Remedy("do not use it here", to.off)), unit=""),
    Rule("draft share of time", _share("draft"), "<=", 0.25,
         (Remedy("half the layers", half_of("layers")),
          Remedy("half the head (shortlist)", half_of("head")),
          Remedy("half the draft time in any way", cheaper(0.5, draft=0.5)),
          Remedy("a tree (if a second candidate takes a quarter of what the first misses)", to.as_tree)), bar="draft"),
    Rule("a draft token's time over a target token's", of.draft_step, "<=", 0.25,
         (Remedy("a fast target leaves little to hide drafting behind: half the draft time", cheaper(0.5, draft=0.5)),
          Remedy("a shrinking window: the adaptive policy (at most; the best measured k of each request)", to.own_k)),
         bar="draft"),
    Rule("launch-bound index of the draft", of.launch_bound, "<=", 0.50,
         (Remedy("capture the draft's steps as a CUDA graph", to.captured),), bar="draft"),
    Rule("prefix KV share of time", _share("prefix_kv"), "<=", 0.20,
         (Remedy("a smaller k, or none", to.smaller_k), OFF), bar="verify"),
    Rule("prefix KV share, longest context less shortest", of.prefix_rise, "<=", 0.10,
         (Remedy("a smaller k, or none", to.smaller_k), OFF), bar="verify"),
    # A window leaves the target's passes as they are: it is for what the draft's own steps read.
    Rule("share of time in which the draft reads its own prefix KV", of.draft_prefix, "<=", 0.10,
         (Remedy("window the draft's cache", to.windowed),), bar="draft"),
    Rule("sampling share of time", _share("sampling"), "<=", 0.10,
         (Remedy("sample on the device in one kernel (for half of it)", cheaper(sampling=0.5)),), bar="sampling"),
    Rule("host share of time", _share("host"), "<=", 0.10,
         (Remedy(f"batch requests ({to.SHARING_ROWS} rows share one host gap)", cheaper(host=1 / to.SHARING_ROWS)),
          Remedy("capture the whole cycle (for no host gap)", cheaper(host=0.0))), bar="host"),
    Rule("share of time wasted on rejected tokens", _share("waste"), "<=", 0.25,
         (Remedy("the best fixed k, or none (by the model)", to.best_k),
          Remedy("the adaptive policy (at most; the best measured k of each request)", to.own_k))),
    Rule("bandwidth use at a batch above 1", _at_load, "<=", 0.95, (OFF,), bar="verify"),
    Rule("acceptance lost from the training domain to the worst", of.domain_gap, "<=", 0.15,
         (Remedy("a draft for each domain (there, at the training domain's acceptance)", to.domain_gain),), unit=""),
    Rule("speed lost in a domain by one choice for all", lambda f: f.domain_regret, "<=", 0.05,
         (Remedy("choose for each domain: the table of domains names its best arm (there)", to.own_choice),)),
    Rule("requests made slower", _cell("slower_frac"), "<=", 0.10,
         (Remedy("the best fixed k, or none (by the model)", to.best_k),
          Remedy("off for such requests (at most; known afterwards)", to.off_where_slower))),
    Rule("p95 end-to-end time, baseline over speculation", of.tail, ">=", 1.0,
         (Remedy("the slowest requests get slower: judge by latency@p95"),
          Remedy("off for such requests (at most; known afterwards)", to.off_where_slower)), unit="x"),
    # -- how far the figures can be trusted --
    Rule("same text as the baseline (greedy, low precision)", of.nearly_exact, ">=", 1.0,
         (Remedy("ties in low precision or a bug: repeat in float32, where texts must be equal"),)),
    Rule("failed rows", lambda f: float(f.num_errors), "<=", 0.0, (Remedy("see the list of errors"),), unit=""),
    Rule("spread of repeated baselines", lambda f: f.baseline["noise_frac"], "<=", 0.05,
         (Remedy("the machine is noisy: free it, or measure more repeats"),)),
    Rule("phase closure error", _cell("closure_frac"), "<=", 0.02, (Remedy("phase shares are unreliable"),)),
    Rule("bare against phased time, by the near end of the interval",
         lambda f: surely_apart_frac(f.cell["clocks"]), "<=", BAR_FRAC,
         (Remedy("phase shares are unreliable"),)),
    Rule("requests timed by both clocks (sets, in a batch), of those needed",
         lambda f: enough_pairs_frac(f.cell["clocks"]), ">=", 1.0,
         (Remedy("too few to compare the clocks: lower eval.phased_every, or measure more requests (sets)"),)),
    Rule("spread of the prefix KV estimates", of.spread, "<=", 0.15,
         (Remedy("the prefix KV share is unreliable: see the three estimates side by side"),)),
    Rule("error of the predicted speedup", of.prediction_error, "<=", 0.05,
         (Remedy("do not rely on the predicted gains; measure more requests, on a free machine"),)),
)  # fmt: skip
DOMAIN_GAP = next(rule.name for rule in RULES if rule.figure is of.domain_gap)


def apply(rule: Rule, facts: Facts) -> dict[str, Any] | None:
    """The reason that a rule gives; None where its figure was not measured.

    Returns:
        rule, figure, threshold, passes, decides, passed, unit, bar; `remedies`, each {remedy, predicted_gain}, the
        largest gain first; `remedy` and `predicted_gain` of the first. None of these where the rule passed.
    """
    figure = rule.figure(facts)
    if figure is None:
        return None
    threshold = getattr(facts.settings, rule.threshold) if isinstance(rule.threshold, str) else rule.threshold
    passed = figure >= threshold if rule.passes == ">=" else figure <= threshold
    offered: list[dict[str, Any]] = (
        [] if passed else [{"remedy": r.text, "predicted_gain": r.gain(facts)} for r in rule.remedies]
    )
    offered.sort(key=lambda r: (r["predicted_gain"] is None, -(r["predicted_gain"] or 0.0)))
    best = offered[0] if offered else {"remedy": "", "predicted_gain": None}
    return {
        "rule": rule.name,
        "figure": figure,
        "threshold": threshold,
        **best,
        "remedies": offered,
        "passes": rule.passes,
        "decides": rule.decides,
        "passed": passed,
        "unit": rule.unit,
        "bar": rule.bar,
    }
