"""One row per request, arm, repeat and clock: the only thing that measuring hands to the statistics. No torch.

`measured` is the one place where warm-up and failed rows leave; `counted` the one where cut cycles do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

BASELINE = "baseline"
LOOKUP = "lookup"
SELF = "self-"  # and a number: that many of the target's first layers
ALL = "all"
PHASES = ("draft", "verify", "sampling", "host")
CLOCKS = ("bare", "phased")
POLICIES = ("fixed", "adaptive", "schedule")
RULES = ("token", "block")
# What each field may hold in JSON; a whole number is also a good float.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "str | None": (str, type(None)),
    "float | None": (float, int, type(None)),
    "dict[str, float] | None": (dict, type(None)),
    "tuple[Cycle, ...]": (list, tuple),
    "tuple[int, ...]": (list, tuple),
    "tuple[float, ...]": (list, tuple),
    "int | None": (int, type(None)),
}


class RowError(ValueError):
    """A row, or a file of rows, that can not be trusted."""


class Cycle(NamedTuple):
    """One propose-verify-accept round.

    Attributes:
        proposed, accepted: tokens.
        emitted: tokens committed; accepted + 1 unless the end of the answer cut the block.
        cut: end-of-sequence or the length limit cut this cycle.
    """

    proposed: int
    accepted: int
    emitted: int
    cut: bool = False


@dataclass(frozen=True)
class RequestRow:
    """What one request took under one arm.

    Attributes:
        request_id, domain, group: the request; group is its context class ("short", "medium", ...).
        arm: "baseline", "draft:NAME@kN", "lookup@kN", "draft:NAME@adaptiveN", ... (see `eval.arms.Arm.name`).
        draft: draft name, "lookup", "self-N", or "" for the baseline.
        k: proposals a cycle; 0 is the baseline. The most that another policy proposes; the levels of a tree.
        batch: rows decoded together.
        context_tok, new_tok: prompt tokens; answer tokens, the first of which the prefill gave.
        repeat, order: which repeat, at batch over 1 which time its prompt came; running number in the run.
        clock: "bare" rows give totals, "phased" rows give shares.
        warmup: excluded from every figure.
        error: None, or why there is no result; the times are then 0.
        finish: "eos" or "length"; "" on error.
        cycles: every round, those cut at the end included.
        wall_ms: decoding alone, without prefills.
        prefill_ms, draft_prefill_ms: of the target and of the draft (0 when there is none).
        phases_ms: draft, verify, sampling, host of the decoding; None under the bare clock.
        waste_ms: rejection waste if it was measured; else it is computed from the plan's costs.
        ttft_ms: request to first token.
        tokens_sha: hash of the answer's ids, so that arms can be compared token by token.
        device, dtype, temperature, seed: what it ran on and with.
        start_s: when decoding was asked for, seconds on one clock for the run.
        label: the arm for people; "" is as good as the arm's name.
        policy: "fixed", "adaptive" or "schedule".
        rule: "token" or "block".
        tree: parents of a tree's nodes; empty for a chain.
        draft_temperature, recent: the arm's own, None where it has none.
        set: which requests were decoded together; 0 at batch 1.
        stall_ms: how long it stood still while other requests were prefilled; 0 at batch 1.
        steady_tok, steady_ms: what it emitted while no row was empty, and its share of that time: over a set they add
            up to the tokens and the length of the steady state. 0 at batch 1.
        simulated: acceptance was simulated by these rates: the tokens are not the target's. Empty is real.

    Raises:
        RowError: a field that contradicts another, named with the request and arm.
    """

    request_id: str
    domain: str
    group: str
    arm: str
    draft: str
    k: int
    batch: int
    context_tok: int
    new_tok: int
    repeat: int
    clock: str
    warmup: bool
    error: str | None
    finish: str
    cycles: tuple[Cycle, ...]
    wall_ms: float
    prefill_ms: float
    draft_prefill_ms: float
    phases_ms: dict[str, float] | None
    waste_ms: float | None
    ttft_ms: float
    tokens_sha: str
    device: str
    dtype: str
    temperature: float
    seed: int
    start_s: float
    order: int
    label: str = ""
    policy: str = "fixed"
    rule: str = "token"
    tree: tuple[int, ...] = ()
    draft_temperature: float | None = None
    recent: int | None = None
    set: int = 0
    stall_ms: float = 0.0
    steady_tok: int = 0
    steady_ms: float = 0.0
    simulated: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), _TYPES[str(field.type)]
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
                raise RowError(f"{self._where()}: {field.name} is {value!r}; it must be {field.type}")
            if isinstance(value, float) and not math.isfinite(value):
                raise RowError(f"{self._where()}: {field.name} is {value}; it must be finite")
        for cycle in self.cycles:
            if not isinstance(cycle, list | tuple) or [type(part) for part in cycle] != [int, int, int, bool]:
                raise RowError(f"{self._where()}: a cycle is {cycle!r}; it must be [proposed, accepted, emitted, cut]")
        for name, value in (self.phases_ms or {}).items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise RowError(f"{self._where()}: phases_ms has {name} = {value!r}; it must be a finite number")
        object.__setattr__(self, "cycles", tuple(Cycle(*cycle) for cycle in self.cycles))
        object.__setattr__(self, "tree", tuple(self.tree))
        object.__setattr__(self, "simulated", tuple(self.simulated))
        self._check()

    def _where(self) -> str:
        return f"request {self.request_id!r}, arm {self.arm!r}, repeat {self.repeat}"

    def _check(self) -> None:
        """Fields that must agree with one another."""
        faults = []
        if ALL in (self.domain, self.group):
            faults.append(f"domain is {self.domain!r}, group {self.group!r}; {ALL!r} is kept for the pooled figures")
        if self.clock not in CLOCKS:
            faults.append(f"clock is {self.clock!r}; allowed are {', '.join(CLOCKS)}")
        if not 0 <= self.k <= 16:
            faults.append(f"k is {self.k}; allowed are 0..16")
        if (self.arm == BASELINE) != (self.k == 0):
            faults.append(f"k is {self.k} but the arm is {self.arm!r}; k = 0 is the baseline, and only it")
        if self.policy not in POLICIES or self.rule not in RULES:
            faults.append(f"policy is {self.policy!r}, rule {self.rule!r}; allowed are {POLICIES} and {RULES}")
        if not all(type(rate) in (int, float) and 0 <= rate <= 1 for rate in self.simulated):
            faults.append(f"simulated is {self.simulated}; every rate must lie in 0..1")
        if self.simulated and not self.k:
            faults.append("the baseline accepts nothing; simulated must be empty")
        if self.batch < 1:
            faults.append(f"batch is {self.batch}; it must be at least 1")
        if self.error is None:
            times = self.wall_ms, self.prefill_ms, self.draft_prefill_ms, self.ttft_ms, self.stall_ms, self.steady_ms
            if min(times) < 0:
                faults.append("a time is negative")
            if self.new_tok > 1 and self.wall_ms == 0:
                faults.append(f"wall_ms is 0 for {self.new_tok} tokens")
            if (self.clock == "phased") != (self.phases_ms is not None):
                faults.append("a phased row, and only one, has phases_ms")
            if self.phases_ms is not None and set(self.phases_ms) != set(PHASES):
                faults.append(f"phases_ms has {sorted(self.phases_ms)}; it must have {', '.join(PHASES)}")
            emitted = 1 + sum(c.emitted for c in self.cycles)
            if emitted != self.new_tok:
                faults.append(f"the prefill and the cycles emitted {emitted} tokens but new_tok is {self.new_tok}")
        for c in self.cycles:
            if not 0 <= c.accepted <= c.proposed <= self.k:
                faults.append(f"a cycle accepted {c.accepted} of {c.proposed} with k = {self.k}")
            if not c.cut and c.emitted != c.accepted + 1:
                faults.append(f"a whole cycle accepted {c.accepted} but emitted {c.emitted}")
        if faults:
            raise RowError(f"{self._where()}: {'; '.join(faults)}")

    @property
    def e2e_ms(self) -> float:
        """Whole request: both prefills, decoding, and at batch over 1 the prefills of others that it waited for."""
        return self.prefill_ms + self.draft_prefill_ms + self.stall_ms + self.wall_ms

    @property
    def runner(self) -> str:
        """What proposed, as the plan's costs name it."""
        return runner_name(self.draft, self.recent)

    @property
    def tpot_ms(self) -> float | None:
        """Decode time a token after the first; None for a single token."""
        return self.wall_ms / (self.new_tok - 1) if self.new_tok > 1 else None


def arm_name(draft: str, k: int) -> str:
    """Names an arm with a fixed k: "baseline", "lookup@k4", "self-6@k3", "draft:code@k3".

    Args:
        draft: draft name, "lookup", "self-N", or "" for none.
        k: proposals a cycle.
    """
    if k == 0:
        return BASELINE
    return f"{draft}@k{k}" if is_control(draft) else f"draft:{draft}@k{k}"


def runner_name(draft: str, recent: int | None) -> str:
    """What proposes: a draft, or the draft with a window, which has a cache and costs of its own."""
    return draft if recent is None else f"{draft}+recent{recent}"


def is_fixed(row: RequestRow) -> bool:
    """Whether an arm proposes k tokens in a chain every cycle, through a window or not."""
    return bool(row.k) and row.policy == "fixed" and not row.tree


def is_chain(row: RequestRow) -> bool:
    """Whether an arm proposes k tokens in a chain every cycle and sees the whole text.

    The one predicate: of such rows the cost model is made, such arms stand on a line over k, and servers run them. How
    proposals are accepted and the draft's temperature do not matter to it. Look-up counts, which may find fewer than k.
    """
    return is_fixed(row) and row.recent is None


def is_control(draft: str) -> bool:
    """Look-up and self-speculation: what no training is needed for. They are measured beside drafts."""
    return draft == LOOKUP or draft.startswith(SELF)


def measured(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """The rows that figures are made of: neither warm-up nor error."""
    return [r for r in rows if not r.warmup and r.error is None]


def errors(rows: Iterable[RequestRow]) -> list[dict[str, Any]]:
    """Failed rows, counted and named by reason, warm-up included (a warm-up that fails is a fault too).

    Returns:
        for each reason: error, num_rows, and the requests and arms that it struck.
    """
    found: dict[str, list[RequestRow]] = {}
    for r in rows:
        if r.error is not None:
            found.setdefault(r.error, []).append(r)
    return [
        {
            "error": error,
            "num_rows": len(failed),
            "requests": list(dict.fromkeys(r.request_id for r in failed)),
            "arms": list(dict.fromkeys(r.arm for r in failed)),
        }
        for error, failed in found.items()
    ]


def counted(row: RequestRow) -> list[Cycle]:
    """Cycles that count for acceptance: not cut by end-of-sequence and not shortened by the length limit.

    A cycle near the limit proposes only what there is room for. It is told by its size: fewer than k proposals, exactly
    as many as the room left.
    """
    kept, before = [], 1
    for c in row.cycles:
        room = row.new_tok - before - 1
        shortened = row.finish == "length" and c.proposed < row.k and c.proposed == room
        if not c.cut and not shortened:
            kept.append(c)
        before += c.emitted
    return kept
