"""k by domain and load: from a report's cells to entries, to a file, and to a policy that the bench runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.recipe import RecipeError, load_recipe
from engine.model import Runner
from engine.policy import Schedule
from eval.arms import Arm, grid
from eval.cells import Settings, build_cells
from eval.decoders import EvalRequest, Load, RequestSet
from eval.measure import Bench
from eval.schedule import read_schedule, schedules, table_of
from tests.engine.test_speculate import DRAFTS, TARGET, plain_greedy
from tests.eval.grid import make_grid


def cell(domain: str, group: str, batch: int, k: int, value: float, end: int = 100, **change: Any) -> dict[str, Any]:
    speed = {"objective": value, "objective_low": value - 0.1, "objective_high": value + 0.1}
    return {
        "draft": "d", "domain": domain, "group": group, "batch": batch, "k": k, "chain": True, "status": "ok",
        "draft_temperature": None, "simulated": [], "context_tok": {"max": end - 20}, "new_tok": {"max": 20},
        "latency_speedup": speed, "throughput_speedup": value - 0.2, "throughput_ci": None, "num_requests": 9, **change,
    }  # fmt: skip


CELLS = [
    cell("code", "short", 1, 2, 1.50), cell("code", "short", 1, 4, 1.505), cell("code", "long", 1, 2, 1.2, 1000),
    cell("code", "short", 4, 2, 0.95), cell("qa", "short", 1, 2, 0.9), cell("qa", "short", 1, 4, 0.8),
    cell("all", "short", 1, 2, 1.1), cell("all", "all", 1, 4, 9.0), cell("code", "short", 1, 3, 9.0, chain=False),
    cell("code", "short", 1, 3, 9.0, draft="lookup"), cell("code", "short", 1, 3, 9.0, status="insufficient"),
]  # fmt: skip


def test_entries_by_hand() -> None:
    entries = schedules(CELLS, Settings())["d"]
    assert set(schedules(CELLS, Settings())) == {"d"}
    kept = [(e["domain"], e["group"], e["context_tok"], e["batch"], e["k"]) for e in entries]
    assert kept == [
        ("code", "short", 100, 1, 2),  # 4 is ahead by less than the tie: the smaller
        ("code", "long", 2000, 1, 2),  # the longest context holds for as much again
        ("code", "short", 200, 4, 0),  # no k is faster than none
        ("qa", "short", 200, 1, 0),
        ("", "short", 200, 1, 2),
    ]
    assert entries[0]["value"] == 1.5 and entries[0]["num_requests"] == 9


def test_a_throughput_objective_goes_by_throughput() -> None:
    cells = [cell("code", "short", 4, 2, 1.3), cell("code", "short", 4, 4, 1.1)]
    (one, any_domain) = schedules(cells, Settings("throughput@4"))["d"]
    assert one["k"] == 2 and one["value"] == pytest.approx(1.1) and any_domain == one | {"domain": ""}


def test_the_policy_takes_each_loads_k() -> None:
    policy = Schedule(table_of(schedules(CELLS, Settings())["d"]), {"c": "code", "q": "qa"})
    assert policy.choose(["c"], 80) == 2 and policy.choose(["c"], 900) == 2 and policy.choose(["c"], 2001) == 0
    assert policy.choose(["q"], 80) == 0 and policy.choose(["other"], 80) == 2 and policy.choose(["c", "c"], 80) == 0


def test_a_report_is_read_back_and_shared_requests_are_counted(tmp_path: Path) -> None:
    cells = build_cells(make_grid(num=5, batches=(1,), ks=(1, 2)), None, Settings(bootstrap=50))
    found = schedules(cells, Settings())
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schedule": found, "cells": cells}))
    read = read_schedule(path, ["small"], 4)
    assert read.entries == found and read.tables["small"] == table_of(found["small"])
    assert read.about(["code-short-0", "new"])["shared_requests"] == 1
    path.write_text(json.dumps({"schedule": found["small"]}))  # as draft.json of a release has it
    assert read_schedule(path, ["any name"], 4).entries == {"any name": found["small"]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "no JSON"),
        ('{"cells": []}', "holds no schedule"),
        ('{"schedule": {"other": [{}]}}', r"schedules of \['other'\], none of d"),
        ('{"schedule": [{"domain": ""}]}', "an entry has domain"),
        ('{"schedule": [{"domain": "", "context_tok": 9, "batch": 1, "k": 6}]}', "takes k = 6"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        read_schedule(tmp_path / "x.json", ["d"], 4)


def test_the_recipe_asks_for_policy_and_table_together() -> None:
    asked = ["eval.policies=[fixed, schedule]", "eval.schedule=report.json"]
    stage = load_recipe("recipes/tiny.yaml", asked).eval
    assert [arm.name for arm in grid(stage, ["d"])][1:3] == ["draft:d@k2", "draft:d@schedule2"]
    for one in asked:
        with pytest.raises(RecipeError, match="needs a table"):
            load_recipe("recipes/tiny.yaml", [one])


def test_the_bench_runs_it_by_domain_and_says_the_same_text() -> None:
    tables = {"small": {("code", 1000, 4): 3, ("qa", 1000, 4): 0}}
    bench = Bench(Runner(TARGET, 3, 120), {"small": Runner(DRAFTS["noise"], 3, 120)}, Load(12, ()), tables=tables)
    requests = [
        EvalRequest(f"{d}{i}", d, "short", tuple(range(3 + i, 12 + i))) for i in range(4) for d in ("code", "qa")
    ]
    arms = [Arm("", 0), Arm("small", 4, "schedule")]
    rows = list(bench.measure(requests, arms, 0))
    mine = [r for r in rows if r.policy == "schedule"]
    assert {r.domain: max(c.proposed for c in r.cycles) for r in mine} == {"code": 3, "qa": 0}
    sets = [RequestSet(i, tuple(r for r in requests if r.domain == d)) for i, d in enumerate(("code", "qa"))]
    batched = list(bench.measure_sets(sets, arms, 3, 0))
    assert {r.domain: max(c.proposed for c in r.cycles) for r in batched if r.k} == {"code": 3, "qa": 0}
    for request in requests:
        shas = {r.tokens_sha for r in [*rows, *batched] if r.request_id == request.id}
        assert len(shas) == 1 and len(plain_greedy(list(request.ids), 12, set())) == 12
    with pytest.raises(ValueError, match="no schedule was given"):
        Bench(bench.target, bench.drafts, bench.load).decoder(arms[1])
