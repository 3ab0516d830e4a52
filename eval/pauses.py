"""Whether an evaluation stood still: the machine slept, or the process was stopped. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

# How often the watch looks, and how long beyond that it must not have got to run.
EVERY_S, LEAST_S = 5.0, 60.0
# A clock that goes on while the machine sleeps; elsewhere than on Linux the monotonic one does.
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clocks_s() -> tuple[float, float]:
    """Seconds on a clock that does not stop with the machine, and on the one that passes are timed by, which does."""
    return time.clock_gettime(CLOCK), time.perf_counter()


class Watch:
    """A thread that looks at the clocks every few seconds: where it did not for long, nothing else ran either.

    Args:
        before: seconds of each stop before the evaluation went on.
        before_slept: seconds of each sleep before that.
        now: seconds on both clocks; tests give their own.
        every_s: between two looks.
        least_s: a shorter pause is none.

    Attributes:
        paused_s: seconds of each stop of the process, which the clock of the passes counted.
        slept_s: seconds of each sleep of the machine, which it did not count.
    """

    def __init__(
        self,
        before: Sequence[float] = (),
        before_slept: Sequence[float] = (),
        now: Callable[[], tuple[float, float]] = clocks_s,
        every_s: float = EVERY_S,
        least_s: float = LEAST_S,
    ) -> None:
        self.paused_s, self.slept_s = list(before), list(before_slept)
        self._now, self._every_s, self._least_s = now, every_s, least_s
        self._last, self._end = now(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pauses", daemon=True)

    def look(self) -> None:
        """Notes a stop or a sleep if the last look is too long ago."""
        now = self._now()
        whole, counted = (new - old for new, old in zip(now, self._last))
        for kept, pause in ((self.paused_s, counted - self._every_s), (self.slept_s, whole - counted)):
            if pause > self._least_s:
                kept.append(pause)
        self._last = now

    def __enter__(self) -> Self:
        self._last = self._now()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self.look()

    def _watch(self) -> None:
        while not self._end.wait(self._every_s):
            self.look()

    def to_json(self) -> dict[str, Any]:
        """How many stops and sleeps, and their minutes."""
        stopped, slept = ({"num": len(each), "min": sum(each) / 60} for each in (self.paused_s, self.slept_s))
        return stopped | {"slept": slept}


def notice(paused: Mapping[str, Any] | None) -> list[str]:
    """What a report must say of pauses; nothing where there was none, or where nobody watched."""
    said = []
    if paused and paused["num"]:
        said.append(
            f"The process was stopped {_times(paused)} (by a signal, or its virtual machine was): what was being "
            "measured then counts as slow. Measure again before relying on p95 or close calls."
        )
    slept = (paused or {}).get("slept")  # absent from older evaluations
    if slept and slept["num"]:
        said.append(
            f"The machine slept {_times(slept)}: the clock of the passes stood still with it, so none counts as slow "
            "for that."
        )
    return said


def _times(paused: Mapping[str, Any]) -> str:
    return f"{paused['num']} time{'s' * (paused['num'] != 1)}, {paused['min']:.0f} minutes in all"
