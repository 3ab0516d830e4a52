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
print(watch.to_json()["num"], sum(watch.paused_s))
"""


def test_a_late_look_is_a_pause() -> None:
    now = [1000.0]
    watch = Watch([90.0], now=lambda: now[0])
    for step in (5.0, 5.2, 64.0, 605.0, 5.0):
        now[0] += step
        watch.look()
    assert watch.paused_s == [90.0, 600.0]
    assert watch.to_json() == {"num": 2, "min": 11.5}


def test_a_pause_that_nobody_looked_at_is_found_at_the_end() -> None:
    now = [0.0]
    with Watch(now=lambda: now[0], every_s=5.0) as watch:
        now[0] = 125.0
    assert watch.paused_s == [120.0]


def test_only_pauses_are_told() -> None:
    assert notice(None) == notice({"num": 0, "min": 0.0}) == []
    assert "1 time, 2 minutes" in notice({"num": 1, "min": 2.0})[0]


def test_a_stopped_process_knows_it() -> None:
    command = [sys.executable, "-c", STOPPED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate("go on\n", timeout=60)
    num, paused_s = said.split()
    assert int(num) >= 1 and float(paused_s) >= 2.0
