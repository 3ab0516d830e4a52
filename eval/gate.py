"""What a report says of one draft: its entry, whether it may be released, and the k to serve. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.files import read_object
from distill.recipe import dump, load_recipe
from distill.runs import RunError
from eval import show
from eval.cells import Cell, Settings
from eval.choice import choose
from eval.records import ALL, LOOKUP, is_control
from eval.rivals import pays
from eval.verdict import decide
from eval.views import Report, is_chain, same_settings

FORMATS = (1, 2, 3)
SIMULATED = "-simulated"  # how the folders of such evaluations end


class NoMeasurement(ValueError):
    """There is no report, or none that measured this draft."""


class GateFailed(ValueError):
    """The report says that the draft does not pay."""


def find_run(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The run's own folder (behind `latest`) and its recipe.

    Raises:
        RunError: no run there, or one that has not finished its draft.
        RecipeError: its recipe is damaged.
    """
    real = folder.resolve()
    if not (real / "recipe.json").is_file():
        raise RunError(f"{folder}: no recipe.json: not a run folder (runs/<recipe>/<run id>, or runs/<recipe>/latest)")
    if not (real / "draft" / "draft.json").is_file():
        raise RunError(f"{folder}: no draft/draft.json: the run has not finished; go on with it (--resume {folder})")
    return real, json.loads(dump(load_recipe(real / "recipe.json")))


def find_report(run: Path, given: Path | None = None) -> Path:
    """The newest report of a run, or the one that is given (a file, or its folder).

    Raises:
        NoMeasurement: there is none.
    """
    if given is not None:
        path = given / "report.json" if given.is_dir() else given
        if not path.is_file():
            raise NoMeasurement(f"--report {given}: no report.json there")
        return path
    real = (path for path in run.glob("eval/*/report.json") if not path.parent.name.endswith(SIMULATED))
    found = sorted(real, key=lambda path: (path.stat().st_mtime, path.parent.name))
    if not found:
        raise NoMeasurement(
            f"{run}/eval holds no report.json: a release says what was measured. Measure first: "
            f"`python -m eval.run RECIPE --draft {run / 'draft'}`, or name a report with --report FILE"
        )
    return found[-1]


def read_report(path: Path) -> dict[str, Any]:
    """Reads report.json.

    Raises:
        NoMeasurement: not JSON, another format, or simulated acceptance.
    """
    report = read_object(path, NoMeasurement, "report")
    if report.get("format") not in FORMATS:
        raise NoMeasurement(f"{path}: report format {report.get('format')!r}; this version reads {FORMATS}")
    if report.get("simulated"):
        raise NoMeasurement(
            f"{path}: its acceptance was simulated: it says nothing of a draft; name another (--report)"
        )
    return report


def names_of(run: Path) -> tuple[str, ...]:
    """What `eval.run` calls the draft of a run: the recipe's name alone, or with the run's."""
    return (run.parent.name, f"{run.parent.name}-{run.name}")


def find_draft(report: Report, meta: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The report's entry of a draft.

    Args:
        report: of `read_report`.
        meta: the draft's draft.json.
        names: of `names_of`.

    Raises:
        NoMeasurement: the report is about other weights, or another target.
    """
    target, made_for = report["settings"].get("target_sha256"), meta["target"]["sha256"]
    if target not in (None, made_for):
        raise NoMeasurement(f"the report's target has sha256 {target[:12]}…, the draft's {made_for[:12]}…")
    for entry in report["drafts"]:
        weights = entry.get("weights_sha256")
        size = (entry.get("stored_params"), entry.get("read_params"))
        same = weights == meta["weights_sha256"] if weights else entry["name"] in names
        if same and size == (meta["size"]["stored"], meta["size"]["read"]):
            return dict(entry)
    measured = ", ".join(show.plain(entry["name"]) for entry in report["drafts"]) or "no draft"
    raise NoMeasurement(f"the report measured {measured}, not this draft ({' or '.join(names)}, by weights and sizes)")


def check_gate(report: Report, name: str) -> None:
    """Asks whether what would be shipped of a draft, `chosen_cell`, pays.

    Raises:
        GateFailed: another draft did better, or the verdict on the shipped arm is no go.
        NoMeasurement: there is nothing to ship.
    """
    judged = next((c for c in report["cells"] if c["arm"] == report["verdict"]["arm"]), None)
    if judged is not None and judged["draft"] != name:
        raise GateFailed(
            f"the verdict is about {show.plain(judged['draft'])}, which did better than {show.plain(name)}"
        )
    verdict = verdict_on(report, chosen_cell(report, name)) if judged is not None else report["verdict"]
    if not verdict["go"]:
        why = "; ".join(
            f"{r['rule']} is {show.figure(r['figure'], r['unit'])}, wanted {r['passes']} "
            f"{show.figure(r['threshold'], r['unit'])}"
            for r in verdict["reasons"]
            if r["decides"] and not r["passed"]
        )
        raise GateFailed(f"verdict {verdict['status']}: {show.plain(verdict['headline'], 300)} ({why})")


def chosen_cell(report: Report, name: str) -> Cell:
    """The draft's best arm with a fixed k, as servers take it, over all that is judged; ties as the ranking has them.

    Raises:
        NoMeasurement: no such arm was ranked.
    """
    ranked = [entry for entry in report["choice"]["ranking"] if entry["draft"] == name]
    entry = next((entry for entry in ranked if is_chain(entry)), None)
    if entry is None:
        why = "too few requests were measured"
        if ranked:
            other = ", ".join(show.plain(c["arm"]) for c in ranked)
            why = f"what was ranked ({other}) servers can not run; measure a fixed k of the whole draft (eval.policies)"
        raise NoMeasurement(f"no arm of {show.plain(name)} with a fixed k was ranked: {why}")
    # Reports from before drafts were judged on their own domain judged all domains together.
    domain = report["choice"].get("domain") or ALL
    mine = [c for c in report["cells"] if c["arm"] == entry["arm"]]
    return max(mine, key=lambda c: (c["domain"] == domain, c["group"] == ALL, c["num_requests"]))


def verdict_on(report: Report, cell: Cell) -> Mapping[str, Any]:
    """The verdict on the arm that is shipped.

    It is the report's where that is about this arm. Else (the report judged a tree, an adaptive policy or a windowed
    draft, which servers do not run) the same rules judge this arm against the baseline and the controls alone.

    Raises:
        NoMeasurement: a report of an earlier format that is about another arm.
    """
    arm = cell["arm"]
    if report["verdict"]["arm"] in (arm, None):
        return dict(report["verdict"])
    if report["format"] != max(FORMATS):
        raise NoMeasurement(f"the report's verdict is about {show.plain(report['verdict']['arm'])}; measure again")
    cells = [
        c | {"chain": is_chain(c)}
        for c in report["cells"]
        if c["arm"] == arm or not c["draft"] or is_control(c["draft"])
    ]
    settings, drafts = Settings.of(report["settings"]), {d["name"]: d for d in report["drafts"]}
    sizes = {name: int(d.get("read_params") or d.get("stored_params") or 0) for name, d in drafts.items()}
    choice = choose(cells, settings, sizes)
    return decide(cells, choice, settings, report["counts"]["failed"], drafts)


def policy_by_domain(report: Report, like: Cell) -> dict[str, dict[str, Any]]:
    """The best fixed k of a draft in each domain at the chosen cell's load, and whether it pays there.

    Args:
        report: of `read_report`.
        like: of `chosen_cell`.

    Returns:
        by domain: k, pays (speedup at least eval.min_speedup, and its interval not below 1), speedup, low, high, alpha,
        tau, num_requests. Domains where nothing could be judged are left out.
    """
    best: dict[str, Cell] = {}
    for cell in arms_of(report, like):
        if (cell["batch"], cell["group"]) == (like["batch"], like["group"]):
            known = best.get(cell["domain"])
            if known is None or _objective(cell) > _objective(known):
                best[cell["domain"]] = cell
    return {domain: _entry(cell, report) for domain, cell in sorted(best.items())}


def policy_by_batch(report: Report, like: Cell) -> dict[int, int]:
    """The best fixed k of a draft at each batch size that was measured, in the judged domain; 0 where none pays."""
    best: dict[int, Cell] = {}
    for cell in arms_of(report, like):
        if (cell["domain"], cell["group"]) == (like["domain"], like["group"]):
            known = best.get(cell["batch"])
            if known is None or _objective(cell) > _objective(known):
                best[cell["batch"]] = cell
    return {batch: cell["k"] if _objective(cell) >= 1 else 0 for batch, cell in sorted(best.items())}


def arms_of(report: Report, like: Cell) -> list[Cell]:
    """Cells with figures of a draft's arms with a fixed k, at the settings of a chosen one."""
    return [
        c
        for c in report["cells"]
        if c["draft"] == like["draft"] and c["status"] == "ok" and is_chain(c) and same_settings(c, like)
        if c["latency_speedup"]
    ]


def lookup_value(report: Report) -> tuple[int, float] | None:
    """k and speedup of the best prompt look-up, a rival that needs no draft."""
    found = [c for c in report["choice"]["ranking"] if c["draft"] == LOOKUP]
    best = max(found, key=lambda c: c["value"], default=None)
    return None if best is None else (best["k"], best["value"])


def summary(report: Report, cell: Cell) -> dict[str, Any]:
    """What draft.json keeps of the measurement: figures with the device and the load they hold for."""
    speed = cell["latency_speedup"]
    return {
        "device": report["device"],
        "machine": report["provenance"].get("cpu"),
        "dtype": cell["dtype"],
        "temperature": cell["temperature"],
        "batch": cell["batch"],
        "context_tok": cell["context_tok"],
        "new_tok": cell["new_tok"],
        "num_requests": cell["num_requests"],
        "domain": cell["domain"],
        "k": cell["k"],
        "alpha": cell["alpha"],
        "tau": cell["tau"],
        "accept_by_position": cell["accept_by_position"],
        "speedup": {key: speed[key] for key in ("p5", "p50", "p95", "gmean", "ci_low", "ci_high")},
        "slower_frac": cell["slower_frac"],
        "objective": report["choice"]["objective"],
        "verdict": verdict_on(report, cell)["status"],
        "time": report["provenance"].get("time"),
    }


def _objective(cell: Cell) -> float:
    return float(cell["latency_speedup"]["objective"])


def _entry(cell: Cell, report: Report) -> dict[str, Any]:
    speed = cell["latency_speedup"]
    low = speed["objective_low"]
    return {
        "k": cell["k"],
        "pays": pays(cell, Settings.of(report["settings"])),
        "speedup": _objective(cell),
        "low": low,
        "high": speed["objective_high"],
        "alpha": cell["alpha"],
        "tau": cell["tau"],
        "num_requests": cell["num_requests"],
    }
