"""What happens to a chunk between the head products: softmax, losses, hand-written gradients, acceptance.

The formulas and the temperature convention are at the top of `distill.losses`, the only user of the gradients here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.footprint import CUDA_BLOCK
from engine.warp import argmax

TEMPERATURE_POWER = {
    "forward_kl": 2,
    "reverse_kl": 2,
    "jsd": 2,
    "tv": 1,
    "tv_pp": 1,
    "neg_log_alpha": 1,
    "kl_tv": 1,
    "cross_entropy": 0,
}
VARIANCE_FLOOR = 1e-4  # of tv_pp's reward: its loss is at most 100 times tv
# Elements of one float32 block of logits on a CPU: about a core's L2, so that the passes of softmax, gradient and
# acceptance read it from there. Four times faster than passes over a whole chunk.
CPU_BLOCK = 1 << 19
# Positions of a product are filled up to a multiple of this: a CPU compiles a product for every new shape and keeps a
# thousand of them, 3 GB where every step has shapes of its own.
PRODUCT_ROWS = 64


@dataclass(frozen=True)
class BlockSettings:
    """What the chunk loop needs beside tensors."""

    weights: Mapping[str, float]
    temperature: float
    beta: float
    eta: float
    chunk_tok: int
    softcaps: tuple[float | None, float | None]
    dtype: torch.dtype
    backward: bool
    topk: bool = False
    survival_k: int = 1


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_rows(z: Tensor) -> int:
    """Positions of a block of logits [c, R]."""
    return max(1, (CUDA_BLOCK if z.is_cuda else CPU_BLOCK) // z.shape[1])


def whole_rows(x: Tensor) -> Tensor:
    """[N, h] with rows of zeros behind it, up to a multiple of PRODUCT_ROWS."""
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % PRODUCT_ROWS))


def chunk_losses(
    y: Tensor, z: Tensor, shift: Tensor | None, s: BlockSettings, backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [c], alpha [c] and argmax match [c] of one chunk; `z` is overwritten by the gradient w.r.t. itself."""
    rows = block_rows(z)
    parts = []
    for start in range(0, z.shape[0], rows):
        z_block = z[start : start + rows]
        value, alpha, match, grad = block(y[start : start + rows], z_block, shift, s, backward)
        if grad is not None:
            z_block.copy_(grad)
        parts.append((value, alpha, match))
    value, alpha, match = (torch.cat(column) for column in zip(*parts))
    return value, alpha, match


def block(
    y_raw: Tensor,
    z_raw: Tensor,
    shift: Tensor | None,
    s: BlockSettings,
    backward: bool,
    best: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Everything between the products for a block of positions, with the closed-form gradient w.r.t. `z_raw`.

    `best` [c] is the target's argmax; None looks for it.
    """
    wide = wide_dtype(s.dtype)
    y, z = capped(y_raw.to(wide), s.softcaps[0]), capped(z_raw.to(wide), s.softcaps[1])
    best = argmax(y) if best is None else best
    match = best == argmax(z)
    tempered_y, tempered_z = temper(y, s.temperature, shift), temper(z, s.temperature, shift)
    p, q = tempered_y.softmax(-1), tempered_z.softmax(-1)
    lse_y, lse_z = _lse(tempered_y, p), _lse(tempered_z, q)
    diff = q - p
    alpha = 1 - torch.linalg.vector_norm(diff, ord=1, dim=-1) / 2
    value = torch.zeros_like(alpha)
    # grad = (q - p) f + q (g - sum q g): f comes from the forward KL, g = df/dq from the others. For tv and
    # -log alpha g is -1 where q < p and 0 elsewhere (a constant in g changes nothing), so that nothing cancels.
    # A factor of its own for each position comes from kl_tv (on the KL too) and tv_pp.
    forward_factor: float | Tensor = 0.0
    pull = None
    for name, weight in s.weights.items():
        weight = weight * s.temperature ** TEMPERATURE_POWER[name]
        if name == "forward_kl":
            value += weight * _forward_kl(p, tempered_y, tempered_z, lse_y, lse_z)
            forward_factor = forward_factor + weight
        elif name == "reverse_kl":
            ratio = (tempered_z - lse_z[:, None]).sub_(tempered_y - lse_y[:, None])
            value += weight * torch.linalg.vecdot(q, ratio)
            pull = _add(pull, ratio, weight)
        elif name == "jsd":
            # Both may underflow to 0, and 0 log 0 is 0.
            log_m = (s.beta * p).add_(q, alpha=1 - s.beta).clamp_(min=torch.finfo(wide).tiny).log_()
            from_q = (tempered_z - lse_z[:, None]).sub_(log_m)
            from_p = (tempered_y - lse_y[:, None]).sub_(log_m)
            value += weight * (s.beta * torch.linalg.vecdot(p, from_p) + (1 - s.beta) * torch.linalg.vecdot(q, from_q))
            pull = _add(pull, from_q, weight * (1 - s.beta))
        elif name == "tv":
            value += weight * (1 - alpha)
            pull = _add(pull, diff.sign().sub_(1), weight / 2)
        elif name == "tv_pp":
            mean = torch.linalg.vecdot(q, (diff < 0).to(wide))
            inverse = (mean * (1 - mean)).clamp(min=VARIANCE_FLOOR).rsqrt()
            value += weight * (1 - alpha) * inverse
            pull = _add(pull, diff.sign().sub_(1).mul_(inverse[:, None]), weight / 2)
        elif name == "kl_tv":
            share = (-s.eta * alpha).exp()
            tempered = share * s.temperature
            value += weight * (tempered * _forward_kl(p, tempered_y, tempered_z, lse_y, lse_z))
            value += weight * ((1 - share) * (1 - alpha))
            forward_factor = forward_factor + weight * tempered[:, None]
            pull = _add(pull, diff.sign().sub_(1).mul_(1 - share[:, None]), weight / 2)
        elif name == "neg_log_alpha":
            # Its own sum: 1 - TV has no digits left where alpha is small, and here it is divided by.
            small = torch.minimum(p, q).sum(-1).clamp(min=1e-30)
            value -= weight * small.log()
            pull = _add(pull, diff.sign().sub_(1).div_(small[:, None]), weight / 2)
    grad = None
    if backward:
        factor = forward_factor / s.temperature
        grad = diff if isinstance(factor, float) and factor == 1 else diff.mul_(factor)
        if pull is not None:
            grad.addcmul_(q, pull - torch.linalg.vecdot(q, pull)[:, None], value=1 / s.temperature)
    weight = s.weights.get("cross_entropy", 0.0)
    if weight:
        hard, probs, lse = tempered_z, q, lse_z
        if s.temperature != 1:
            hard = temper(z, 1.0, shift)
            probs, lse = hard.softmax(-1), hard.logsumexp(-1)
        value += weight * (lse - hard.gather(-1, best[:, None]).squeeze(-1))
        if grad is not None:
            one_hot = torch.full_like(best[:, None], -weight, dtype=wide)
            grad.add_(probs, alpha=weight).scatter_add_(-1, best[:, None], one_hot)
    if grad is not None and s.softcaps[1] is not None:
        grad.mul_(1 - (z / s.softcaps[1]).square())
    return value, alpha, match, grad


def _forward_kl(p: Tensor, tempered_y: Tensor, tempered_z: Tensor, lse_y: Tensor, lse_z: Tensor) -> Tensor:
    return torch.linalg.vecdot(p, tempered_y - tempered_z) - lse_y + lse_z


def accumulate(total: Tensor, part: Tensor) -> None:
    """total += part, where a 16-bit part is widened block by block: a whole copy costs more than the sum."""
    rows = total.shape[0] if total.is_cuda else block_rows(total)
    for to, extra in zip(total.split(rows), part.split(rows)):
        to += extra


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap), or the logits where there is no cap (Gemma-2's final soft cap)."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def temper(logits: Tensor, temperature: float, shift: Tensor | None) -> Tensor:
    """Logits over temperature, plus the rows' log-weights."""
    logits = logits if temperature == 1 else logits / temperature
    return logits if shift is None else logits + shift


def _lse(logits: Tensor, probs: Tensor) -> Tensor:
    """Log of the partition function from the largest logit and its probability (>= 1/R, so its log is exact)."""
    return logits.amax(-1) - probs.amax(-1).log()


def _add(total: Tensor | None, term: Tensor, weight: float) -> Tensor:
    return term.mul_(weight) if total is None else total.add_(term, alpha=weight)
