"""How much a target's layers, FFN channels, KV groups and residual directions matter: by activations or weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Importance:
    """Scores of a target's parts; larger is kept first. Float32.

    Attributes:
        ffn: channels of each layer's feed-forward [L, I].
        kv_heads: key-value groups of each layer [L, K].
        hidden: second moment of the residual stream, each state scaled to length sqrt(H) [H, H]. Its leading
            eigenvectors are the directions that a narrower draft keeps.
        influence: 1 - cosine between what enters and leaves each layer [L]; None when made from weights.
        measured: from activations, not from weights.
    """

    ffn: Tensor
    kv_heads: Tensor
    hidden: Tensor
    influence: Tensor | None
    measured: bool


@torch.no_grad()
def measure_importance(model: PreTrainedModel, batches: Iterable[Tensor]) -> Importance:
    """Importance from one forward of the target over a few texts of the domain; 2,000 tokens are enough.

    A channel scores its root mean square activation times the length of its down-projection column, a KV group the
    root mean square length of what its query heads write to the residual stream.

    Args:
        model: The target.
        batches: Token ids [B, T] without padding.

    Returns:
        Scores of every layer.

    Raises:
        ValueError: When there is no token.

    Source:
        arXiv 2407.14679 section 2.2 (channels and heads), arXiv 2403.03853 eq. 1 (influence), arXiv 2401.15024
        (principal directions of the residual stream).
    """
    meter = _Meter(model)
    hooks = meter.attach()
    try:
        for ids in batches:
            meter.num_tok += ids.numel()
            model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if meter.num_tok == 0:
        raise ValueError("importance needs at least one token; give some prompts or answers of the domain")
    return meter.result()


class _Meter:
    """Sums over tokens, filled by forward hooks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.decoder, config = model.get_decoder(), model.config
        self.num_layers, self.groups = config.num_hidden_layers, config.num_key_value_heads
        width, device = config.hidden_size, model.device
        self.ffn = torch.zeros(self.num_layers, config.intermediate_size, device=device)
        self.kv_heads = torch.zeros(self.num_layers, self.groups, device=device)
        self.hidden = torch.zeros(width, width, device=device)
        self.influence = torch.zeros(self.num_layers, device=device)
        self.num_tok = 0
        self._previous: Tensor | None = None

    def attach(self) -> list[torch.utils.hooks.RemovableHandle]:
        hooks = []
        for number, layer in enumerate(self.decoder.layers):
            # Pre-norm types read the stream a second time through post_attention_layernorm; Gemma's norm of that name
            # scales what attention writes, and the second reader is pre_feedforward_layernorm.
            second = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
            hooks += [
                layer.input_layernorm.register_forward_pre_hook(self._stream(number)),
                second.register_forward_pre_hook(self._second_read),
                layer.self_attn.o_proj.register_forward_pre_hook(self._heads(number)),
                layer.mlp.down_proj.register_forward_pre_hook(self._channels(number)),
            ]
        hooks.append(self.decoder.norm.register_forward_pre_hook(self._stream(self.num_layers)))
        return hooks

    def result(self) -> Importance:
        norms = torch.stack([layer.mlp.down_proj.weight.float().norm(dim=0) for layer in self.decoder.layers])
        return Importance(
            ffn=((self.ffn / self.num_tok).sqrt() * norms).cpu(),
            kv_heads=(self.kv_heads / self.num_tok).sqrt().cpu(),
            hidden=(self.hidden / (self.num_tok * (2 * self.num_layers + 1))).cpu(),
            influence=(self.influence / self.num_tok).cpu(),
            measured=True,
        )

    def _moment(self, states: Tensor) -> Tensor:
        """Adds a place where the stream is read; returns the states as unit vectors [N, H]."""
        unit = nn.functional.normalize(states.flatten(0, 1).float(), dim=-1)
        self.hidden.addmm_(unit.T, unit, alpha=unit.shape[1])
        return unit

    def _second_read(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._moment(args[0])

    def _stream(self, number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            unit = self._moment(args[0])
            if number:
                assert self._previous is not None
                self.influence[number - 1] += (1 - (unit * self._previous).sum(-1)).sum()
            self._previous = unit

        return hook

    def _heads(self, number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            values = args[0].flatten(0, 1).unflatten(-1, (self.groups, -1))
            weight = module.weight.unflatten(-1, (self.groups, -1))
            for group in range(self.groups):
                written = values[:, group] @ weight[:, group].T
                self.kv_heads[number, group] += written.float().square().sum()

        return hook

    def _channels(self, number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.ffn[number] += args[0].flatten(0, 1).float().square().sum(0)

        return hook


def weight_importance(config: PreTrainedConfig, state: Mapping[str, Tensor]) -> Importance:
    """Importance from the weights alone, for when no text is at hand.

    A channel scores |gate| * |up| * |down|; a KV group the sum over its query heads of |q| * |k| + |v| * |o|; residual
    directions are those that the layers' matrices read and write, a poor stand-in for measured ones (see
    `distill.width`).

    Args:
        config: The target's.
        state: Its weights.

    Returns:
        Scores of every layer.
    """
    groups = config.num_key_value_heads
    ffn, kv_heads = [], []
    reads = torch.zeros(config.hidden_size, config.hidden_size)
    writes = torch.zeros_like(reads)
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        q, k, v, o = (state[f"{prefix}self_attn.{name}_proj.weight"].float() for name in "qkvo")
        gate, up, down = (state[f"{prefix}mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down"))
        ffn.append(gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0))
        by_head = (w.unflatten(0, (groups, -1)).flatten(1).norm(dim=1) for w in (q, k, v, o.T))
        q_norm, k_norm, v_norm, o_norm = by_head
        kv_heads.append(q_norm * k_norm + v_norm * o_norm)
        for read in (q, k, v, gate, up):
            reads += read.T @ read / read.square().sum()
        writes += o @ o.T + down @ down.T
    hidden = reads / reads.trace() + writes / writes.trace()
    return Importance(
        torch.stack(ffn), torch.stack(kv_heads), hidden * config.hidden_size / 2, influence=None, measured=False
    )
