"""plan.json -> tables, ceilings by load, what-ifs and one line of advice. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from engine import costs as model
from engine.costs import Costs
from engine.surface import fit_surface
from eval.explain import ceilings
from eval.whatif import Case, Question, ask

SPEEDUPS = (1.25, 1.5, 2.0)
CONTEXTS = (128, 512)
# What public results make plausible, not a measurement: T5-small drafting for T5-XXL was accepted at 0.53 to 0.75
# over two tasks and two temperatures (arXiv 2211.17192, table 2).
PLAUSIBLE_ALPHA = (0.5, 0.7)


def case_of_plan(plan: dict[str, Any], new_tok: int) -> Case:
    """The recipe's shape (a race's first) at the shortest context, batch 1, the lower plausible acceptance, its best k.

    Args:
        plan: plan.json.
        new_tok: answer tokens; prefills are left out, which the plan does not measure.

    Raises:
        ValueError: a plan without costs.
    """
    if not plan["costs"]:
        raise ValueError("the plan holds no costs; measure one with python -m eval.plan RECIPE")
    # A race has no shape of its own; its first is the one that was measured at more loads.
    names = [c["draft"] for c in plan["costs"]]
    name = "recipe" if "recipe" in names else names[0]
    costs = [Costs.from_json(c) for c in plan["costs"] if c["draft"] == name]
    first = min(costs, key=lambda c: (c.batch, c.context))
    k = max(first.ks, key=lambda n: (model.predicted_speedup(first, n, PLAUSIBLE_ALPHA[0]), -n))
    accept = (PLAUSIBLE_ALPHA[0],)
    return Case(fit_surface(costs), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), k, first.context, 1, max(2, new_tok), accept)


def what_if_table(case: Case, questions: Sequence[Question]) -> Table:
    """Answers to some questions about the recipe's shape."""
    table = Table(
        title=f"What if (as it is: k = {case.k}, acceptance {case.accept[0]:g}, context {case.context}, batch 1)"
    )
    table.add_column("if", overflow="fold")
    for column in ("speedup", "change", "best k", "speedup there", "ceiling", "break-even alpha", ""):
        table.add_column(column, justify="right")
    for question in (Question(), *questions):
        a = ask(case, question)
        if a["speedup"] is None:
            table.add_row(a["what"], *["n/a"] * 6, "")
            table.caption = f"n/a: {a['why_not']}"
            continue
        even = "none pays" if a["alpha_break_even"] is None else f"{a['alpha_break_even']:.2f}"
        table.add_row(
            a["what"],
            f"{a['speedup']:.2f}x",
            f"{a['gain_frac']:+.0%}",
            str(a["best_k"] or "off"),
            f"{a['best_speedup']:.2f}x",
            f"{a['ceiling']:.2f}x",
            even,
            "" if a["measured_load"] else "not measured there",
        )
    return table


def load_table(case: Case, predicted: bool = False) -> Table:
    """Ceilings by context and batch of the recipe's shape; `predicted` where its costs were not measured either."""
    how = "Predicted by load" if predicted else "By load"
    table = Table(title=f"{how} (k = {case.k}, acceptance {case.accept[0]:g}, prefill left out)")
    names = (
        "context",
        "batch",
        "T ms",
        "V ms",
        "ceiling",
        "all accepted",
        "predicted",
        "best k",
        "break-even alpha",
        "",
    )
    for column in names:
        table.add_column(column, justify="right")
    for load in ceilings(case):
        even = "none pays" if load["break_even"] is None else f"{load['break_even']:.2f}"
        table.add_row(
            f"{load['context']:,}",
            str(load["batch"]),
            f"{load['T_ms']:.2f}",
            f"{load['V_ms']:.2f}",
            f"{load['ceiling']:.2f}x",
            f"{load['perfect']:.2f}x",
            f"{load['predicted']:.2f}x",
            str(load["best_k"] or "off"),
            even,
            "" if predicted or load["measured_load"] else "not measured there",
        )
    return table


def tables(plan: dict[str, Any]) -> list[Table]:
    """One table of shapes, and for each shape one of draft lengths, at the shortest context."""
    costs = [Costs.from_json(c) for c in plan["costs"]]
    where = f"{plan['num_threads']} threads, " if "num_threads" in plan else ""
    mark = "Predicted, not measured: draft" if plan.get("predicted") else "Draft"
    overview = Table(title=f"{mark} shapes on {plan['device']} ({where}{plan['dtype']})")
    if plan.get("predicted"):
        overview.caption = (
            f"from {plan['source']}; verify passes x {plan['factors']['verify']:.2f} and draft steps x "
            f"{plan['factors']['draft']:.2f}: how far the same prediction was off for them where both were measured"
        )
    for column in (
        "shape",
        "stored",
        "read",
        "context",
        "batch",
        "T ms",
        "t ms",
        "V(1) ms",
        "ceiling",
        "P ms (fit/diff/bytes)",
    ):
        overview.add_column(column, justify="left" if column == "shape" else "right")
    sizes = {shape["name"]: shape for shape in plan["shapes"]}
    for c in costs:
        shape, kv = sizes[c.draft], c.prefix_kv_ms or {}
        overview.add_row(
            c.draft,
            f"{shape['stored_frac']:.1%}",
            f"{shape['read_frac']:.1%}",
            str(c.context),
            str(c.batch),
            f"{c.T_ms:.2f}",
            f"{c.t_ms:.2f}",
            f"{model.verify_ms(c, 1):.2f}",
            f"{model.ceiling(c).speedup:.2f}x",
            " / ".join(f"{kv[name]:.2f}" for name in ("fit", "difference", "bandwidth") if name in kv),
        )
    found = [overview]
    for c in (c for c in costs if c.context == min(CONTEXTS) and c.batch == 1):
        table = Table(title=f"{mark} shape {c.draft}: what k proposals need (context {c.context})")
        alphas = (*PLAUSIBLE_ALPHA, 1.0)
        heads = (
            "k",
            "V ms",
            "cycle ms",
            "break-even alpha",
            *(f"tau for {s:g}x" for s in SPEEDUPS),
            *(f"alpha {alpha:g}" for alpha in alphas),
        )
        for head in heads:
            table.add_column(head, justify="right")
        for k in c.ks:
            even = model.break_even_alpha(c, k)
            needed = [model.needed_tau(c, k, s) for s in SPEEDUPS]
            table.add_row(
                str(k),
                f"{model.verify_ms(c, k):.2f}",
                f"{model.cycle_ms(c, k):.2f}",
                "never" if even is None else f"{even:.2f}",
                *("never" if tau is None else f"{tau:.2f}" for tau in needed),
                *(f"{model.predicted_speedup(c, k, alpha):.2f}x" for alpha in alphas),
            )
        found.append(table)
    return found


def verdict(plan: dict[str, Any], min_speedup: float) -> str:
    """One line: train this shape, another one, or none; of a predicted plan it says so.

    Args:
        plan: plan.json.
        min_speedup: what the recipe asks for.
    """
    if not plan.get("predicted"):
        return _advice(plan, min_speedup)
    if plan["fits_bytes"] > plan["memory_bytes"]:
        need, have = plan["fits_bytes"] / 1e9, plan["memory_bytes"] / 1e9
        return f"Does not fit: target and draft take {need:.0f} GB, {plan['device']} has {have:.0f} GB."
    return f"Predicted, not measured: {_advice(plan, min_speedup)}"


def _advice(plan: dict[str, Any], min_speedup: float) -> str:
    shortest = (min(CONTEXTS), 1)
    costs = [Costs.from_json(c) for c in plan["costs"] if (c["context"], c["batch"]) == shortest]
    perfect = {c.draft: max(model.predicted_speedup(c, k, 1.0) for k in c.ks) for c in costs}
    likely = {c.draft: max(model.predicted_speedup(c, k, PLAUSIBLE_ALPHA[0]) for k in c.ks) for c in costs}
    best = max(perfect, key=lambda name: perfect[name])
    if perfect[best] < min_speedup:
        return f"Do not train: even a perfect draft gives {perfect[best]:.2f}x here (asked for {min_speedup:.2f}x)."
    other = max(likely, key=lambda name: likely[name])
    if "recipe" not in likely:
        return (
            f"At alpha {PLAUSIBLE_ALPHA[0]} for all of them '{other}' is fastest ({likely[other]:.2f}x), at most "
            f"{perfect[other]:.2f}x; they will not accept alike, so race them."
        )
    own = likely["recipe"]
    text = (
        f"The recipe's shape gives {own:.2f}x at alpha {PLAUSIBLE_ALPHA[0]} and at most {perfect['recipe']:.2f}x. "
        f"At that alpha the fastest shape is '{other}' ({likely[other]:.2f}x); a smaller draft accepts less, so "
        "train both before believing it."
    )
    text += off_at(plan, min_speedup)
    return text if own >= min_speedup else f"Doubtful: {text}"


def off_at(plan: dict[str, Any], min_speedup: float) -> str:
    """Where among the measured loads even a perfect draft of the recipe's shape does not pay; "" for nowhere."""
    lost = []
    for c in (Costs.from_json(c) for c in plan["costs"] if c["draft"] == "recipe"):
        perfect = max(model.predicted_speedup(c, k, 1.0) for k in c.ks)
        if perfect < min_speedup:
            lost.append(f"batch {c.batch} at {c.context:,} tokens ({perfect:.2f}x)")
    return f" Off even for a perfect draft: {'; '.join(lost)}." if lost else ""
