"""What is kept of a stopped evaluation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.locks import try_lock
from engine.policy import Adaptive
from eval.arms import Arm
from eval.decoders import RequestSet
from eval.records import RequestRow
from eval.resume import PROGRESS, ROWS, RUN, Progress, ResumeError, check_same, find_stopped, keep_whole
from eval.rowfile import append_rows, read_rows
from eval.run import main
from tests.eval.rows import make_run
from tests.eval.test_measure import ALL_ARMS, COSTS, REQUESTS, big_bench

GOOD = {"recipe": {}, "settings": {}, "plan": {}, "provenance": {}, "drafts": {}, "requests_sha256": "0"}


def stop_at(folder: Path, num: int, more: bytes = b"") -> list[Any]:
    """A folder with rows of which `num` are whole."""
    rows = make_run(num=2, ks=(1,))
    append_rows(folder / ROWS, rows)
    with (folder / ROWS).open("ab") as file:
        file.write(more)
    (folder / RUN).write_text(json.dumps(GOOD))
    Progress(num).save(folder)
    return rows


def test_rows_behind_the_last_whole_request_are_cut_off(tmp_path: Path) -> None:
    rows = stop_at(tmp_path, 5, b'{"request_id": "ha')
    found = keep_whole(tmp_path, find_stopped(tmp_path))
    assert found.rows == rows[:5] == read_rows(tmp_path / ROWS) and not found.measured
    append_rows(tmp_path / ROWS, rows[5:7])
    assert read_rows(tmp_path / ROWS) == rows[:7]
    timed = [r for r in rows[:5] if not r.warmup]
    assert found.done(1) == {r.request_id for r in timed} and found.done(4) == set()


def test_a_stop_within_the_first_request_leaves_no_rows(tmp_path: Path) -> None:
    stop_at(tmp_path, 0)
    assert keep_whole(tmp_path, find_stopped(tmp_path)).rows == [] and not (tmp_path / ROWS).exists()
    (tmp_path / PROGRESS).unlink()
    assert keep_whole(tmp_path, find_stopped(tmp_path)).progress == Progress()


@pytest.mark.parametrize(
    "harm, said",
    [
        (lambda f: (f / RUN).unlink(), "no run.json: it stopped before its first request"),
        (lambda f: (f / RUN).write_text("{"), "run.json: not JSON"),
        (lambda f: (f / RUN).write_text("[1]"), "run.json: a list"),
        (lambda f: (f / RUN).write_text(json.dumps(GOOD | {"plan": 1})), "plan is not as it was written"),
        (lambda f: (f / RUN).write_text('{"recipe": {}}'), "without drafts, plan"),
        (lambda f: (f / PROGRESS).unlink(), "without progress.json"),
        (lambda f: (f / PROGRESS).write_text('{"rows": -1}'), "not as an evaluation writes it"),
        (lambda f: (f / PROGRESS).write_text('{"rows": 5, "paused_s": ["x"]}'), "not as an evaluation writes it"),
        (lambda f: (f / PROGRESS).write_text('{"rows": 5, "slept_s": 60}'), "not as an evaluation writes it"),
        (lambda f: (f / ROWS).write_text('{"format": 2}\n'), "0 whole rows, where 5 were written"),
        (lambda f: (f / ROWS).write_text(""), "0 whole rows, where 5 were written"),
        (lambda f: (f / ROWS).unlink(), "No such file"),
    ],
)
def test_what_can_not_be_gone_on_with_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Any, said: str
) -> None:
    """T44: whatever was damaged is named, nothing is cut off, and the exit code is 2."""
    stop_at(tmp_path, 5)
    harm(tmp_path)
    left = (tmp_path / ROWS).read_bytes() if (tmp_path / ROWS).exists() else None
    with pytest.raises((ValueError, OSError), match=said):
        keep_whole(tmp_path, find_stopped(tmp_path))
    assert (left is None) or (tmp_path / ROWS).read_bytes() == left
    assert main(["--resume", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_changed_world_is_refused(tmp_path: Path) -> None:
    before = {"target_sha256": "1", "drafts": [{"name": "a", "size": 1.5}], "num_threads": 2}
    check_same(tmp_path, before, {"drafts": [{"name": "a", "size": 1.5}], "num_threads": 2})
    with pytest.raises(ResumeError, match="num_threads was 2 and is 4 now"):
        check_same(tmp_path, before, {"num_threads": 4})


def test_what_an_older_version_did_not_tell_was_empty(tmp_path: Path) -> None:
    before = {"target_sha256": "1"}
    check_same(tmp_path, before, {"target_sha256": "1", "cut": {}, "not_asked": {}, "ids": [], "why": None})
    with pytest.raises(ResumeError, match=r"cut was \{\} and is \{\"code\": 1\} now"):
        check_same(tmp_path, before, {"cut": {"code": 1}})
    with pytest.raises(ResumeError, match=r"cut was null and is \{\} now"):
        check_same(tmp_path, {"cut": None}, {"cut": {}})


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["recipes/tiny.yaml", "--resume", str(tmp_path)])
    assert caught.value.code == 2 and "leave out RECIPE" in capsys.readouterr().err
    assert main(["--resume", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_folder_is_held_by_one_process(tmp_path: Path) -> None:
    assert try_lock(tmp_path) is not None and try_lock(tmp_path) is None


def fixed_cycles(row: RequestRow) -> list[tuple[int, int, int]]:
    """Cycles of an arm with a fixed k."""
    return [] if row.policy == "adaptive" else [(c.proposed, c.accepted, c.emitted) for c in row.cycles]


def test_requests_that_were_measured_keep_the_turns_of_the_others() -> None:
    """A bench that goes on measures what one without a stop would have: order of arms, clocks, what a policy knows.

    The adaptive arm's k also depends on what cycles took, so that its cycles are not the same twice; its text is.
    """
    whole, first, second = big_bench(), big_bench(), big_bench()

    def seen(rows: Any) -> list[Any]:
        return [
            (r.request_id, r.set, r.arm, r.clock, r.repeat, fixed_cycles(r), r.tokens_sha) for r in rows if not r.warmup
        ]

    wanted = seen(whole.measure(REQUESTS, ALL_ARMS, 1, 2))
    rows = []
    for row in first.measure(REQUESTS, ALL_ARMS, 1, 2):
        if row.request_id == "r2":
            break
        rows.append(row)
    learnt = json.loads(json.dumps(first.learnt()))
    assert set(learnt) == {"draft:small@adaptive4"}
    second.recall(ALL_ARMS, 1, learnt)
    assert json.loads(json.dumps(second.decoder(ALL_ARMS[3]).policy.state())) == learnt["draft:small@adaptive4"]  # type: ignore[union-attr]
    assert seen(rows) + seen(second.measure(REQUESTS, ALL_ARMS, 1, 2, done={"r0", "r1"})) == wanted


def test_sets_that_were_measured_keep_the_turns_of_the_others() -> None:
    sets = [RequestSet(number, tuple(REQUESTS)) for number in range(3)]
    arms = [arm for arm in ALL_ARMS if arm.tree is None]
    whole = [r for r in big_bench(3).measure_sets(sets, arms, 3, 0, 2) if r.set]
    first, second = big_bench(3), big_bench(3)
    next(r for r in first.measure_sets(sets, arms, 3, 0, 2) if r.set == 1)
    second.recall(arms, 3, first.learnt())
    again = list(second.measure_sets(sets, arms, 3, 0, 2, done={0}))
    assert [(r.set, r.arm, r.clock) for r in again] == [(r.set, r.arm, r.clock) for r in whole]

    def made(rows: list[RequestRow]) -> list[Any]:
        return sorted((r.set, r.arm, r.clock, r.request_id, r.tokens_sha, fixed_cycles(r)) for r in rows)

    assert made(again) == made(whole)


DAMAGED: list[dict[str, Any]] = [
    {},
    {"means": 1, "rests": [], "times": []},
    {"means": {"": [[1, 2]]}, "rests": [], "times": []},
    {"means": {"": [[3, 2]] * 4}, "rests": [], "times": []},
    {"means": {}, "rests": [], "times": 1},
    {"means": {}, "rests": [], "times": [[5, 1.0, 1.0]]},
    {"means": {}, "rests": [], "times": [[1, 1.0, 0.0]]},
    {"means": {}, "rests": [], "times": [[1, float("nan"), 1.0]]},
]


@pytest.mark.parametrize("state", DAMAGED)
def test_a_policy_takes_its_own_state_alone(state: dict[str, Any]) -> None:
    policy = Adaptive([c for c in COSTS if c.batch == 1], 4)
    with pytest.raises(ValueError, match="adaptive policy"):
        policy.restore(state)
    policy.observe("a", 3, 1)
    policy.took(0, 1, 100, 12.0)
    policy.forget("a")
    other = Adaptive(policy.costs, 4)
    other.restore(policy.state())
    assert other.expected_ms(2, 100) == policy.expected_ms(2, 100)
    assert other.acceptance("b") == policy.acceptance("b") and Arm("", 0).name == "baseline"
