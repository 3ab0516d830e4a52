"""Test data: rows worked by hand, and a made-up run of a made-up device with known costs. Nothing here was measured."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.costs import Costs, draft_ms, verify_ms
from eval.records import Cycle, RequestRow, arm_name

# A made-up device: T 22 ms; the small draft is cheap, the large one accepts more and still loses.
VERIFY_MS = {0: 20.9, 1: 21.6, 2: 22.5, 3: 23.3, 4: 24.6, 5: 25.7}
SMALL = Costs(22.0, VERIFY_MS, 2.1, 0.5, 0.5, 0.6, 250, 1, "made-up CPU", "code-5pct", 2.1, None, {"a": 1.9, "b": 2.0})
LARGE = Costs(22.0, VERIFY_MS, 6.4, 0.9, 0.5, 0.6, 250, 1, "made-up CPU", "code-18pct", 6.4, None, {"a": 1.9, "b": 2.0})
LOOKUP = Costs(22.0, VERIFY_MS, 0.0, 0.15, 0.4, 0.6, 250, 1, "made-up CPU", "lookup")
ACCEPT = {
    "code-5pct": {"code": 0.66, "math": 0.60, "qa": 0.41},
    "code-18pct": {"code": 0.74, "math": 0.69, "qa": 0.55},
    "lookup": {"code": 0.42, "math": 0.22, "qa": 0.12},
}
NAMES = {"code": "code <b>&amp;</b> #{}", "math": "math/{}", "qa": "qa-{}"}


def make_row(cycles: Sequence[Sequence[Any]] = (), **change: Any) -> RequestRow:
    """A row of draft "d" whose tokens follow from its cycles; anything can be changed."""
    made = tuple(Cycle(*c) for c in cycles)
    k = change.pop("k", max((c.proposed for c in made), default=3))
    draft = change.pop("draft", "d" if k else "")
    values: dict[str, Any] = {
        "request_id": "r0",
        "domain": "code",
        "group": "short",
        "arm": arm_name(draft, k),
        "draft": draft,
        "k": k,
        "batch": 1,
        "context_tok": 100,
        "new_tok": 1 + sum(c.emitted for c in made),
        "repeat": 0,
        "clock": "bare",
        "warmup": False,
        "error": None,
        "finish": "length",
        "cycles": made,
        "wall_ms": 10.0 * max(1, len(made)),
        "prefill_ms": 20.0,
        "draft_prefill_ms": 0.0,
        "phases_ms": None,
        "waste_ms": None,
        "ttft_ms": 20.0,
        "tokens_sha": "same",
        "device": "made-up CPU",
        "dtype": "float32",
        "temperature": 0.0,
        "seed": 0,
        "start_s": 0.0,
        "order": 0,
    }
    return RequestRow(**values | change)


def plain(num_tok: int, **change: Any) -> RequestRow:
    """A baseline row of that many tokens."""
    return make_row([(0, 0, 1)] * (num_tok - 1), k=0, **change)


def timed(row: RequestRow, draft: float, verify: float, sampling: float, host: float) -> dict[str, Any]:
    """Fields that turn a row into a phased one with these milliseconds."""
    phases = {"draft": draft, "verify": verify, "sampling": sampling, "host": host}
    return {"clock": "phased", "phases_ms": phases, "wall_ms": sum(phases.values())}


def _decode(rng: np.random.Generator, k: int, accept: float, new_tok: int, eos: bool, lookup: bool) -> list[Cycle]:
    """Cycles of one answer, cut as the engine cuts them."""
    cycles, done = [], 1
    while done < new_tok:
        room = new_tok - done - 1
        proposed = min(k, room) if not lookup or rng.random() < 0.45 else 0
        misses = rng.random(proposed) > (accept if not lookup else min(1.0, 2 * accept))
        accepted = int(np.argmax(misses)) if misses.any() else proposed
        emitted = min(accepted + 1, new_tok - done)
        done += emitted
        cycles.append(Cycle(proposed, accepted, emitted, False))
    last = cycles[-1] if cycles else None
    if eos and last and last.proposed > last.accepted:
        # The end came as an accepted token: the correction behind it was dropped.
        cycles[-1] = Cycle(last.proposed, last.accepted + 1, last.emitted, True)
    return cycles


def make_run(
    num: int = 8,
    ks: Sequence[int] = (1, 2, 3, 4, 5),
    drafts: Sequence[Costs] = (SMALL, LARGE),
    lookup: bool = True,
    noise: float = 0.012,
    seed: int = 0,
    new_tok: int = 96,
) -> list[RequestRow]:
    """Rows of a whole evaluation: three domains, a warm-up, both clocks, some baseline repeats, one failed request."""
    rng = np.random.default_rng(seed)
    arms = [("", 0, SMALL)] + [(c.draft, k, c) for c in drafts for k in ks]
    arms += [("lookup", k, LOOKUP) for k in ks[1::2]] if lookup else []
    rows: list[RequestRow] = []
    for domain in ("code", "math", "qa"):
        for i in range(-1, num):
            context, eos = int(rng.integers(60, 420)), bool(rng.random() < 0.4)
            length = int(rng.integers(max(2, new_tok // 3), new_tok)) if eos else new_tok
            skill = float(np.clip(rng.normal(1.0, 0.12), 0.6, 1.3))
            for draft, k, costs in arms:
                accept = min(0.97, ACCEPT[draft][domain] * skill) if draft else 0.0
                cycles = _decode(rng, k, accept, length, eos, draft == "lookup")
                clocks = [("bare", 0), ("phased", 0)] + [("bare", 1)] * (not draft and i % 3 == 0)
                for clock, repeat in clocks:
                    jitter = float(np.exp(rng.normal(0, noise)))
                    row = _timed_row(domain, i, draft, k, costs, cycles, context, eos, clock, repeat, jitter)
                    rows.append(_numbered(row, len(rows)))
    reason = "8150 prompt + 96 new tokens exceed the target's 8192 positions"
    for draft, k, _ in arms:
        rows.append(
            make_row(k=k, draft=draft, request_id="qa-too-long", domain="qa", error=reason, finish="", new_tok=0)
        )
    return rows


def _numbered(values: dict[str, Any], order: int) -> RequestRow:
    return make_row(**values, order=order)


def _timed_row(
    domain: str,
    i: int,
    draft: str,
    k: int,
    costs: Costs,
    cycles: Sequence[Cycle],
    context: int,
    eos: bool,
    clock: str,
    repeat: int,
    jitter: float,
) -> dict[str, Any]:
    phases = {
        "draft": sum(draft_ms(costs, c.proposed) for c in cycles) * jitter,
        "verify": sum(verify_ms(costs, c.proposed) + 0.0015 * (context - 250) for c in cycles) * jitter,
        "sampling": sum(costs.S_ms for _ in cycles) * jitter,
        "host": sum(costs.H_ms for _ in cycles) * jitter,
    }
    prefill, draft_prefill = 0.36 * context, costs.t_ms * 0.012 * context if k else 0.0
    return {
        "cycles": cycles,
        "k": k,
        "draft": draft,
        "request_id": NAMES[domain].format(max(i, 0)),
        "domain": domain,
        "context_tok": context,
        "warmup": i < 0,
        "clock": clock,
        "repeat": repeat,
        "finish": "eos" if eos else "length",
        "wall_ms": sum(phases.values()) * (1.004 if clock == "phased" else 1.0),
        "phases_ms": phases if clock == "phased" else None,
        "prefill_ms": prefill,
        "draft_prefill_ms": draft_prefill,
        "ttft_ms": prefill + draft_prefill,
        "dtype": "bfloat16",
        "tokens_sha": hashlib.sha1(f"{domain}{i}".encode(), usedforsecurity=False).hexdigest(),
    }


def make_plan() -> dict[str, Any]:
    """plan.json of the made-up device."""
    return {"format": 1, "device": "made-up CPU", "costs": [SMALL.to_json(), LARGE.to_json()]}
