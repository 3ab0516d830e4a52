"""Distillation losses between target and draft next-token distributions, from final hidden states, in chunks.

`p` is the target's distribution, `q` the draft's, both softmax(logits / temperature), in float32 (float64 for float64
inputs). What is minimised:

| name          | formula                                              | power of T |
|---------------|------------------------------------------------------|------------|
| forward_kl    | KL(p || q) = sum p log(p / q)                        | 2          |
| reverse_kl    | KL(q || p) = sum q log(q / p)                        | 2          |
| jsd           | b KL(p || m) + (1 - b) KL(q || m), m = b p + (1-b) q | 2          |
| tv            | 1/2 sum abs(p - q) = 1 - alpha                       | 1          |
| neg_log_alpha | -log alpha, alpha = sum min(p, q)                    | 1          |
| cross_entropy | -log q(argmax of the target), always at T = 1        | 0          |

Convention for the temperature: every value is multiplied by T to the power of the table, in `divergence` and in
`chunked_loss` alike, so that changing T (or mixing with the hard loss) does not change the size of the gradient: the
first three are quadratic in q - p, whose gradient shrinks as 1/T^2; the next two are linear in it.

`divergence` is the readable reference. `chunked_loss` is the training path: four products a chunk (target head, draft
head, two for the gradient), gradients written by hand and taken in forward, so nothing of size [N, R] ever lives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from distill.loss_block import TEMPERATURE_POWER, BlockSettings, accumulate, chunk_losses, wide_dtype

logger = logging.getLogger(__name__)

IGNORE = -100
LOSSES = tuple(TEMPERATURE_POWER)


class LossError(ValueError):
    """A loss, temperature, beta or set of shapes that cannot be trained with."""


def check_losses(weights: Mapping[str, float], temperature: float = 1.0, beta: float = 0.5) -> None:
    """Refuse a mixture that cannot train and warn of one that hardly can; to be called once, before the first step.

    Args:
        weights: Loss name to its weight, finite and >= 0, not all 0.
        temperature: Softmax temperature of both models, > 0.
        beta: The target's weight in the mixture of `jsd`, in (0, 1).

    Raises:
        LossError: Naming the value, what is allowed and what to do.
    """
    _refuse(weights, temperature, beta)
    if weights.get("jsd") and not 0.05 <= beta <= 0.95:
        logger.warning(
            "jsd_beta %g is near an end, where jsd and its gradient shrink like min(beta, 1 - beta): "
            "training will hardly move; use forward_kl (beta -> 0) or reverse_kl (beta -> 1)",
            beta,
        )


def _refuse(weights: Mapping[str, float], temperature: float, beta: float) -> None:
    unknown = [name for name in weights if name not in TEMPERATURE_POWER]
    if unknown:
        raise LossError(f"unknown loss {unknown[0]!r}; allowed: {', '.join(LOSSES)}")
    if any(not math.isfinite(w) or w < 0 for w in weights.values()) or not any(weights.values()):
        raise LossError(f"loss weights {dict(weights)}: each must be finite and >= 0, and one of them > 0")
    if not (math.isfinite(temperature) and temperature > 0):
        raise LossError(f"distillation temperature {temperature}: must be > 0 (for a hard target use cross_entropy)")
    if weights.get("jsd") and not 0 < beta < 1:
        raise LossError(f"jsd_beta {beta}: must lie in (0, 1); for the two ends use forward_kl or reverse_kl")


def divergence(name: str, p_logits: Tensor, q_logits: Tensor, temperature: float = 1.0, beta: float = 0.5) -> Tensor:
    """One loss per position from two full sets of logits: the reference that `chunked_loss` is tested against.

    Columns that are -inf in both sets are impossible tokens and add nothing.

    Args:
        name: One of `LOSSES`; see the table at the top for the formulas and the power of T.
        p_logits: Target logits [N, V].
        q_logits: Draft logits [N, V].
        temperature: Softmax temperature of both, > 0.
        beta: The target's weight in the mixture of `jsd`.

    Returns:
        Values [N] in nats (tv: a probability), float32, or float64 for float64 logits.

    Raises:
        LossError: For an unknown name, a bad temperature or beta, or logits of different shapes.

    Source:
        jsd: arXiv 2306.13649 eq. 1 (beta weighs the target). T^2: arXiv 1503.02531 section 2. alpha: arXiv 2211.17192.
    """
    _refuse({name: 1.0}, temperature, beta)
    if p_logits.shape != q_logits.shape:
        raise LossError(f"target logits {tuple(p_logits.shape)} and draft logits {tuple(q_logits.shape)} must be alike")
    dtype = torch.float64 if q_logits.dtype == torch.float64 else torch.float32
    p_logits, q_logits = p_logits.to(dtype), q_logits.to(dtype)
    if name == "cross_entropy":
        best = p_logits.argmax(-1, keepdim=True)
        return -q_logits.log_softmax(-1).gather(-1, best).squeeze(-1)
    log_p, log_q = (p_logits / temperature).log_softmax(-1), (q_logits / temperature).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if name == "forward_kl":
        value = _kl(p, log_p, log_q)
    elif name == "reverse_kl":
        value = _kl(q, log_q, log_p)
    elif name == "jsd":
        log_m = (beta * p + (1 - beta) * q).clamp(min=torch.finfo(dtype).tiny).log()
        value = beta * _kl(p, log_p, log_m) + (1 - beta) * _kl(q, log_q, log_m)
    elif name == "tv":
        value = (p - q).abs().sum(-1) / 2
    else:
        value = -torch.minimum(p, q).sum(-1).log()
    return value * temperature ** TEMPERATURE_POWER[name]


def _kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum a (log a - log b) over the last axis, with 0 log 0 = 0 also where both logits are -inf."""
    return (a * torch.where(a > 0, log_a - log_b, torch.zeros_like(a))).sum(-1)


@dataclass(frozen=True)
class LossStats:
    """Sums over the supervised positions of one call, as tensors so that reading them is the caller's wait.

    alpha_sum: sum over positions of sum_j min(p_j, q_j) at the loss temperature, over the rows given.
    match_sum: positions at which the two argmaxes over the rows given agree.
    num_positions: supervised positions.
    """

    alpha_sum: Tensor
    match_sum: Tensor
    num_positions: Tensor


def chunked_loss(
    hidden_draft: Tensor,
    weight_draft: Tensor,
    hidden_target: Tensor,
    weight_target: Tensor,
    labels: Tensor,
    weights: Mapping[str, float],
    denominator: Tensor | float,
    chunk_tok: int = 1024,
    temperature: float = 1.0,
    beta: float = 0.5,
    softcaps: tuple[float | None, float | None] = (None, None),
    row_logit_shift: Tensor | None = None,
    position_weights: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Weighted sum of losses over supervised positions, divided by `denominator`, with gradients for the draft only.

    Equal to sum_i sum_l weights[l] * divergence(l)_i / denominator over the rows R, for any `chunk_tok`. Products run
    in the autocast dtype when autocast is on, else in the dtype of `weight_draft`; everything between is float32.

    `row_logit_shift` is added to both models' logits after the division by the temperature: log(1 / chance of the row
    being in R), see `distill.rows`, which says why. It enters p and q but neither argmax.

    Args:
        hidden_draft: What the draft's head multiplies [N, h]; for a low-rank head, its inner factor's output [N, r].
        weight_draft: Rows of the draft's head [R, h].
        hidden_target: What the target's head multiplies [N, H].
        weight_target: The same rows of the target's head [R, H].
        labels: [N]; only `IGNORE` (-100) matters, such positions add nothing.
        weights: Loss name to weight; see `check_losses`.
        denominator: Supervised tokens over the whole accumulation window and all ranks. 0 gives a loss of 0.
        chunk_tok: Positions whose logits live at a time.
        temperature: Softmax temperature of both models.
        beta: The target's weight in the mixture of `jsd`.
        softcaps: Final logit soft cap of (target, draft), None for none.
        row_logit_shift: [R], finite, or None.
        position_weights: Factor on each position's loss [N], or None for 1.

    Returns:
        The loss (a scalar) and sums for the log, both on the draft's device.

    Raises:
        LossError: For shapes that do not fit (row counts named), a bad mixture, temperature, beta or chunk.

    Source:
        Gradients inside forward, chunk by chunk: Liger-Kernel's fused linear losses, arXiv 2410.10989.
    """
    _refuse(weights, temperature, beta)
    _check_shapes(hidden_draft, weight_draft, hidden_target, weight_target, labels, chunk_tok)
    device = hidden_draft.device.type
    settings = BlockSettings(
        weights={name: w for name, w in weights.items() if w},
        temperature=temperature,
        beta=beta,
        chunk_tok=chunk_tok,
        softcaps=softcaps,
        dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_draft.dtype,
        backward=torch.is_grad_enabled(),
    )
    scale = torch.as_tensor(denominator, dtype=wide_dtype(settings.dtype), device=hidden_draft.device)
    scale = torch.where(scale > 0, 1 / scale, 0)
    loss, stats = _Chunked.apply(
        hidden_draft,
        weight_draft,
        hidden_target,
        weight_target,
        labels,
        scale,
        row_logit_shift,
        position_weights,
        settings,
    )
    return loss, LossStats(*stats.unbind())


def _check_shapes(hd: Tensor, wd: Tensor, ht: Tensor, wt: Tensor, labels: Tensor, chunk_tok: int) -> None:
    if wd.shape[0] != wt.shape[0]:
        raise LossError(
            f"draft head has {wd.shape[0]} rows, target head {wt.shape[0]}: give both the same rows (the shared ids)"
        )
    if not hd.shape[0] == ht.shape[0] == labels.shape[0]:
        raise LossError(f"positions differ: draft {hd.shape[0]}, target {ht.shape[0]}, labels {labels.shape[0]}")
    if hd.shape[1] != wd.shape[1] or ht.shape[1] != wt.shape[1]:
        raise LossError(
            f"hidden width and head width differ: draft {hd.shape[1]} and {wd.shape[1]}, "
            f"target {ht.shape[1]} and {wt.shape[1]}"
        )
    if chunk_tok < 1:
        raise LossError(f"chunk_tok {chunk_tok}: must be >= 1")


class _Chunked(torch.autograd.Function):
    """The chunk loop; gradients are kept unscaled (values below 1) so that a 16-bit product does not underflow."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_draft: Tensor,
        weight_draft: Tensor,
        hidden_target: Tensor,
        weight_target: Tensor,
        labels: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        position_weights: Tensor | None,
        s: BlockSettings,
    ) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(s.dtype)
        need_hidden, need_weight = (s.backward and need for need in ctx.needs_input_grad[:2])
        rows_d, rows_t = weight_draft.detach().to(s.dtype), weight_target.to(s.dtype)
        shift = None if shift is None else shift.to(wide)
        grad_hidden = torch.zeros_like(hidden_draft, dtype=wide) if need_hidden else None
        grad_weight = torch.zeros_like(weight_draft, dtype=wide) if need_weight else None
        total, stats = scale.new_zeros(()), scale.new_zeros(3)
        keep_all = labels != IGNORE
        with torch.autocast(hidden_draft.device.type, enabled=False):
            for start in range(0, labels.shape[0], s.chunk_tok):
                at = slice(start, start + s.chunk_tok)
                keep = keep_all[at]
                # An ignored position may hold anything, NaN included: zeros make its row harmless in every product.
                hidden = torch.where(keep[:, None], hidden_draft[at], 0).to(s.dtype)
                z = hidden @ rows_d.T
                y = torch.where(keep[:, None], hidden_target[at], 0).to(s.dtype) @ rows_t.T
                value, alpha, match = chunk_losses(y, z, shift, s, need_hidden or need_weight)
                factor = (
                    keep.to(wide) if position_weights is None else torch.where(keep, position_weights[at], 0).to(wide)
                )
                total += (value * factor).sum()
                stats += torch.stack([(alpha * keep).sum(), (match & keep).sum(), keep.sum()])
                if grad_hidden is not None:
                    torch.mul(z @ rows_d, factor[:, None], out=grad_hidden[at])
                if grad_weight is not None:
                    accumulate(grad_weight, z.T @ (hidden * factor[:, None].to(s.dtype)))
        ctx.save_for_backward(grad_hidden, grad_weight, scale)
        ctx.dtypes = hidden_draft.dtype, weight_draft.dtype
        ctx.mark_non_differentiable(stats)
        return total * scale, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *grads, scale = ctx.saved_tensors
        factor = grad_loss * scale
        out = [None if g is None else (g * factor).to(d) for g, d in zip(grads, ctx.dtypes)]
        return (*out, *[None] * 7)
