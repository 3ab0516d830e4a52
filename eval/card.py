"""The model card of a released draft: every figure comes from report.json. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCardData

from distill.readers import HUB_ID
from eval import servers, show
from eval.cells import Cell
from eval.gate import arms_of, lookup_value, policy_by_batch, verdict_on
from eval.records import ALL
from eval.show import safe, table
from eval.views import Report, domain_name, share_bars

# A path in a command: its place on the machine says nothing to a reader.
PLACE = re.compile(r"(?<![\w.])/(?:[^\s'\"=/]+/)+")


@dataclass(frozen=True)
class Facts:
    """What a card says beside the report.

    Attributes:
        name: of the release.
        draft: its hub id or folder, for commands.
        target, base_model: the target's name in the recipe, and its hub id where there is one.
        target_note: what must be said of the target's weights.
        licence: header keys, of `Licence.metadata`.
        licence_source: where it was read.
        meta: the completed draft.json.
        train_command, train_git: of the run's provenance.
        gguf: file names of the draft's and the target's GGUF files, by kind ("f16"); empty without.
        gate_skipped: why the gate failed, when it was overridden.
        figure: name of the copied bottleneck chart, or "".
    """

    name: str
    draft: str
    target: str
    base_model: str | None
    target_note: str
    licence: Mapping[str, Any]
    licence_source: str
    meta: Mapping[str, Any]
    train_command: str
    train_git: Mapping[str, Any] | None
    gguf: Mapping[str, Sequence[str]]
    gate_skipped: str
    figure: str


def render_card(report: Report, cell: Cell, policy: Mapping[str, Mapping[str, Any]], facts: Facts) -> str:
    """README.md of a release.

    Args:
        report: of `gate.read_report`.
        cell: of `gate.chosen_cell`.
        policy: of `gate.policy_by_domain`.
        facts: the rest.

    Returns:
        header and text; ends in a newline.
    """
    # The card is about what is shipped, also where the report judged an arm that servers can not run.
    report = {**report, "verdict": verdict_on(report, cell)}
    lines = ["---", _header(facts), "---", "", f"# {safe(facts.name)}", ""]
    lines += [
        f"A draft model for speculative decoding with **{safe(facts.base_model or facts.target)}**. It proposes tokens "
        "that the target verifies: alone it is a poor language model, and the target's output does not change.",
        "",
    ]
    if facts.gate_skipped:
        lines += [f"> **Released against the verdict** (`--no-gate`): {safe(facts.gate_skipped, 500)}.", ""]
    lines += [f"> {safe(report['verdict']['headline'], 400)}", "", f"Measured on {_load(report, cell)}.", ""]
    lines += ["## What it is for", "", *_purpose(report, cell, facts)]
    lines += ["## Acceptance by domain and position", "", *_acceptance(report, cell)]
    lines += ["## Speedup by context and batch", "", *_speedups(report, cell)]
    lines += ["## Where the time goes", "", *_shares(report, facts)]
    lines += ["## When not to use it", "", *_limits(report, cell, policy, facts)]
    lines += ["## Serve it", "", *_serving(report, cell, policy, facts)]
    lines += ["## Reproduce", "", *_reproduce(report, facts)]
    return "\n".join(lines).rstrip("\n") + "\n"


def without_places(text: str) -> str:
    """A command with the folders cut off its absolute paths."""
    return PLACE.sub("", text)


def _header(facts: Facts) -> str:
    data = ModelCardData(
        **facts.licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model"],
        base_model=facts.base_model if facts.base_model and HUB_ID.fullmatch(facts.base_model) else None,
    )
    return str(data.to_yaml()).strip()


def _load(report: Report, cell: Cell) -> str:
    device = report["device"] if isinstance(report["device"], str) else ", ".join(map(str, report["device"]))
    machine = report["provenance"].get("cpu")
    where = f"{device} ({machine})" if machine and device == "cpu" else device
    threads = report["settings"].get("num_threads")
    threads = f", {threads} threads" if threads and device == "cpu" else ""
    temperature = ", ".join(f"{value:g}" for value in cell["temperature"])
    return (
        f"{safe(where)}{threads}, {safe(cell['dtype'])}, temperature {temperature}, batch {cell['batch']}, "
        f"{cell['num_requests']} requests of {safe(domain_name(cell['domain']))}, context "
        f"{cell['context_tok']['p50']:,.0f} tokens (at most {cell['context_tok']['max']:,}), "
        f"{cell['new_tok']['p50']:,.0f} new tokens"
    )


def _purpose(report: Report, cell: Cell, facts: Facts) -> list[str]:
    meta = facts.meta
    entry = next(d for d in report["drafts"] if d["name"] == cell["draft"])
    traffic, target = meta["traffic"], meta["target"]
    stored, read = show.compact(entry["stored_params"]), show.compact(entry["read_params"])
    parts = show.percent(entry["stored_frac"]), show.percent(entry["read_frac"])
    used, rows = meta["rows"]["used"], meta["rows"]["stored"]
    factors = "; its low-rank factors lie in low_rank_head/" if meta["head"]["kind"] == "low_rank" else ""
    answers = (traffic["answers_sha256"] or "not kept")[:16]
    files = f"{safe(', '.join(traffic['train']))}; the target's answers: `{answers}`"
    said = {
        "target": f"{safe(facts.base_model or facts.target)}, sha256 `{target['sha256'][:16]}`{facts.target_note}",
        "domain": safe(traffic["domain"]),
        "trained on": files,
        "parameters": f"{stored} stored ({parts[0]} of the target), {read} read a token ({parts[1]})",
        "shape": f"{entry['layers']} layers, hidden size {entry['hidden_size']}",
        "head": f"{used:,} of {rows:,} rows in use where measured{factors}",
        "draft temperature": _temperature(entry, meta),
        "licence": f"{safe(facts.licence.get('license_name', facts.licence['license']))} ({facts.licence_source})",
    }
    return table(["", ""], said.items())


def _temperature(entry: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    value = entry.get("draft_temperature")
    text = "as the target's" if value is None else f"{value:g} where measured"
    fitted = meta.get("temperature")
    return text + (f"; fitted: {fitted['draft']:g} for a target at {fitted['target']:g}" if fitted else "")


def _acceptance(report: Report, cell: Cell) -> list[str]:
    """For each domain the chosen k, and the longest k, which shows the most positions."""
    mine = [c for c in arms_of(report, cell) if (c["batch"], c["group"]) == (cell["batch"], cell["group"])]
    longest = max(c["k"] for c in mine)
    rows = []
    for c in sorted(mine, key=lambda c: (c["domain"] == ALL, c["domain"], c["k"])):
        if c["k"] in (cell["k"], longest):
            kept = [f"{p['A']:.2f}" for p in c["accept_by_position"]]
            rows.append(
                [safe(domain_name(c["domain"])), str(c["k"]), str(c["num_requests"]), show.number(c["alpha"]),
                 show.number(c["tau"]), *kept, *[""] * (longest - len(kept))]
            )  # fmt: skip
    head = ["domain", "k", "requests", "alpha", "tau", *(f"first {j}" for j in range(1, longest + 1))]
    said = (
        "alpha: accepted over proposed tokens. tau: tokens a cycle, the target's own included. first j: share of "
        "cycles whose first j proposals were all accepted."
    )
    return [said, "", *table(head, rows)]


def _speedups(report: Report, cell: Cell) -> list[str]:
    """The chosen k at every load, and the other k at the chosen load."""
    rows = []
    for c in sorted(arms_of(report, cell), key=_by_load):
        same = (c["domain"], c["group"], c["batch"]) == (cell["domain"], cell["group"], cell["batch"])
        if c["k"] != cell["k"] and not same:
            continue
        s = c["latency_speedup"]
        rows.append(
            (
                safe(domain_name(c["domain"])), f"{safe(c['group'])}, {c['context_tok']['p50']:,.0f}", str(c["batch"]),
                str(c["k"]), str(c["num_requests"]), show.speed(s["p50"]), show.interval(s["ci_low"], s["ci_high"]),
                show.speed(s["p5"]), show.percent(c["slower_frac"]), show.speed(c["throughput_speedup"]),
            )
        )  # fmt: skip
    head = ["domain", "context tokens", "batch", "k", "requests", "speedup p50", "95% interval", "p5", "slower",
            "throughput"]  # fmt: skip
    said = "End to end with both prefills, against the same engine without a draft, paired by request."
    return [said, "", *table(head, rows)]


def _by_load(cell: Cell) -> tuple[Any, ...]:
    return (cell["domain"] == ALL, cell["domain"], cell["batch"], cell["group"] == ALL, cell["group"], cell["k"])


def _shares(report: Report, facts: Facts) -> list[str]:
    names = ("draft", "verify", "sampling", "host", "prefix_kv", "waste")
    bars = share_bars(report)
    if not bars:
        return ["No run was timed by phase.", ""]
    rows = [
        (safe(b["label"]), show.ms(b["total_ms_per_tok"]), *(show.percent(b[f"{name}_share"]) for name in names))
        for b in bars
    ]
    chart = [f"![decode time by phase]({facts.figure})", ""] if facts.figure else []
    head = ["arm", "decode ms a token", "draft", "verify", "sampling", "host", "prefix KV", "waste"]
    return [*chart, *table(head, rows)]


def _limits(report: Report, cell: Cell, policy: Mapping[str, Mapping[str, Any]], facts: Facts) -> list[str]:
    said = [f"The verdict is **{safe(report['verdict']['status'])}**."]
    for r in report["verdict"]["reasons"]:
        if r["decides"] and not r["passed"]:
            found, wanted = show.figure(r["figure"], r["unit"]), show.figure(r["threshold"], r["unit"])
            said.append(
                f"{safe(r['rule'])}: {found}, wanted {'at least' if r['passes'] == '>=' else 'at most'} {wanted}."
            )
    for domain, entry in policy.items():
        if not entry["pays"]:
            said.append(
                f"Not on {safe(domain_name(domain))}: its best k = {entry['k']} gives {show.speed(entry['speedup'])} "
                f"({show.interval(entry['low'], entry['high'])})."
            )
    slow = [c for c in arms_of(report, cell) if c["latency_speedup"]["objective"] < 1]
    for c in sorted(slow, key=_by_load)[:12]:
        said.append(
            f"Slower than no speculation at k = {c['k']} on {safe(domain_name(c['domain']))}, {safe(c['group'])} "
            f"context, batch {c['batch']}: {show.speed(c['latency_speedup']['objective'])}."
        )
    if (rival := lookup_value(report)) is not None:
        said.append(
            f"Prompt look-up, which needs no draft, gave {show.speed(rival[1])} at k = {rival[0]}: try it first."
        )
    if cell.get("rule", "token") != "token":
        said.append(
            f"The figures are those of the {safe(cell['rule'])} rule. Servers accept token by token: they accept less."
        )
    if cell.get("draft_temperature") is not None:
        said.append(f"The figures are those of the draft at temperature {cell['draft_temperature']:g}: serve it so.")
    batches = sorted({c["batch"] for c in report["cells"]})
    said.append(f"Batch sizes other than {', '.join(map(str, batches))} and other devices were not measured.")
    used, stored = facts.meta["rows"]["used"], facts.meta["rows"]["stored"]
    if used < stored:
        said.append(
            f"The figures use a shortlist of {used:,} head rows. Servers read all {stored:,}: their draft step costs "
            "more, and their acceptance can differ."
        )
    return [*(f"- {line}" for line in said), ""]


def _serving(report: Report, cell: Cell, policy: Mapping[str, Mapping[str, Any]], facts: Facts) -> list[str]:
    lines = [f"k = {cell['k']} is the measured choice for {safe(domain_name(cell['domain']))}; traffic of one domain:"]
    rows = [
        (safe(domain_name(d)), str(p["k"]), show.speed(p["speedup"]), "yes" if p["pays"] else "no, serve without")
        for d, p in policy.items()
    ]
    lines += ["", *table(["domain", "best k", "speedup", "pays"], rows)]
    local = facts.draft.startswith("./")
    gguf: tuple[str, str] | None = None
    if "draft" in facts.gguf:
        place = f"{facts.draft}/" if local else ""
        other = place + facts.gguf["target"][0] if "target" in facts.gguf else "TARGET.gguf"
        gguf = (other, place + facts.gguf["draft"][0])
    lines += ["Paths are seen from the folder that holds this one.", ""] if local else []
    target, temperature = facts.base_model or facts.target, max(cell["temperature"])
    for one in servers.settings(target, facts.draft, cell["k"], temperature, policy_by_batch(report, cell), gguf):
        lines += [f"### {one.server}", "", f"```{one.language}", one.text, "```", ""]
        lines += [one.note, ""] if one.note else []
    if gguf:
        copied = "" if local else "The GGUF files are seen from a copy of this folder. "
        lines += [f"{copied}They were read back and compared with the checkpoints: {_agreement(facts)}.", ""]
    return lines


def _agreement(facts: Facts) -> str:
    """How far each GGUF file chooses the checkpoint's greedy tokens."""
    files = [f for name in ("draft", "target") for f in facts.meta["gguf"].get(name, ())]
    return ", ".join(
        f"{f['path'].rsplit('/', 1)[-1]} chooses {show.percent(f['greedy_agreement'])} of {f['num_tok']} greedy tokens"
        for f in files
    )


def _reproduce(report: Report, facts: Facts) -> list[str]:
    git = facts.train_git or {}
    measured = report["provenance"]
    rows = [
        ("train", f"`{without_places(facts.train_command)}`"),
        ("commit", f"`{git.get('commit')}`{' with changes' if git.get('dirty') else ''}"),
        ("measure", f"`{without_places(str(measured.get('command', 'not recorded')))}`"),
        ("measured", safe(measured.get("time", "not recorded"))),
        ("versions", safe(", ".join(f"{k} {v}" for k, v in (measured.get("versions") or {}).items() if v), 400)),
    ]
    return table(["", ""], [(key, value.replace("|", "\\|")) for key, value in rows])
