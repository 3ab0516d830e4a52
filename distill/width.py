"""A narrower residual stream: the target's matrices seen in an orthonormal basis of its main directions.

With P [H, h] the basis and x the residual state, the draft's state is x' = P^T x. RMSNorm divides by the length of its
input, which an orthonormal basis keeps: with the norm's gain g folded into the matrices behind it,

    embedding  E -> E P        reads  W -> W diag(g) P        writes  W -> P^T W, b -> P^T b

and norm gains sqrt(kappa H / h), kappa being the share of the stream's energy inside the basis, the draft computes what
the target computes up to the part of x outside the basis, and exactly it when h = H.

A tied head must be E P too, where E diag(g) P would be right, g being the final norm's gain. A tied draft therefore
takes E diag(g) P (scaled back) for both: its head is exact and its input off, which costs less than the other way
round, since the embedding has no outlier directions and the final state has. Measured on SmolLM2-135M with all layers
kept, 700 calibration tokens, KL to the target in nats at widths 512, 384, 288, 192:

| basis from        | head                | 512  | 384  | 288  | 192  |
|-------------------|---------------------|------|------|------|------|
| activations       | of its own          | 0.48 | 1.98 | 3.88 | 7.14 |
| activations       | tied, E diag(g) P   | 3.29 | 4.26 | 5.37 | 7.39 |
| activations       | tied, E P           | 6.89 | 9.00 | 11.9 |      |
| channels kept     | tied                | 0.85 | 3.99 | 8.40 |      |
| reads and writes  | of its own          | 4.11 | 8.90 |      | 21.1 |
| embedding's SVD   | of its own          | 13.6 | 17.7 | 13.1 |      |

So the basis comes from activations when they are given, and from the weights' reads and writes (with a warning) when
not. These are starting points before any training.

Source: SliceGPT, arXiv 2401.15024 (there with a basis for each layer).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig

_NORM_BEFORE = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
_READ = re.compile(r"(.*\.)(self_attn|mlp)\.(q|k|v|gate|up)_proj\.weight")
_WRITE = re.compile(r".*\.(o|down)_proj\.(weight|bias)")
_NORM = re.compile(r".*\.(input_layernorm|post_attention_layernorm)\.weight")


def main_directions(moment: Tensor, width: int) -> tuple[Tensor, float]:
    """The orthonormal basis that keeps most of the stream's energy.

    Args:
        moment: Second moment of the stream [H, H].
        width: Directions to keep, 1..H.

    Returns:
        The basis [H, width], largest direction first, and the share of energy inside it.
    """
    values, vectors = torch.linalg.eigh(moment.double())
    kept = values[-width:].clamp(min=0).sum() / values.clamp(min=0).sum()
    return vectors[:, -width:].flip(1).float(), float(kept)


def fold_hidden(
    config: PreTrainedConfig, state: Mapping[str, Tensor], basis: Tensor, energy: float
) -> dict[str, Tensor]:
    """Weights of the model whose residual stream lives in `basis`; see the module for the formulas.

    Args:
        config: The model's; `tie_word_embeddings` says whether embedding and head stay one matrix.
        state: Weights of a pre-norm model (`distill.known.PRE_NORM`) of width H.
        basis: Orthonormal columns [H, h].
        energy: Share of the stream's energy inside the basis, in (0, 1].

    Returns:
        Weights of width h, in the dtypes of `state`.
    """
    full, width = basis.shape
    gain = (energy * full / width) ** 0.5
    folded: dict[str, Tensor] = {}
    for name, weight in state.items():
        wide = weight.float()
        if read := _READ.fullmatch(name):
            norm = state[f"{read[1]}{_NORM_BEFORE[read[2]]}.weight"].float()
            wide = (wide * norm) @ basis
        elif _WRITE.fullmatch(name):
            wide = basis.T @ wide
        elif _NORM.fullmatch(name):
            wide = torch.full((width,), gain)
        folded[name] = wide.to(weight.dtype)
    table, final = state["model.embed_tokens.weight"], state["model.norm.weight"]
    head = state.get("lm_head.weight", table).float() * final.float() @ basis
    scale = 1.0
    if config.tie_word_embeddings:
        energy_in = table.float().square().sum(0)
        scale = float((final.float() * energy_in).sum() / energy_in.sum())
        folded["model.embed_tokens.weight"] = folded["lm_head.weight"] = (head / scale).to(table.dtype)
    else:
        folded["model.embed_tokens.weight"] = (table.float() @ basis).to(table.dtype)
        folded["lm_head.weight"] = head.to(table.dtype)
    folded["model.norm.weight"] = torch.full((width,), gain * scale, dtype=final.dtype)
    return folded
