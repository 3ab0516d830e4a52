"""From a request, an arm and what the engine answered to a row."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

from engine.model import Runner
from engine.request import Answer
from eval.arms import Arm
from eval.decoders import EvalRequest, Load
from eval.records import Cycle, RequestRow


def blank_row(
    request: EvalRequest, arm: Arm, clock: str, repeat: int, warmup: bool, target: Runner, load: Load, order: int
) -> RequestRow:
    """A row with all that is known before the run; its error is "not run".

    Args:
        request, arm: what is asked, and how it is decoded.
        clock: "bare" or "phased".
        repeat: which time this request comes.
        warmup: excluded from every figure.
        target, load: where it runs, and its decoding settings.
        order: running number of the row.
    """
    return RequestRow(
        request_id=request.id,
        domain=request.domain,
        group=request.group,
        arm=arm.name,
        draft=arm.draft,
        k=arm.k,
        batch=1,
        context_tok=len(request.ids),
        new_tok=0,
        repeat=repeat,
        clock=clock,
        warmup=warmup,
        error="not run",
        finish="",
        cycles=(),
        wall_ms=0.0,
        prefill_ms=0.0,
        draft_prefill_ms=0.0,
        phases_ms=None,
        waste_ms=None,
        ttft_ms=0.0,
        tokens_sha="",
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        temperature=load.temperature,
        seed=load.seed,
        start_s=time.perf_counter(),
        order=order,
        label=arm.label,
        policy=arm.policy,
        rule=arm.rule,
        tree=() if arm.tree is None else arm.tree.parents,
        draft_temperature=arm.draft_temperature,
        recent=arm.recent,
    )


def finished_row(blank: RequestRow, answer: Answer, **times: Any) -> RequestRow:
    """The row of a finished answer.

    Args:
        blank: of `blank_row`.
        answer: its tokens and cycles.
        times: fields of the row that were measured.
    """
    return replace(
        blank,
        error=None,
        new_tok=len(answer.tokens),
        finish=answer.finish,
        cycles=tuple(Cycle(c.proposed, c.accepted, c.emitted, c.cut) for c in answer.cycles),
        tokens_sha=hashlib.sha1(repr(answer.tokens).encode(), usedforsecurity=False).hexdigest(),
        **times,
    )
