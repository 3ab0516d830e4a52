"""python -m scripts.compare_training RECIPE [key=value ...] --trl-python PYTHON --minutes M --out DIR: beside TRL.

TRL's GKD trainer and this project's train the same student (the recipe's draft before its first step), on the same
target's answers as the same token ids, for the same minutes of steps, one after the other, each in a process of its
own. Then both are scored alike on held-out traffic: greedy answers, and answers sampled at T = 1, with every row of the
head. The table gives steps, supervised tokens per second (also per CPU second, for a machine that does other work),
peak resident memory and acceptance.

PYTHON is an interpreter that has trl (this project does not need it), for example of
`python -m venv trl && trl/bin/pip install torch trl`. What the sides do not share: TRL runs the target at every step,
this trainer reads the states that were kept when the answers were written (distill.teacher=live runs it too), and it
trains the rows of the recipe's head alone where that is a shortlist (draft.head={kind: full} trains all).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.acceptance import acceptance, summarise_target
from distill.draft import make_draft
from distill.models import load_model
from distill.race import check_all
from distill.recipe import Recipe, load_recipe
from distill.shape import find_target
from distill.teacher import ResponseDataset
from distill.tokens import eos_ids
from distill.traffic import load_prompts
from distill.validation import PLAIN
from eval.entry import guarded
from scripts.ablate_table import alpha, difference, markdown
from scripts.judged import SAMPLED, answer, judge

SIDE = Path(__file__).with_name("side_trl.py")
PROBE = "import trl; from trl.experimental.gkd import GKDTrainer; print(trl.__version__)"
OLDEST = (1, 16)
COLUMNS = (
    "trainer",
    "steps",
    "supervised tok",
    "supervised tok/s",
    "per CPU s",
    "peak GB",
    "greedy alpha",
    "sampled alpha",
)


class CompareError(ValueError):
    """A comparison that cannot be made."""


def check_trl(python: str) -> str:
    """The version of trl in that interpreter.

    Raises:
        CompareError: no such interpreter, no GKD trainer in it, or one older than OLDEST, whose loss left out answer
            tokens of rows with a short prompt.
    """
    try:
        asked = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, env=_clean())
    except OSError as error:
        raise CompareError(f"--trl-python {python}: {error.strerror}") from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise CompareError(
            f"--trl-python {python}: it cannot import trl.experimental.gkd ({last}); make an environment that can, "
            "`python -m venv trl && trl/bin/pip install torch trl`, and give its bin/python"
        )
    version = asked.stdout.strip()
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise CompareError(f"--trl-python {python}: trl {version}; at least {'.'.join(map(str, OLDEST))} is needed")
    return version


def _clean() -> dict[str, str]:
    """The environment without this project's modules, and offline."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def hand_over(args: argparse.Namespace, recipe: Recipe) -> tuple[dict[str, Any], ResponseDataset, Tensor]:
    """Writes what both sides read: the student, the answers, job.json; also the held-out answers and target's head."""
    target = find_target(recipe)
    check_all(recipe, target)
    model = load_model(target.folder, recipe.target.dtype)
    eos = tuple(eos_ids(target.config, model.generation_config, target.tokenizer))
    answers = args.answers or args.out / "answers"
    if args.answers is None:
        prompts = load_prompts(recipe.traffic, "train", recipe.seed)
        answer(answers, prompts, recipe, target, model, eos)
    judge(args.out / "heldout", recipe, target, model, eos)
    dataset = ResponseDataset(answers, recipe.distill.max_length)
    with (args.out / "rows.jsonl").open("w") as file:
        for row, kept in zip(dataset.rows, dataset.num_supervised):
            file.write(json.dumps({"prompt": row.prompt_ids, "answer": row.answer_ids[:kept]}) + "\n")
    told = args.out / "student.json"
    made_of = json.dumps([recipe.target.model, recipe.seed, recipe.draft.model_dump(mode="json")])
    if (args.out / "student").exists() and (not told.exists() or told.read_text() != made_of):
        raise CompareError(f"{args.out}/student may be of another target, seed or draft: stage; give another --out")
    if not (args.out / "student").exists():
        told.write_text(made_of)
        made = make_draft(recipe, target, model, dataset)
        made.model.save_pretrained(args.out / "student")
    stage = recipe.distill
    job = {
        "folder": str(args.out),
        "target": target.folder,
        "target_dtype": recipe.target.dtype,
        "student": str(args.out / "student"),
        "rows": str(args.out / "rows.jsonl"),
        "answers": str(answers),
        "heldout": str(args.out / "heldout"),
        "minutes": args.minutes,
        "sequences": args.sequences,
        "bf16": recipe.trainer.precision == "bf16-mixed",
        "seed": recipe.seed,
        "recipe": args.recipe,
        "overrides": args.overrides,
    }
    names = ("lr", "min_lr_frac", "warmup_steps", "betas", "weight_decay", "grad_clip")
    job |= {name: getattr(stage, name) for name in names}
    (args.out / "job.json").write_text(json.dumps(job, indent=2))
    judged = ResponseDataset(args.out / "heldout", stage.max_length)
    return job, judged, model.get_output_embeddings().weight.detach().clone()


@torch.no_grad()
def score(folder: Path, judged: ResponseDataset, head: Tensor, softcap: float | None) -> dict[str, list[float]]:
    """Acceptance of a draft folder with every row of its head, in the layout of `scripts.ablate_table`."""
    draft = load_model(str(folder), "float32")
    weight = draft.get_output_embeddings().weight.to(head.dtype)  # as it is served
    cap = getattr(draft.config, "final_logit_softcapping", None)
    found: dict[str, list[float]] = {}
    for at, row in enumerate(judged.rows):
        batch = judged.collate([at])
        states = draft.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        states = states[0, batch.positions[:, 1]]
        summary = summarise_target(batch.hidden_target, head, PLAIN, softcap)
        rows = min(len(weight), len(head))
        given = summary, None, PLAIN, PLAIN, (softcap, cap)
        got = acceptance(states, weight[:rows], batch.hidden_target, head[:rows], *given)
        match, overlap = float(got.match.float().mean()), float(got.alpha.mean())
        found[row.id] = [float(len(batch.labels)), match, match, overlap, overlap]
    return found


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs both sides and scores them.

    Raises:
        CompareError: a side failed; its own words are on stderr.
    """
    version = check_trl(args.trl_python) if args.trl_python else None
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.absolute()
    recipe = load_recipe(args.recipe, args.overrides)
    job, judged, head = hand_over(args, recipe)
    commands = {"ours": ([sys.executable, "-m", "scripts.side_ours"], dict(os.environ))}
    if version:
        commands["trl"] = ([args.trl_python, str(SIDE)], _clean())
    softcap = getattr(find_target(recipe).config, "final_logit_softcapping", None)
    sides: dict[str, dict[str, Any]] = {}
    for name, (command, environment) in commands.items():
        sys.stderr.write(f"{name}: training for {args.minutes:g} minutes\n")
        # What a side says goes to stderr: stdout is the table's.
        if code := subprocess.run([*command, str(args.out / "job.json")], env=environment, stdout=2).returncode:
            raise CompareError(f"{' '.join(command)} ended with code {code}; what it said is above")
        sides[name] = json.loads((args.out / f"{name}.json").read_text())
    for name, side in {**sides, "student": {"name": "before training"}}.items():
        sides[name] = side | {"seed": recipe.seed, "requests": score(args.out / name, judged, head, softcap)}
    return {"made": time.strftime("%Y-%m-%d"), "job": job, "sides": sides}


def table(found: dict[str, Any]) -> str:
    """Markdown: a line a side, then ours against TRL's."""
    sides = found["sides"]
    ids = list(sides["student"]["requests"])
    parts = [[name for name in ids if not name.endswith(SAMPLED)], [name for name in ids if name.endswith(SAMPLED)]]
    rows = []
    for side in sides.values():
        took = ["", "", "", "", ""]
        if "seconds" in side:
            num = side["supervised_tok"]
            took = [str(side["steps"]), f"{num:,}", *(f"{num / side[key]:,.0f}" for key in ("seconds", "cpu_s"))]
            took.append(f"{side['peak_bytes'] / 1e9:.2f}")
        rows.append([side["name"], *took, *(f"{alpha([side], part, col):.3f}" for part, col in zip(parts, (1, 3)))])
    if "trl" in sides:
        ours, theirs = sides["ours"], sides["trl"]
        more = ours["supervised_tok"] / theirs["supervised_tok"]
        paces = [f"{more * theirs[key] / ours[key]:.1f}x" for key in ("seconds", "cpu_s")]
        gaps = []
        for part, column in zip(parts, (1, 3)):
            gap, ends = difference([ours], [theirs], part, column)
            gaps.append(f"{gap:+.3f}" + (f" ({ends[0]:+.3f} to {ends[1]:+.3f})" if ends else ""))
        memory = f"{ours['peak_bytes'] / theirs['peak_bytes']:.2f}x"
        rows.append(["ours against TRL", "", "", *paces, memory, *gaps])
    return markdown(COLUMNS, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, compares, writes comparison.json and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--trl-python", help="interpreter with trl; without it our side alone is run")
    parser.add_argument("--minutes", type=float, required=True, help="of steps, each side")
    parser.add_argument("--out", type=Path, required=True, help="folder for the hand-over and comparison.json")
    parser.add_argument(
        "--answers", type=Path, help="a run's responses/, written with this recipe; default: write them"
    )
    parser.add_argument("--sequences", type=int, default=16, help="answers a step of TRL's")
    args = parser.parse_intermixed_args(argv)
    if args.minutes <= 0 or args.sequences < 1:
        parser.error(f"--minutes {args.minutes} must be above 0, --sequences {args.sequences} at least 1")

    def work() -> int:
        found = compare(args)
        (args.out / "comparison.json").write_text(json.dumps(found, indent=2) + "\n")
        sys.stdout.write(table(found))
        return 0

    return guarded(work, "no comparison was written")


if __name__ == "__main__":
    sys.exit(main())
