"""What a draft loses by keeping a window of its past only, and what that saves: agreement and step time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from engine.bench import times_ms
from engine.divergence import forced_logits
from engine.model import Runner


def agreement(draft: Runner, prompt: Sequence[int], answer: Sequence[int]) -> list[bool]:
    """Whether the draft's most likely token is the answer's, at each place, the answer being forced.

    On the target's greedy answer its mean is the teacher-forced acceptance.

    Args:
        draft: its first row is overwritten.
        prompt, answer: token ids, at least one each.
    """
    best = draft.token(forced_logits(draft, prompt, answer, 1).argmax(-1))
    return (best.cpu() == torch.tensor(answer)).tolist()


@torch.inference_mode()
def step_times_ms(
    runners: Mapping[str, Runner], contexts: Sequence[int], rounds: int = 60
) -> dict[str, dict[int, float]]:
    """Median milliseconds of one greedy step (head and argmax included) of each runner at each context.

    All pairs are measured in turns, so that what else the machine does meets them alike.

    Args:
        runners: by name; their first row's keys are whatever they are.
        contexts: tokens of the row when the step starts.
        rounds: steps measured for each pair, after three that warm up.

    Returns:
        {name: {context: ms}}.
    """

    def step(run: Runner, context: int) -> None:
        ids, start = (torch.full(shape, value, device=run.device) for shape, value in (((1, 1), 1), ((1,), context)))
        run.logits(run.step(ids, start, run.extent(context + 1, context + 1))).argmax(-1)

    spans: dict[tuple[str, int], list[float]] = {(name, c): [] for name in runners for c in contexts}
    for number in range(rounds + 3):
        for name, context in spans:
            run = runners[name]
            took = times_ms(partial(step, run, context), run.device, 1, 0)
            if number >= 3:
                spans[name, context] += took
    return {name: {c: statistics.median(spans[name, c]) for c in contexts} for name in runners}
