"""The recipe's stages: names, types, allowed ranges, and the checks between fields. Loading is in `distill.recipe`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from distill.fields import (
    BUNDLED_DOMAINS,
    Count,
    Fraction,
    Loss,
    Positive,
    Stage,
    Temperature,
    Text,
    TopP,
    Weight,
    Word,
    increasing,
    ordered,
    paths,
    sources,
)
from distill.schema_eval import Eval


class Target(Stage):
    """The model that is to be sped up.

    Attributes:
        model: bundled name, hub id, local folder, or a .gguf file.
        revision: branch, tag or commit of a hub id.
        dtype: of the weights while the target runs.
        trust_remote_code: run model code that comes with the checkpoint.
    """

    model: Text = "smollm2-135m-instruct"
    revision: Text | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    trust_remote_code: bool = False


class Head(Stage):
    """The draft's output head.

    Attributes:
        kind: full reads every row; shortlist reads `size` rows; low_rank is trained as two factors.
        size: rows of the shortlist.
        rank: inner width of the factors.
    """

    kind: Literal["full", "shortlist", "low_rank"] = "full"
    size: Positive | None = None
    rank: Positive | None = None

    def clashes(self) -> Iterator[tuple[str, str]]:
        for key, kind in (("size", "shortlist"), ("rank", "low_rank")):
            if self.kind == kind and getattr(self, key) is None:
                yield key, f"is needed for kind: {kind}"
            elif self.kind != kind and getattr(self, key) is not None:
                yield key, f"belongs to kind: {kind}, but kind is {self.kind}; replace the whole head, {{kind: ...}}"


class Draft(Stage):
    """The small model: cut from the target, or a checkpoint with the same tokenizer.

    Attributes:
        kind: prune cuts it from the target; pretrained loads `model`.
        model: where a pretrained draft lies.
        layers: the target's layers to keep, strictly increasing.
        num_layers: keep so many, evenly spaced, first and last among them.
        hidden_size, intermediate_size, num_kv_heads: widths of the draft; null keeps the target's.
        head: the output head.
        size_frac: lowest and highest allowed share of the target's parameters.
        size_count: which count `size_frac` bounds: all stored parameters, or those read per drafted token.
        dtype: of the exported weights.
    """

    kind: Literal["prune", "pretrained"] = "prune"
    model: Text | None = None
    layers: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(increasing)] | None = None
    num_layers: Positive | None = None
    hidden_size: Positive | None = None
    intermediate_size: Positive | None = None
    num_kv_heads: Positive | None = None
    head: Head = Head()
    size_frac: Annotated[tuple[Fraction, Fraction], AfterValidator(ordered)] = (0.05, 0.10)
    size_count: Literal["stored", "read"] = "stored"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def clashes(self) -> Iterator[tuple[str, str]]:
        if self.kind == "prune":
            if self.layers is None and self.num_layers is None:
                yield "layers", "is missing: kind: prune needs layers (which to keep) or num_layers (how many)"
            if self.layers is not None and self.num_layers is not None:
                yield "num_layers", "is given beside layers; set one of the two to null"
            if self.model is not None:
                yield "model", "belongs to kind: pretrained; a pruned draft comes from target.model"
        else:
            if self.model is None:
                yield "model", "is missing: kind: pretrained needs a checkpoint (hub id or folder)"
            for key in ("layers", "num_layers", "hidden_size", "intermediate_size", "num_kv_heads"):
                if getattr(self, key) is not None:
                    yield key, "belongs to kind: prune; a pretrained draft keeps its own shape"


class Traffic(Stage):
    """Prompts of the domain, to train on and to measure with.

    Attributes:
        domain: code, math, qa or mixed for bundled prompts; any word for own files.
        train, heldout: "bundled", or a path, a glob, a hub data set id, or a list of these.
        split_train, split_heldout: splits of a hub data set.
        prompt_column, messages_column, response_column: names in own files.
        num_train: prompts to train on.
        num_heldout: held-out prompts per domain.
        max_prompt_tok: longer prompts are left out.
        on_bad_line: refuse stops at a broken line; skip counts it and goes on.
        system: system message put before every prompt that has none.
    """

    domain: Word = "code"
    train: Text | Annotated[tuple[Text, ...], Field(min_length=1)] = "bundled"
    heldout: Text | Annotated[tuple[Text, ...], Field(min_length=1)] = "bundled"
    split_train: Text = "train"
    split_heldout: Text = "test"
    prompt_column: Text = "prompt"
    messages_column: Text = "messages"
    response_column: Text = "reference"
    num_train: Positive = 2000
    num_heldout: Positive = 200
    max_prompt_tok: Positive = 1024
    on_bad_line: Literal["refuse", "skip"] = "refuse"
    system: Text | None = None

    def clashes(self) -> Iterator[tuple[str, str]]:
        if "bundled" in sources(self.train) and self.domain not in (*BUNDLED_DOMAINS, "mixed"):
            yield (
                "domain",
                f"= {self.domain!r} has no bundled prompts; they exist for {', '.join(BUNDLED_DOMAINS)} and mixed; "
                "give traffic.train a file for another domain",
            )
        train = {name: paths(name) for name in sources(self.train) if name != "bundled"}
        for name in sources(self.heldout):
            if name == "bundled":
                continue
            for other, files in train.items():
                if shared := files & paths(name):
                    yield "heldout", f"= {name!r} reads {min(shared)}, which traffic.train reads too; use another file"
                elif name == other and not files and self.split_train == self.split_heldout:
                    yield "heldout", f"= {name!r}, split {self.split_heldout!r}, is what traffic.train reads too"


class Responses(Stage):
    """The answers the draft learns from.

    Attributes:
        source: target writes its own answers; reference takes those of the data set.
        max_new_tok: longest answer.
        temperatures: cycled over the prompts.
        top_p, top_k: of sampling; 1.0 and 0 are off.
        batch_size: rows generated together.
        shard_rows: rows a file.
        loop_repeats: an answer ending in an n-gram that often repeated is cut there; 0 is off.
    """

    source: Literal["target", "reference"] = "target"
    max_new_tok: Positive = 256
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0, 0.7, 1.0)
    top_p: TopP = 1.0
    top_k: Count = 0
    batch_size: Positive = 64
    shard_rows: Positive = 256
    loop_repeats: Count = 4

    def clashes(self) -> Iterator[tuple[str, str]]:
        if self.loop_repeats == 1:
            yield "loop_repeats", "= 1 would cut every answer; use 0 (off) or at least 2"


class Distill(Stage):
    """Training of the draft.

    Attributes:
        loss: weights of the losses, summed.
        jsd_beta: weight of the target in the mixture of the generalised JSD.
        temperature: of both distributions in the losses.
        lr, min_lr_frac, warmup_steps: peak of the cosine schedule, its end as a share of the peak, linear start.
        weight_decay, betas, grad_clip: of AdamW; grad_clip 0 is off.
        max_steps: optimizer steps.
        tokens_per_step: prompt and answer tokens of a micro-batch.
        accumulate: micro-batches a step.
        max_length: longest row, prompt and answer tokens.
        chunk_tok: supervised positions whose logits are alive at a time.
        outside_rows: rows outside the shortlist drawn each step, so that the whole head stays good.
        validate_every, checkpoint_every: in optimizer steps.
        num_validation: answers per domain kept for the teacher-forced acceptance.
    """

    loss: Annotated[dict[Loss, Weight], Field(min_length=1)] = Field(default_factory=lambda: {"forward_kl": 1.0})
    # Nearer to 0 or 1 the loss is all but zero and trains nothing.
    jsd_beta: Annotated[float, Field(ge=0.05, le=0.95)] = 0.5
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    lr: Annotated[float, Field(gt=0, title="learning rate")] = 1e-3
    min_lr_frac: Fraction = 0.1
    warmup_steps: Count = 20
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    max_steps: Positive = 400
    tokens_per_step: Positive = 8192
    accumulate: Positive = 1
    max_length: Annotated[int, Field(ge=2)] = 640
    chunk_tok: Positive = 1024
    outside_rows: Count = 1024
    validate_every: Positive = 100
    num_validation: Positive = 32
    checkpoint_every: Positive = 100

    def clashes(self) -> Iterator[tuple[str, str]]:
        if not any(self.loss.values()):
            yield "loss", "has no weight above 0, so nothing would be trained"
        if self.warmup_steps >= self.max_steps:
            yield "warmup_steps", f"= {self.warmup_steps} must be less than distill.max_steps = {self.max_steps}"
        if self.tokens_per_step < self.max_length:
            yield (
                "tokens_per_step",
                f"= {self.tokens_per_step} cannot hold a row of distill.max_length = {self.max_length}; "
                "raise the first or lower the second",
            )


class Track(Stage):
    """Weights & Biases: offline by default, no network."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    project: Text = "specdraft"
    entity: Text | None = None
    tags: tuple[Text, ...] = ()


class TrainerStage(Stage):
    """Where it runs.

    Attributes:
        accelerator, devices, num_nodes, strategy, precision: of Lightning's Trainer.
        num_threads: CPU threads; null leaves torch's choice.
        graph: capture CUDA graphs when the device is CUDA.
    """

    accelerator: Literal["cpu", "cuda", "auto"] = "auto"
    devices: Positive = 1
    num_nodes: Positive = 1
    strategy: Text = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    num_threads: Positive | None = None
    graph: bool = True


class Recipe(Stage):
    """Everything that decides a run. `name` is the folder under `output_dir`."""

    name: Word
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    output_dir: Text = "runs"
    target: Target = Target()
    draft: Draft
    traffic: Traffic = Traffic()
    responses: Responses = Responses()
    distill: Distill = Distill()
    eval: Eval = Eval()
    track: Track = Track()
    trainer: TrainerStage = TrainerStage()

    def clashes(self) -> Iterator[tuple[str, str]]:
        if set(sources(self.traffic.heldout)) == {"bundled"}:
            for domain in self.eval.domains:
                if domain not in BUNDLED_DOMAINS:
                    yield (
                        "eval.domains",
                        f"names {domain!r}: bundled held-out prompts exist for {', '.join(BUNDLED_DOMAINS)}; "
                        "give traffic.heldout a file for another domain",
                    )
