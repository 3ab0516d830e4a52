"""The planted faults: each must fit the code as it is, or nothing is planted."""

from __future__ import annotations

from dataclasses import replace

from scripts.mutants import MUTANTS, ROOT, stale


def test_every_fault_fits_the_code() -> None:
    assert [f"{mutant.file}: {mutant.name}" for mutant in stale(MUTANTS)] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert all((ROOT / test.split("::")[0]).is_file() for test in mutant.tests), mutant.name


def test_a_fault_that_no_longer_fits_is_named() -> None:
    gone, idle = replace(MUTANTS[0], old="no such text"), replace(MUTANTS[0], new=MUTANTS[0].old)
    assert stale([MUTANTS[0], gone, idle]) == [gone, idle]
