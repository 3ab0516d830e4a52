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


@dataclass
class Prefixes:
    """Prompts that were read, by runner, in the memory of the host.

    Attributes:
        most_bytes: of all together. Where they are too many the longest stay: they took longest to read.
    """

    most_bytes: int = 0
    _kept: dict[tuple[Runner, tuple[int, ...]], Prefix] = field(default_factory=dict)

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
        found = self._kept.get((runner, ids))
        if found is not None:
            runner.slab.put_row(row, found.rows)
            return found.hidden, found.read_ms
        start = clock.now_ms()
        hidden = runner.prefill(torch.tensor(ids, device=runner.device), row)[-1].clone()
        read_ms = clock.now_ms() - start
        if keep:
            self._keep(runner, ids, row, hidden, read_ms)
        return hidden, read_ms

    def start(self, drafter: Drafter, ids: tuple[int, ...], row: int, clock: Clock) -> float:
        """The drafter reads a prompt into a row; the milliseconds that this takes."""
        if isinstance(drafter, ModelDrafter) and not isinstance(drafter, SelfDrafter):
            return self.read(drafter.runner, ids, row, clock)[1]
        start = clock.now_ms()
        drafter.start(row, torch.tensor(ids))
        return clock.now_ms() - start

    def _keep(self, runner: Runner, ids: tuple[int, ...], row: int, hidden: Tensor, read_ms: float) -> None:
        """Keeps a copy, in the place of shorter ones if it must."""
        need = runner.slab.row_nbytes(len(ids))
        room = self.most_bytes - sum(p.nbytes for p in self._kept.values())
        shorter = sorted((key for key in self._kept if len(key[1]) < len(ids)), key=lambda key: len(key[1]))
        gone = []
        while room < need and shorter:
            gone.append(shorter.pop(0))
            room += self._kept[gone[-1]].nbytes
        if room >= need:
            for key in gone:
                del self._kept[key]
            self._kept[runner, ids] = Prefix(hidden, runner.slab.take_row(row, len(ids)), read_ms)
