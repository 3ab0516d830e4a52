"""How figures are written for people: one way for the page, the text and the plots."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

NA = "n/a"


def number(value: Any, digits: int = 2) -> str:
    """A plain number; None is "n/a"."""
    if value is None:
        return NA
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def speed(value: float | None) -> str:
    """1.312 -> "1.31x"."""
    return NA if value is None else f"{value:.2f}x"


def percent(value: float | None, digits: int = 0) -> str:
    """0.254 -> "25%"; small parts keep a digit."""
    if value is None:
        return NA
    if digits == 0 and 0 < abs(value) < 0.095:
        digits = 1
    return f"{value:.{digits}%}"


def gain(value: float | None) -> str:
    """0.083 -> "+8%"; "" where nothing could be predicted."""
    if value is None:
        return ""
    return "0%" if abs(value) < 0.005 else f"{value:+.0%}"


def ms(value: float | None) -> str:
    """Milliseconds with three significant digits: 0.53, 22.4, 1,840."""
    if value is None:
        return NA
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def interval(low: float | None, high: float | None) -> str:
    """1.25 to 1.38."""
    return NA if low is None or high is None else f"{low:.2f} to {high:.2f}"


def equal_memory(found: dict[str, Any] | None) -> str:
    """Throughput over a baseline of equal memory, with its rows: "1.12x (3.0 rows)", "≤ 0.90x (9.0 rows)"."""
    if found is None:
        return NA
    return f"{memory_ratio(found)} ({found['rows']:.1f} row{'s' * (found['rows'] != 1)})"


def memory_ratio(found: dict[str, Any]) -> str:
    """The ratio alone: "1.12x", "≤ 0.90x"."""
    most = found.get("at_most")
    return speed(found["speedup"]) if most is None else f"≤ {speed(most)}"


def clocks(found: dict[str, Any] | None) -> str:
    """The phase clock against the bare one: "+0.4% (-0.9% to +1.6%), 10 requests: within"."""
    if found is None:
        return NA
    unit = found["unit"].removesuffix("s" * (found["num_pairs"] == 1))
    span = f" ({found['low_frac']:+.1%} to {found['high_frac']:+.1%})" if found["low_frac"] is not None else ""
    return f"{found['diff_frac']:+.1%}{span}, {found['num_pairs']} {unit}: {found['status']}"


def medians(load: dict[str, Any]) -> str:
    """The one request that the cost model is asked about: "412 prompt and 16 answer tokens at batch 1"."""
    return f"{load['context']:,} prompt and {load['new_tok']:,} answer tokens at batch {load['batch']}"


def figure(value: float, unit: str) -> str:
    """A rule's figure or threshold in its unit ("x", "%", or none)."""
    if unit == "x":
        return speed(value)
    if unit == "%":
        return percent(value, 1)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.2f}"


def compact(value: int | None) -> str:
    """Parameters: 6,912,000 -> "6.9M"."""
    if value is None:
        return NA
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{suffix}"
    return str(value)


def plain(text: Any, limit: int = 60) -> str:
    """One printable line of text that came from outside; cut with an ellipsis."""
    flat = "".join(c if unicodedata.category(c)[0] != "C" else " " for c in str(text))
    flat = " ".join(flat.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def safe(text: Any, limit: int = 120) -> str:
    """Text from outside as one line that no Markdown reader interprets."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", plain(text, limit)).replace("&", "&amp;")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; cells are already safe."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]
