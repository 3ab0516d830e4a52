"""serving.json for people: a table in the terminal and serving.md. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from eval import show
from eval.notes import prompt_notes
from eval.show import safe, table

HEAD = (
    "load", "domain", "arm", "answered", "TTFT ms p50/p95", "TPOT ms p50/p95", "E2E ms p50/p95", "tok/s", "speedup",
    "alpha", "tau",
)  # fmt: skip


def served_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells as texts, the engine's own figures below the server's."""
    rows = []
    for cell in result["cells"]:
        acceptance = cell["acceptance"] or {}
        speedup = cell.get("speedup")
        answered = f"{cell['num_requests']} of {cell['num_requests'] + cell['num_errors']}"
        rows.append(
            (
                cell["load"], cell["domain"], cell["arm"], answered,
                *(_both(cell[name]) for name in ("ttft_ms", "tpot_ms", "e2e_ms")),
                show.number(cell["throughput_tok_s"], 1), show.speed(speedup["gmean"] if speedup else None),
                show.number(acceptance.get("alpha"), 3), show.number(acceptance.get("tau")),
            )
        )  # fmt: skip
        if engine := cell.get("engine"):
            rows.append(
                (
                    "", "", f"engine B={engine['batch']}", "",
                    *(_both(engine[name]) for name in ("ttft_ms", "tpot_ms", "e2e_ms")),
                    show.number(engine["throughput_tok_s"], 1), show.speed(engine["speedup"]),
                    show.number(engine["alpha"], 3), show.number(engine["tau"]),
                )
            )  # fmt: skip
            if engine["predicted_speedup"] is not None:
                blank = ("",) * 5
                rows.append(("", "", "predicted", *blank, show.speed(engine["predicted_speedup"]), "", ""))
    return rows


def served_table(result: Mapping[str, Any]) -> Table:
    """For the terminal."""
    shown = Table(title=f"{result['recipe']} against a server", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for number, name in enumerate(HEAD):
        shown.add_column(name, no_wrap=number < 3)
    for row in served_rows(result):
        shown.add_row(*map(Text, row))
    return shown


def render_served(result: Mapping[str, Any]) -> str:
    """serving.md: servers, figures, failures, and what the figures mean."""
    lines = [f"# {safe(result['recipe'])} against a server", ""]
    for arm, server in result["servers"].items():
        lines.append(f"- {safe(arm)}: {safe(server['url'])}, model {safe(server['model'])}")
    if result["report"]:
        lines.append(f"- engine: {safe(result['report'], 200)}")
    lines += ["", *table(HEAD, [tuple(map(safe, row)) for row in served_rows(result)])]
    lines += [f"- {note}" for note in notes(result)]
    lines += [f"- {safe(note, 600)}" for note in prompt_notes(result["settings"])]
    failed = [(c, reason, num) for c in result["cells"] for reason, num in c["errors"].items() if c["domain"] != "all"]
    if failed:
        lines += ["", "## Failed requests", ""]
        lines += table(
            ["load", "domain", "arm", "requests", "reason"],
            [(safe(c["load"]), safe(c["domain"]), c["arm"], str(num), safe(text, 300)) for c, text, num in failed],
        )
    return "\n".join(lines) + "\n"


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader has to know to read the figures right."""
    cells = result["cells"]
    said = [
        "Times are the client's: TTFT to the first piece of text, TPOT between the first and the last piece, a token. "
        "An open load counts from the arrival. Rows 'engine' and 'predicted' are those of the report.",
        "Speedup: geometric mean over requests of baseline E2E / server E2E, per token where lengths differ; failed "
        "requests are left out of all figures but the errors.",
    ]
    sources = sorted({c["acceptance"]["source"] for c in cells if c["acceptance"]})
    if sources:
        said.append(
            f"alpha and tau are from {' and '.join(sources)}, in the report's definitions (tau with the bonus token). "
            "Servers also count the pass that the end of an answer cuts, the engine does not; their counters hold the "
            "requests of every client of the server."
        )
    if any(c["acceptance"] is None for c in cells if c["arm"] != "baseline"):
        said.append("n/a: the server tells nothing about acceptance.")
    if other := sum(c["num_other_prompt"] for c in cells if c["domain"] != "all"):
        said.append(
            f"{other} answers are to prompts whose tokens are not as many as by the target's own chat template: the "
            "server reads other prompts than the engine does, so their acceptances can not be compared."
        )
    if any(c["arm"] != "baseline" for c in cells) and result["settings"]["temperature"] > 0:
        said.append(
            "Sampled: what a server does of itself beside temperature and top_p (llama-server: top_k 40, min_p 0.05; "
            "vLLM: the target's generation_config.json) the engine does not do; --body names it, such as "
            '`{"top_k": 0, "min_p": 0}`.'
        )
    same = [c["same_text_frac"] for c in cells if c.get("same_text_frac") is not None]
    if same:
        said.append(f"Share of requests whose text equals the baseline's: {show.percent(min(same))} at the least.")
    if ties := result.get("ties"):
        said.append(_ties(ties))
    if any(c["cached_tok"] for c in cells):
        said.append(
            "The server had read part of some prompts before (prefix cache): TTFT at the second and later loads is too "
            "good; start it without the cache to compare TTFT."
        )
    return said


def _ties(ties: Mapping[str, Any]) -> str:
    """Texts that differ, and what the target thinks of where they part."""
    if not ties["num_pairs"]:
        return "No prompt was answered by both servers, so no text was compared."
    if not ties["num_differ"]:
        return f"No text of {ties['num_pairs']} differs from the baseline's."
    differ = f"{ties['num_differ']} texts of {ties['num_pairs']} differ from the baseline's"
    if not (judged := len(ties["partings"])):
        return f"{differ} by their length alone."
    return (
        f"{differ}. Where {judged} of them part, the target's logits (float32) of the two tokens are at most "
        f"{ties['margin_max']:.3f} apart, and its largest logit is at most {ties['below_max']:.3f} above them; its two "
        f"best tokens are usually {ties['typical']:.1f} apart (median)."
    )


def _both(value: Mapping[str, float] | None) -> str:
    return show.NA if not value else f"{show.ms(value['p50'])}/{show.ms(value['p95'])}"
