"""What the rules of the verdict look at. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import costs as model
from engine.costs import Costs
from engine.surface import Surface
from eval.cells import Cell, Settings
from eval.predict import held_tok


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        cell: the arm under judgement, over all requests of what is judged.
        baseline: k = 0 on the same requests.
        settings: of the report.
        domains: the same arm by domain.
        groups: the same arm by context group, shortest context first.
        siblings: the other arms of the same draft on the same requests.
        lookup: the draft against the best look-up arm, {arm, value, low, high}; None when none was measured.
        value, low: objective of the arm under judgement and its interval's low end.
        num_errors: failed rows.
        domain_regret: the most that the common choice loses in any domain against that domain's best arm.
        costs: of the arm, for "what if"; None where the model does not describe it: look-up, trees, adaptive policies,
            windowed drafts.
        size: of the draft: layers, hidden_size, head_rows, read_params.
        surface: costs by context and batch; None without a fit, or where `costs` is.
        held_out_error: mean absolute error of the model on held-out cells, by the scheme where it is largest.
    """

    cell: Cell
    baseline: Cell
    settings: Settings
    domains: Sequence[Cell] = ()
    groups: Sequence[Cell] = ()
    siblings: Sequence[Cell] = ()
    lookup: Mapping[str, Any] | None = None
    value: float | None = None
    low: float | None = None
    num_errors: int = 0
    domain_regret: float | None = None
    costs: Costs | None = None
    size: Mapping[str, Any] = field(default_factory=dict)
    surface: Surface | None = None
    held_out_error: float | None = None

    def share(self, name: str) -> float | None:
        """A phase's share, None where it was not measured."""
        return (self.cell["share"] or {}).get(name)

    def predicted(
        self, costs: Costs | None = None, accept: Sequence[float] | None = None, reading: float = 1.0
    ) -> float:
        """Speedup of this cell's mean request, with some part of the model replaced; `reading` scales draft prefill."""
        used, kept, request = costs or self.costs, accept or positions(self.cell), self.cell["request"]
        assert used is not None
        request = {**request, "draft_prefill_ms": reading * request["draft_prefill_ms"]}
        return model.predicted_speedup(used, self.cell["k"], kept, **request)


def positions(cell: Cell) -> list[float]:
    """Measured conditional acceptances of a cell."""
    return [p["c"] for p in cell["accept_by_position"] if p["c"] is not None]


def launch_bound(facts: Facts) -> float | None:
    """1 - t_graph / t_eager."""
    return facts.cell["launch_bound_frac"]


def draft_prefix(facts: Facts) -> float | None:
    """Share of time that the draft's own steps take for reading their prefix; None for a draft that has a window."""
    share = facts.share("draft")
    if share is None or facts.surface is None or facts.costs is None:
        return None
    context, batch = held_tok(facts.cell["context_tok"]["p50"], facts.cell["new_tok"]["p50"]), facts.cell["batch"]
    step, costs, k = facts.surface.t, facts.costs, facts.cell["k"]
    whole = step.at(context, batch)
    steps = k * costs.t_ms / model.draft_ms(costs, k) if costs.t_ms else 0.0
    return share * steps * step.per_tok * batch * context / whole if whole else 0.0


def prefix_rise(facts: Facts) -> float | None:
    """Prefix KV share in the longest context group less that in the shortest."""
    shares = [(c["share"] or {}).get("prefix_kv") for c in facts.groups]
    known = [s for s in shares if s is not None]
    return known[-1] - known[0] if len(known) > 1 else None


def prompt_share(facts: Facts) -> float | None:
    """Part of the baseline's request time that is not decoding: prefill, which no draft makes shorter."""
    request, costs = facts.cell["request"], facts.costs
    if costs is None:
        return None
    decoding = costs.T_ms * (request["new_tok"] - 1)
    return float(request["prefill_ms"] / (request["prefill_ms"] + decoding))


def draft_prompt_share(facts: Facts) -> float | None:
    """Part of a request's time with speculation in which the draft reads the prompt."""
    request, spent = facts.cell["request"], facts.cell["decode_ms_per_tok"]
    if facts.costs is None or not spent:
        return None
    whole = request["prefill_ms"] + request["draft_prefill_ms"] + spent * (request["new_tok"] - 1)
    return float(request["draft_prefill_ms"] / whole)


def trained(facts: Facts) -> Cell | None:
    """The cell of the domain that the draft was trained on."""
    return next((c for c in facts.domains if c["domain"] == facts.settings.domain and c["alpha"] is not None), None)


def worst(facts: Facts) -> Cell | None:
    """The domain that accepts least."""
    return min((c for c in facts.domains if c["alpha"] is not None), key=lambda c: c["alpha"], default=None)


def domain_gap(facts: Facts) -> float | None:
    """Acceptance of the training domain less that of the worst."""
    here, there = trained(facts), worst(facts)
    return here["alpha"] - there["alpha"] if here and there else None


def margin(facts: Facts) -> float | None:
    """alpha - alpha*."""
    alpha, needed = facts.cell["alpha"], facts.cell["alpha_break_even"]
    return alpha - needed if alpha is not None and needed is not None else None


def first(facts: Facts) -> float | None:
    """A_1: unlike the pooled alpha it does not fall with k, so one threshold serves every k."""
    return next((p["A"] for p in facts.cell["accept_by_position"]), None)


def perfect(facts: Facts) -> float | None:
    """Speedup if every token were accepted."""
    return facts.predicted(accept=[1.0]) if facts.costs else None


def draft_step(facts: Facts) -> float | None:
    """A draft token's time over a target token's."""
    return facts.costs.t_ms / facts.costs.T_ms if facts.costs else None


def tail(facts: Facts) -> float | None:
    """p95 end to end, baseline over the arm; None where there are too few requests for it."""
    ours, base = ((cell["e2e_ms"] or {}).get("p95") for cell in (facts.cell, facts.baseline))
    return base / ours if ours and base else None


def exact(facts: Facts) -> float | None:
    """Share of equal texts where they must be equal."""
    greedy_fp32 = facts.cell["dtype"] == "float32" and facts.cell["temperature"] == [0.0]
    return facts.cell["same_text_frac"] if greedy_fp32 else None


def nearly_exact(facts: Facts) -> float | None:
    """Share of equal texts where ties may differ."""
    greedy_low = facts.cell["dtype"] != "float32" and facts.cell["temperature"] == [0.0]
    return facts.cell["same_text_frac"] if greedy_low else None


def spread(facts: Facts) -> float | None:
    """Spread of the prefix KV estimates, where prefix KV is a twentieth of the time or more."""
    share = facts.share("prefix_kv")
    return facts.cell["prefix_kv_spread_frac"] if share is not None and share >= 0.05 else None


def prediction_error(facts: Facts) -> float | None:
    """Mean error on held-out cells by the worst scheme; without these, of this cell by the plan's costs."""
    if facts.held_out_error is not None:
        return facts.held_out_error
    error = facts.cell["prediction_error_frac"]
    return None if error is None else abs(error)
