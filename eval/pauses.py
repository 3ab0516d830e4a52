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


def awake_or_not_s() -> float:
    """Seconds on a clock that does not stop with the machine."""
    return time.clock_gettime(CLOCK)


class Watch:
    """A thread that looks at the clock every few seconds: where it did not for long, nothing else ran either.

    Args:
        before: seconds of each pause before a stop.
        now: seconds; tests give their own.
        every_s: between two looks.
        least_s: a shorter pause is none.

    Attributes:
        paused_s: seconds of each pause.
    """

    def __init__(
        self,
        before: Sequence[float] = (),
        now: Callable[[], float] = awake_or_not_s,
        every_s: float = EVERY_S,
        least_s: float = LEAST_S,
    ) -> None:
        self.paused_s = list(before)
        self._now, self._every_s, self._least_s = now, every_s, least_s
        self._last, self._end = now(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pauses", daemon=True)

    def look(self) -> None:
        """Notes a pause if the last look is too long ago."""
        now = self._now()
        pause = now - self._last - self._every_s
        if pause > self._least_s:
            self.paused_s.append(pause)
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
        """How many pauses, and their minutes."""
        return {"num": len(self.paused_s), "min": sum(self.paused_s) / 60}


def notice(paused: Mapping[str, Any] | None) -> list[str]:
    """What a report must say of pauses; nothing where there was none, or where nobody watched."""
    if not paused or not paused["num"]:
        return []
    times = f"{paused['num']} time{'s' * (paused['num'] != 1)}"
    return [
        f"The evaluation stood still {times}, {paused['min']:.0f} minutes in all (the machine slept, or the process "
        "was stopped): what was being measured then counts as slow. Measure again before relying on p95 or close calls."
    ]
