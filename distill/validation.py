"""Teacher-forced validation on held-out answers: acceptance, cycles and the predicted end-to-end speedup, by domain."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distill.acceptance import TargetSummary, acceptance, overlap_by_temperature, summarise_target
from distill.tau import Cycles, count_cycles
from distill.teacher import Batch, ResponseDataset
from engine.costs import Costs, predicted_speedup
from engine.warp import Warp

GREEDY, PLAIN = Warp(0.0), Warp(1.0)
# Tried for the draft, times the target's temperature.
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5)


@dataclass(frozen=True)
class Served:
    """What the predicted speedup is for.

    Attributes:
        costs: measured on this device for a draft of this shape.
        ks: draft lengths to choose from.
        target, draft: how they draw as served; a temperature of 0 is greedy.
        prefill_ms, draft_prefill_ms: reading the prompt.
        new_tok: answer tokens.
    """

    costs: Costs
    ks: tuple[int, ...]
    target: Warp = GREEDY
    draft: Warp = GREEDY
    prefill_ms: float = 0.0
    draft_prefill_ms: float = 0.0
    new_tok: int | None = None


@dataclass(frozen=True)
class Score:
    """One domain's figures.

    Attributes:
        domain, num_answers, num_tok: whose they are, over how many answers and tokens.
        alpha: share of positions at which the draft's argmax over the rows in use is the target's argmax.
        alpha_whole: the same with every row of the draft's head.
        overlap: mean of sum min(p, q) over the rows in use, as served (greedily: at temperature 1).
        overlap_whole: the same with every row.
        cycles: what drafting would have done, by k, with the rows in use.
        speedup: predicted end-to-end speedup by k.
        matches: of each answer, in a fixed order: positions that are accepted as it is served (of a sampled one the sum
            of their chances), and all of them.
        accepted: of each answer, the chance of each token to be accepted with the rows in use, as it is served.
    """

    domain: str
    num_answers: int
    num_tok: int
    alpha: float
    alpha_whole: float
    overlap: float
    overlap_whole: float
    cycles: dict[int, Cycles]
    speedup: dict[int, float]
    matches: list[tuple[float, int]]
    accepted: tuple[tuple[float, ...], ...] = ()

    @property
    def best(self) -> tuple[int, float]:
        """The k with the highest predicted speedup, and that; of equal ones the smaller k."""
        return max(self.speedup.items(), key=lambda item: (item[1], -item[0]))


class Validation:
    """Scores a draft on the target's held-out answers.

    Args:
        dataset: held-out answers.
        served: sampler, costs and draft lengths.
        softcaps: final logit caps of (target, draft).
        batch_tok: padded tokens of a batch.
        chunk_tok: positions whose logits live at a time.
    """

    def __init__(
        self,
        dataset: ResponseDataset,
        served: Served,
        softcaps: tuple[float | None, float | None] = (None, None),
        batch_tok: int = 8192,
        chunk_tok: int = 1024,
    ) -> None:
        self.dataset, self.served, self.softcaps, self.chunk_tok = dataset, served, softcaps, chunk_tok
        self.sampled = not served.target.greedy
        self.warp, self.draft = (served.target, served.draft) if self.sampled else (PLAIN, PLAIN)
        self._batches = _batches(dataset.lengths, batch_tok)
        self._summaries: dict[int, TargetSummary] = {}

    @torch.no_grad()
    def run(
        self, hidden: Callable[[Batch], Tensor], head: Tensor, teacher_head: Tensor, shortlist: Tensor | None
    ) -> list[Score]:
        """Scores a draft.

        Args:
            hidden: [N, h] of a batch: what the draft's head multiplies at the supervised positions.
            head: [V, h] the draft's whole head, in the dtype it is served in.
            teacher_head: [V, H] the target's whole head.
            shortlist: [S] rows of the draft's head that the engine uses; None is every row.

        Returns:
            One score for each domain, in order of name.
        """
        heads = [(None, head, teacher_head)]
        if shortlist is not None:
            heads.insert(0, (shortlist, head[shortlist], teacher_head[shortlist]))
        by_row: dict[int, list[Tensor]] = {}
        for number, rows in enumerate(self._batches):
            by_row |= self._batch(number, rows, hidden, heads)
        domains: dict[str, list[list[Tensor]]] = {}
        for row, values in sorted(by_row.items()):
            domains.setdefault(self.dataset.rows[row].domain, []).append(values)
        return [self._score(name, answers) for name, answers in sorted(domains.items())]

    def _batch(
        self,
        number: int,
        rows: Sequence[int],
        hidden: Callable[[Batch], Tensor],
        heads: Sequence[tuple[Tensor | None, Tensor, Tensor]],
    ) -> dict[int, list[Tensor]]:
        """By row: match and overlap with the rows in use, then both with every row; each [A]."""
        batch = self.dataset.collate(rows).to(heads[-1][1].device)
        states, summary = hidden(batch), self._summary(number, batch, heads[-1][2])
        columns: list[Tensor] = []
        for ids, weight, teacher in heads:
            found = acceptance(
                states,
                weight,
                batch.hidden_target,
                teacher,
                summary,
                ids,
                self.warp,
                self.draft,
                self.softcaps,
                self.chunk_tok,
            )
            columns += [found.match.cpu(), found.alpha.clamp(0, 1).cpu()]
        columns = columns if len(heads) == 2 else columns * 2
        lengths = [self.dataset.num_supervised[row] for row in rows]
        return {row: list(values) for row, *values in zip(rows, *(column.split(lengths) for column in columns))}

    def _summary(self, number: int, batch: Batch, teacher_head: Tensor) -> TargetSummary:
        """The target's side of a batch: the same at every validation."""
        if number not in self._summaries:
            self._summaries[number] = summarise_target(
                batch.hidden_target, teacher_head, self.warp, self.softcaps[0], self.chunk_tok
            )
        return self._summaries[number]

    @torch.no_grad()
    def fit_temperature(
        self, hidden: Callable[[Batch], Tensor], head: Tensor, teacher_head: Tensor, shortlist: Tensor | None
    ) -> FittedTemperature:
        """Tries FACTORS times the served temperature (1 where that is greedy) for the draft; arguments as for `run`.

        It costs no acceptance test its exactness: q is what the draft samples from, whatever its temperature.
        """
        rows = slice(None) if shortlist is None else shortlist
        sums, num = torch.zeros(len(FACTORS), dtype=torch.float64), 0
        for number, members in enumerate(self._batches):
            batch = self.dataset.collate(members).to(teacher_head.device)
            sums += overlap_by_temperature(
                hidden(batch),
                head[rows],
                batch.hidden_target,
                teacher_head[rows],
                self._summary(number, batch, teacher_head),
                self.warp,
                [replace(self.draft, temperature=factor * self.warp.temperature) for factor in FACTORS],
                self.softcaps,
                self.chunk_tok,
            )
            num += len(batch.labels)
        mean = (sums / num).tolist()
        best = max(range(len(FACTORS)), key=mean.__getitem__)
        found = round(FACTORS[best] * self.warp.temperature, 6)
        return FittedTemperature(self.warp.temperature, found, mean[best], mean[FACTORS.index(1.0)])

    def _score(self, domain: str, answers: list[list[Tensor]]) -> Score:
        match, overlap, match_whole, overlap_whole = (torch.cat(list(column)).float() for column in zip(*answers))
        accepted = 1 if self.sampled else 0
        texts = [values[accepted].float().tolist() for values in answers]
        cycles = {k: count_cycles(texts, k) for k in self.served.ks}
        return Score(
            domain=domain,
            num_answers=len(answers),
            num_tok=len(match),
            alpha=float(match.mean()),
            alpha_whole=float(match_whole.mean()),
            overlap=float(overlap.mean()),
            overlap_whole=float(overlap_whole.mean()),
            cycles=cycles,
            speedup={k: self._speedup(k, counted, texts) for k, counted in cycles.items()},
            matches=[(float(values[accepted].sum()), len(values[accepted])) for values in answers],
            accepted=tuple(map(tuple, texts)),
        )

    def _speedup(self, k: int, counted: Cycles, texts: list[list[float]]) -> float:
        # Answers shorter than one cycle still have an acceptance, only no cycles to take it from.
        accept = counted.conditional if counted.num else statistics.fmean(value for text in texts for value in text)
        served = self.served
        return predicted_speedup(served.costs, k, accept, served.prefill_ms, served.draft_prefill_ms, served.new_tok)


@dataclass(frozen=True)
class FittedTemperature:
    """The temperature at which the draft overlaps the target most, over all held-out answers.

    Attributes:
        target: temperature that the target is served at.
        draft: the draft's best one.
        overlap: mean sum min(p, q) there; `overlap_same` at the target's own temperature.
    """

    target: float
    draft: float
    overlap: float
    overlap_same: float


def choose(scores: Sequence[Score], domain: str) -> tuple[int, float]:
    """The draft length and the predicted speedup that decide which checkpoint is best.

    Args:
        scores: by domain.
        domain: the domain trained for; where it is not among them (mixed traffic) the mean over all of them counts.

    Returns:
        k and its predicted speedup.
    """
    own = [score for score in scores if score.domain == domain] or list(scores)
    mean = {k: statistics.fmean(score.speedup[k] for score in own) for k in own[0].speedup}
    return max(mean.items(), key=lambda item: (item[1], -item[0]))


def table(scores: Sequence[Score]) -> str:
    """The scores as lines of text; "/whole" is the same figure with every row of the draft's head."""
    ks = list(scores[0].cycles)
    head = f"{'domain':<10}{'answers':>8}{'tok':>7}{'alpha':>8}{'/whole':>8}{'overlap':>9}{'/whole':>8}"
    lines = [head + "".join(f"{f'tau({k})':>8}" for k in ks) + f"{'speedup':>11}"]
    for score in scores:
        taus = "".join(f"{'n/a' if (tau := score.cycles[k].tau) is None else f'{tau:.2f}':>8}" for k in ks)
        k, speedup = score.best
        lines.append(
            f"{score.domain:<10}{score.num_answers:>8}{score.num_tok:>7}{score.alpha:>8.3f}{score.alpha_whole:>8.3f}"
            f"{score.overlap:>9.3f}{score.overlap_whole:>8.3f}{taus}{f'{speedup:.2f}x k={k}':>11}"
        )
    return "\n".join(lines)


def flat(scores: Sequence[Score]) -> dict[str, float]:
    """The scores under names for the log: `val/<domain>/<figure>`."""
    out: dict[str, float] = {}
    for score in scores:
        figures = {
            "num_tok": float(score.num_tok),
            "alpha": score.alpha,
            "alpha_whole": score.alpha_whole,
            "overlap": score.overlap,
            "overlap_whole": score.overlap_whole,
            "speedup": score.best[1],
            "best_k": float(score.best[0]),
        }
        figures |= {f"tau_{k}": tau for k, counted in score.cycles.items() if (tau := counted.tau) is not None}
        out |= {f"val/{score.domain}/{name}": value for name, value in figures.items()}
    return out


def _batches(lengths: Sequence[int], batch_tok: int) -> list[list[int]]:
    """Every row once, alike lengths together, in a fixed order."""
    batches: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[row] > batch_tok:
            batches.append([])
        batches[-1].append(row)
    return batches
