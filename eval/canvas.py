"""The sheet that figures are drawn on: style, palette, and an SVG that can stand in a page beside others."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from eval.records import LOOKUP

# Okabe and Ito's palette: told apart by all common kinds of colour blindness, and by lightness in print.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE, GREY, INK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8A8F98", "#22262B",
)  # fmt: skip
DOMAINS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
DRAFTS = (BLUE, RED, PURPLE, GREEN, ORANGE)
MARKERS = ("o", "s", "^", "D", "v", "P")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specdraft",
    "text.parse_math": False,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.edgecolor": "#9AA0A8",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E7EB",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Figure:
    """One figure of the report.

    Attributes:
        name: of its files.
        title: what it shows, in words.
        caption: how to read it.
        svg: a whole SVG document without prolog, ids unique to the figure.
        table: what was drawn.
    """

    name: str
    title: str
    caption: str
    svg: str
    table: list[dict[str, Any]]

    def csv(self) -> str:
        """The table as CSV; text that a spreadsheet would run as a formula is quoted."""
        out = io.StringIO()
        writer = csv.DictWriter(out, list(self.table[0]))
        writer.writeheader()
        for row in self.table:
            writer.writerow({key: _inert(value) for key, value in row.items()})
        return out.getvalue()


def _inert(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def draft_style(name: str, names: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of a draft, the same in every figure; look-up is grey.

    Args:
        name: of the draft.
        names: of all drafts in the report.
    """
    if name == LOOKUP or name not in names:
        return GREY, "v"
    i = names.index(name)
    return DRAFTS[i % len(DRAFTS)], MARKERS[i % len(MARKERS)]


@contextmanager
def styled() -> Iterator[None]:
    """The report's style, for the time of drawing only."""
    with matplotlib.rc_context(STYLE):
        yield


def make_figure(
    name: str,
    title: str,
    caption: str,
    table: list[dict[str, Any]],
    draw: Callable[[Axes], None],
    height: float = 2.8,
) -> Figure:
    """Draws at 420 px wide, which a phone shows as it is and a desktop two abreast."""
    canvas = Canvas(figsize=(4.2, height), layout="constrained")
    FigureCanvasSVG(canvas)
    draw(canvas.add_subplot())
    out = io.StringIO()
    canvas.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Figure(name, title, caption, _inline(out.getvalue(), name, title), table)


def _inline(svg: str, name: str, title: str) -> str:
    """An SVG that can stand in a page beside others: no prolog, own ids, no global style, no fixed size."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.S)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    body = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', body)
    body = re.sub(r' (width|height)="[\d.]+pt"', "", body, count=2)
    opening = f'<svg role="img" aria-label="{title}" style="stroke-linejoin:round;stroke-linecap:butt"'
    return body.replace("<svg", opening, 1)
