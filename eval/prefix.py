"""What reading a prompt leaves in a slab, kept: every arm and every batch starts from one prefill, and is charged it.

A prefill depends neither on the arm nor on the other rows, and at long contexts it takes several times as long as the
short answers that are measured behind it. So each prompt is read once, and its keys are copied from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.clock import Clock
from engine.draft import Drafter, ModelDrafter, SelfDrafter
from engine.model import Runner


@dataclass(frozen=True)
class Prefix:
    """A prompt that was read.

    Attributes:
        hidden: [H] the final hidden state at its last token.
        rows: keys and values, as `Slab.take_row` has them.
        read_ms: what reading it took.
    """

    hidden: Tensor
    rows: Tensor
    read_ms: float

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.rows.numel() * self.rows.element_size()

    @property
    def worth(self) -> float:
        """Milliseconds that a byte of it saves."""
        return self.read_ms / self.nbytes


@dataclass
class Prefixes:
    """Prompts that were read, by runner, in the memory of the host.

    Attributes:
        most_bytes: of all together. Where they are too many those stay that took longest to read for their size; others
            stay for the set that reads them, in an eighth as much again, or each of its arms would read them anew.
    """

    most_bytes: int = 0
    _kept: dict[tuple[Runner, tuple[int, ...]], Prefix] = field(default_factory=dict)
    _of_set: dict[tuple[Runner, tuple[int, ...]], Prefix] = field(default_factory=dict)

    def next_set(self) -> None:
        """Other requests come: what stayed for those before goes."""
        self._of_set.clear()

    @torch.inference_mode()
    def read(
        self, runner: Runner, ids: tuple[int, ...], row: int, clock: Clock, keep: bool = True
    ) -> tuple[Tensor, float]:
        """Puts a prompt into a row.

        Args:
            runner: the target or a draft.
            ids: the prompt.
            row: of its slab.
            clock: times the reading, where there is one.
            keep: false leaves no copy (a reading that warms up is slower than others).

        Returns:
            [H] the hidden state at the last token, and the milliseconds that reading the prompt takes, now or before.
        """
        found = self._kept.get((runner, ids)) or self._of_set.get((runner, ids))
        if found is not None:
            runner.slab.put_row(row, found.rows)
            return found.hidden, found.read_ms
        text = torch.tensor(ids, device=runner.device)
        runner.slab.ensure(min(len(ids), runner.slab.capacity))  # laying out slots is no part of reading
        start = clock.now_ms()
        hidden = runner.prefill(text, row)[-1].clone()
        read_ms = clock.now_ms() - start
        if keep:
            self._keep(runner, ids, row, hidden, read_ms)
        return hidden, read_ms

    def start(self, drafter: Drafter, ids: tuple[int, ...], row: int, clock: Clock, keep: bool = True) -> float:
        """The drafter reads a prompt into a row; the milliseconds that this takes, now or before."""
        if isinstance(drafter, ModelDrafter) and not isinstance(drafter, SelfDrafter):
            return self.read(drafter.runner, ids, row, clock, keep)[1]
        text = torch.tensor(ids)
        start = clock.now_ms()
        drafter.start(row, text)
        return clock.now_ms() - start

    def _keep(self, runner: Runner, ids: tuple[int, ...], row: int, hidden: Tensor, read_ms: float) -> None:
        """Keeps a copy, in the place of those that saved less time for their size if it must, or for this set."""
        need = runner.slab.row_nbytes(len(ids))
        room = self.most_bytes - sum(p.nbytes for p in self._kept.values())
        worth = read_ms / need
        less = sorted((key for key, p in self._kept.items() if p.worth < worth), key=lambda key: self._kept[key].worth)
        gone = []
        while room < need and less:
            gone.append(less.pop(0))
            room += self._kept[gone[-1]].nbytes
        if room >= need:
            for key in gone:
                del self._kept[key]
            self._kept[runner, ids] = Prefix(hidden, runner.slab.take_row(row, len(ids)), read_ms)
        elif need + sum(p.nbytes for p in self._of_set.values()) <= self.most_bytes // 8:
            self._of_set[runner, ids] = Prefix(hidden, runner.slab.take_row(row, len(ids)), read_ms)
