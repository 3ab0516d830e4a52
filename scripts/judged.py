"""The answers that training comparisons are made with: written by the target, held-out ones greedy and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from distill.prompt import Prompt
from distill.recipe import Recipe, longest_prompt
from distill.responses import write_responses
from distill.shape import Target
from distill.stages import held_out
from distill.teacher import ResponseDataset

SAMPLED = "@T=1"  # ends the id of a held-out request whose answer was sampled


def answer(
    folder: Path,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    target: Target,
    model: PreTrainedModel,
    eos: Sequence[int],
) -> None:
    """Lets the target answer the prompts, or goes on where that stopped."""
    write_responses(
        folder,
        model,
        target.tokenizer,
        prompts,
        recipe.responses,
        0,
        eos,
        target.sha256,
        longest_prompt(recipe, target.positions),
        recipe.traffic.system,
    )


def judge(folder: Path, recipe: Recipe, target: Target, model: PreTrainedModel, eos: Sequence[int]) -> None:
    """Writes the held-out answers: each request once greedily and once sampled at T = 1."""
    prompts = [p for prompt in held_out(recipe, target) for p in (prompt, replace(prompt, id=prompt.id + SAMPLED))]
    served = {"source": "target", "server": (), "temperatures": (0.0, 1.0), "top_p": 1.0, "top_k": 0}
    both = recipe.model_copy(update={"responses": recipe.responses.model_copy(update=served)})
    answer(folder, prompts, both, target, model, eos)


def only(dataset: ResponseDataset, ids: frozenset[str]) -> ResponseDataset:
    """The dataset with the rows of these ids alone, in place.

    Raises:
        ValueError: there are none.
    """
    kept = [at for at, row in enumerate(dataset.rows) if row.id in ids]
    for name in ("rows", "lengths", "num_supervised"):
        values = getattr(dataset, name)
        setattr(dataset, name, [values[at] for at in kept])
    if not dataset.rows:
        raise ValueError(f"{dataset.folder}: no answer is left for an arm; look at its keep")
    return dataset
