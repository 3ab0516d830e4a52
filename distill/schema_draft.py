"""The recipe's draft stage: one draft, or several that race."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from distill.fields import Count, Fraction, Positive, Stage, Text, increasing, ordered
from distill.schema_rounds import Round, order_clashes


class Head(Stage):
    """The draft's output head.

    Attributes:
        kind: full reads every row; shortlist reads `size` rows; low_rank is trained as two factors, kept beside
            their product, which the engine reads.
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


class Lora(Stage):
    """Train low-rank updates of every linear layer of the body instead of all weights; merged on export.

    Attributes:
        rank: of each update.
        alpha: updates are scaled by alpha / rank.
        dropout: of the updates' input while training.
    """

    rank: Positive = 32
    alpha: Annotated[float, Field(gt=0)] = 64.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Draft(Stage):
    """The small model: cut from the target, or a checkpoint with the same tokenizer, or the best of several.

    Attributes:
        kind: prune cuts it from the target; pretrained loads `model`; race tries every one of `candidates` first.
        model, revision: where a pretrained draft lies; branch, tag or commit of a hub id.
        layers: the target's layers to keep, strictly increasing.
        num_layers: keep so many; `choose` says which.
        choose: spaced is evenly, first and last among them; ends is the first ones and the last; influence leaves out
            those that change their input least on the training answers.
        bridge: refit the last kept layer to the target's final state in closed form (`distill.bridge`).
        hidden_size, intermediate_size, num_kv_heads: widths of the draft; null keeps the target's.
        untie_head: give a narrower draft of a target whose head is its embedding a head of its own: a far better start
            (`distill.width`), for rows x hidden_size more parameters stored; those that are read are as many.
        rounds: shapes in between, for a target much larger than the draft: each is cut from the one before and
            distilled for a share of the steps; null widths keep the last round's. () cuts in one go.
        head: the output head.
        lora: train low-rank updates; null trains every weight.
        candidates: drafts of a race, each written like this stage.
        race_steps: optimizer steps of each; the fastest by prediction goes on from there to distill.max_steps.
        size_frac: lowest and highest allowed share of the target's parameters.
        size_count: which count `size_frac` bounds: all stored parameters, or those read per drafted token.
        dtype: of the exported weights.
    """

    kind: Literal["prune", "pretrained", "race"] = "prune"
    model: Text | None = None
    revision: Text | None = None
    layers: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(increasing)] | None = None
    num_layers: Positive | None = None
    choose: Literal["spaced", "ends", "influence"] = "spaced"
    bridge: bool = False
    hidden_size: Positive | None = None
    intermediate_size: Positive | None = None
    num_kv_heads: Positive | None = None
    untie_head: bool = False
    rounds: tuple[Round, ...] = ()
    head: Head = Head()
    lora: Lora | None = None
    candidates: Annotated[tuple[Draft, ...], Field(min_length=2)] | None = None
    race_steps: Positive | None = None
    size_frac: Annotated[tuple[Fraction, Fraction], AfterValidator(ordered)] = (0.05, 0.10)
    size_count: Literal["stored", "read"] = "stored"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def clashes(self) -> Iterator[tuple[str, str]]:
        if self.kind == "race":
            yield from self._race_clashes()
            return
        for key in ("candidates", "race_steps"):
            if getattr(self, key) is not None:
                yield key, f"belongs to kind: race, but kind is {self.kind}"
        if self.lora is not None and self.head.kind == "low_rank":
            yield (
                "lora",
                "leaves the head as it is, but a low_rank one is trained whole; use kind full or shortlist",
            )
        if self.kind == "prune":
            if self.layers is None and self.num_layers is None:
                yield "layers", "is missing: kind: prune needs layers (which to keep) or num_layers (how many)"
            if self.layers is not None and self.num_layers is not None:
                yield "num_layers", "is given beside layers; set one of the two to null"
            if self.layers is not None and self.choose != "spaced":
                yield "choose", f"= {self.choose} chooses num_layers layers, but layers names them; drop one of the two"
            if sum(one.frac for one in self.rounds) >= 1:
                yield "rounds", "take all steps (their frac sum to 1 or more); leave some for the draft itself"
            yield from order_clashes(self.rounds, self.layers)
            if self.model is not None:
                yield "model", "belongs to kind: pretrained; a pruned draft comes from target.model"
            if self.revision is not None:
                yield "revision", "belongs to kind: pretrained; a pruned draft comes from target.revision"
            if self.untie_head and self.head.kind == "low_rank":
                yield "untie_head", "= true: a low_rank head is one of its own already; leave it out"
        else:
            if self.model is None:
                yield "model", "is missing: kind: pretrained needs a checkpoint (hub id or folder)"
            widths = ("hidden_size", "intermediate_size", "num_kv_heads")
            for key in ("layers", "num_layers", "choose", "bridge", "untie_head", "rounds", *widths):
                if getattr(self, key) != type(self).model_fields[key].default:
                    yield key, "belongs to kind: prune; a pretrained draft keeps its own shape"

    def _race_clashes(self) -> Iterator[tuple[str, str]]:
        for key in ("candidates", "race_steps"):
            if getattr(self, key) is None:
                yield key, "is missing: kind: race needs candidates (two or more drafts) and race_steps (steps of each)"
        for number, candidate in enumerate(self.candidates or ()):
            if candidate.kind == "race":
                yield "candidates", f"[{number}] is a race of its own; a candidate is one draft, prune or pretrained"
            if candidate.rounds:
                yield "candidates", f"[{number}] has rounds; drafts that race are cut in one go"
        for key, field in type(self).model_fields.items():
            if key not in ("kind", "candidates", "race_steps") and getattr(self, key) != field.default:
                yield key, "belongs to each of draft.candidates, not beside them"
