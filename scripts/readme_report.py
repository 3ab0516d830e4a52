"""python -m scripts.readme_report REPORT.json [README.md]: puts a real report's tables between the README's markers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from eval.markdown import render_markdown

START, END = "<!-- report -->", "<!-- /report -->"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    readme = Path(sys.argv[2] if len(sys.argv) > 2 else "README.md")
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    body = render_markdown(report).split("\n## Words", 1)[0]
    # The report's own headings go two levels down, under the README's.
    body = "\n".join(f"##{line}" if line.startswith("#") else line for line in body.splitlines())
    readme.write_text(f"{before}{START}\n\n{body.strip()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
