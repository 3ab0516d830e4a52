"""A made-up evaluation over several contexts and batches; its device has costs that are exact lines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from engine.costs import Costs, draft_ms, verify_ms
from eval.records import RequestRow
from tests.eval.rows import _decode, make_row

CONTEXTS = {"short": 250, "medium": 3000, "long": 8000}
ACCEPTED = {"code": 0.72, "math": 0.65, "qa": 0.45}


def device(context: float, batch: int, draft: str = "small", slow: float = 1.0, wide: float = 0.35) -> Costs:
    """Costs at one load: `slow` scales the draft's step, `wide` is what a token more in a pass takes."""
    held = batch * context
    verify = {k: 20.0 + wide * batch * (k + 1) + 0.0012 * held for k in range(6)}
    step = slow * (1.9 + 0.12 * (batch - 1) + 0.00015 * held)
    return Costs(
        verify[0] + 0.9 + 0.05 * (batch - 1), verify, step, 0.4, 0.5 + 0.03 * (batch - 1), 0.4, round(context), batch,
        "made-up CPU", draft,
    )  # fmt: skip


def make_grid(
    num: int = 8,
    contexts: Mapping[str, int] | None = None,
    batches: Sequence[int] = (1, 4, 16),
    domains: Sequence[str] = ("code", "math", "qa"),
    ks: Sequence[int] = (1, 2, 4),
    drafts: Mapping[str, float] | None = None,
    noise: float = 0.01,
    wide: float = 0.35,
    new_tok: int = 96,
    seed: int = 0,
) -> list[RequestRow]:
    """Rows of both clocks for every domain, context group, batch and arm; requests of a batch start together."""
    rng = np.random.default_rng(seed)
    rows: list[RequestRow] = []
    arms = [("", 0, 1.0)] + [(d, k, slow) for d, slow in (drafts or {"small": 1.0}).items() for k in ks]
    for group, typical in (contexts or CONTEXTS).items():
        for batch in batches:
            for domain in domains:
                for i in range(num):
                    context = int(typical * rng.uniform(0.8, 1.2))
                    accept = float(np.clip(ACCEPTED[domain] * rng.normal(1, 0.08), 0.1, 0.95))
                    sha = hashlib.sha1(f"{domain}{group}{i}".encode(), usedforsecurity=False).hexdigest()
                    for draft, k, slow in arms:
                        costs = device(context + new_tok / 2, batch, draft or "none", slow, wide)
                        cycles = _decode(rng, k, accept, new_tok, False, False)
                        start = 1000.0 * len(rows) + (0 if batch > 1 else i)
                        for clock in ("bare", "phased"):
                            jitter = float(np.exp(rng.normal(0, noise)))
                            phases = {
                                "draft": sum(draft_ms(costs, c.proposed) for c in cycles) * jitter,
                                "verify": sum(verify_ms(costs, c.proposed) for c in cycles) * jitter,
                                "sampling": costs.S_ms * len(cycles) * jitter * (1 if k else 0.5),
                                "host": costs.H_ms * len(cycles) * jitter,
                            }
                            prefill, own = 0.36 * context, 0.02 * slow * context if k else 0.0
                            rows.append(
                                make_row(
                                    cycles, k=k, draft=draft, request_id=f"{domain}-{group}-{i}", domain=domain,
                                    group=group, batch=batch, context_tok=context, clock=clock, finish="length",
                                    wall_ms=sum(phases.values()), phases_ms=phases if clock == "phased" else None,
                                    prefill_ms=prefill, draft_prefill_ms=own, ttft_ms=prefill + own,
                                    dtype="bfloat16", start_s=start, order=len(rows),
                                    tokens_sha=sha,
                                )
                            )  # fmt: skip
    return rows
