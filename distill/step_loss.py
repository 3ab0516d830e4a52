"""The loss of a micro-batch as a recipe's distill stage asks for it."""

from __future__ import annotations

from torch import Tensor

from distill.loss_topk import TopK
from distill.losses import LossStats, chunked_loss
from distill.schema import Distill


def step_loss(
    stage: Distill,
    softcaps: tuple[float | None, float | None],
    shift: Tensor | None,
    states: Tensor,
    weight: Tensor,
    target: Tensor | TopK,
    teacher: Tensor,
    labels: Tensor,
    denominator: float,
    place: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """`chunked_loss` with the settings of a stage.

    Args:
        stage: losses and their settings.
        softcaps: final logit caps of (target, draft).
        shift: of the rows [R], or None.
        states: what the draft's head multiplies [N, h].
        weight: rows of the draft's head [R, h].
        target: what the target's head multiplies [N, H], or its likeliest tokens.
        teacher: the same rows of the target's head [R, H].
        labels: indices into the rows [N].
        denominator: supervised tokens of the step, over all micro-batches and processes.
        place: index of each position in its answer [N], for losses weighted by survival.
    """
    return chunked_loss(
        states,
        weight,
        target,
        None if isinstance(target, TopK) else teacher,
        labels,
        stage.loss,
        denominator=denominator,
        chunk_tok=stage.chunk_tok,
        temperature=stage.temperature,
        beta=stage.jsd_beta,
        softcaps=softcaps,
        row_logit_shift=shift,
        eta=stage.hybrid_eta,
        survival_k=stage.survival_k,
        place=place if stage.survival_k > 1 else None,
    )
