"""python -m scripts.readme_report REPORT.json [README.md]: puts a real report's tables between the README's markers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.files import read_object
from eval.entry import guarded, whole
from eval.markdown import render_markdown
from eval.report import FORMAT

START, END = "<!-- report -->", "<!-- /report -->"
# What the text is made of, and the type of each in JSON.
PARTS: dict[str, Any] = {
    "counts": dict, "errors": list, "cells": list, "choice": dict, "verdict": dict, "provenance": dict,
    "settings": dict, "drafts": list, "device": str | list | dict, "target": str | dict,
}  # fmt: skip


def read_report(path: Path) -> dict[str, Any]:
    """Reads report.json.

    Raises:
        ValueError: not JSON, no report, or a report of another format.
        OSError: it cannot be read.
    """
    report = read_object(path, ValueError, "report")
    if report.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {report.get('format')!r}; this version reads reports of format {FORMAT}")
    if report.get("simulated"):
        raise ValueError(f"{path}: its acceptance was simulated; give the report of a real evaluation")
    if wrong := [name for name, kind in PARTS.items() if not isinstance(report.get(name), kind)]:
        raise ValueError(f"{path}: no whole report: {', '.join(wrong)} missing or of another type; make it again")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.readme_report", description=(__doc__ or "").split(": ")[1])
    parser.add_argument("report", type=Path, help="report.json of an evaluation")
    parser.add_argument("readme", type=Path, nargs="?", default=Path("README.md"))
    args = parser.parse_args(argv)
    return guarded(lambda: put(args.report, args.readme))


def put(path: Path, readme: Path) -> int:
    """Writes the report's tables between the markers.

    Raises:
        ValueError: no whole report, or no markers.
    """
    report = read_report(path)
    with whole(path, "report"):
        body = render_markdown(report).split("\n## Words", 1)[0]
    text = readme.read_text(encoding="utf-8")
    if not 0 <= text.find(START) < text.find(END):
        raise ValueError(f"{readme}: the markers {START} and {END} are not both there, in this order")
    # The report's own headings go two levels down, under the README's.
    body = "\n".join(f"##{line}" if line.startswith("#") else line for line in body.splitlines())
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    readme.write_text(f"{before}{START}\n\n{body.strip()}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
