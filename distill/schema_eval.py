"""The recipe's `eval` stage: what is measured, under which loads, and what the choice goes by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from distill.fields import (
    BUNDLED_DOMAINS,
    Count,
    Fraction,
    Length,
    Positive,
    Stage,
    Temperature,
    Text,
    TopP,
    Word,
    distinct,
)

Rows = Annotated[int, Field(ge=1, le=64)]
Nodes = Annotated[int, Field(ge=2, le=64)]
Recent = Annotated[int, Field(ge=32)]
if TYPE_CHECKING:
    Group = str  # so that any group may be looked up
else:
    Group = Literal["short", "medium", "long"]
# Context classes by prompt tokens.
GROUPS = (("short", 0, 1024), ("medium", 1024, 6144), ("long", 6144, 1 << 40))
LATENCY = ("latency@p50", "latency@p95")
THROUGHPUT = re.compile(r"throughput@([1-9][0-9]?)")


def group_of(num_tok: int) -> str:
    """Context class of a prompt."""
    return next(name for name, low, high in GROUPS if low <= num_tok < high)


def known_objective(value: str) -> str:
    """Refuses what the choice can not go by."""
    if value not in LATENCY and not THROUGHPUT.fullmatch(value):
        raise ValueError(f'= "{value}": allowed is {" | ".join(LATENCY)} | throughput@B with B of eval.batches')
    return value


def batch_of(value: str) -> int | None:
    """B of throughput@B; None for a latency."""
    found = THROUGHPUT.fullmatch(value)
    return int(found[1]) if found else None


class Eval(Stage):
    """How the draft is measured and chosen.

    Attributes:
        k: draft lengths to try.
        policies: fixed tries every k; adaptive chooses each cycle's k from past cycles, the largest of `k` at most;
            schedule takes k by domain, context and rows from a table (`schedule`).
        schedule: where that table is: report.json of an earlier evaluation of these drafts, or draft.json of a release.
        rule: how sampled proposals are accepted, token by token or as a block. Trees have a rule of their own.
        tree_nodes: try the best tree of at most so many proposals, where measured costs say that it wins; null is none.
        windows: recent tokens that a draft keeps (with the first 4), to try beside the draft that keeps all.
        self_layers: try self-speculation by so many of the target's first layers; null is none.
        lookup: also run the prompt look-up control.
        temperature, top_p, top_k: of the served target; 0 is greedy.
        draft_temperature: the draft's own; null is what was fitted for it, else the target's.
        draft_temperatures: temperatures of the draft to try beside that.
        draft_top_p: the draft's own.
        num_requests: per domain and context group, one number for every group or a mapping, {short: 60, medium: 30};
            a group that the mapping leaves out is not measured.
        min_requests: fewer give "insufficient" instead of a number.
        cut_long: cut the middle out of the user's last message where a prompt is over the limit
            (traffic.max_prompt_tok, or the target's positions less `max_new_tok`); else such prompts are left out.
        max_new_tok: tokens a request.
        warmup: requests run first and left out.
        phased_every: every so many requests one is timed by phase too (shares); the others by the bare clock alone.
        batches: rows decoded together; above 1 sets of 2 * B requests run, a waiting one takes each free row.
        batch_sets: such sets for each domain and group at least; more where its requests need more, so that each is
            measured at every batch.
        prefix_gib: host memory for the keys of prompts that were read, which sets then need not read again; that time
            is charged all the same. Where they do not all fit the longest stay. 0 keeps none.
        budget_min: minutes after which no new request is taken; a cell's `min_requests` are measured even so.
        race: drop arms that are clearly slower after a sixth or a third of the requests at batch 1; the choice leaves
            them out.
        objective: what the choice goes by: latency@p50, latency@p95, or throughput@B.
        min_speedup: below it the verdict is no-go.
        simulate: acceptance of the first proposal, the second given the first, ... (further ones take the last), in
            place of the target's judgement: what the system costs, apart from a draft's quality. Nothing is released
            by it. Empty is off.
        bootstrap: resamples of an interval.
        domains: held-out domains to measure.
    """

    k: Annotated[tuple[Length, ...], Field(min_length=1), AfterValidator(distinct)] = (1, 2, 3, 4, 5)
    policies: Annotated[
        tuple[Literal["fixed", "adaptive", "schedule"], ...], Field(min_length=1), AfterValidator(distinct)
    ] = ("fixed",)
    schedule: Text | None = None
    rule: Literal["token", "block"] = "token"
    tree_nodes: Nodes | None = None
    windows: Annotated[tuple[Recent, ...], AfterValidator(distinct)] = ()
    self_layers: Positive | None = None
    lookup: bool = True
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: Count = 0
    draft_temperature: Temperature | None = None
    draft_temperatures: Annotated[tuple[Temperature, ...], AfterValidator(distinct)] = ()
    draft_top_p: TopP = 1.0
    num_requests: Positive | Annotated[dict[Group, Positive], Field(min_length=1)] = 8
    min_requests: Positive = 5
    cut_long: bool = False
    max_new_tok: Positive = 96
    warmup: Count = 1
    phased_every: Positive = 1
    batches: Annotated[tuple[Rows, ...], Field(min_length=1), AfterValidator(distinct)] = (1,)
    batch_sets: Annotated[int, Field(ge=2)] = 3
    prefix_gib: Annotated[float, Field(ge=0)] = 4.0
    budget_min: Annotated[float, Field(gt=0)] | None = None
    race: bool = False
    objective: Annotated[str, AfterValidator(known_objective)] = "latency@p50"
    min_speedup: Annotated[float, Field(gt=0)] = 1.05
    simulate: tuple[Fraction, ...] = ()
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    domains: Annotated[tuple[Word, ...], Field(min_length=1), AfterValidator(distinct)] = BUNDLED_DOMAINS

    def num_of(self, group: str) -> int:
        """Requests of a context group in each domain; 0 for a group that is not measured."""
        return self.num_requests.get(group, 0) if isinstance(self.num_requests, dict) else self.num_requests

    def clashes(self) -> Iterator[tuple[str, str]]:
        asked = self.num_requests if isinstance(self.num_requests, dict) else {"": self.num_requests}
        for group, num in asked.items():
            if num < self.min_requests:
                key = f"num_requests.{group}".rstrip(".")
                yield key, f"= {num} is less than eval.min_requests = {self.min_requests}"
        batch = batch_of(self.objective)
        if batch is not None and batch not in self.batches:
            yield "objective", f"= {self.objective!r} asks for batch {batch}; eval.batches = {list(self.batches)}"
        if ("schedule" in self.policies) != (self.schedule is not None):
            yield "schedule", f"= {self.schedule!r}: the policy 'schedule' needs a table, and a table that policy"
        if self.temperature == 0:
            if self.rule == "block":
                yield "rule", "= 'block' belongs to sampling; at eval.temperature = 0 both rules keep the same tokens"
            if self.draft_temperatures:
                yield "draft_temperatures", "belong to sampling; at eval.temperature = 0 the draft is greedy too"
        if self.draft_temperature in self.draft_temperatures:
            yield "draft_temperatures", f"= {list(self.draft_temperatures)} repeats eval.draft_temperature"
        if self.simulate and self.tree_nodes is not None:
            yield "simulate", "has no rates for the branches of a tree; set eval.tree_nodes to null"
        if self.tree_nodes is not None and 1 not in self.batches:
            yield "tree_nodes", f"= {self.tree_nodes}: trees are tried at batch 1; eval.batches = {list(self.batches)}"
