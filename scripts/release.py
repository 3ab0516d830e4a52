"""python -m scripts.release RUN [--to DIR] [--push HUB_ID]: the folder that people ship, checked, or nothing.

RUN is a finished run folder (runs/<recipe>/<run id> or .../latest). Nothing goes over the network without --push.
Exit code 0: released; 1: the gate says no; 2: refused or bad input; 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from distill.runs import Interrupted, Stop
from eval.entry import whole
from eval.gate import (
    GateFailed,
    check_gate,
    chosen_cell,
    find_draft,
    find_report,
    find_run,
    names_of,
    policy_by_domain,
    read_report,
    summary,
)

console = Console(stderr=True, highlight=False, soft_wrap=True)
# Where a bundled target's weights come from: on the hub, and how they differ from what lies there.
BUNDLED_ON_HUB = {
    "smollm2-135m-instruct": (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        " (weights of its Q4_1 GGUF: with the hub's bfloat16 weights acceptance may differ)",
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and releases."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished run folder")
    parser.add_argument("--to", type=Path, metavar="DIR", help="the release (default: RUN/release); must not exist")
    parser.add_argument("--report", type=Path, metavar="FILE", help="report.json (default: the run's newest)")
    parser.add_argument("--licence", metavar="NAME", help="the target's licence, where its files do not say it")
    parser.add_argument(
        "--gguf",
        choices=("both", "draft", "none"),
        default="both",
        help="GGUF files: of draft and target, of the draft, none",
    )
    parser.add_argument("--no-gate", action="store_true", help="release against the verdict; the card says so")
    parser.add_argument("--push", metavar="HUB_ID", help="upload to this model repository (owner/name)")
    args = parser.parse_args(argv)
    if not args.push:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import that reads it
    try:
        with Stop().listening():
            folder = release(args)
            console.print(f"release: {folder}")
    except GateFailed as error:
        console.print(f"not released: {error}. --no-gate releases it all the same.", style="bold red", markup=False)
        return 1
    except (ValueError, OSError) as error:
        console.print(f"not released: {error}", style="bold red", markup=False)
        return 2
    except (KeyboardInterrupt, Interrupted):
        console.print("interrupted; nothing was released", style="bold red")
        return 130
    return _push(folder, args.push) if args.push else 0


def _push(folder: Path, hub_id: str) -> int:
    """Uploads a finished release; it stays where it is whatever comes of it."""
    from huggingface_hub.errors import HTTPError

    from distill.release import upload

    try:
        console.print(f"pushed: {upload(folder, hub_id)}")
    except (OSError, ValueError, HTTPError) as error:
        console.print(f"not pushed: {error}; the release stays in {folder}", style="bold red", markup=False)
        return 2
    return 0


def release(args: argparse.Namespace) -> Path:
    """Checks everything, then writes the folder whole."""
    run, recipe = find_run(args.run)
    path = find_report(run, args.report)  # what is missing is told before torch is imported

    from transformers.utils import logging

    from distill.provenance import collect
    from distill.release import (
        check_draft,
        check_reload,
        find_target,
        read_made,
        read_provenance,
        staged,
        write_checkpoint,
    )
    from distill.traffic_hashes import traffic_hashes

    logging.disable_progress_bar()
    to = args.to or run / "release"
    made = read_made(run / "draft")
    with whole(path, "report"):
        report = read_report(path)
        name = find_draft(report, made, names_of(run))["name"]
        skipped = _gate(report, name, args.no_gate)
        cell = chosen_cell(report, name)
        policy = policy_by_domain(report, cell)
        measured = summary(report, cell)

    from distill.licence import licence_of
    from distill.readers import HUB_ID
    from eval.card import Facts, render_card

    target = find_target(recipe["target"]["model"], recipe["target"]["revision"])
    licence = licence_of(target.name, target.folder, args.licence)
    draft, model = check_draft(run / "draft", target)
    if args.gguf != "none":
        _refuse_gguf(draft.folder, target.folder if args.gguf == "both" else None)
    provenance = read_provenance(run)
    remote = HUB_ID.fullmatch(target.name) and not Path(target.name).exists()
    hub, note = BUNDLED_ON_HUB.get(target.name, (target.name if remote else None, ""))
    with staged(to) as staging:
        more = {
            "target": {
                **draft.meta["target"],
                "name": Path(target.name).name if hub is None else target.name,
                "hub": hub,
            },
            "traffic": {"domain": recipe["traffic"]["domain"], **traffic_hashes(run, recipe["traffic"]["train"])},
            "policy": policy,
            "schedule": report.get("schedule", {}).get(name, []),
            "measured": measured,
            "licence": {**licence.metadata(), "source": licence.source},
            "released_with": collect(recipe["seed"])["git"],
        }
        gguf = _gguf(staging, args.gguf, target, model) if args.gguf != "none" else {}
        more["gguf"] = {key: [f | {"path": f"gguf/{f['path']}"} for f in files] for key, files in gguf.items()}
        meta = write_checkpoint(staging, draft, target, more)
        for file in licence.files:
            shutil.copyfile(file, staging / file.name)
        figure = path.parent / "figures" / "phase_shares.svg"
        if figure.is_file():
            shutil.copyfile(figure, staging / figure.name)
        facts = Facts(
            name=(args.push or f"{recipe['name']}-draft").split("/")[-1],
            draft=args.push or f"./{to.name}",
            target=Path(target.name).name,
            base_model=hub,
            target_note=note,
            licence=licence.metadata(),
            licence_source=licence.source,
            meta=meta,
            train_command=provenance["command"],
            train_git=provenance["git"],
            gguf={key: [f["path"] for f in files] for key, files in more["gguf"].items()},
            gate_skipped=skipped,
            figure=figure.name if figure.is_file() else "",
        )
        with whole(path, "report"):
            card = render_card(report, cell, policy, facts)
        (staging / "README.md").write_text(card, encoding="utf-8")
        check_reload(staging, model, target.tokenizer)
    return to


def _gate(report: dict[str, Any], name: str, override: bool) -> str:
    """ "" when the gate passes; why it failed, when that is overridden."""
    try:
        check_gate(report, name)
    except GateFailed as error:
        if not override:
            raise
        return str(error)
    return ""


def _refuse_gguf(draft: Path, target: Path | None) -> None:
    from transformers import AutoTokenizer

    from distill.gguf_file import refuse_gguf

    for folder in (draft, target):
        if folder is not None:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            refuse_gguf(config, AutoTokenizer.from_pretrained(folder))


def _gguf(staging: Path, which: str, target: Any, model: Any) -> dict[str, list[dict[str, Any]]]:
    """Writes and checks the GGUF files; what draft.json says of them."""
    from dataclasses import asdict

    from distill.gguf_file import write_and_check
    from distill.models import load_model

    (staging / "gguf").mkdir()
    models = {"draft": lambda: model}
    if which == "both":
        models["target"] = lambda: load_model(str(target.folder), "float32")
    return {
        key: [
            asdict(f) | {"path": f.path.name}
            for f in write_and_check(staging / "gguf", key, load(), target.tokenizer, target.eos)
        ]
        for key, load in models.items()
    }


if __name__ == "__main__":
    sys.exit(main())
