"""The comparison with transformers refuses what cannot be compared, before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.peer_check import main


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["generate", "--batch", "0"], "--batch 0: at least 1"),
        (["generate", "--rounds", "0"], "--rounds 0: at least 1"),
        (["generate", "--num", "-1"], "--num -1: at least 1"),
        (["baseline", "--max-new", "1"], "--max-new 1: at least 2"),
        (["baseline", "--max-prompt", "0"], "--max-prompt 0: at least 1"),
        (["greedy", "--draft", "x", "--k", "3", "0"], "--k 0: allowed are 1 to 16"),
        (["greedy", "--draft", "x", "--k", "17"], "--k 17"),
        (["greedy"], "greedy needs --draft"),
    ],
)
def test_odd_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_draft_or_target_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["greedy", "--draft", str(tmp_path)], ["baseline", "--target", str(tmp_path)]):
        assert main(arguments) == 2
        assert "no config.json" in capsys.readouterr().err
