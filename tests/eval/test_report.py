"""The report: whole, self-contained, safe with hostile text, the same facts in every form."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.definitions import DEFINITIONS
from eval.load_figures import verify_surface
from eval.records import RequestRow, arm_name
from eval.report import build_report, terminal_table, write_report
from eval.show import compact, figure, gain, interval, ms, number, percent, plain, safe, speed
from tests.eval.grid import make_grid
from tests.eval.rows import SMALL, make_plan, make_row, make_run

FIGURES = {
    "waterfall", "phase_shares", "speedup_by_k", "inversion", "acceptance", "matrix", "verify_surface", "costs",
    "prediction", "what_if", "requests",
}  # fmt: skip
EVIL = "<script>alert(1)</script> | `x` **b** $\\alpha$ & \"q\" 'r' [l](http://e.vil)"
PROVENANCE = {
    "git": {"sha": "0123abc", "dirty": False},
    "versions": {"torch": "2.13.0"},
    "time": "2026-01-02T03:04:05Z",
}


def settings(**change: Any) -> dict[str, Any]:
    made = {
        "objective": "latency@p50", "min_speedup": 1.05, "min_requests": 5, "bootstrap": 200, "domain": "code",
        "k": [1, 2, 3], "draft_temperature": None, "draft_top_p": 1.0, "dtype": "bfloat16", "graph": "off: no CUDA",
        "target": "smollm2-135m-instruct", "device": "cpu",
        "drafts": [{"name": "code-5pct", "stored_params": 9_400_000, "read_params": 6_900_000, "layers": 4}],
    }  # fmt: skip
    return made | change


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    rows = make_run(num=6, ks=(1, 2, 3))
    write_report(folder, build_report(rows, make_plan(), PROVENANCE, settings(domain="mixed")))
    return folder


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every text that a user or a model can write is hostile."""
    folder = tmp_path_factory.mktemp("evil")
    rows: list[RequestRow] = []
    for r in make_run(num=5, ks=(2, 3), drafts=(SMALL,), lookup=False):
        change = {"domain": f"{r.domain}{EVIL}", "request_id": f"={r.request_id}{EVIL}", "group": EVIL, "device": EVIL}
        if r.k:
            change["draft"], change["arm"] = f"d{EVIL}", arm_name(f"d{EVIL}", r.k)
        if r.error:
            change["error"] = f"{EVIL}\n\x00\x1b[31m"
        rows.append(make_row(**{**r.__dict__, **change}))
    made = settings(target=EVIL, device={"name": EVIL}, drafts=[{"name": f"d{EVIL}", EVIL: EVIL}], note=EVIL)
    write_report(folder, build_report(rows, make_plan(), {EVIL: EVIL}, made))
    return folder


class Page(HTMLParser):
    """Tags, ids and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_all_files_are_there(written: Path) -> None:
    assert {p.name for p in written.iterdir()} == {"report.json", "report.md", "report.html", "figures"}
    names = {f"{n}.{e}" for n in FIGURES for e in ("svg", "csv")}
    assert {p.name for p in (written / "figures").iterdir()} == names


def test_json_has_the_contract(written: Path) -> None:
    def refuse(text: str) -> float:
        raise AssertionError(text)

    report = json.loads((written / "report.json").read_text(), parse_constant=refuse)
    assert report["format"] == 3
    assert {"device", "target", "drafts", "cells", "choice", "verdict", "provenance"} <= set(report)
    assert {"draft", "policy", "objective", "regret"} <= set(report["choice"])
    assert set(report["verdict"]) >= {"go", "reasons"}
    assert report["counts"]["failed"] == len([r for r in make_run(num=6, ks=(1, 2, 3)) if r.error])
    assert report["counts"]["requests"] == 18 and report["counts"]["warmup"] > 0
    assert report["errors"][0]["requests"] == ["qa-too-long"]


def test_t63_effective_settings_are_in_the_result(written: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    assert {"k", "draft_temperature", "draft_top_p", "dtype", "graph", "min_speedup", "objective", "seed"} <= set(
        report["settings"]
    )
    page = (written / "report.html").read_text()
    assert "off: no CUDA" in page and "draft_temperature" in page


def test_prompts_that_are_not_measured_are_told(tmp_path: Path) -> None:
    long = {
        "num": 3,
        "limit_tok": 8128,
        "limit": "the target's positions less eval.max_new_tok",
        "ids": ["a", "b", "c"],
    }
    told = settings(
        left_out={"code": long}, cut={"qa": long | {"num": 1}}, not_asked={"math": {"medium": 1, "long": 12}}
    )
    write_report(tmp_path, build_report(make_run(num=6, ks=(2,)), make_plan(), PROVENANCE, told))
    for text in ((tmp_path / "report.md").read_text(), Page((tmp_path / "report.html").read_text()).text):
        assert "they do not fit: 3 held-out prompts of code over 8,128 tokens (the target's positions less" in text
        assert "without their middle: 1 held-out prompt of qa, cut to 8,128 tokens" in text
        assert "does not name their group: 1 held-out prompt of math (medium)." in text.replace("\\", "")
        assert "12 held-out prompts of math (long)." in text.replace("\\", "")


def test_what_ifs_tell_the_request_that_they_are_about(tmp_path: Path) -> None:
    report = build_report(make_run(num=6, ks=(2,)), make_plan(), PROVENANCE, settings())
    write_report(tmp_path, report)
    asked = report["model"]["what_if"][0]
    assert (asked["what"], asked["context"], asked["new_tok"]) == ("as it is", 300, 82)
    told = "one request of 300 prompt and 82 answer tokens at batch 1"
    for text in ((tmp_path / "report.md").read_text(), Page((tmp_path / "report.html").read_text()).text):
        assert told in text.lower()


@pytest.mark.parametrize("least", [5, 50])
def test_an_evaluation_that_stood_still_is_told_on_top(tmp_path: Path, least: int) -> None:
    paused = settings(paused={"num": 2, "min": 12.4}, min_requests=least)
    report = build_report(make_run(num=6, ks=(2,)), make_plan(), PROVENANCE, paused)
    assert report["verdict"]["notices"][0].startswith("The process was stopped 2 times, 12 minutes in all")
    write_report(tmp_path, report)
    assert "stopped 2 times" in (tmp_path / "report.md").read_text()
    assert "stopped 2 times" in Page((tmp_path / "report.html").read_text()).text


def test_settings_left_out_show_their_defaults() -> None:
    report = build_report(make_run(num=5, ks=(2,)), None, {}, {})
    assert report["settings"]["objective"] == "latency@p50" and report["settings"]["min_requests"] == 5
    assert report["device"] == ["made-up CPU"]
    assert {d["name"] for d in report["drafts"]} == {"code-5pct", "code-18pct", "lookup"} - {"lookup"}


def test_the_page_asks_for_nothing_from_outside(written: Path, evil: Path) -> None:
    for folder in (written, evil):
        text = (folder / "report.html").read_text()
        page = Page(text)
        assert not {"script", "iframe", "link", "img", "object", "embed", "form", "base"} & set(page.tags)
        assert all(link.startswith(("#", "figures/")) for link in page.links), page.links
        assert "@import" not in text and not re.search(r"url\((?!#)", text)
        assert "<!doctype html>" in text and 'name="viewport"' in text


def test_ids_are_unique_and_references_resolve(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    assert len(page.ids) == len(set(page.ids))
    wanted = {link[1:] for link in page.links if link.startswith("#")}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", (written / "report.html").read_text()))
    assert wanted <= set(page.ids)


def test_the_verdict_comes_first(written: Path) -> None:
    text = Page((written / "report.html").read_text().split("</style>")[1]).text
    order = ["GO", "End-to-end speedup", "Why", "Draft and k", "Figures", "Every cell", "Words", "What was measured"]
    at = [text.index(word) for word in order]
    assert at == sorted(at)
    assert "all domains" in text and "n/a" in text


def test_hostile_text_stays_text(evil: Path) -> None:
    page = (evil / "report.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "\x00" not in page and "\x1b" not in page
    assert "<script>" not in (evil / "report.md").read_text().replace("\\<script\\>", "")
    for svg in (evil / "figures").glob("*.svg"):
        root = ET.fromstring(svg.read_text())
        assert not [node for node in root.iter() if node.tag.endswith("script")]


def test_a_long_name_never_hides_k(evil: Path) -> None:
    report = json.loads((evil / "report.json").read_text())
    page = Page((evil / "report.html").read_text()).text
    for entry in report["choice"]["ranking"]:
        assert not entry["k"] or f"…, k = {entry['k']}" in page


def test_hostile_text_in_markdown_is_inert(evil: Path) -> None:
    lines = (evil / "report.md").read_text().split("\n")
    # A bar inside a cell would add a column; every row of a table has as many as its head.
    for first, line in pairwise(lines):
        if first.startswith("|") and line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", first)) == len(re.findall(r"(?<!\\)\|", line))
    assert "](http" not in "\n".join(lines).replace("\\]", "")
    assert safe("a|b\n`c` <i> *d*") == r"a\|b \`c\` \<i\> \*d\*"


def test_csv_is_inert_and_whole(evil: Path, written: Path) -> None:
    rows = list(csv.DictReader((evil / "figures" / "requests.csv").open(newline="")))
    assert rows and all(row["request_id"].startswith("'=") for row in rows)
    shares = list(csv.DictReader((written / "figures" / "phase_shares.csv").open(newline="")))
    for row in shares:
        total = sum(float(row[f"{name}_share"]) for name in ("draft", "verify", "sampling", "host"))
        assert total == pytest.approx(1.0, abs=0.02)
    steps = list(csv.DictReader((written / "figures" / "waterfall.csv").open(newline="")))
    assert len(steps) == 5 and steps[-1]["name"] == "end to end"


def test_figures_are_valid_svg_and_scale(written: Path) -> None:
    for path in (written / "figures").glob("*.svg"):
        root = ET.fromstring(path.read_text())
        assert "viewBox" in root.attrib and "width" not in root.attrib
        assert root.attrib["role"] == "img" and root.attrib["aria-label"]


def test_the_same_report_gives_the_same_files(written: Path, tmp_path: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    write_report(tmp_path, report)
    for path in sorted(p for p in written.rglob("*") if p.is_file()):
        assert (tmp_path / path.relative_to(written)).read_bytes() == path.read_bytes(), path.name


def test_markdown_and_terminal_say_the_same(written: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    text = (written / "report.md").read_text()
    assert text.startswith("# GO: Speculate with code-5pct at k =")
    for entry in report["choice"]["ranking"]:
        assert speed(entry["value"]) in text
    console = Console(width=140, record=True, file=(written.parent / "console").open("w"))
    console.print(terminal_table(report))
    shown = console.export_text()
    assert "GO: Speculate with" in shown and "chosen" in shown


def test_the_verify_surface_marks_whole_chains_alone() -> None:
    """A windowed arm of the same k has a verify time of its own, which is not the chain's."""
    rows = make_grid(num=6, batches=(1,), domains=("code",), contexts={"short": 250}, ks=(1, 2))
    other = [
        replace(
            r,
            arm=f"{r.arm}+recent64",
            recent=64,
            wall_ms=3 * r.wall_ms,
            phases_ms=r.phases_ms and {name: 3 * ms for name, ms in r.phases_ms.items()},
        )
        for r in rows
        if r.k == 2
    ]
    figures = [
        verify_surface(build_report(given, None, {}, settings(drafts=[{"name": "small"}])))
        for given in (rows, rows + other)
    ]
    plain_one, beside = ([row["measured_ms"] for row in f.table] for f in figures if f is not None)
    assert plain_one == beside and plain_one[2] is not None


def test_insufficient_and_empty_reports_render(tmp_path: Path) -> None:
    few = build_report(make_run(num=1, ks=(2,)), make_plan(), PROVENANCE, settings(min_requests=9))
    page = write_report(tmp_path / "few", few).read_text()
    assert "INSUFFICIENT" in page and 'colspan="15">insufficient' in page
    none = build_report([], None, {}, {})
    page = write_report(tmp_path / "none", none).read_text()
    assert "no baseline (k = 0) was measured" in page
    failed = build_report([make_row(error="died", new_tok=0)], None, {}, {})
    assert "died" in write_report(tmp_path / "failed", failed).read_text()


def test_a_baseline_alone_is_insufficient_not_a_crash(tmp_path: Path) -> None:
    rows = [r for r in make_run(num=6, ks=(2,)) if r.k == 0]
    report = build_report(rows, None, {}, {})
    assert report["verdict"]["status"] == "insufficient"
    assert "n/a" in write_report(tmp_path, report).read_text()


def test_no_phased_rows_leave_shares_out(tmp_path: Path) -> None:
    rows = [r for r in make_run(num=6, ks=(2,)) if r.clock == "bare"]
    report = build_report(rows, None, {}, settings())
    assert all(c["share"] is None for c in report["cells"])
    assert report["verdict"]["status"] == "go"
    write_report(tmp_path, report)
    assert not (tmp_path / "figures" / "phase_shares.svg").exists()


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="report format is 1"):
        write_report(tmp_path, {"format": 1})


def test_words_of_the_page_are_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for terms, _ in DEFINITIONS:
        for term in terms.split(", "):
            assert re.search(rf"(?<![a-z]){re.escape(term)}(?![a-z])", docs, re.I), term


def test_how_numbers_are_shown() -> None:
    assert (speed(1.314), speed(None)) == ("1.31x", "n/a")
    assert (percent(0.254), percent(0.021), percent(0.0), percent(None)) == ("25%", "2.1%", "0%", "n/a")
    assert (ms(0.534), ms(22.44), ms(1840.2), ms(None)) == ("0.53", "22.4", "1,840", "n/a")
    assert (number(0.12345, 3), number(1200), number(None)) == ("0.123", "1,200", "n/a")
    assert (gain(0.083), gain(None)) == ("+8%", "")
    assert (interval(1.0, 2.0), interval(None, 2.0)) == ("1.00 to 2.00", "n/a")
    assert (compact(6_912_000), compact(950), compact(None)) == ("6.9M", "950", "n/a")
    assert (figure(1.5, "x"), figure(0.25, "%"), figure(5.0, ""), figure(0.153, "")) == ("1.50x", "25.0%", "5", "0.15")
    assert plain("a\n\x00b  c") == "a b c" and plain("x" * 99, 10) == "x" * 9 + "…"


def test_markdown_says_what_each_load_needs_and_how_far_phases_hold(tmp_path: Path) -> None:
    """Over several contexts and batches: the fastest arm at each, k with its interval, clocks at every batch."""
    made = build_report(make_grid(num=6, ks=(1, 2)), None, PROVENANCE, settings(domain="mixed", max_new_tok=96))
    write_report(tmp_path, made)
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    for batch in (1, 4, 16):
        line = next(x for x in text.splitlines() if x.startswith(f"| {batch} | 0.00%"))
        assert line.count("|") == 5 and re.search(r"\d (requests?|sets?): ", line)
        assert f"At batch {batch}: not explained by the phases 0.00%" in page
    fastest = text.split("## The fastest arm by load")[1].split("##")[0]
    assert len(fastest.strip().splitlines()) == 2 + len(made["choice"]["by_load"])
    assert re.search(r"\| code \| 1 \| k = \d \(\d\.\d\dx, \d\.\d\d to \d\.\d\d, 6\)", text)
    assert "Answers are of at most 96 tokens" in text and "at batch 1" in text.split("| figure")[0]
    for name in ("total", "predicted"):
        assert f" {name} |" in text


def test_loads_stand_from_short_to_long() -> None:
    """Whatever request came first."""
    contexts = {"medium": 3000, "long": 8000, "short": 250}
    rows = make_grid(num=5, contexts=contexts, batches=(4, 1), domains=("code",), ks=(2,), new_tok=24)
    loads = [(x["batch"], x["group"]) for x in build_report(rows, None, {}, {"bootstrap": 100})["choice"]["by_load"]]
    assert loads == [(b, group) for b in (1, 4) for group in ("short", "medium", "long", "all")]
