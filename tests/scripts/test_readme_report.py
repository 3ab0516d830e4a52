"""The README's tables come from a real report, or nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.report import build_report
from scripts.readme_report import END, START, main
from tests.eval.rows import make_plan, make_run
from tests.eval.test_report import PROVENANCE, settings


@pytest.fixture(scope="module")
def text() -> str:
    return json.dumps(build_report(make_run(num=5, ks=(2,)), make_plan(), PROVENANCE, settings()))


def test_tables_stand_between_the_markers(tmp_path: Path, text: str) -> None:
    report, readme = tmp_path / "report.json", tmp_path / "README.md"
    report.write_text(text)
    readme.write_text(f"# Title\n{START}\nold\n{END}\n# End\n")
    assert main([str(report), str(readme)]) == 0
    first = readme.read_text()
    assert first.startswith(f"# Title\n{START}\n\n###") and first.endswith(f"{END}\n# End\n") and "old" not in first
    assert main([str(report), str(readme)]) == 0
    assert readme.read_text() == first


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "directory"),
        ("", "not JSON"),
        ("[1]", "a list, no report"),
        ('{"format": 99}', "format is 99"),
        ('{"format": 3}', "no whole report: counts, errors"),
        ("cut", "not JSON"),
    ],
)
def test_what_is_no_report_is_one_message(
    tmp_path: Path, content: str | None, said: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report, readme = tmp_path / "report.json", tmp_path / "README.md"
    if content is None:
        report.mkdir()
    else:
        report.write_text(text[: len(text) // 2] if content == "cut" else content)
    readme.write_text(f"{START}\n{END}\n")
    assert main([str(report), str(readme)]) == 2
    assert said in capsys.readouterr().err
    assert readme.read_text() == f"{START}\n{END}\n"


def test_a_readme_without_markers_is_left_alone(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    report, readme = tmp_path / "report.json", tmp_path / "README.md"
    report.write_text(text)
    for content in ("# Title\n", f"{END}{START}"):
        readme.write_text(content)
        assert main([str(report), str(readme)]) == 2
        assert "markers" in capsys.readouterr().err and readme.read_text() == content
