"""The lines of an ablation as tables: each arm against the first of its group, over the same held-out requests."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.bootstrap import Floats, Ints, statistic_interval

TIMES = 2000
COLUMNS = {"greedy": (1, 2), "sampled": (3, 4)}  # of a request's figures: rows in use, whole head
HEAD = (
    "arm", "seeds", "steps", "supervised tok", "greedy alpha", "against the first", "whole head",
    "sampled alpha", "against the first", "whole head", "read", "CPU s a step",
)  # fmt: skip


def per_request(lines: Sequence[Mapping[str, Any]], ids: Sequence[str], column: int) -> tuple[Floats, Floats]:
    """[R] sums of a figure over each request's tokens, and the tokens; mean over the seeds."""
    found = np.array([[line["requests"][name] for name in ids] for line in lines], float)  # [S, R, 5]
    return (found[:, :, 0] * found[:, :, column]).mean(0), found[:, :, 0].mean(0)


def alpha(lines: Sequence[Mapping[str, Any]], ids: Sequence[str], column: int) -> float:
    """A figure over all tokens of the requests."""
    above, below = per_request(lines, ids, column)
    return float(above.sum() / below.sum())


def difference(
    arm: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]], ids: Sequence[str], column: int
) -> tuple[float, tuple[float, float] | None]:
    """alpha(arm) - alpha(first) over the seeds that both have, and its paired 95% interval over requests.

    Args:
        arm, first: lines, one a seed.
        ids: of the requests.
        column: of a request's figures.

    Returns:
        The difference, and None for the interval with fewer than two requests.

    Raises:
        ValueError: no seed in common.
    """
    seeds = {line["seed"] for line in arm} & {line["seed"] for line in first}
    if not seeds:
        raise ValueError("the two arms have no seed in common")
    (above, below), (above_first, below_first) = (
        per_request([line for line in lines if line["seed"] in seeds], ids, column) for lines in (arm, first)
    )

    def statistic(index: Ints) -> Floats:
        theirs = above_first[index].sum(-1) / below_first[index].sum(-1)
        return np.asarray(above[index].sum(-1) / below[index].sum(-1) - theirs, float)

    whole = float(statistic(np.arange(len(ids))[None])[0])
    return whole, statistic_interval(len(ids), statistic, TIMES, 0)


def tables(keys: Mapping[tuple[str, str], Sequence[str]], lines: Mapping[str, Mapping[str, Any]], sampled: str) -> str:
    """Markdown, one table a group; an arm without a line is left out.

    Args:
        keys: (group, arm) -> keys of its lines, one a seed, in the order wanted.
        lines: by key.
        sampled: what the ids of sampled requests end in.
    """
    out: list[str] = []
    for group in dict.fromkeys(group for group, _ in keys):
        own = {arm: [lines[k] for k in found if k in lines] for (g, arm), found in keys.items() if g == group}
        own = {arm: found for arm, found in own.items() if found}
        if not own:
            continue
        first = next(iter(own.values()))
        names = list(first[0]["requests"])
        parts = {
            "greedy": [name for name in names if not name.endswith(sampled)],
            "sampled": [name for name in names if name.endswith(sampled)],
        }
        counts = ", ".join(f"{len(ids)} {kind}" for kind, ids in parts.items())
        out += [f"### {group} ({counts} held-out requests)", ""]
        out.append(markdown(HEAD, [_cells(arm, found, first, parts) for arm, found in own.items()]))
    return "\n".join(out) + "\n"


def _cells(
    arm: str, found: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]], parts: Mapping[str, list[str]]
) -> list[str]:
    cells = [
        arm,
        str(len(found)),
        str(found[0]["steps"]),
        f"{statistics.fmean(x['supervised_tok'] for x in found):,.0f}",
    ]
    for kind, ids in parts.items():
        used, whole = COLUMNS[kind]
        values = [alpha([line], ids, used) for line in found]
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        cells.append(f"{alpha(found, ids, used):.3f}{spread}")
        if found is first or not {line["seed"] for line in found} & {line["seed"] for line in first}:
            cells.append("")
        else:
            gap, ends = difference(found, first, ids, used)
            cells.append(f"{gap:+.3f}" + (f" ({ends[0]:+.3f} to {ends[1]:+.3f})" if ends else ""))
        cells.append(f"{alpha(found, ids, whole):.3f}")
    read = f"{100 * found[0]['read_frac']:.1f}%"
    return [*cells, read, f"{statistics.median(line['cpu_s_per_step'] for line in found):.2f}"]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))
