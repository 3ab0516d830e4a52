"""What if draft time halved, or the batch were 16 at 8k context? Answers from the cost model. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine import costs as model
from engine.costs import MAX_K, Costs
from engine.surface import Surface
from eval.predict import held_tok


@dataclass(frozen=True)
class Question:
    """A change to one case; None leaves a thing as it is.

    Attributes:
        draft, verify, sampling, host: factors on that part's time (0.5 halves it); the draft's reading of prompts too.
        alpha: acceptance at every position.
        k: proposals a cycle.
        context, batch, new_tok: the load.

    Raises:
        ValueError: a value out of range.
    """

    draft: float = 1.0
    verify: float = 1.0
    sampling: float = 1.0
    host: float = 1.0
    alpha: float | None = None
    k: int | None = None
    context: int | None = None
    batch: int | None = None
    new_tok: int | None = None

    def __post_init__(self) -> None:
        for name in ("draft", "verify", "sampling", "host"):
            if not 0 <= getattr(self, name) <= 100 or (name == "verify" and self.verify == 0):
                least = "above 0" if name == "verify" else "at least 0"
                raise ValueError(f"what-if {name}={getattr(self, name)}: a factor on time, {least} and at most 100")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ValueError(f"what-if alpha={self.alpha}: an acceptance lies in 0..1")
        for name, low, high in (("k", 1, MAX_K), ("context", 0, 1 << 22), ("batch", 1, 4096), ("new_tok", 2, 1 << 20)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"what-if {name}={value}: allowed are {low}..{high}")

    def words(self) -> str:
        """The change in words: "draft time x 0.5, acceptance 0.80"."""
        said = [f"{name} time x {getattr(self, name):g}" + (" (the baseline's too)" if name == "verify" else "")
                for name in ("draft", "verify", "sampling", "host") if getattr(self, name) != 1.0]  # fmt: skip
        if self.alpha is not None:
            said.append("every token accepted" if self.alpha == 1 else f"acceptance {self.alpha:.2f}")
        said += [
            f"{word} {getattr(self, name):,}"
            for name, word in (("k", "k ="), ("batch", "batch"), ("context", "context"), ("new_tok", "answer tokens"))
            if getattr(self, name) is not None
        ]
        return ", ".join(said) or "as it is"


def parse(text: str) -> Question:
    """Reads "batch=16,context=8192".

    Args:
        text: name=value, joined by commas.

    Raises:
        ValueError: an unknown name, a name given twice, or a value that is no number.
    """
    kinds: dict[str, Callable[[str], Any]] = {
        f.name: int if f.name in ("k", "context", "batch", "new_tok") else float for f in fields(Question)
    }
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in kinds or name in given:
            fault = "is given twice" if name in given else f"is unknown; allowed are {', '.join(kinds)}"
            raise ValueError(f"what-if {text!r}: {name!r} {fault}")
        try:
            given[name] = kinds[name](value)
        except ValueError as error:
            want = "a whole number" if kinds[name] is int else "a number"
            raise ValueError(f"what-if {text!r}: {name} is {value!r}; it must be {want}") from error
    return Question(**given)


@dataclass(frozen=True)
class Case:
    """What a question changes: one draft at one load.

    Attributes:
        surface: costs of the draft.
        prefill, draft_prefill: of the prompts, as `eval.predict.prefill_curve` gives them.
        k, context, batch, new_tok: the load as it is.
        accept: conditional acceptances; positions beyond the last take its value.
    """

    surface: Surface
    prefill: tuple[float, float, float]
    draft_prefill: tuple[float, float, float]
    k: int
    context: int
    batch: int
    new_tok: int
    accept: tuple[float, ...]

    def request(self, context: float, new_tok: int, batch: int) -> dict[str, Any]:
        """Prefills and length of a request, as `engine.costs.predicted_speedup` takes them.

        While a request is answered one more comes to each of the other rows, whose prefill stops them all.
        """
        first, second = (batch * (a + b * context + c * context**2) for a, b, c in (self.prefill, self.draft_prefill))
        return {"prefill_ms": first, "draft_prefill_ms": second, "new_tok": new_tok}


def ask(case: Case, question: Question) -> dict[str, Any]:
    """The speedup of a changed case.

    Args:
        case: as it is.
        question: what changes.

    Returns:
        `what` in words; the changed `k`, `context`, `batch`, `new_tok`; `speedup`; `gain_frac` over the case as it is;
        `best_k` and `best_speedup` (0 and 1: off); `ceiling`; `alpha_break_even` (pooled like alpha; None: none pays);
        `measured_load`: False when the load lies outside what was measured; `why_not`: None, or why the figures are
        None (a load so far off that the model would guess).
    """
    context = case.context if question.context is None else question.context
    batch, new_tok = question.batch or case.batch, question.new_tok or case.new_tok
    k = question.k or case.k
    held = held_tok(context, new_tok)
    found: dict[str, Any] = {
        "what": question.words(), "k": k, "context": context, "batch": batch, "new_tok": new_tok, "speedup": None,
        "gain_frac": None, "best_k": None, "best_speedup": None, "ceiling": None, "alpha_break_even": None,
        "measured_load": case.surface.measured(held, batch, k), "why_not": None,
    }  # fmt: skip
    if not case.surface.reaches(held, batch, k):
        widest, longest = case.surface.widths[-1][0], case.surface.contexts[1]
        found["why_not"] = (
            f"too far from what was measured (passes up to {widest:.0f} tokens, contexts up to {longest:,}): "
            "measure at such a load first"
        )
        return found
    accept: Sequence[float] = case.accept if question.alpha is None else (question.alpha,)
    costs = _changed(case.surface.at(held, batch, min(MAX_K, max(k, case.surface.max_k))), question)
    request = case.request(context, new_tok, batch)
    request["draft_prefill_ms"] *= question.draft
    speedup = model.predicted_speedup(costs, k, accept, **request)
    best_k, best = model.best_k(costs, accept, **request)
    even = model.break_even_alpha(costs, k, **request)
    return found | {
        "speedup": speedup,
        "gain_frac": speedup / as_it_is(case) - 1,
        "best_k": best_k,
        "best_speedup": best,
        "ceiling": model.ceiling(costs, request["prefill_ms"], new_tok).speedup,
        "alpha_break_even": None if even is None else (model.tau(even, k) - 1) / k,
    }


def _changed(costs: Costs, question: Question) -> Costs:
    """Factors on the parts; the baseline's own pass, sampling and host gap change with them."""
    passes = costs.V_ms[0]
    rest, parts = costs.T_ms - passes, costs.S_ms + costs.H_ms
    kept = (costs.S_ms * question.sampling + costs.H_ms * question.host) / parts if parts else 1.0
    scaled = model.scaled(costs, question.draft, question.verify, question.sampling, question.host)
    return replace(scaled, T_ms=passes * question.verify + rest * kept)


def as_it_is(case: Case) -> float:
    """Predicted speedup of the case without any change."""
    held = held_tok(case.context, case.new_tok)
    costs = case.surface.at(held, case.batch, min(MAX_K, max(case.k, case.surface.max_k)))
    return model.predicted_speedup(costs, case.k, case.accept, **case.request(case.context, case.new_tok, case.batch))


def usual(case: Case) -> list[Question]:
    """The questions that every report answers."""
    asked = [
        Question(),
        Question(draft=0.5),
        Question(draft=0.0),
        Question(verify=0.5),
        Question(sampling=0.0, host=0.0),
        Question(alpha=0.8),
        Question(alpha=1.0),
        *(Question(context=c) for c in (512, 2048, 8192) if not 0.7 * c <= case.context <= 1.4 * c),
        *(Question(batch=b) for b in (4, 16, 64) if b != case.batch),
        Question(batch=16, context=8192),
    ]
    return asked


def answers(case: Case, questions: Sequence[Question] | None = None) -> list[dict[str, Any]]:
    """Answers to some questions; None asks the usual ones."""
    return [ask(case, q) for q in (usual(case) if questions is None else questions)]


def case_of(report_model: Mapping[str, Any], surface: Surface, cell: Mapping[str, Any]) -> Case:
    """The case of a cell of a report.

    Args:
        report_model: `model` of report.json.
        surface: of the cell's draft.
        cell: with its load and acceptance by position.
    """
    prefill = report_model["prefill_ms"]
    a, b, c = report_model["drafts"][cell["draft"]]["draft_prefill_ms"]
    return Case(
        surface,
        (prefill["base"], prefill["per_tok"], prefill["per_tok_squared"]),
        (a, b, c),
        cell["k"],
        round(cell["context_tok"]["p50"]),
        cell["batch"],
        max(2, int(cell["request"]["new_tok"])),
        tuple(p["c"] for p in cell["accept_by_position"] if p["c"] is not None),
    )
