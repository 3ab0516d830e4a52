"""Where proposals come from: a draft model, the target's own first layers, or the request's text (prompt look-up)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine import noise
from engine.graphs import Step, check_graph
from engine.model import Runner
from engine.ring import SLACK
from engine.warp import Warp, argmax, draw, draws_of, probabilities


@dataclass(frozen=True)
class Batch:
    """What a cycle starts from, for B active rows.

    Attributes:
        last: [B, 2] the two newest tokens of each row.
        length: [B] tokens of each row so far (prompt and emitted).
        longest: the largest length, known to the host.
        temperature: [B] the target's temperature.
        keys: [B] noise keys.
        text: each row's tokens (for look-up).
        draws: what the host knows of the temperatures (`warp.draws_of`).
    """

    last: Tensor
    length: Tensor
    longest: int
    temperature: Tensor
    keys: Tensor
    text: Sequence[list[int]]
    draws: str = "mixed"


@dataclass(frozen=True)
class Proposal:
    """k proposals a row.

    Attributes:
        tokens: [B, k] ids in the target's vocabulary.
        q: [B, k, R] what they were drawn from; None where they are deterministic.
        rows: [R] ids of q's columns; None: ids 0..R-1.
        count: [B] proposals that are real; None: all k.
    """

    tokens: Tensor
    q: Tensor | None = None
    rows: Tensor | None = None
    count: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens; keeps what state it needs row by row."""

    def start(self, row: int, ids: Tensor) -> None:
        """The row reads a new request's prompt [T]."""
        ...

    def forget(self, positions: int) -> None:
        """No row is in use any more, and the next ones start with so many positions."""
        ...

    def join(self, row: int, read: bool = True) -> None:
        """A request starts now; without `read` its prompt is read when something is first proposed."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """The request of one row moves to another."""
        ...

    def reach(self, longest: int) -> int:
        """How many tokens can still be proposed to a row of this length."""
        ...

    def skip(self) -> None:
        """A cycle went by without proposals: what follows was not seen."""
        ...

    def propose(self, batch: Batch, k: int) -> Proposal:
        """Up to k proposals for every row."""
        ...


def refuse_window(target: Runner, reason: str) -> None:
    """Refuses a target that forgets a part of its prefix: its answers would be those of another model.

    Raises:
        ValueError: the target's slab is a ring.
    """
    if target.slab.ring is not None:
        raise ValueError(
            f"the target has recent = {target.slab.ring.recent}: {reason}, and must keep the whole prefix; give the "
            "window to the draft alone, and the target recent=None"
        )


class ModelDrafter:
    """A standalone draft model: k serial steps.

    The first step reads the row's two newest tokens and rewrites the older one's slot. After a fully accepted cycle
    the draft has not seen its own last proposal; reading two tokens every time closes that gap with one fixed shape.

    Args:
        runner: the draft.
        seed: the run's seed.
        warp: the draft's own warping (q is exactly what it samples from); None samples as the target does.
        graph: capture the k steps as one CUDA graph for each shape.

    Raises:
        ValueError: graphs are asked for without a CUDA device.
    """

    def __init__(self, runner: Runner, seed: int = 0, warp: Warp | None = None, graph: bool = False) -> None:
        self.runner, self.seed, self.warp = runner, seed, warp
        self._skipped = 0
        self._joined: dict[int, int] = {}  # row: cycles that had been skipped when its request came
        self._unread: set[int] = set()  # rows whose prompts were not read
        # Several decoders may draft with this one, so its graph reads copies of their rows' state.
        self._steps = Step(self._draft, check_graph(graph, runner.device, runner.config), own=True)

    def start(self, row: int, ids: Tensor) -> None:
        self.runner.prefill(ids, row)

    def forget(self, positions: int) -> None:
        self.runner.forget(positions)

    def join(self, row: int, read: bool = True) -> None:
        self._joined[row] = self._skipped
        (self._unread.discard if read else self._unread.add)(row)

    def move(self, source: int, target: int, length: int) -> None:
        self.runner.slab.move_row(source, target, length)
        self._joined[target] = self._joined.pop(source, 0)
        (self._unread.add if source in self._unread else self._unread.discard)(target)
        self._unread.discard(source)

    def reach(self, longest: int) -> int:
        return max(0, self.runner.max_positions - longest)

    def skip(self) -> None:
        self._skipped += 1

    def propose(self, batch: Batch, k: int) -> Proposal:
        run = self.runner
        for row in sorted(row for row in self._unread if row < len(batch.text)):
            self.start(row, torch.tensor(batch.text[row][:-1], device=run.device))
            self.join(row)
        if self._skipped:
            self._catch_up(batch)
        draws = batch.draws if self.warp is None else draws_of([self.warp.temperature])
        extents = tuple(run.extent(batch.longest + j, batch.longest + k) for j in range(k))
        tokens, q = self._steps((draws, extents), batch.last, batch.length, self._temperature(batch), batch.keys)
        assert tokens is not None
        return Proposal(tokens, q, run.shortlist)

    def _draft(
        self, draws: str, extents: tuple[int, ...], last: Tensor, length: Tensor, temperature: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """One step for each extent: tokens [B, k] and what they were drawn from [B, k, R] (None when all is greedy)."""
        run, warp, greedy = self.runner, self.warp or Warp(), draws == "greedy"
        ids, start = last, length - 2
        if not greedy:
            ahead = length[:, None] + torch.arange(len(extents), device=run.device)
            uniforms = noise.uniform(self.seed, keys[:, None], ahead, noise.DRAFT)
        tokens, q = [], []
        for j, extent in enumerate(extents):
            hidden = run.step(ids, start, extent)
            logits = run.logits(hidden[:, -1:])
            if greedy:
                column = argmax(logits[:, 0])
            else:
                probs = probabilities(logits, temperature, warp.top_k, warp.top_p, draws)
                column = draw(probs[:, 0], uniforms[:, j])
                q.append(probs)
            tokens.append(run.token(column))
            ids, start = tokens[-1][:, None], length + j
        return torch.stack(tokens, 1), None if greedy else torch.cat(q, 1)

    def _catch_up(self, batch: Batch) -> None:
        """Reads what was emitted while nothing was drafted: one token a cycle in every row.

        A row reads no more than it missed, or than one step has for all: a window has no room to go further back, and
        can be written in pieces only.
        """
        run, read = self.runner, [len(text) - 1 for text in batch.text]
        missed = [self._skipped - self._joined.get(row, 0) + 1 for row in range(len(read))]
        self._skipped, self._joined = 0, {}
        left = min(max(missed), max(read))
        piece = left if run.slab.ring is None else SLACK
        extent = run.extent(batch.longest - 1, batch.longest - 1)
        while left:
            size = min(piece, left)
            # Rows shorter than that are read from their start; what stands behind their end is overwritten later.
            starts = [max(0, n - min(left, max(size, own))) for n, own in zip(read, missed, strict=True)]
            texts = [text[at : min(at + size, len(text) - 1)] for text, at in zip(batch.text, starts, strict=True)]
            ids = torch.tensor([text + [0] * (size - len(text)) for text in texts], device=run.device)
            run.step(ids, torch.tensor(starts, device=run.device), extent)
            left -= size

    def _temperature(self, batch: Batch) -> Tensor:
        """[B] what is drafted at."""
        if self.warp is None:
            return batch.temperature
        # Drafting greedily for a sampling target is allowed, and the reverse only costs acceptance.
        return torch.full_like(batch.temperature, self.warp.temperature)


class SelfDrafter(ModelDrafter):
    """Self-speculation: the target's own first layers and its head, over the target's own slab.

    The keys that the first layers write for a proposal are those that verification writes again, so that the draft
    needs no prefill, no memory and no catching up.

    Args:
        target: the target that verifies.
        num_layers: how many of its first layers draft.
        seed, warp: as for `ModelDrafter`.

    Raises:
        ValueError: the target keeps a window only; layers that it does not have.

    Source: the idea of arXiv 2309.08168, with a fixed choice of layers.
    """

    def __init__(self, target: Runner, num_layers: int, seed: int = 0, warp: Warp | None = None) -> None:
        refuse_window(target, "self-speculation drafts over the target's own slab")
        super().__init__(target.first_layers(num_layers), seed, warp)

    def start(self, row: int, ids: Tensor) -> None:
        """The target's prefill wrote these keys."""

    def forget(self, positions: int) -> None:
        """The target does."""

    def join(self, row: int, read: bool = True) -> None:
        """The target reads every prompt."""

    def move(self, source: int, target: int, length: int) -> None:
        """The target's row moves."""

    def skip(self) -> None:
        """The target reads every token."""


class LookupDrafter:
    """Prompt look-up: continue as the text went on after the latest earlier occurrence of the newest n-gram.

    Args:
        longest: longest n-gram tried first.
        device: where proposals are put.

    Source: Saxena, "Prompt Lookup Decoding" (2023); the same idea as arXiv 2304.04487.
    """

    def __init__(self, longest: int = 3, device: torch.device | str = "cpu") -> None:
        self.longest, self.device = longest, device

    def start(self, row: int, ids: Tensor) -> None:
        """Nothing is kept: the text is all there is."""

    def forget(self, positions: int) -> None:
        """Nothing is kept."""

    def join(self, row: int, read: bool = True) -> None:
        """Nothing is kept."""

    def move(self, source: int, target: int, length: int) -> None:
        """Nothing is kept."""

    def reach(self, longest: int) -> int:
        return 1 << 30

    def skip(self) -> None:
        """Nothing is kept."""

    def propose(self, batch: Batch, k: int) -> Proposal:
        found = [self.find(text, k) for text in batch.text]
        padded = [f + [0] * (k - len(f)) for f in found]
        count = torch.tensor([len(f) for f in found], device=self.device)
        return Proposal(torch.tensor(padded, device=self.device, dtype=torch.long).view(len(found), k), count=count)

    def find(self, text: list[int], k: int) -> list[int]:
        """At most k tokens that followed the latest earlier occurrence of the last n-gram."""
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            tail = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == tail:
                    return text[start + n : start + n + k]
        return []
