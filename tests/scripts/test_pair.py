"""What the comparing scripts share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from scripts.pair import add_domains, check_ranges, parser_of, prompts_of, write_result


def test_prompts_are_the_first_short_ones_of_a_domain(tmp_path: Path, tok_a: PreTrainedTokenizerFast) -> None:
    rows = [{"id": f"r{i}", "domain": "code", "prompt": "word " * (1 + 200 * (i % 2)) + str(i)} for i in range(8)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = prompts_of(tok_a, [str(tmp_path / "p.jsonl")], "code", 3, 60)
    assert len(found) == 3 and all(name in ("r0", "r2", "r4", "r6") and len(ids) <= 60 for name, ids in found)
    again = prompts_of(tok_a, [str(tmp_path / "p.jsonl")], "code", 3, 60)
    assert again == found and len(prompts_of(tok_a, [str(tmp_path / "p.jsonl")], "code", 9, 60)) == 4
    with pytest.raises(ValueError, match="no held-out prompt of code has 3 tokens or less"):
        prompts_of(tok_a, [str(tmp_path / "p.jsonl")], "code", 3, 3)


@pytest.mark.parametrize("words", [["--num", "0"], ["--max-new", "1"], ["--max-prompt", "0"], ["--k", "3", "17"]])
def test_numbers_out_of_range_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of(__doc__, 4, 8, 100)
    add_domains(parser)
    parser.add_argument("--k", type=int, nargs="+", default=[1])
    args = parser.parse_args(["--draft", "d", *words])
    with pytest.raises(SystemExit):
        check_ranges(parser, args, k=(1, 16))
    assert f"{words[0]} {words[-1]}: allowed are " in capsys.readouterr().err
    good = parser.parse_args(["--draft", "d"])
    check_ranges(parser, good, k=(1, 16))
    assert (good.num, good.max_new, good.max_prompt, good.domains) == (4, 8, 100, ["code", "math", "qa"])


def test_settings_go_with_the_figures(tmp_path: Path) -> None:
    write_result(argparse.Namespace(out=None), {"a": 1})
    write_result(argparse.Namespace(out=tmp_path / "r.json", k=3), {"a": 1})
    assert json.loads((tmp_path / "r.json").read_text())["settings"]["k"] == "3"
