"""A closed-form bridge over cut layers: the last kept layer's down-projection is refitted to the target's final state.

With u = x / rms(x) the draft's final stream as its norm sees it, a the input of the last layer's down-projection D, and
z* what the draft's head should multiply to give the target's logits, the last layer writes

    x' = x + dD a,    dD = argmin sum_t | dD a_t / rms(x_t) - (z*_t / g - u_t) |^2 + ridge |dD|^2,

g being the final norm's gain. Nothing but D changes, so the result is a plain checkpoint of the same shape. The norm's
division is held at rms(x), which makes it linear; z* is the target's cached state itself where both heads are one
matrix, else W^+ W_target times it, the least-squares answer over all rows.

Measured on SmolLM2-135M (1,024 of 1,536 channels, 8,000 answer tokens of code to fit, 968 held-out ones), KL in nats
and share of equal argmaxes before any training: layers {0, 1, 29} 35.7 and 0 -> 4.7 to 5.0 and .21; {0, 14, 29} 12.7
and 0 -> 4.9 and .23. A free matrix in front of the head, which costs a head of its own, gives 4.1 to 4.2 and .20.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.teacher import Batch

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)  # times the mean of the squared inputs
HELD_OUT = 5  # every fifth batch chooses the ridge


@dataclass(frozen=True)
class BridgeFit:
    """How a bridge was fitted; errors are |z - z*|^2 / |z*|^2 over the batches that chose the ridge.

    Attributes:
        num_tok: positions it was fitted to, the held-out ones included.
        ridge: penalty, as a multiple of the mean squared input.
        error_before, error_after: with D as it was, and with D + dD in the linear model above.
    """

    num_tok: int
    ridge: float
    error_before: float
    error_after: float


class _Sums:
    """Products of inputs [N, I] and residuals [N, h], summed."""

    def __init__(self, inputs: int, width: int, device: torch.device) -> None:
        self.gram = torch.zeros(inputs, inputs, device=device)
        self.cross = torch.zeros(inputs, width, device=device)
        self.square = torch.zeros(width, device=device)
        self.wanted = torch.zeros((), device=device)

    def add(self, inputs: Tensor, residual: Tensor, wanted: Tensor) -> None:
        self.gram.addmm_(inputs.T, inputs)
        self.cross.addmm_(inputs.T, residual)
        self.square += residual.square().sum(0)
        self.wanted += wanted.square().sum()

    def error(self, delta: Tensor, gain: Tensor) -> float:
        """|z - z*|^2 / |z*|^2 with D + delta [h, I]."""
        left = self.square - 2 * (delta.T * self.cross).sum(0) + (delta.T * (self.gram @ delta.T)).sum(0)
        return float((left * gain.square()).sum() / self.wanted)


@torch.no_grad()
def bridge(draft: PreTrainedModel, teacher_head: Tensor, batches: Iterable[Batch], num_tok: int) -> BridgeFit:
    """Refits the draft's last down-projection, in place.

    Args:
        draft: cut from a pre-norm target (`distill.known.PRE_NORM`), in float32, with an ordinary attention.
        teacher_head: [V, H] the target's head.
        batches: answers with the target's cached states; at least two.
        num_tok: supervised positions to use.

    Returns:
        What was found.

    Raises:
        ValueError: fewer than two batches.

    Source:
        Ridge regression; a linear map in the place of removed layers, merged into the down-projection before them, is
        the idea of arXiv 2505.02819 (there from the stream at the cut, here from the channels at the end).
    """
    layer, norm = draft.get_decoder().layers[-1], draft.get_decoder().norm
    projection, gain = layer.mlp.down_proj, norm.weight.float()
    to_draft = _head_map(draft.get_output_embeddings().weight.float(), teacher_head.float().to(draft.device))
    shape = projection.in_features, projection.out_features
    fitting, choosing = (_Sums(*shape, draft.device) for _ in range(2))
    # A channel that the final norm all but switches off is left alone: what it should be is not known.
    live = gain.abs() > 1e-4 * gain.abs().max()
    seen: dict[str, Tensor] = {}
    hooks = [
        projection.register_forward_pre_hook(lambda _, args: seen.__setitem__("inputs", args[0])),
        norm.register_forward_pre_hook(lambda _, args: seen.__setitem__("stream", args[0])),
    ]
    num = count = 0
    try:
        for number, batch in enumerate(batch.to(draft.device) for batch in batches):
            if num >= num_tok:
                break
            draft.get_decoder()(input_ids=batch.input_ids, use_cache=False)
            at = batch.positions[:, 0], batch.positions[:, 1]
            inputs, scale = _unit(seen["inputs"][at].float(), seen["stream"][at].float(), norm)
            wanted = batch.hidden_target.float() @ to_draft.T if to_draft is not None else batch.hidden_target.float()
            residual = torch.where(live, wanted / torch.where(live, gain, 1) - scale, 0)
            (choosing if number % HELD_OUT == 1 else fitting).add(inputs, residual, wanted)
            num, count = num + len(inputs), number + 1
    finally:
        for hook in hooks:
            hook.remove()
    if count < 2:
        raise ValueError(f"a bridge is fitted to {count} batches of answers; at least 2 are needed: give more prompts")
    none = torch.zeros(shape[1], shape[0], device=draft.device)
    deltas = {ridge: _solve(fitting, ridge) for ridge in RIDGES}
    best = min(RIDGES, key=lambda ridge: choosing.error(deltas[ridge], gain))
    found = BridgeFit(num, best, choosing.error(none, gain), choosing.error(deltas[best], gain))
    projection.weight += deltas[best].to(projection.weight.dtype)
    return found


def _unit(inputs: Tensor, stream: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs and stream [N, .] divided by the length that the final norm divides by."""
    inverse = (stream.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return inputs * inverse, stream * inverse


def _solve(sums: _Sums, ridge: float) -> Tensor:
    """dD [h, I] of a ridge."""
    gram = sums.gram.double()
    gram.diagonal().add_(ridge * gram.diagonal().mean().clamp(min=1e-12))
    return torch.cholesky_solve(sums.cross.double(), torch.linalg.cholesky(gram)).T.float()


def _head_map(own: Tensor, teacher: Tensor) -> Tensor | None:
    """[h, H]: what the draft's head must multiply for the target's logits, from what the target's does; None is equal.

    Rows that only one of the heads has (padding) do not count.
    """
    rows = min(own.shape[0], teacher.shape[0])
    own, teacher = own[:rows], teacher[:rows]
    if own.shape == teacher.shape and torch.equal(own, teacher):
        return None
    gram = (own.T @ own).double()
    gram.diagonal().add_(1e-6 * gram.diagonal().mean())
    return torch.linalg.solve(gram, (own.T @ teacher).double()).float()
