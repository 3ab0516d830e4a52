"""Which answers meet in which batch of training, and several of them in one row (`distill.packing`).

Which rows form batch n is a function of (seed, n) alone, so a run resumes anywhere without state.

Packed answers stand one behind the other. Each has positions from 0 and sees itself alone, which is what a branch with
no text before it does (`distill.branches`): no layout of another kind is needed.

    token      a0  a1  a2  a3 | b0  b1 | pad
    position    0   1   2   3 |  0   1 |  0
    branch      1   1   1   1 |  2   2 | -1
    anchor     -1  -1  -1  -1 | -1  -1 | -1      no text is seen
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch.utils.data import IterableDataset, get_worker_info

from distill.branches import PAD, Layout
from distill.teacher import Batch, ResponseDataset, TeacherError, width_of

# Batches' worth of shuffled rows that are sorted by length, or packed, together: enough that little is padding, few
# enough that batches differ between epochs.
SORTED_BATCHES = 16


class BatchPlan:
    """Which rows form batch n, for n = 0, 1, 2, ... without end: shuffled by epoch, alike lengths together.

    Every row is in exactly one batch of an epoch. A batch's size (rows times longest; its width is then rounded up, see
    `width_of`) is at most `tokens_per_batch`, except that a row longer than that forms a batch of its own. Packed, a
    batch is of any lengths: lines of answers that fill the width of the longest one are drawn at random, and `pack`
    lays them so.

    Args:
        lengths: Input tokens of each row.
        tokens_per_batch: Padded tokens of a batch.
        seed: Of the shuffles.
        packed: Lay several answers in a line.

    Attributes:
        width: Tokens of a line of several answers; None where each has its own.

    Raises:
        TeacherError: When there are no rows or the budget is below 1.
    """

    def __init__(self, lengths: Sequence[int], tokens_per_batch: int, seed: int, packed: bool = False) -> None:
        if not lengths or tokens_per_batch < 1:
            raise TeacherError(f"{len(lengths)} rows at {tokens_per_batch} tokens a batch: both must be >= 1")
        self.lengths, self.tokens_per_batch, self.seed = lengths, tokens_per_batch, seed
        self.width = min(max(lengths), tokens_per_batch) if packed else None
        self._ends = [0]
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of one epoch, in order."""
        if self._epoch[0] != number:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            order = torch.randperm(len(self.lengths), generator=generator).tolist()
            mean = sum(self.lengths) / len(self.lengths)
            bucket = max(1, round(SORTED_BATCHES * self.tokens_per_batch / mean))
            batches: list[list[int]] = []
            for start in range(0, len(order), bucket):
                rows = sorted(order[start : start + bucket], key=self.lengths.__getitem__)
                batches += self._fill(rows) if self.width is None else self._draw(rows, self.width, generator)
            shuffle = torch.randperm(len(batches), generator=generator).tolist()
            self._epoch = number, [batches[at] for at in shuffle]
        return self._epoch[1]

    def __getitem__(self, number: int) -> list[int]:
        """Rows of the batch with this number, counted over all epochs."""
        while self._ends[-1] <= number:
            self._ends.append(self._ends[-1] + len(self.epoch(len(self._ends) - 1)))
        epoch = next(e for e in range(len(self._ends) - 2, -1, -1) if self._ends[e] <= number)
        return self.epoch(epoch)[number - self._ends[epoch]]

    def _fill(self, rows: list[int]) -> list[list[int]]:
        """Cuts rows of ascending length so that the last (the longest) of each batch keeps the budget."""
        batches: list[list[int]] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * self.lengths[row] > self.tokens_per_batch:
                batches.append([])
            batches[-1].append(row)
        return batches

    def _draw(self, rows: list[int], width: int, generator: torch.Generator) -> list[list[int]]:
        """Packs rows of ascending length, longest first, each into the first line with room; batches of random lines.

        In the order in which they were drawn, rows would leave more of the lines empty than sorting by length does.
        """
        lines: list[list[int]] = []
        room: list[int] = []
        for row in reversed(rows):
            at = next((at for at, free in enumerate(room) if free >= self.lengths[row]), len(lines))
            if at == len(lines):
                lines.append([])
                room.append(width)
            lines[at].append(row)
            room[at] -= self.lengths[row]
        order, num = torch.randperm(len(lines), generator=generator).tolist(), self.tokens_per_batch // width
        return [list(chain(*(lines[at] for at in order[n : n + num]))) for n in range(0, len(order), num)]


def pack(batch: Batch, lengths: Sequence[int], width: int) -> Batch:
    """The same answers, one behind the other in as few rows as their order allows.

    Args:
        batch: A row for each answer.
        lengths: Input tokens of each.
        width: Tokens of a row at most; a longer answer has a row of its own.
    """
    starts: list[tuple[int, int]] = []
    row = column = longest = 0
    for length in lengths:
        if column and column + length > width:
            row, column = row + 1, 0
        starts.append((row, column))
        column += length
        longest = max(longest, column)
    input_ids = torch.zeros(row + 1, width_of(longest), dtype=torch.long)
    position, branch = torch.zeros_like(input_ids), torch.full_like(input_ids, PAD)
    for number, (length, (row, column)) in enumerate(zip(lengths, starts)):
        span = slice(column, column + length)
        input_ids[row, span] = batch.input_ids[number, :length]
        position[row, span] = torch.arange(length)
        branch[row, span] = number + 1
    rows, columns = batch.positions.T
    positions = torch.tensor(starts)[rows]
    positions[:, 1] += columns
    return replace(
        batch, input_ids=input_ids, positions=positions, layout=Layout(position, branch, torch.full_like(branch, -1))
    )


class Windows(IterableDataset[list[Batch]]):
    """The micro-batches of each optimizer step, from `start_step` on, without end; for a loader with batch_size=None.

    Args:
        dataset: The answers.
        plan: Which rows form which batch.
        accumulate: Micro-batches a step on each rank.
        start_step: Optimizer steps already taken.
        rank: This process, in [0, num_ranks).
        num_ranks: Processes that share each step; they get different batches of the same plan.
    """

    def __init__(
        self,
        dataset: ResponseDataset,
        plan: BatchPlan,
        accumulate: int = 1,
        start_step: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        self.dataset, self.plan, self.accumulate, self.start_step = dataset, plan, accumulate, start_step
        self.rank, self.num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[list[Batch]]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        step = self.start_step + first
        while True:
            start = (step * self.num_ranks + self.rank) * self.accumulate
            yield [self._batch(self.plan[number]) for number in range(start, start + self.accumulate)]
            step += stride

    def _batch(self, rows: list[int]) -> Batch:
        batch, width = self.dataset.collate(rows), self.plan.width
        return batch if width is None else pack(batch, [self.dataset.lengths[row] for row in rows], width)
