"""Who leaves a race, who never does, and when."""

from __future__ import annotations

import math
import random

from eval.measure import Bench
from eval.race import ERRORS, Race, errors_of
from tests.eval.rows import make_row, plain
from tests.eval.test_measure import ARMS, REQUESTS, big_bench


def run(paces: dict[str, dict[str, float]], num: int, noise: float = 0.05) -> Race:
    """A race over `num` requests a domain; paces are ms a cycle by domain and arm, the baseline at 20."""
    rng, race = random.Random(0), Race(num * len(paces))
    arms = {arm: True for by_arm in paces.values() for arm in by_arm}
    for i in range(num):
        for domain, by_arm in paces.items():
            name, hard = f"{domain}{i}", rng.uniform(0.5, 2.0)
            race.add(plain(8, request_id=name, domain=domain, wall_ms=140.0 * hard, prefill_ms=0.0))
            for arm, ms in by_arm.items():
                if race.keeps(arm):
                    wall = 7 * ms * hard * rng.uniform(1 - noise, 1 + noise)
                    kept = {"k": 3, "arm": arm, "wall_ms": wall, "prefill_ms": 0.0}
                    race.add(make_row([(3, 3, 4), (3, 2, 3)], request_id=name, domain=domain, **kept))
                else:
                    arms[arm] = False
    assert all(gone == (arm not in race.dropped) for arm, gone in arms.items())
    return race


def test_the_clearly_slower_leave_early() -> None:
    race = run({"code": {"a": 10.0, "b": 15.0, "c": 10.1}}, 30)
    assert race.looks == [5, 10] and set(race.dropped) == {"b"}
    assert 0.4 < race.dropped["b"] < 0.6
    assert race.to_json()["after_requests"] == [5, 10]


def test_the_second_look_sees_what_the_first_could_not_and_forgets_those_who_are_gone() -> None:
    """In the first requests `gone` is slow and `late` seems level; then `late` falls behind."""
    race = Race(60)
    for i in range(20):
        name = f"r{i}"
        race.add(plain(8, request_id=name, wall_ms=140.0, prefill_ms=0.0))
        for arm, ms in {"best": 10.0 + i % 3, "late": 10.0 + i % 3 + (i > 7), "gone": 20.0 + i % 2}.items():
            if race.keeps(arm):
                kept = {"k": 3, "arm": arm, "wall_ms": 7 * ms, "prefill_ms": 0.0}
                race.add(make_row([(3, 3, 4), (3, 2, 3)], request_id=name, **kept))
        assert set(race.dropped) == (set() if i < 9 else {"gone"} if i < 19 else {"gone", "late"})


def test_the_best_of_one_domain_stays() -> None:
    race = run({"code": {"a": 10.0, "b": 15.0}, "qa": {"a": 30.0, "b": 18.0}}, 30)
    assert not race.dropped
    assert set(run({"code": {"a": 10.0, "b": 15.0}, "qa": {"a": 18.0, "b": 30.0}}, 30).dropped) == {"b"}


def test_the_baseline_and_the_best_arm_of_a_draft_never_leave() -> None:
    assert set(run({"code": {"a": 30.0, "b": 40.0}}, 30).dropped) == {"b"}
    race = Race(30)
    assert race.keeps("baseline")


def test_noise_and_few_requests_decide_nothing() -> None:
    assert not run({"code": {"a": 10.0, "b": 10.5}}, 30, noise=0.4).dropped
    assert not run({"code": {"a": 10.0, "b": 15.0}}, 9).dropped


def test_few_requests_must_lie_further_apart() -> None:
    """Five pairs that are 3 errors apart: of normal noise that is 0.1%, of five values it is 2%."""
    assert errors_of(5) > 4 and errors_of(1000) < 1.01 * ERRORS
    assert [errors_of(num) for num in range(5, 60)] == sorted((errors_of(num) for num in range(5, 60)), reverse=True)
    race = Race(30)
    for i, noise in enumerate((-0.22, -0.11, 0.0, 0.11, 0.22)):  # sd 0.174, error 0.078
        race.add(plain(8, request_id=f"r{i}", wall_ms=400.0, prefill_ms=0.0))
        for arm, log_lag in {"a": 0.0, "b": 0.24 + noise, "c": 0.48 + noise}.items():
            ms = 100.0 * math.exp(log_lag)
            row = {"request_id": f"r{i}", "k": 3, "arm": arm, "wall_ms": ms, "prefill_ms": 0.0}
            race.add(make_row([(3, 3, 4), (3, 2, 3)], **row))
    race.keeps("a")
    assert race.looked == 1 and set(race.dropped) == {"c"}  # 3.1 errors, and 6.2


def test_rows_that_do_not_count() -> None:
    race = Race(3)
    race.add(plain(8, warmup=True))
    race.add(plain(8, error="died", new_tok=0))
    race.add(plain(8, repeat=1))
    assert race.keeps("a") and not race.looked


def test_the_bench_leaves_out_what_is_not_kept() -> None:
    bench: Bench = big_bench()
    rows = list(bench.measure(REQUESTS, ARMS, 1, 1, None, lambda arm: arm.k != 2 or arm.draft != "small"))
    assert {r.arm for r in rows if r.warmup} == {"baseline", "draft:small@k2", "lookup@k2"}
    assert {r.arm for r in rows if not r.warmup} == {"baseline", "lookup@k2"}
