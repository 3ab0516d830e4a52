"""The readable losses, on whole logits and by autograd: what `distill.losses.chunked_loss` is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from distill.loss_block import TEMPERATURE_POWER, VARIANCE_FLOOR
from distill.losses import ETA, LossError, refuse


def divergence(
    name: str, p_logits: Tensor, q_logits: Tensor, temperature: float = 1.0, beta: float = 0.5, eta: float = ETA
) -> Tensor:
    """One loss per position from two full sets of logits: the reference that `chunked_loss` is tested against.

    Columns that are -inf in both sets are impossible tokens and add nothing.

    Args:
        name: One of `LOSSES`; see the table at the top of `distill.losses` for the formulas and the power of T.
        p_logits: Target logits [N, V].
        q_logits: Draft logits [N, V].
        temperature: Softmax temperature of both, > 0.
        beta: The target's weight in the mixture of `jsd`.
        eta: How fast `kl_tv` turns from the KL to the TV as acceptance grows.

    Returns:
        Values [N] in nats (tv: a probability), float32, or float64 for float64 logits.

    Raises:
        LossError: For an unknown name, a bad temperature or beta, or logits of different shapes.

    Source:
        See the top of `distill.losses`.
    """
    refuse({name: 1.0}, temperature, beta, eta)
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
    elif name in ("tv", "tv_pp"):
        value = (p - q).abs().sum(-1) / 2
        if name == "tv_pp":
            mean = (q * (p > q)).sum(-1)
            value = value / (mean * (1 - mean)).clamp(min=VARIANCE_FLOOR).sqrt().detach()
    elif name == "kl_tv":
        total_variation = (p - q).abs().sum(-1) / 2
        weight = (-eta * (1 - total_variation)).exp().detach()
        value = weight * temperature * _kl(p, log_p, log_q) + (1 - weight) * total_variation
    else:
        value = -torch.minimum(p, q).sum(-1).log()
    return value * temperature ** TEMPERATURE_POWER[name]


def _kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum a (log a - log b) over the last axis, with 0 log 0 = 0 also where both logits are -inf."""
    return (a * torch.where(a > 0, log_a - log_b, torch.zeros_like(a))).sum(-1)
