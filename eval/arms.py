"""The ways to decode that an evaluation compares, and their names. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from distill.schema_eval import Eval
from engine.tree import Tree
from eval.records import BASELINE, LOOKUP, SELF, arm_name, runner_name


@dataclass(frozen=True)
class Arm:
    """A way to decode.

    Attributes:
        draft: a draft's name, "lookup", "self-N" (the target's first N layers), or "" for the baseline.
        k: proposals a cycle; 0 is the baseline. Of another policy the largest, of a tree its depth.
        policy: "fixed", "adaptive" (k from past cycles), or "schedule" (k from a table by domain and load).
        rule: how samples are accepted, "token" by token or by "block".
        tree: proposed in place of a chain; its size is in the name.
        draft_temperature: the draft's; None is what the load says.
        recent: newest tokens that the draft sees (with the first few); None is all of them.
        simulated: accept by these rates (`engine.simulate`), which is no decoding of the target; empty is real.
    """

    draft: str
    k: int
    policy: str = "fixed"
    rule: str = "token"
    tree: Tree | None = None
    draft_temperature: float | None = None
    recent: int | None = None
    simulated: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The arm in rows and reports: "draft:code@k3", "draft:code@adaptive5", "draft:code@tree8"."""
        if self.k == 0:
            return BASELINE
        how = "k" if self.policy == "fixed" else self.policy
        size = f"tree{self.tree.proposals}" if self.tree else f"{how}{self.k}"
        name = arm_name(self.draft, self.k).removesuffix(f"k{self.k}") + size
        name += "" if self.rule == "token" else f"+{self.rule}"
        name += "" if self.draft_temperature is None else f"+t{self.draft_temperature:g}"
        name += "" if self.recent is None else f"+recent{self.recent}"
        return name + (f"+simulated{'-'.join(f'{rate:g}' for rate in self.simulated)}" if self.simulated else "")

    @property
    def label(self) -> str:
        """The arm for people: "code k=2", "code adaptive<=5", "code tree 8", "look-up k=4", "first 6 layers k=3"."""
        if self.k == 0:
            return "no speculation"
        who = self.draft
        if who == LOOKUP:
            who = "look-up"
        elif who.startswith(SELF):
            who = f"first {who.removeprefix(SELF)} layers"
        how = f"k={self.k}" if self.policy == "fixed" else f"{self.policy}<={self.k}"
        parts = [f"{who} tree {self.tree.proposals}" if self.tree else f"{who} {how}"]
        parts += [] if self.rule == "token" else [f"{self.rule} rule"]
        parts += [] if self.draft_temperature is None else [f"draft at {self.draft_temperature:g}"]
        parts += [] if self.recent is None else [f"last {self.recent} tokens"]
        parts += [f"SIMULATED acceptance {rates_text(self.simulated)}"] if self.simulated else []
        return ", ".join(parts)

    @property
    def runner(self) -> str:
        """Which of the bench's drafts proposes: a windowed one has a cache of its own."""
        return runner_name(self.draft, self.recent)

    @property
    def adaptive(self) -> bool:
        return self.policy == "adaptive"


def rates_text(rates: Iterable[float]) -> str:
    """Rates of acceptance in words: "0.8, 0.6"."""
    return ", ".join(f"{rate:g}" for rate in rates)


def grid(stage: Eval, drafts: Iterable[str]) -> list[Arm]:
    """Every arm of an evaluation but its trees, which are chosen from measurements (`eval.trees`).

    Args:
        stage: the recipe's.
        drafts: names of the drafts.

    Returns:
        the baseline first; then each draft at every k, its policies, its windows, and both controls. With
        simulated acceptance the controls are left out: what they propose depends on the text.
    """
    arms, most = [Arm("", 0)], max(stage.k)
    for draft in drafts:
        for temperature in (None, *stage.draft_temperatures):
            if "fixed" in stage.policies:
                arms += [Arm(draft, k, "fixed", stage.rule, None, temperature) for k in stage.k]
            if "adaptive" in stage.policies:
                arms.append(Arm(draft, most, "adaptive", stage.rule, None, temperature))
        if "schedule" in stage.policies:
            arms.append(Arm(draft, most, "schedule", stage.rule))
        for recent in stage.windows:
            arms += [Arm(draft, k, rule=stage.rule, recent=recent) for k in stage.k]
    if stage.simulate:
        return [arms[0], *(replace(arm, simulated=stage.simulate) for arm in arms[1:])]
    if stage.lookup:
        arms.append(Arm(LOOKUP, most, rule=stage.rule))
    if stage.self_layers is not None:
        arms += [Arm(f"{SELF}{stage.self_layers}", k, rule=stage.rule) for k in stage.k]
    return arms
