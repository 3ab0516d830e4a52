"""Phase timers. One protocol, four clocks: CUDA events, perf_counter, a scripted one for tests, and none at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Clock(Protocol):
    """Adds up milliseconds by phase."""

    def phase(self, name: str):  # type: ignore[no-untyped-def]  # a context manager
        """Everything inside counts for `name`."""
        ...

    def now_ms(self) -> float:
        """Wall clock in milliseconds, all work on the device done."""
        ...

    def totals_ms(self) -> dict[str, float]:
        """Milliseconds by phase since the last call; empty for a bare clock."""
        ...


class BareClock:
    """No phases: only the wall clock, so that nothing disturbs a total."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sync = torch.device(device).type == "cuda"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def now_ms(self) -> float:
        if self._sync:
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    def totals_ms(self) -> dict[str, float]:
        return {}


class WallClock:
    """perf_counter around each phase: right where the host itself does the work (a CPU).

    Args:
        tick: seconds; a scripted source makes the clock testable (a planted delay must land in its phase).
    """

    def __init__(self, tick: Callable[[], float] = time.perf_counter) -> None:
        self._tick = tick
        self._sum: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._tick()
        yield
        self._sum[name] = self._sum.get(name, 0.0) + (self._tick() - start) * 1e3

    def now_ms(self) -> float:
        return self._tick() * 1e3

    def totals_ms(self) -> dict[str, float]:
        totals, self._sum = self._sum, {}
        return totals


class EventClock:
    """CUDA events around each phase: what the device was busy with, not when the host enqueued it."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._spans.append((name, start, end))

    def now_ms(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    def totals_ms(self) -> dict[str, float]:
        torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for name, start, end in self._spans:
            totals[name] = totals.get(name, 0.0) + start.elapsed_time(end)
        self._spans.clear()
        return totals


def phased(device: torch.device | str) -> Clock:
    """The phase clock that is right for a device."""
    return EventClock() if torch.device(device).type == "cuda" else WallClock()
