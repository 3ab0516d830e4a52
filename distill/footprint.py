"""What training a draft takes on each device: memory by part, products of a step, bytes between processes. No torch.

Memory is what stays or lives at once in a step as the module runs it: float32 weights, gradients and optimizer, bf16
copies under autocast, activations of one micro-batch (nothing is recomputed but the logits), one chunk of logits, what
the teacher holds. With fsdp it is a device's part of the draft and of a live target, and what is gathered whole for as
long as it runs. The allocator's slack, CUDA itself (some 1 GB) and the host's memory are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.counts import attention_width, count, head_dim, kv_heads, layer_matrices, lora_count, tied
from distill.schema import Recipe
from distill.schema_draft import Draft

Config = Mapping[str, Any]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Elements of one block of logits on a GPU, and blocks alive at once in the loss, each in float32: both models' logits,
# probabilities and gradients. Six whole chunks of 1,024 positions at 152k rows would be 3.7 GB; blocks are 0.4.
CUDA_BLOCK = 1 << 24
LOGIT_COPIES = 6
# Layers that fsdp holds whole at once: the one that runs, and the next, which comes meanwhile.
GATHERED_LAYERS = 2


@dataclass(frozen=True)
class Footprint:
    """Memory of one device in bytes, and the work of one optimizer step of one device.

    Attributes:
        weights, gradients, optimizer, buckets, copies: of the draft; buckets are what DDP gathers gradients in, copies
            the bf16 ones that autocast makes.
        teacher: the target's head; with teacher: live the target beside it, of which fsdp leaves each device a part; a
            reference draft, whole.
        gathered: by fsdp, of the draft or the live target, whichever is more: they do not run at the same time.
        activations, logits: of one micro-batch; with the logits what the loss holds of the head's gradient.
        flops: products of a step.
        moved_bytes: read and written by the optimizer in a step.
        sent_bytes: that each device sends in a step.
        trained: parameters that are trained.
        head_rows: rows of the head in a loss.
    """

    weights: float
    gradients: float
    optimizer: float
    buckets: float
    copies: float
    teacher: float
    gathered: float
    activations: float
    logits: float
    flops: float
    moved_bytes: float
    sent_bytes: float
    trained: int
    head_rows: int

    @property
    def total(self) -> float:
        """Bytes at once on one device."""
        parts = (self.weights, self.gradients, self.optimizer, self.buckets, self.copies)
        return sum(parts) + self.teacher + self.gathered + self.activations + self.logits


def footprint(
    recipe: Recipe, draft: Draft, target: Config, config: Config, reference: Config | None = None
) -> Footprint:
    """The footprint of one draft.

    Args:
        recipe: its distill and trainer stages count.
        draft: the draft's stage (of a race, one candidate).
        target, config: contents of the target's and the draft's config.json.
        reference: of `distill.reference`, where there is one.
    """
    stage, trainer, head = recipe.distill, recipe.trainer, draft.head
    stored = count(config, head.size, head.rank)[0]
    body = count(config, 0)[1]
    rows, width = config["vocab_size"], config["hidden_size"]
    if head.rank is not None:  # trained as two factors beside the embedding
        stored = body + rows * width + head.rank * (rows + width)
    trained = stored if draft.lora is None else lora_count(config, draft.lora.rank)
    weights = stored + (0 if draft.lora is None else trained)
    matrices = layer_matrices(config) * config["num_hidden_layers"] if draft.lora is None else trained
    # AdamW keeps two moments, Muon one momentum.
    moments = 8 * trained - (4 * matrices if stage.optimizer == "muon" else 0)
    world = trainer.num_processes
    sharded = trainer.strategy == "fsdp"
    parts = world if sharded else 1
    mixed = trainer.precision == "bf16-mixed"

    used = rows if head.size is None else head.size + stage.outside_rows
    size = BYTES[recipe.target.dtype]
    teacher = target["vocab_size"] * target["hidden_size"] * size
    gathered = _gathered(config, 4) if sharded else 0
    sent = 2 * 4 * trained * (world - 1) / world * (1.5 if sharded else 1)  # a ring's sum: every element about twice
    tokens = stage.tokens_per_step
    chunk = min(stage.chunk_tok, tokens) * used
    flops = 6 * body * tokens
    if draft.lora is not None:
        flops = 4 * body * tokens + 6 * trained * tokens  # frozen matrices have no gradient of their own
    # Heads: the draft's forward, recomputed, backward twice; the target's forward, recomputed where it is not cached.
    inner = width if head.rank is None else head.rank
    flops += 2 * tokens * used * (4 * inner + (0 if stage.teacher == "topk" else 2 * target["hidden_size"]))
    if stage.teacher == "live":
        flops += 2 * count(target, 0)[1] * tokens
        # The loss has a copy of the head. Where the target is cut, a head of its own is dropped for that copy.
        own_head = 0 if tied(target) or not sharded else target["vocab_size"] * target["hidden_size"]
        held = (count(target)[0] - own_head) * size
        teacher += held / parts
        if sharded:
            gathered = max(gathered, _gathered(target, size))
            sent += held * (world - 1) / world * stage.accumulate  # gathered once a micro-batch
    if reference is not None:
        teacher += 4 * count(reference)[0]
        flops += 2 * count(reference)[1] * tokens + 2 * tokens * used * width
    return Footprint(
        weights=4 * weights / parts,
        gradients=4 * trained / parts,
        optimizer=moments / parts,
        buckets=4 * trained if world > 1 and not sharded else 0,
        copies=2 * (body + (used * inner)) if mixed else 0,
        teacher=teacher,
        gathered=gathered,
        activations=activation_bytes(config, mixed) * tokens,
        # A chunk of both models' products, the block that is being worked on, the head's gradient and its scaled copy.
        logits=2 * (2 if mixed else 4) * chunk
        + LOGIT_COPIES * 4 * min(chunk, CUDA_BLOCK)
        + (8 * used * inner if draft.lora is None else 0),
        flops=flops * stage.accumulate,
        # Read weight, gradient, moments; write weight and moments.
        moved_bytes=(12 * trained + 2 * moments) / parts,
        sent_bytes=sent,
        trained=trained,
        head_rows=used,
    )


def _gathered(config: Config, size: int) -> float:
    """Bytes of the embedding, which fsdp keeps whole while the body runs, and of the layers beside it."""
    table = config["vocab_size"] * config["hidden_size"]
    num = config["num_hidden_layers"]
    layer = (count(config)[0] - table * (1 if tied(config) else 2) - config["hidden_size"]) / num
    return size * (table + min(GATHERED_LAYERS, num) * layer)


def activation_bytes(config: Config, mixed: bool) -> float:
    """Bytes that one token's forward pass keeps for the backward pass, all layers.

    Counted part by part in transformers' own layers (a test counts a real one's saved tensors): residual stream and
    norms in float32, products' inputs in the precision of the products.

    Args:
        config: content of config.json.
        mixed: bf16 products under autocast.
    """
    low = 2 if mixed else 4
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = attention_width(config), kv_heads(config) * head_dim(config)
    norms = 4 if config["model_type"].startswith("gemma") else 2
    # Norms in and out; what they give to q, k, v and to gate and up, which autocast copies for each of the five.
    layer = norms * 8 * width + (5 if mixed else 2) * low * width
    layer += 5 * low * queries  # queries; keys and values, repeated for their groups; the output, and its copy
    layer += 4 * low * inner
    if config["model_type"] in ("qwen3", "gemma3_text"):
        layer += (6 if mixed and norms == 2 else 8) * (queries + keys)  # norms of queries and keys
    return float(config["num_hidden_layers"] * layer + 8 * width + low * width)
