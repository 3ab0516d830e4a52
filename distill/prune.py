"""A draft cut from its target: fewer layers, whole KV groups, a narrower feed-forward, a narrower residual stream.

Pure on a config and a state dict: nothing is loaded here, and the target's tensors are never changed. The result is an
ordinary checkpoint of the target's own type that stock classes load; its vocabulary rows are the target's.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from distill.importance import Importance, weight_importance
from distill.known import PRE_NORM, PRUNABLE
from distill.width import fold_hidden, main_directions

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class PruneError(ValueError):
    """A draft that cannot be cut from this target."""


def layer_plan(
    num_target_layers: int,
    layers: Sequence[int] | None = None,
    num_layers: int | None = None,
    choose: str = "spaced",
    influence: Tensor | None = None,
) -> list[int]:
    """The target layers that the draft keeps.

    Args:
        num_target_layers: Layers of the target.
        layers: Indices, strictly increasing; wins over `num_layers`.
        num_layers: How many.
        choose: Which: "spaced" evenly with the first and the last among them (one is the first); "ends" the first ones
            and the last; "influence" those with the largest block influence.
        influence: Of each layer [L], for that choice.

    Returns:
        Indices in the target, ascending.

    Raises:
        PruneError: Naming the value and what is allowed.

    Source:
        Block influence: arXiv 2403.03853 eq. 1, removal of the lowest in one go (section 3.2).
    """
    last = num_target_layers - 1
    if layers is not None:
        kept = list(layers)
        if not kept or sorted(set(kept)) != kept or kept[0] < 0 or kept[-1] > last:
            raise PruneError(f"draft.layers {kept}: must be one or more strictly increasing indices in 0..{last}")
        return kept
    if num_layers is None:
        raise PruneError("a pruned draft needs draft.layers or draft.num_layers")
    if not 1 <= num_layers <= num_target_layers:
        raise PruneError(f"draft.num_layers {num_layers}: must be in 1..{num_target_layers}, the target's layers")
    if choose == "influence":
        assert influence is not None and len(influence) == num_target_layers
        return _largest(influence, num_layers).tolist()
    if choose == "ends":
        return [*range(num_layers - 1), last] if num_layers > 1 else [0]
    return [round(at * last / max(1, num_layers - 1)) for at in range(num_layers)]


def pruned_config(
    config: PreTrainedConfig,
    layers: Sequence[int],
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_kv_heads: int | None = None,
    untie_head: bool = False,
    num_heads: int | None = None,
) -> PreTrainedConfig:
    """The draft's config, from the target's config alone, with every wish checked: no weights are needed.

    Per-layer lists are cut to the kept layers, the head size is written out, and all else (rope parameters, end ids,
    soft caps, rows, positions) stays.

    Args:
        config: The target's.
        layers: Target layers to keep; see `layer_plan`.
        hidden_size: Width of the residual stream, None for the target's.
        intermediate_size: Feed-forward channels, None for the target's.
        num_kv_heads: KV heads, each kept with all its query heads; None for the target's.
        untie_head: Give a draft narrower than a tied target a head of its own: the exact start, for V * h parameters.
        num_heads: Query heads wished for; must be whole groups.

    Returns:
        A new config.

    Raises:
        PruneError: For a target type that cannot be cut, or a size that does not fit it.
    """
    kind = config.model_type
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        raise PruneError(f"{kind} is a mixture of experts, which cannot be pruned here; use draft.kind=pretrained")
    if kind not in PRUNABLE:
        raise PruneError(f"model type {kind!r} cannot be pruned; supported: {', '.join(PRUNABLE)}")
    kept = layer_plan(config.num_hidden_layers, layers)
    group = config.num_attention_heads // config.num_key_value_heads
    if num_heads is not None:
        if num_heads % group:
            raise PruneError(
                f"{num_heads} query heads: the target's share KV heads in groups of {group}, keep a multiple"
            )
        num_kv_heads = num_kv_heads or num_heads // group
        if num_kv_heads * group != num_heads:
            raise PruneError(f"{num_heads} query heads do not go with {num_kv_heads} KV heads of {group} each")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    draft = copy.deepcopy(config)
    for key, wish in (
        ("hidden_size", hidden_size),
        ("intermediate_size", intermediate_size),
        ("num_key_value_heads", num_kv_heads),
    ):
        limit = getattr(config, key)
        if wish is not None and not 1 <= wish <= limit:
            raise PruneError(f"draft {key} {wish}: must be in 1..{limit}, the target's")
        setattr(draft, key, wish or limit)
    if draft.hidden_size < config.hidden_size and kind not in PRE_NORM:
        raise PruneError(
            f"draft.hidden_size {hidden_size}: {kind} norms what its layers write, so its width cannot be folded; "
            f"keep {config.hidden_size} and cut layers, draft.intermediate_size or draft.num_kv_heads"
        )
    if untie_head:
        draft.tie_word_embeddings = False
    draft.num_attention_heads = draft.num_key_value_heads * group
    draft.head_dim = head_dim
    for key, value in config.to_dict().items():
        if "layer" in key and isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(draft, key, [value[at] for at in kept])
    draft.num_hidden_layers = len(kept)
    try:
        draft.validate()
    except StrictDataclassError as error:
        heads = draft.num_attention_heads
        raise PruneError(
            f"draft of width {draft.hidden_size} with {heads} query heads: {error.__cause__ or error} "
            f"Stock classes refuse it; try draft.hidden_size {draft.hidden_size // heads * heads or heads}"
        ) from error
    if kind == "qwen2" and head_dim * draft.num_attention_heads != draft.hidden_size:
        logger.warning(
            "qwen2 with heads * head_dim != hidden_size loads in transformers; other servers may not read it"
        )
    return draft


def prune(
    config: PreTrainedConfig,
    state_dict: Mapping[str, Tensor],
    layers: Sequence[int],
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_kv_heads: int | None = None,
    importance: Importance | None = None,
    untie_head: bool = False,
) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """Config and weights (on the CPU) of the draft.

    Channels and KV groups are chosen layer by layer, the largest scores kept in their old order. A narrower residual
    stream is a projection, see `distill.width`; it starts far better from measured importance.

    Args:
        config: The target's.
        state_dict: The target's weights.
        layers: Target layers to keep, ascending.
        hidden_size: See `pruned_config`.
        intermediate_size: See `pruned_config`.
        num_kv_heads: See `pruned_config`.
        importance: Of the target's parts, from `measure_importance`; None takes it from the weights.
        untie_head: See `pruned_config`.

    Returns:
        The draft's config and its weights (copies), for `load_state_dict(strict=True)`.

    Raises:
        PruneError: See `pruned_config`.
    """
    draft = pruned_config(config, layers, hidden_size, intermediate_size, num_kv_heads, untie_head)
    narrower = draft.hidden_size < config.hidden_size
    cut = narrower or any(
        getattr(draft, key) < getattr(config, key) for key in ("intermediate_size", "num_key_value_heads")
    )
    if cut and importance is None:
        importance = weight_importance(config, {name: weight.detach().cpu() for name, weight in state_dict.items()})
    if narrower and importance is not None and not importance.measured:
        logger.warning(
            "hidden_size %d: directions come from the weights, a poor start; measure them", draft.hidden_size
        )
    new_index = {old: new for new, old in enumerate(layers)}
    state: dict[str, Tensor] = {}
    for name, weight in state_dict.items():
        weight = weight.detach().cpu()
        if (match := _LAYER.fullmatch(name)) is None:
            state[name] = weight.clone()
        elif (old := int(match[1])) in new_index:
            if importance is not None:
                weight = _cut(match[2], weight, config, draft, importance.ffn[old], importance.kv_heads[old])
            state[f"model.layers.{new_index[old]}.{match[2]}"] = weight.clone()
    if config.tie_word_embeddings and not untie_head:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    elif config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    if narrower:
        assert importance is not None
        basis, energy = main_directions(importance.hidden, draft.hidden_size)
        state = fold_hidden(draft, state, basis, energy)
    return draft, state


def _cut(
    name: str, weight: Tensor, config: PreTrainedConfig, draft: PreTrainedConfig, channels: Tensor, groups: Tensor
) -> Tensor:
    """The rows or columns of one layer's matrix or bias that the draft keeps."""
    if "mlp." in name and draft.intermediate_size < config.intermediate_size:
        kept = _largest(channels, draft.intermediate_size)
        if "down_proj" in name:
            return weight[:, kept] if weight.dim() == 2 else weight
        return weight[kept]
    projection = re.match(r"self_attn\.([qkvo])_proj\.", name)
    if projection and draft.num_key_value_heads < config.num_key_value_heads:
        kept = _largest(groups, draft.num_key_value_heads)
        if projection[1] != "o":
            return weight.unflatten(0, (len(groups), -1))[kept].flatten(0, 1)
        return weight.unflatten(1, (len(groups), -1))[:, kept].flatten(1) if weight.dim() == 2 else weight
    return weight


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest scores, in ascending order; equal scores go by index."""
    return torch.sort(scores, descending=True, stable=True).indices[:count].sort().values.cpu()
