"""Power cuts and full disks while an evaluation or a release is written: nothing lost, nothing doubled.

A fixed seed says where; SPECDRAFT_KILLS is the number of kills of each (2; 20 takes minutes).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from distill.checkpoint import write_draft
from distill.models import model_hash
from eval.resume import PROGRESS, REPORT, ROWS, RUN
from eval.rowfile import read_rows
from eval.run import main as evaluate
from scripts.release import main as release
from tests.conftest import make_noisy, make_target, make_tokenizer
from tests.distill.test_train import write_world
from tests.scripts.test_release import made  # noqa: F401 - a run that can be released

KILLS = int(os.environ.get("SPECDRAFT_KILLS", "2"))
SEED = 20240701
CHANGES = ["eval.num_requests=4", "eval.batches=[1, 2]", "eval.batch_sets=2", "eval.policies=[fixed, adaptive]"]
CHANGES += ["eval.k=[2]", "eval.domains=[code]", "eval.max_new_tok=10", "eval.lookup=false", "eval.bootstrap=100"]
CHANGES += ["eval.phased_every=2"]
# Children are made by a process that has imported all, and computed nothing.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["eval.run", "eval.rounds", "scripts.release", "distill.release", "distill.gguf_file"])


def _child(work: Callable[[list[str]], int], arguments: list[str], said: str) -> None:
    with open(said, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)
        sys.exit(work(arguments))


def start(work: Callable[[list[str]], int], arguments: list[str], said: Path) -> BaseProcess:
    child = CONTEXT.Process(target=_child, args=(work, arguments, str(said)))
    child.start()
    return child


def finish(work: Callable[[list[str]], int], arguments: list[str], said: Path) -> tuple[int | None, str]:
    child = start(work, arguments, said)
    child.join()
    text = said.read_text()
    assert "Traceback" not in text, text
    return child.exitcode, text


def kill_when(child: BaseProcess, due: Callable[[], bool], after_s: float) -> bool:
    """SIGKILL once something is so, and a moment later; false when the process was faster."""
    while not due():
        if not child.is_alive():
            return False
        time.sleep(0.001)
    time.sleep(after_s)
    alive = child.is_alive()
    child.kill()
    child.join()
    return alive


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs of that size; what is given makes it larger."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk here")

    def grow(to: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={to}", str(folder)], check=True)

    try:
        yield grow
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# -- evaluation --


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation that was killed before its first row: its costs are measured, and the same for all that follow."""
    world = write_world(tmp_path_factory.mktemp("world"))
    target = make_target()
    meta = {"target": {"sha256": model_hash(world / "target")}, "traffic": {}, "temperature": None}
    draft = world / "runs" / "tiny" / "1" / "draft"
    write_draft(draft, make_noisy(target), make_tokenizer(), meta, dtype="float32", eos_ids=(1, 4))
    out, said = world / "first", world / "said.txt"
    child = start(evaluate, [str(world / "recipe.yaml"), "--draft", str(draft), "--out", str(out), *CHANGES], said)
    assert kill_when(child, (out / PROGRESS).exists, 0.0), said.read_text()
    (out / ROWS).unlink(missing_ok=True)
    (out / PROGRESS).write_text(json.dumps({"rows": 0, "used_s": 0.0, "policies": {}}))
    return out


def what_was_measured(folder: Path) -> list[tuple[Any, ...]]:
    """All of the rows that does not depend on the clock, warm-up left out."""
    rows = read_rows(folder / ROWS)
    orders = [row.order for row in rows]
    assert orders == sorted(set(orders)), "rows were doubled"
    starts = [row.start_s for row in rows if row.batch == 1]
    assert starts == sorted(starts), "times go backwards"
    return [  # an adaptive arm's k also depends on what cycles took
        (r.batch, r.set, r.request_id, r.arm, r.clock, r.repeat, r.tokens_sha, r.finish, r.error)
        + (() if r.policy == "adaptive" else (r.cycles,))
        for r in rows
        if not r.warmup
    ]


@pytest.fixture(scope="module")
def whole(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same evaluation without a kill."""
    folder = tmp_path_factory.mktemp("whole") / "eval"
    shutil.copytree(stopped, folder)
    code, said = finish(evaluate, ["--resume", str(folder)], folder.parent / "said.txt")
    assert code == 0, said
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_evaluation_that_is_killed_goes_on(stopped: Path, whole: Path, tmp_path: Path) -> None:
    """T44, T46, T55: killed again and again, it has the rows of one that ran through."""
    rng, said, kills = random.Random(SEED), tmp_path / "said.txt", 0
    total, wanted = len(read_rows(whole / ROWS)), what_was_measured(whole)
    assert {row[0] for row in wanted} == {1, 2} and len({row[3] for row in wanted}) == 3
    for attempt in range(10 * KILLS):
        folder = tmp_path / f"eval {attempt}"
        shutil.copytree(stopped, folder)
        for _ in range(rng.choice((1, 2, 3))):
            lines, child = rng.randrange(total), start(evaluate, ["--resume", str(folder)], said)
            have = (folder / ROWS).read_bytes().count(b"\n") if (folder / ROWS).exists() else 0

            def due(path: Path = folder / ROWS, num: int = min(total, have + lines)) -> bool:
                return path.exists() and path.read_bytes().count(b"\n") >= num

            kills += kill_when(child, due, rng.choice((0.0, 0.001, 0.01)))
            assert not (folder / REPORT).exists() or json.loads((folder / REPORT).read_text())["format"]
        code, text = finish(evaluate, ["--resume", str(folder)], said)
        assert code == 0 and (folder / REPORT).exists(), text
        assert what_was_measured(folder) == wanted
        assert len(json.loads((folder / REPORT).read_text())["cells"]) == len(
            json.loads((whole / REPORT).read_text())["cells"]
        )
        if kills >= KILLS:
            break
    assert kills >= KILLS
    print(f"\nevaluation: {kills} kills")  # noqa: T201


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_evaluation_on_a_full_disk_goes_on(stopped: Path, whole: Path, tmp_path: Path) -> None:
    """T44: one message and how to go on; the rows of whole requests are kept."""
    rng, said = random.Random(SEED + 1), tmp_path / "said.txt"
    begun, end = (stopped / RUN).stat().st_size // 4096 + 3, sum(f.stat().st_size for f in whole.rglob("*")) // 4096
    for number in range(max(1, KILLS // 2)):
        with small_disk(tmp_path / "disk", f"{4 * rng.randrange(begun, end)}k") as grow:
            folder = tmp_path / "disk" / "eval"
            shutil.copytree(stopped, folder)
            code, text = finish(evaluate, ["--resume", str(folder)], said)
            assert "No space left on device" in " ".join(text.split()), (number, code, text)
            if (folder / REPORT).exists():  # there was room for all but its copy in W&B
                assert code == 0 and "no copy in W&B" in " ".join(text.split()), text
            else:
                assert code == 2 and f"--resume {folder}" in " ".join(text.split()), text
            grow("64m")
            code, text = finish(evaluate, ["--resume", str(folder)], said)
            assert code == 0 and what_was_measured(folder) == what_was_measured(whole), text
    print(f"\nevaluation: {max(1, KILLS // 2)} full disks")  # noqa: T201


def evaluate_and_fill(arguments: list[str]) -> int:
    """Evaluates; the disk is full from the moment that W&B gets its first file."""

    def hook(event: str, values: tuple[object, ...]) -> None:
        filler = Path(arguments[1]).parent / "filler"
        if event == "open" and "wandb-media" in str(values[0]) and not filler.exists():
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(b"\0" * 4096):
                    pass

    sys.addaudithook(hook)
    return evaluate(arguments)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_disk_that_is_full_behind_the_report_costs_its_copy_alone(whole: Path, tmp_path: Path) -> None:
    """The report is there: no failure, and nothing to go on with."""
    with small_disk(tmp_path / "disk", "4m"):
        folder = tmp_path / "disk" / "eval"
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("report.*", "figures", "wandb"))
        code, text = finish(evaluate_and_fill, ["--resume", str(folder)], tmp_path / "said.txt")
        text = " ".join(text.split())
        assert code == 0 and "no copy in W&B" in text and "No space left" in text and "rows measured so far" not in text
        assert json.loads((folder / REPORT).read_text())["cells"]
        assert (folder.parent / "filler").exists()


# -- release --


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_release_that_is_killed_is_absent_and_can_be_made(made: Path, tmp_path: Path) -> None:  # noqa: F811
    """T44, T46: whole or absent, whenever the machine stops; what was left is cleared by the next one."""
    rng, said, kills = random.Random(SEED + 2), tmp_path / "said.txt", 0
    began = time.perf_counter()
    assert finish(release, [str(made), "--to", str(tmp_path / "first" / "out")], said)[0] == 0
    takes_s, wanted = time.perf_counter() - began, contents(tmp_path / "first" / "out")
    out = tmp_path / "out"
    for _ in range(20 * KILLS):
        child, at_s = start(release, [str(made), "--to", str(out)], said), time.perf_counter() + rng.random() * takes_s
        kills += kill_when(child, lambda at_s=at_s: time.perf_counter() >= at_s, 0.0)  # type: ignore[misc]
        if out.exists():
            assert contents(out) == wanted
            shutil.rmtree(out)
        if kills >= KILLS:
            break
    assert kills >= KILLS
    assert finish(release, [str(made), "--to", str(out)], said)[0] == 0
    assert contents(out) == wanted
    assert not list(tmp_path.glob(".out-*")), "what a killed one left is still there"
    print(f"\nrelease: {kills} kills")  # noqa: T201


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_release_on_a_full_disk_is_absent(made: Path, tmp_path: Path) -> None:  # noqa: F811
    rng, said = random.Random(SEED + 3), tmp_path / "said.txt"
    assert finish(release, [str(made), "--to", str(tmp_path / "whole")], said)[0] == 0
    end = sum(f.stat().st_size for f in (tmp_path / "whole").rglob("*") if f.is_file()) // 4096
    for number in range(max(1, KILLS // 2)):
        with small_disk(tmp_path / "disk", f"{4 * rng.randrange(2, end - 4)}k") as grow:
            out = tmp_path / "disk" / "out"
            code, text = finish(release, [str(made), "--to", str(out)], said)
            assert code == 2 and "not released: " in text and "No space left" in text, (number, code, text)
            assert list((tmp_path / "disk").iterdir()) == [], "a failed release left something"
            grow("64m")
            assert finish(release, [str(made), "--to", str(out)], said)[0] == 0
            assert contents(out).keys() == contents(tmp_path / "whole").keys()
    print(f"\nrelease: {max(1, KILLS // 2)} full disks")  # noqa: T201
