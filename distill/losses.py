"""Distillation losses between target and draft next-token distributions, from final hidden states, in chunks.

`p` is the target's distribution, `q` the draft's, both softmax(logits / temperature), in float32 (float64 for float64
inputs). What is minimised, with alpha = sum min(p, q) and sg[.] a value that is not differentiated:

| name          | formula                                                                | power of T |
|---------------|------------------------------------------------------------------------|------------|
| forward_kl    | KL(p || q) = sum p log(p / q)                                          | 2          |
| reverse_kl    | KL(q || p) = sum q log(q / p)                                          | 2          |
| jsd           | b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q                 | 2          |
| tv            | 1/2 sum abs(p - q) = 1 - alpha                                         | 1          |
| tv_pp         | TV / sg[std_q r], r = 1 where p > q and 0 elsewhere                    | 1          |
| neg_log_alpha | -log alpha                                                             | 1          |
| kl_tv         | w T KL(p || q) + (1 - w) TV, w = sg[exp(-eta alpha)]                   | 1          |
| cross_entropy | -log q(argmax of the target), always at T = 1                          | 0          |

Convention for the temperature: every value is multiplied by T to the power of the table, in `divergence` and in
`chunked_loss` alike, so that changing T (or mixing with the hard loss) does not change the size of the gradient: the
first three are quadratic in q - p, whose gradient shrinks as 1/T^2; the next are linear in it.

The gradient of `tv_pp` is the policy gradient - E_q[A grad log q] with the normalised reward A = (r - mean_q r) /
std_q r; tv's own is the same with r alone. It keeps positions alive where tv is flat (little of q has p above it). The
reward is normalised over the draft's own distribution at each position (std at least 0.01); the paper does so over a
batch, which would need a second pass. `kl_tv` takes alpha of each position: as it grows, the KL hands over to what
acceptance is. The gradient of w is no part of its gradient.

Source: jsd arXiv 2306.13649 eq. 1; T^2 arXiv 1503.02531 section 2; alpha arXiv 2211.17192; tv_pp after arXiv
2403.00858 (TVD++), neg_log_alpha and kl_tv after arXiv 2602.23881 (LK losses). The last two papers' normalisations
differ as said above.

`distill.loss_reference.divergence` is the readable reference. `chunked_loss` is the training path: four products a
chunk (target head, draft head, two for the gradient), gradients written by hand and taken in forward, so nothing of
size [N, R] ever lives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from distill.loss_block import TEMPERATURE_POWER, BlockSettings, accumulate, chunk_losses, whole_rows, wide_dtype
from distill.loss_topk import TopK, topk_losses
from distill.loss_weights import survival_weights

logger = logging.getLogger(__name__)

IGNORE = -100
ETA = 3.0  # of kl_tv
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
    refuse(weights, temperature, beta)
    if weights.get("jsd") and not 0.05 <= beta <= 0.95:
        logger.warning(
            "jsd_beta %g is near an end, where jsd and its gradient shrink like min(beta, 1 - beta): "
            "training will hardly move; use forward_kl (beta -> 0) or reverse_kl (beta -> 1)",
            beta,
        )


def refuse(weights: Mapping[str, float], temperature: float, beta: float, eta: float = ETA) -> None:
    """Raises `LossError` for a mixture that cannot train; see `check_losses`."""
    unknown = [name for name in weights if name not in TEMPERATURE_POWER]
    if unknown:
        raise LossError(f"unknown loss {unknown[0]!r}; allowed: {', '.join(LOSSES)}")
    if any(not math.isfinite(w) or w < 0 for w in weights.values()) or not any(weights.values()):
        raise LossError(f"loss weights {dict(weights)}: each must be finite and >= 0, and one of them > 0")
    if not (math.isfinite(temperature) and temperature > 0):
        raise LossError(f"distillation temperature {temperature}: must be > 0 (for a hard target use cross_entropy)")
    if weights.get("jsd") and not 0 < beta < 1:
        raise LossError(f"jsd_beta {beta}: must lie in (0, 1); for the two ends use forward_kl or reverse_kl")
    if weights.get("kl_tv") and not (math.isfinite(eta) and eta >= 0):
        raise LossError(f"eta {eta}: must be finite and >= 0 (0 is forward_kl at temperature 1)")


@dataclass(frozen=True)
class LossStats:
    """Sums over the supervised positions of one call, as tensors so that reading them is the caller's wait.

    Attributes:
        alpha_sum: sum over positions of sum_j min(p_j, q_j) at the loss temperature, over the rows given.
        match_sum: positions at which the two argmaxes over the rows given agree.
        num_positions: supervised positions.
        loss: each position's own loss [N], before weights of positions; ignored ones hold anything.
    """

    alpha_sum: Tensor
    match_sum: Tensor
    num_positions: Tensor
    loss: Tensor


def chunked_loss(
    hidden_draft: Tensor,
    weight_draft: Tensor,
    hidden_target: Tensor | TopK,
    weight_target: Tensor | None,
    labels: Tensor,
    weights: Mapping[str, float],
    denominator: Tensor | float,
    chunk_tok: int = 1024,
    temperature: float = 1.0,
    beta: float = 0.5,
    softcaps: tuple[float | None, float | None] = (None, None),
    row_logit_shift: Tensor | None = None,
    eta: float = ETA,
    survival_k: int = 1,
    place: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Weighted sum of losses over supervised positions, divided by `denominator`, with gradients for the draft only.

    Equal to sum_i sum_l weights[l] * divergence(l)_i / denominator over the rows R, for any `chunk_tok`. Products run
    in the autocast dtype when autocast is on, else in the dtype of `weight_draft`; everything between is float32.

    `row_logit_shift` is added to both models' logits after the division by the temperature: log(1 / chance of the row
    being in R), see `distill.rows`, which says why. It enters p and q but neither argmax.

    Args:
        hidden_draft: What the draft's head multiplies [N, h]; for a low-rank head, its inner factor's output [N, r].
        weight_draft: Rows of the draft's head [R, h].
        hidden_target: What the target's head multiplies [N, H], or its likeliest tokens at temperature 1.
        weight_target: The same rows of the target's head [R, H]; None with a TopK.
        labels: [N]; only `IGNORE` (-100) matters, such positions add nothing.
        weights: Loss name to weight; see `check_losses`.
        denominator: Supervised tokens over the whole accumulation window and all ranks. 0 gives a loss of 0.
        chunk_tok: Positions whose logits live at a time.
        temperature: Softmax temperature of both models.
        beta: The target's weight in the mixture of `jsd`.
        softcaps: Final logit soft cap of (target, draft), None for none.
        row_logit_shift: [R], finite, or None.
        eta: How fast `kl_tv` turns from the KL to the TV.
        survival_k: Above 1, each position's loss is multiplied by `survival_weights` for drafts of so many tokens, from
            this call's own alpha, which is not differentiated. An ignored position lets everything pass.
        place: Index of each position in its answer [N]; needed for survival_k > 1.

    Returns:
        The loss (a scalar) and sums for the log, both on the draft's device.

    Raises:
        LossError: For shapes that do not fit (row counts named), a bad mixture, temperature, beta, eta or chunk, or a
            TopK with another temperature than 1 or with row shifts.

    Source:
        Gradients inside forward, chunk by chunk: Liger-Kernel's fused linear losses, arXiv 2410.10989.
    """
    refuse(weights, temperature, beta, eta)
    if isinstance(hidden_target, TopK):
        if temperature != 1 or row_logit_shift is not None or weight_target is not None:
            raise LossError("a target given as its likeliest tokens goes with temperature 1 and every row of the head")
        hidden_target, weight_target, topk = hidden_target.ids, hidden_target.log_p, True
    else:
        assert weight_target is not None
        topk = False
    _check_shapes(hidden_draft, weight_draft, hidden_target, weight_target, labels, chunk_tok, topk)
    if survival_k > 1 and (place is None or place.shape != labels.shape):
        raise LossError(f"survival_k {survival_k} needs the place of each of the {len(labels)} positions in its answer")
    device = hidden_draft.device.type
    settings = BlockSettings(
        weights={name: w for name, w in weights.items() if w},
        temperature=temperature,
        beta=beta,
        eta=eta,
        chunk_tok=chunk_tok,
        softcaps=softcaps,
        dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_draft.dtype,
        backward=torch.is_grad_enabled(),
        topk=topk,
        survival_k=survival_k,
    )
    scale = torch.as_tensor(denominator, dtype=wide_dtype(settings.dtype), device=hidden_draft.device)
    scale = torch.where(scale > 0, 1 / scale, 0)
    loss, stats, values = _Chunked.apply(
        hidden_draft,
        weight_draft,
        hidden_target,
        weight_target,
        labels,
        scale,
        row_logit_shift,
        place,
        settings,
    )
    return loss, LossStats(stats[0], stats[1], stats[2], values)


def _check_shapes(
    hd: Tensor, wd: Tensor, ht: Tensor, wt: Tensor, labels: Tensor, chunk_tok: int, topk: bool = False
) -> None:
    if topk:
        wt = wd  # ids and log probabilities have no head of their own
        ht = hd.new_empty(len(ht), wd.shape[1])
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
        place: Tensor | None,
        s: BlockSettings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = wide_dtype(s.dtype)
        need_hidden, need_weight = (s.backward and need for need in ctx.needs_input_grad[:2])
        rows_d = weight_draft.detach().to(s.dtype)
        rows_t = weight_target if s.topk else weight_target.to(s.dtype)
        accepted = scale.new_ones(labels.shape[0]) if place is not None and s.survival_k > 1 else None
        shift = None if shift is None else shift.to(wide)
        grad_hidden = torch.zeros_like(hidden_draft, dtype=wide) if need_hidden else None
        grad_weight = torch.zeros_like(weight_draft, dtype=wide) if need_weight else None
        total, stats, values = scale.new_zeros(()), scale.new_zeros(3), scale.new_zeros(labels.shape[0])
        keep_all = labels != IGNORE
        with torch.autocast(hidden_draft.device.type, enabled=False):
            for start in range(0, labels.shape[0], s.chunk_tok):
                at = slice(start, start + s.chunk_tok)
                keep = keep_all[at]
                num = len(keep)
                # An ignored position may hold anything, NaN included: zeros make its row harmless in every product.
                hidden = whole_rows(torch.where(keep[:, None], hidden_draft[at], 0).to(s.dtype))
                z = hidden @ rows_d.T  # rows that `whole_rows` added stay zero
                if s.topk:
                    found = topk_losses(hidden_target[at], rows_t[at], z[:num], s, need_hidden or need_weight)
                else:
                    y = whole_rows(torch.where(keep[:, None], hidden_target[at], 0).to(s.dtype)) @ rows_t.T
                    found = chunk_losses(y[:num], z[:num], shift, s, need_hidden or need_weight)
                value, alpha, match = found
                values[at] = value
                factor = keep.to(wide)
                if accepted is not None and place is not None:
                    accepted[at] = torch.where(keep, alpha.clamp(0, 1), 1)
                    seen = slice(max(0, start - s.survival_k + 1), start + s.chunk_tok)
                    survive = survival_weights(accepted[seen], place[seen], s.survival_k)
                    factor = factor * survive[start - seen.start :]
                total += (value * factor).sum()
                stats += torch.stack([(alpha * keep).sum(), (match & keep).sum(), keep.sum()])
                if grad_hidden is not None:
                    torch.mul((z @ rows_d)[:num], factor[:, None], out=grad_hidden[at])
                if grad_weight is not None:
                    hidden[:num] *= factor[:, None].to(s.dtype)
                    accumulate(grad_weight, z.T @ hidden)
        ctx.save_for_backward(grad_hidden, grad_weight, scale)
        ctx.dtypes = hidden_draft.dtype, weight_draft.dtype
        ctx.mark_non_differentiable(stats, values)
        return total * scale, stats, values

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *grads, scale = ctx.saved_tensors
        factor = grad_loss * scale
        out = [None if g is None else (g * factor).to(d) for g, d in zip(grads, ctx.dtypes)]
        return (*out, *[None] * 7)
