"""From an arm to its decoder, and the load that it decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.costs import Costs
from engine.draft import Drafter, LookupDrafter, ModelDrafter, SelfDrafter
from engine.model import Runner
from engine.policy import Adaptive, Policy, Schedule
from engine.simulate import SimulatedDecoder
from engine.speculate import Decoder
from engine.tree_cycle import TreeDecoder
from engine.tree_draft import TreeDrafter
from engine.warp import Warp
from eval.arms import Arm
from eval.records import LOOKUP, SELF
from eval.schedule import Table


@dataclass(frozen=True)
class EvalRequest:
    """A prompt to measure with.

    Attributes:
        id: the prompt's.
        domain, group: group is its context class.
        ids: its tokens.
        repeat: which time it comes; a prompt comes again where a batch would have empty rows.
    """

    id: str
    domain: str
    group: str
    ids: tuple[int, ...]
    repeat: int = 0

    @property
    def name(self) -> str:
        """What the engine calls it: each time has its own noise."""
        return self.id if not self.repeat else f"{self.id}#{self.repeat + 1}"


@dataclass(frozen=True)
class Load:
    """How requests are decoded.

    Attributes:
        max_new: tokens a request.
        eos: ids that end an answer.
        temperature, top_p, top_k: of the target.
        draft_warps: each draft's own warping; a draft without one samples as the target does.
        seed: of the noise.
    """

    max_new: int
    eos: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_warps: Mapping[str, Warp] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class RequestSet:
    """Requests that are decoded together, all of one domain and group; `index` tells the sets of a run apart."""

    index: int
    requests: tuple[EvalRequest, ...]


def build_decoder(
    arm: Arm,
    batch: int,
    target: Runner,
    drafts: Mapping[str, Runner],
    load: Load,
    graph: bool = False,
    costs: Sequence[Costs] = (),
    table: Table | None = None,
    domains: Mapping[str, str] | None = None,
) -> Decoder:
    """The decoder of an arm.

    Args:
        arm: the way to decode.
        batch: rows in use, which an adaptive policy's costs were measured with.
        target, drafts: with at least so many rows.
        load: what is decoded.
        graph: capture steps (trees and self-speculation draft eagerly all the same).
        costs: of all drafts and batches.
        table: of a schedule, of the arm's draft.
        domains: of requests by name; a schedule and an adaptive policy tell them apart. It may grow.

    Raises:
        ValueError: an adaptive arm without costs, a scheduled one without its table, or more first layers than the
            target has.
    """
    common = load.seed, load.top_k, load.top_p
    if arm.tree is not None:
        tree_drafter = TreeDrafter(drafts[arm.runner], load.seed, _warp(arm, load))
        return TreeDecoder(target, load.eos, tree_drafter, arm.tree, *common)
    policy: Policy | None = None
    if arm.policy == "schedule":
        if table is None:
            raise ValueError(f"arm {arm.name}: no schedule was given for {arm.draft!r} (eval.schedule)")
        policy = Schedule(table, {} if domains is None else domains)
    elif arm.adaptive:
        policy = Adaptive([c for c in costs if (c.draft, c.batch) == (arm.runner, batch)], arm.k, kinds=domains)
    drafter = _drafter(arm, target, drafts, load, graph)
    if arm.simulated:
        assert isinstance(drafter, ModelDrafter)
        rates = arm.simulated
        return SimulatedDecoder(target, drafter, arm.k, rates, *common, rule=arm.rule, policy=policy, graph=graph)
    return Decoder(target, load.eos, drafter, arm.k, *common, rule=arm.rule, policy=policy, graph=graph)


def _drafter(arm: Arm, target: Runner, drafts: Mapping[str, Runner], load: Load, graph: bool) -> Drafter | None:
    if arm.k == 0:
        return None
    if arm.draft == LOOKUP:
        return LookupDrafter(device=target.device)
    if arm.draft.startswith(SELF):
        return SelfDrafter(target, int(arm.draft.removeprefix(SELF)), load.seed)
    return ModelDrafter(drafts[arm.runner], load.seed, _warp(arm, load), graph)


def _warp(arm: Arm, load: Load) -> Warp | None:
    """What a draft model samples from; None is as the target does."""
    warp = load.draft_warps.get(arm.draft)
    if arm.draft_temperature is None:
        return warp
    return replace(warp or Warp(load.temperature), temperature=arm.draft_temperature)
