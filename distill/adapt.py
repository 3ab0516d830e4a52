"""What is trained in place of a draft's own weights, and folded back in: LoRA updates, and a head of two factors.

LoRA (arXiv 2106.09685) comes through peft. Every linear layer of the body gets one. Embedding and head stay as they
are: where they are one matrix, an update of the head could not be merged without changing the embedding, so neither is
ever trained beside the updates.
"""

from __future__ import annotations

import logging

from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.schema_draft import Lora

log = logging.getLogger(__name__)


def add_lora(model: PreTrainedModel, lora: Lora) -> int:
    """Puts an update beside every linear layer of the body, in place, and freezes everything else.

    An update starts at zero: the model computes what it computed before.

    Args:
        model: the draft, in float32.
        lora: rank, scale and dropout.

    Returns:
        Parameters that are left to train.
    """
    from peft import LoraConfig, inject_adapter_in_model

    body, head = model.get_decoder(), model.get_output_embeddings()
    names = [name for name, part in body.named_modules() if isinstance(part, nn.Linear) and part is not head]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=names)
    inject_adapter_in_model(config, body)
    head.weight.requires_grad_(False)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    log.info("LoRA of rank %d on %d linear layers: %d parameters to train", lora.rank, len(names), trained)
    return trained


def merge_lora(model: PreTrainedModel) -> PreTrainedModel:
    """Adds every update to its matrix and takes it out, in place: what is left is the ordinary model.

    Args:
        model: of `add_lora`, in float32.

    Returns:
        The same model.

    Raises:
        ValueError: an update is not finite.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer.get_base_layer())
    for weight in model.parameters():
        weight.requires_grad_(True)
    return model


def fold_head(model: PreTrainedModel, left: Tensor, right: Tensor) -> None:
    """Gives a model the head left @ right, dense and of its own, in place.

    Args:
        model: its head may be nn.Identity.
        left, right: [V, r] and [r, h].
    """
    folded = (left @ right).detach()
    head = nn.Linear(folded.shape[1], folded.shape[0], bias=False, device=folded.device)
    head.weight = nn.Parameter(folded)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
