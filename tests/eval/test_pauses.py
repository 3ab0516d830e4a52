"""An evaluation that stood still knows it; one that only took long says nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eval.pauses import Watch, notice

ROOT = Path(__file__).parents[2]
STOPPED = """
import sys, time
from eval.pauses import Watch
with Watch(every_s=0.05, least_s=1.0) as watch:
    print("ready", flush=True)
    sys.stdin.readline()
print(watch.to_json()["num"], sum(watch.paused_s), len(watch.slept_s))
"""


def test_a_late_look_is_a_stop_or_a_sleep() -> None:
    """The clock of the passes goes on while a process is stopped, and stands still while the machine sleeps."""
    now = [1000.0, 40.0]
    watch = Watch([90.0], [70.0], now=lambda: (now[0], now[1]))
    for whole, counted in ((5, 5), (5.25, 5.25), (64, 64), (605, 605), (5, 5), (305, 5), (500, 105)):
        now[0] += whole
        now[1] += counted
        watch.look()
    assert watch.paused_s == [90.0, 600.0, 100.0] and watch.slept_s == [70.0, 300.0, 395.0]
    assert watch.to_json() == {"num": 3, "min": 790 / 60, "slept": {"num": 3, "min": 765 / 60}}


def test_a_pause_that_nobody_looked_at_is_found_at_the_end() -> None:
    now = [0.0]
    with Watch(now=lambda: (now[0], now[0]), every_s=5.0) as watch:
        now[0] = 125.0
    assert watch.paused_s == [120.0] and not watch.slept_s


def test_only_pauses_are_told_each_with_what_it_means() -> None:
    none = {"num": 0, "min": 0.0}
    assert notice(None) == notice(none) == notice(none | {"slept": none}) == []
    (stopped,) = notice({"num": 1, "min": 2.0})
    assert "stopped 1 time, 2 minutes in all" in stopped and "counts as slow" in stopped
    (slept,) = notice(none | {"slept": {"num": 2, "min": 480.0}})
    assert "slept 2 times, 480 minutes in all" in slept and "none counts as slow" in slept


def test_a_stopped_process_knows_it() -> None:
    command = [sys.executable, "-c", STOPPED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate("go on\n", timeout=60)
    num, paused_s, slept = said.split()
    assert int(num) >= 1 and float(paused_s) >= 2.0 and slept == "0"
