"""python -m scripts.side_ours JOB: our side of scripts.compare_training, alone in its process."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from distill.draft import low_rank_factors
from distill.fit import fit
from distill.models import load_model
from distill.module import DraftModule
from distill.recipe import Recipe, load_recipe
from distill.runs import Run, Stop
from distill.shape import find_target
from distill.shortlist import shortlist_of
from distill.teacher import ResponseDataset
from distill.tokens import eos_ids
from distill.validation import Served, Validation
from engine.costs import Costs
from scripts.ablate import Meter

PROBE_STEPS, WARM_STEPS = 8, 3
# The trainer keeps the draft with the best predicted speedup; it is asked once, at the end, so any costs will do.
SOME_COSTS = Costs(T_ms=1.0, V_ms={0: 1.0, 1: 1.0}, t_ms=0.1)


def peak_bytes() -> int:
    """Most resident memory of this process since it began; rusage would count what its parent had when it forked."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def train(job: dict[str, Any], recipe: Recipe, steps: int) -> tuple[list[dict[str, Any]], float, DraftModule]:
    """Trains the job's student for so many steps; the rows of train.jsonl, CPU seconds, the module."""
    stage = recipe.distill.model_copy(
        update={
            "max_steps": steps,
            "warmup_steps": min(recipe.distill.warmup_steps, steps // 5),
            "validate_every": steps,
            "checkpoint_every": steps,
        }
    )
    recipe = recipe.model_copy(update={"distill": stage})
    target = find_target(recipe)
    model = load_model(target.folder, recipe.target.dtype)
    eos = eos_ids(target.config, model.generation_config, target.tokenizer)
    softcap = getattr(target.config, "final_logit_softcapping", None)
    teacher = model.get_output_embeddings().weight.detach().clone()
    live = model if stage.teacher == "live" else None
    del model
    answers = ResponseDataset(Path(job["answers"]), stage.max_length, topk=stage.teacher == "topk")
    draft = load_model(job["student"], "float32")
    rank = recipe.draft.head.rank
    factors = None if rank is None else low_rank_factors(draft.get_output_embeddings().weight, rank)
    shortlist = shortlist_of(recipe, target.config, answers.rows, eos)
    module = DraftModule(draft, teacher, stage, recipe.seed, shortlist, factors, softcap, live)
    held_out = ResponseDataset(Path(job["heldout"]), stage.max_length)
    validation = Validation(held_out, Served(SOME_COSTS, (1,)), module.softcaps, stage.tokens_per_step, stage.chunk_tok)
    run = Run(Path(job["folder"]) / "run")
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir()
    meter = Meter()
    fit(recipe, run, module, answers, validation, Stop(), meter)
    rows = [json.loads(line) for line in (run.folder / "train.jsonl").read_text().splitlines()]
    shutil.rmtree(run.folder)
    return [row for row in rows if "loss" in row], sum(meter.cpu_s), module


def main() -> None:
    """Finds the pace with a few steps, trains for the job's minutes, and writes the draft and what it took."""
    job = json.loads(Path(sys.argv[1]).read_text())
    recipe = load_recipe(job["recipe"], job["overrides"])
    torch.manual_seed(recipe.seed)
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    rows = train(job, recipe, PROBE_STEPS)[0]  # its module must not outlive it
    pace_ms = statistics.median(row["step_ms"] for row in rows[WARM_STEPS:])
    rows, cpu_s, module = train(job, recipe, max(1, int(60e3 * job["minutes"] / pace_ms)))
    module.export()[0].save_pretrained(Path(job["folder"]) / "ours")
    found = {
        "name": "this trainer",
        "steps": len(rows),
        "seconds": sum(row["step_ms"] for row in rows) / 1e3,
        "cpu_s": cpu_s,
        "supervised_tok": sum(int(row["num_tok"]) for row in rows),
        "loss": rows[-1]["loss"],
        "peak_bytes": peak_bytes(),
    }
    (Path(job["folder"]) / "ours.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
