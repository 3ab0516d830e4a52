"""The target's answers as training batches: token ids, supervised positions and the target's cached hidden states.

The target's body is not needed in training: a shard keeps the final hidden state of every answer position, which its
head turns into logits chunk by chunk (`distill.losses`). The states stay on disk and are mapped, not read. The same
rows may carry the target's likeliest tokens instead (`distill.teacher_topk`). `distill.batches` says which rows meet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset

from distill.branches import Layout
from distill.loss_topk import TopK
from distill.shards import ResponseRow, load_rows
from distill.teacher_topk import read_topk, topk_path

logger = logging.getLogger(__name__)

WIDTHS = 16


class TeacherError(ValueError):
    """Answers that cannot be trained on."""


@dataclass(frozen=True)
class Example:
    """One answered prompt: `input_ids` [T], and for its last A positions `labels` [A] and `hidden_target` [A, H].

    With `topk` (the target's likeliest tokens there), `hidden_target` is [A, 0].
    """

    input_ids: Tensor
    labels: Tensor
    hidden_target: Tensor
    topk: TopK | None = None


@dataclass(frozen=True)
class Batch:
    """Examples side by side, right-padded (a causal model needs no mask then); or several in a row (`distill.batches`).

    Attributes:
        input_ids: [B, T].
        positions: (row, position) of each supervised position [N, 2]: rows in order, positions ascending.
        labels: the token id that the target wrote next [N].
        hidden_target: what the target's head multiplies there [N, H], as stored (bf16).
        rows: index of each row in the dataset.
        topk: the target's likeliest tokens there; `hidden_target` is [N, 0] then.
        layout: where tokens stand and what they see, in rows of branches or of several answers; None is causal text.
        verified: the states are those of a verification pass, which no live target is asked for again.
    """

    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    hidden_target: Tensor
    rows: tuple[int, ...]
    topk: TopK | None = None
    layout: Layout | None = None
    verified: bool = False

    @property
    def place(self) -> Tensor:
        """Index of each supervised position in its own answer, or branch [N]."""
        rows, columns = self.positions.T.contiguous()
        own = rows if self.layout is None else rows * self.input_ids.shape[1] + self.layout.branch[rows, columns]
        return torch.arange(len(own), device=own.device) - torch.searchsorted(own, own)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; the data loader calls this."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            input_ids=move(self.input_ids),
            positions=move(self.positions),
            labels=move(self.labels),
            hidden_target=move(self.hidden_target),
            topk=None if self.topk is None else self.topk.map(move),
            layout=None if self.layout is None else self.layout.map(move),
        )


class ResponseDataset(Dataset[Example]):
    """The rows of a responses folder that can be trained on, cut to `max_length` tokens of prompt and answer.

    A row without an answer, or whose prompt leaves no room for one, is dropped and counted.

    Args:
        folder: The folder with manifest.json, rows-*.jsonl and hidden-*.safetensors.
        max_length: Tokens of prompt and answer that are kept, >= 2.
        topk: Read the target's likeliest tokens (`distill.teacher_topk`) instead of its hidden states.

    Attributes:
        rows: The rows kept.
        lengths: Input tokens of each.
        num_supervised: Supervised positions of each.
        num_dropped: {"empty": ..., "prompt_too_long": ...}; num_cut: answers that lost their end.

    Raises:
        TeacherError: When no row is left, or `max_length` is too small.
    """

    def __init__(self, folder: Path, max_length: int, topk: bool = False) -> None:
        if max_length < 2:
            raise TeacherError(f"max_length {max_length}: must be >= 2, a prompt token and an answer token")
        self.folder = Path(folder)
        self.rows: list[ResponseRow] = []
        self.lengths: list[int] = []
        self.num_supervised: list[int] = []
        self.num_dropped = {"empty": 0, "prompt_too_long": 0}
        self.num_cut = 0
        self.topk = topk
        self._hidden: dict[int, Tensor | TopK] = {}
        for row in load_rows(self.folder):
            kept = min(len(row.answer_ids), max_length - len(row.prompt_ids))
            if not row.answer_ids:
                self.num_dropped["empty"] += 1
            elif kept < 1 or not row.prompt_ids:
                self.num_dropped["prompt_too_long"] += 1
            else:
                self.rows.append(row)
                self.num_supervised.append(kept)
                self.num_cut += kept < len(row.answer_ids)
                # The last kept answer token predicts nothing that is supervised, so it is not fed.
                self.lengths.append(len(row.prompt_ids) + kept - 1)
        logger.info(
            "%s: %d answers, %d supervised tokens; dropped %d empty, %d whose prompt fills max_length %d; %d cut there",
            self.folder,
            len(self.rows),
            sum(self.num_supervised),
            *self.num_dropped.values(),
            max_length,
            self.num_cut,
        )
        if not self.rows:
            raise TeacherError(
                f"{self.folder}: no answer to train on (dropped {self.num_dropped}, max_length {max_length}); "
                "generate answers first, or raise distill.max_length"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row, kept = self.rows[index], self.num_supervised[index]
        shard = self._shard(row.shard)
        num = len(shard.ids if isinstance(shard, TopK) else shard)
        if row.offset + len(row.answer_ids) > num:
            raise TeacherError(
                f"{self._path(row.shard)}: {num} hidden states, but row {row.id!r} lies at "
                f"{row.offset}..{row.offset + len(row.answer_ids)}; the shard is cut, generate the answers again"
            )
        ids, labels = torch.tensor(row.prompt_ids + row.answer_ids[: kept - 1]), torch.tensor(row.answer_ids[:kept])
        at = slice(row.offset, row.offset + kept)
        if isinstance(shard, TopK):
            return Example(ids, labels, torch.empty(kept, 0), shard[at])
        return Example(ids, labels, shard[at])

    def collate(self, indices: Sequence[int]) -> Batch:
        """The batch of these rows; pad positions hold token 0 and are never supervised."""
        examples = [self[index] for index in indices]
        input_ids = torch.zeros(len(examples), width_of(max(len(e.input_ids) for e in examples)), dtype=torch.long)
        positions = []
        for number, example in enumerate(examples):
            length, answer = len(example.input_ids), len(example.labels)
            input_ids[number, :length] = example.input_ids
            column = torch.arange(length - answer, length)
            positions.append(torch.stack([torch.full_like(column, number), column], dim=1))
        return Batch(
            input_ids,
            torch.cat(positions),
            torch.cat([e.labels for e in examples]),
            torch.cat([e.hidden_target for e in examples]),
            tuple(indices),
            _together([e.topk for e in examples if e.topk is not None]) if self.topk else None,
        )

    def _path(self, shard: int) -> Path:
        return topk_path(self.folder, shard) if self.topk else self.folder / f"hidden-{shard:05d}.safetensors"

    def _shard(self, shard: int) -> Tensor | TopK:
        if shard not in self._hidden:
            try:
                if self.topk:
                    self._hidden[shard] = read_topk(self._path(shard))
                else:
                    with safe_open(self._path(shard), framework="pt") as file:
                        self._hidden[shard] = file.get_tensor("hidden")
            except (SafetensorError, FileNotFoundError) as error:
                raise TeacherError(f"{self._path(shard)}: {error}; generate the answers again") from error
        return self._hidden[shard]

    def __getstate__(self) -> dict[str, object]:
        # A worker maps the files itself.
        return {**self.__dict__, "_hidden": {}}


def width_of(longest: int) -> int:
    """Tokens of a batch's rows: the next multiple of WIDTHS, so that shapes come again (see `PRODUCT_ROWS`)."""
    return -(-longest // WIDTHS) * WIDTHS


def _together(parts: Sequence[TopK]) -> TopK:
    return TopK(torch.cat([part.ids for part in parts]), torch.cat([part.log_p for part in parts]))
