"""The recipe's stages: names, types, allowed ranges, and the checks between fields. Loading is in `distill.recipe`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from distill.fields import (
    BUNDLED_DOMAINS,
    Count,
    Fraction,
    Length,
    Loss,
    Positive,
    Stage,
    Temperature,
    Text,
    TopP,
    Url,
    Variable,
    Weight,
    Word,
    distinct,
    paths,
    sources,
)
from distill.objective import LOWEST, known, losses_of, temperature_of
from distill.schema_draft import Draft
from distill.schema_eval import Eval
from distill.schema_replay import Replay, start_clashes
from distill.schema_rounds import round_steps, step_clashes
from distill.schema_trainer import Track, TrainerStage


class Target(Stage):
    """The model that is to be sped up.

    Attributes:
        model: bundled name, hub id, local folder, or a .gguf file.
        revision: branch, tag or commit of a hub id.
        dtype: of the weights while the target runs; auto is bfloat16, or float32 on a CPU without bf16 products.
        trust_remote_code: run model code that comes with the checkpoint.
    """

    model: Text = "smollm2-135m-instruct"
    revision: Text | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False


class Traffic(Stage):
    """Prompts of the domain, to train on and to measure with.

    Attributes:
        domain: code, math, qa or mixed (as many of each) for bundled prompts; any word for own files.
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
        server: addresses of OpenAI-compatible endpoints that all serve the target; they write the answers then. Start
            them without the checkpoint's own sampling defaults (vLLM: --generation-config vllm).
        server_model: the name to ask them for; null is the one model they list.
        concurrency: requests in flight at each endpoint.
        retries: failures in a row after which an endpoint is given up; waits double from 0.5 to 30 seconds.
        timeout_s: of one request.
        api_key_env: environment variable that holds the endpoints' key; null sends none.
    """

    source: Literal["target", "reference"] = "target"
    max_new_tok: Positive = 256
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0, 0.7, 1.0)
    top_p: TopP = 1.0
    top_k: Count = 0
    batch_size: Positive = 64
    shard_rows: Positive = 256
    loop_repeats: Count = 4
    server: Annotated[tuple[Url, ...], AfterValidator(distinct)] = ()
    server_model: Text | None = None
    concurrency: Positive = 16
    retries: Count = 6
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    api_key_env: Variable | None = None

    def clashes(self) -> Iterator[tuple[str, str]]:
        if self.server and self.source != "target":
            yield "server", f"writes the target's answers, but responses.source is {self.source}; drop one of the two"
        if self.loop_repeats == 1:
            yield "loop_repeats", "= 1 would cut every answer; use 0 (off) or at least 2"


class Distill(Stage):
    """Training of the draft.

    Attributes:
        objective: what the draft is served for: greedy, sampling or sampling@T; it stands for losses and their
            temperature (`distill.objective`), in place of `loss` and `temperature`.
        loss: weights of the losses, summed.
        jsd_beta: weight of the target in the mixture of the generalised JSD.
        hybrid_eta: of kl_tv: the KL's share is exp(-eta * acceptance).
        temperature: of both distributions in the losses.
        survival_k: above 1, weigh a position by how often a draft of so many tokens gets there.
        teacher: hidden: the target's cached final states and its head; live: the target itself, at every step; topk:
            its cached `teacher_topk` likeliest tokens and the mass of all others.
        teacher_topk: tokens kept at each position for teacher: topk.
        reference: folder of a distilled draft; only the positions where this draft's loss exceeds the reference's most
            are trained on. It costs a forward pass of the reference and of both heads at every step.
        select_frac: share of the positions to keep then.
        optimizer: adamw, or muon for the matrices with adamw for embeddings, head, norms and biases.
        lr, min_lr_frac, warmup_steps: peak of the cosine schedule, its end as a share of the peak, linear start.
        weight_decay, betas, grad_clip: of AdamW; grad_clip 0 is off.
        max_steps: optimizer steps.
        tokens_per_step: prompt and answer tokens of a micro-batch.
        accumulate: micro-batches a step.
        max_length: longest row, prompt and answer tokens.
        packing: lay several answers in a row, each seeing itself alone, in place of batches of alike lengths.
        chunk_tok: supervised positions whose logits are alive at a time.
        outside_rows: rows outside the shortlist drawn each step, so that the whole head stays good.
        validate_every, checkpoint_every: in optimizer steps.
        num_validation: answers per domain kept for the teacher-forced acceptance.
        replay: train the last steps on the draft's own proposals; null is off.
    """

    objective: Annotated[str, AfterValidator(known)] | None = None
    loss: Annotated[dict[Loss, Weight], Field(min_length=1)] = Field(
        default_factory=lambda earlier: losses_of(earlier["objective"])
    )
    # Nearer to 0 or 1 the loss is all but zero and trains nothing.
    jsd_beta: Annotated[float, Field(ge=0.05, le=0.95)] = 0.5
    hybrid_eta: Annotated[float, Field(ge=0)] = 3.0
    temperature: Annotated[float, Field(ge=LOWEST)] = Field(
        default_factory=lambda earlier: temperature_of(earlier["objective"])
    )
    survival_k: Length = 1
    teacher: Literal["hidden", "live", "topk"] = "hidden"
    teacher_topk: Positive = 64
    reference: Text | None = None
    select_frac: Annotated[float, Field(gt=0, le=1)] = 0.4
    optimizer: Literal["adamw", "muon"] = "adamw"
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
    packing: bool = False
    chunk_tok: Positive = 1024
    outside_rows: Count = 1024
    validate_every: Positive = 100
    num_validation: Positive = 32
    checkpoint_every: Positive = 100
    replay: Replay | None = None

    def clashes(self) -> Iterator[tuple[str, str]]:
        if not any(self.loss.values()):
            yield "loss", "has no weight above 0, so nothing would be trained"
        # A resolved recipe, which is read again, holds both.
        for key, own in (("loss", losses_of(self.objective)), ("temperature", temperature_of(self.objective))):
            if self.objective is not None and getattr(self, key) != own:
                yield (
                    "objective",
                    f"= {self.objective!r} stands for {key} = {own}, but distill.{key} = {getattr(self, key)}; drop "
                    "one of the two",
                )
        if self.teacher == "topk" and self.temperature != 1:
            yield "temperature", f"= {self.temperature:g}: teacher: topk keeps probabilities at temperature 1; use 1.0"
        if self.reference is not None and self.survival_k > 1:
            yield "survival_k", f"= {self.survival_k} weighs whole answers, but reference trains on parts; set it to 1"
        if self.replay is not None and self.survival_k > 1:
            yield "survival_k", f"= {self.survival_k} weighs whole answers, but replay trains on branches; set it to 1"
        if self.replay is not None and self.packing:
            yield (
                "packing",
                "= true puts answers where replay puts the branches of one; drop one of the two",
            )
        if self.warmup_steps >= self.max_steps:
            yield "warmup_steps", f"= {self.warmup_steps} must be less than distill.max_steps = {self.max_steps}"
        if self.tokens_per_step < self.max_length:
            yield (
                "tokens_per_step",
                f"= {self.tokens_per_step} cannot hold a row of distill.max_length = {self.max_length}; "
                "raise the first or lower the second",
            )


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
        steps, stage = self.draft.race_steps, self.distill
        if steps is not None and not stage.warmup_steps < steps < stage.max_steps:
            yield (
                "draft.race_steps",
                f"= {steps} must be above distill.warmup_steps = {stage.warmup_steps} and below distill.max_steps = "
                f"{stage.max_steps}: the winner goes on from there",
            )
        for what, asked in (
            ("draft.kind: race runs", steps is not None),
            ("draft.rounds run", bool(self.draft.rounds)),
            ("distill.replay runs", stage.replay is not None),
        ):
            for key, num in (("devices", self.trainer.devices), ("num_nodes", self.trainer.num_nodes)):
                if asked and num > 1:
                    yield f"trainer.{key}", f"= {num}: {what} in one process; use 1"
        if self.trainer.strategy == "fsdp" and stage.optimizer == "muon":
            yield (
                "distill.optimizer",
                "= 'muon' works on whole matrices, trainer.strategy: fsdp has parts; use adamw or ddp",
            )
        own = round_steps(self.draft.rounds, stage.max_steps)
        yield from step_clashes(own, stage.warmup_steps)
        if stage.replay is not None:
            yield from start_clashes(stage.replay, own[-1], max(stage.warmup_steps, steps or 1))
        if self.distill.teacher == "topk" and any(
            draft.head.kind == "shortlist" for draft in (self.draft, *(self.draft.candidates or ()))
        ):
            yield (
                "distill.teacher",
                "= 'topk' knows no row outside its k, but draft.head.kind: shortlist trains on drawn rows; use "
                "teacher: hidden, or a full or low_rank head",
            )
        if set(sources(self.traffic.heldout)) == {"bundled"}:
            for domain in self.eval.domains:
                if domain not in BUNDLED_DOMAINS:
                    yield (
                        "eval.domains",
                        f"names {domain!r}: bundled held-out prompts exist for {', '.join(BUNDLED_DOMAINS)}; "
                        "give traffic.heldout a file for another domain",
                    )
