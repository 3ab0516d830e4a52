"""draft.rounds: prune, distil, prune again. For a target much larger than its draft, in steps that training can mend.

Each round is a run of its own in rounds/NUMBER, with its own schedule over its share of the steps, on the same answers:
it is cut from what the round before left, and its best weights are what the next one, at the end the draft itself, is
cut from. What is measured for cutting (activations, influence) is so measured on a model that has been trained since.
The loss is against the target in every round. A round that is finished has its draft/ folder, in float32, and no
checkpoints; a resumed run goes on in the first one that has none.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

from transformers import PreTrainedModel

from distill.checkpoint import read_draft, verify_draft, write_draft
from distill.draft import Source
from distill.fit import fit
from distill.models import load_model
from distill.race import Answers
from distill.recipe import Recipe, rounds_of
from distill.runs import Run, Stop
from distill.shape import Target
from distill.stages import prepare, trained_on
from distill.track import NullTracker

log = logging.getLogger(__name__)


def run_rounds(
    recipe: Recipe,
    run: Run,
    target: Target,
    model: PreTrainedModel,
    answers: Answers,
    stop: Stop,
    tokenizer_class: str | None = None,
) -> tuple[Recipe, Source | None]:
    """Takes every round, or goes on where that was interrupted.

    Args:
        recipe: its draft may have rounds.
        run: gets rounds/.
        target, model: the target.
        answers: of the target.
        stop: signals.
        tokenizer_class: class named by the target's own files.

    Returns:
        The recipe of the draft itself, and what it is cut from (None: the target).

    Raises:
        Interrupted: a signal arrived; finished rounds and the checkpoint of the current one are kept.
    """
    *rounds, last = rounds_of(recipe)
    source = None
    for number, one in enumerate(rounds):
        own = Run(run.folder / "rounds" / str(number), run.attempt)
        if not (own.draft / "draft.json").exists():
            log.info("round %d of %d: %d steps", number + 1, len(rounds), one.distill.max_steps)
            _take(one, own, target, model, answers, stop, source, tokenizer_class)
        shutil.rmtree(own.folder / "checkpoints", ignore_errors=True)
        found = verify_draft(own.draft, target.tokenizer, target.tokenizer, target.config.vocab_size)
        source = Source(load_model(str(own.draft), "float32", str(model.device)), found.meta["round"]["layers"])
    return last, source


def round_facts(recipe: Recipe, run: Run) -> dict[str, Any]:
    """What draft.json says of the rounds; nothing where there is none."""
    folders = [run.folder / "rounds" / str(number) / "draft" for number in range(len(recipe.draft.rounds))]
    return {"rounds": [read_draft(folder).meta["round"] for folder in folders]} if folders else {}


def _take(
    recipe: Recipe,
    run: Run,
    target: Target,
    model: PreTrainedModel,
    answers: Answers,
    stop: Stop,
    source: Source | None,
    tokenizer_class: str | None,
) -> None:
    """One round, from its cut to its folder."""
    run.folder.mkdir(parents=True, exist_ok=True)
    ready = prepare(recipe, run, target, model, answers.training, answers.held_out, answers.eos, source)
    rows = trained_on(recipe.distill, answers.training)
    best = fit(recipe, run, ready.module, rows, ready.validation, stop, NullTracker(), run.newest_whole())
    stop.check()
    exported, _ = ready.module.export()
    config = exported.config
    facts = {"layers": ready.facts["layers"], "hidden_size": config.hidden_size, "steps": recipe.distill.max_steps}
    facts |= {"intermediate_size": config.intermediate_size, "num_kv_heads": config.num_key_value_heads}
    meta = {"round": facts | {"metrics": best}}
    write_draft(run.draft, exported, target.tokenizer, meta, None, None, "float32", answers.eos, tokenizer_class)
