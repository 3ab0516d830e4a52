"""From a recipe to what training needs: the target's answers, the draft, the costs. All lies in the run folder."""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.acceptance import served_warps
from distill.adapt import add_lora
from distill.draft import Source, make_draft
from distill.files import read_object, write_json
from distill.models import load_model
from distill.module import DraftModule
from distill.prompt import Prompt
from distill.recipe import Distill, Recipe, longest_prompt
from distill.responses import write_responses
from distill.runs import Run, RunError
from distill.schema_eval import group_of
from distill.shape import Target
from distill.shortlist import by_use, coverage_line, shortlist_of
from distill.teacher import ResponseDataset
from distill.tokens import encode_prompt
from distill.traffic import load_prompts, stream_prompts
from distill.validation import Served, Validation
from engine.bench import measure_costs
from engine.costs import Costs
from engine.model import Runner

log = logging.getLogger(__name__)


def held_out(recipe: Recipe, target: Target) -> list[Prompt]:
    """Held-out prompts for validation: of each domain the last `num_validation` that the evaluation does not take.

    A checkpoint must not be chosen by the prompts that it is then measured on.
    """
    found: list[Prompt] = []
    prompts = load_prompts(recipe.traffic, "heldout", recipe.seed, recipe.eval.domains)
    taken = _evaluated(recipe, target, prompts)
    for domain in dict.fromkeys(prompt.domain for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.domain == domain]
        spare = [prompt for prompt in own if prompt.id not in taken]
        if not spare:
            log.warning(
                "%s: %d held-out prompts, all of which are evaluated (eval.num_requests = %s): the best checkpoint "
                "is chosen on prompts that it will be measured on; give more held-out prompts",
                *(domain, len(own), recipe.eval.num_requests),
            )
        found += (spare or own)[-recipe.distill.num_validation :]
    return found


def _evaluated(recipe: Recipe, target: Target, prompts: Sequence[Prompt]) -> set[str]:
    """Ids of the prompts that `eval.prompts` takes: the first of each domain and context group that fit, or are cut."""
    stage, longest = recipe.eval, recipe.traffic.max_prompt_tok
    limit = longest if target.positions is None else min(longest, target.positions - stage.max_new_tok)
    taken: set[str] = set()
    num: Counter[tuple[str, str]] = Counter()
    for prompt in prompts:
        length = len(encode_prompt(target.tokenizer, prompt.messages, recipe.traffic.system))
        if length > limit and not stage.cut_long:
            continue
        cell = prompt.domain, group_of(max(0, min(length, limit)))
        if num[cell] < stage.num_of(cell[1]):
            num[cell] += 1
            taken.add(prompt.id)
    return taken


def write_answers(recipe: Recipe, run: Run, target: Target, model: PreTrainedModel, eos: Sequence[int]) -> None:
    """Lets the target answer the training prompts and the held-out ones, or goes on where that stopped."""
    # Validation asks what is served: the target's own answers at the served temperature.
    served = recipe.responses.model_copy(
        update={"source": "target", "temperatures": (recipe.eval.temperature,), "top_p": recipe.eval.top_p}
        | {"top_k": recipe.eval.top_k}
    )
    for folder, prompts, stage in (
        (run.responses, stream_prompts(recipe.traffic, recipe.seed), recipe.responses),
        (run.validation, held_out(recipe, target), served),
    ):
        started = last = time.perf_counter()

        def progress(answered: int, asked: int, num_tok: int) -> None:
            nonlocal last
            now = time.perf_counter()
            if answered == asked or now - last >= 10:
                last = now
                log.info("answers: %d of %d, %d tokens, %.0f s", answered, asked, num_tok, now - started)  # noqa: B023

        write_responses(
            folder,
            model,
            target.tokenizer,
            prompts,
            stage,
            recipe.seed,
            eos,
            target.sha256,
            longest_prompt(recipe, target.positions),
            recipe.traffic.system,
            progress,
        )


def find_costs(
    recipe: Recipe,
    run: Run,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    shortlist: Tensor | None,
    dataset: ResponseDataset,
    factors: tuple[Tensor, Tensor] | None = None,
) -> Served:
    """What speculation costs here: from the run's plan.json, or measured now and written there.

    Args:
        recipe: eval stage: draft lengths, temperature, answer length.
        run: holds plan.json.
        target: the target.
        draft: a draft of the right shape; its weights do not matter.
        shortlist: head rows in use.
        dataset: held-out answers, for a typical prompt.
        factors: of a low-rank head.

    Returns:
        Costs and sampler for the prediction.

    Raises:
        RunError: plan.json is damaged.
    """
    if not run.plan.exists():
        prompt = int(statistics.median(len(row.prompt_ids) for row in dataset.rows))
        context = max(2, int(statistics.median(dataset.lengths)))
        log.info("measuring the costs of a cycle at a context of %d tokens", context)
        vocab = target.config.vocab_size
        small = copy.deepcopy(draft).to(target.dtype).to(target.device).eval()
        runners = (
            Runner(target, 1, context + 200, None, vocab),
            Runner(small, 1, context + 200, shortlist, vocab, factors=factors),
        )
        (costs,) = measure_costs(*runners, recipe.eval.k, [context])
        prefill = [_prefill_ms(runner, prompt) for runner in runners]
        found: dict[str, Any] = {
            "format": 1,
            "device": str(target.device),
            "target": recipe.target.model,
            "costs": [costs.to_json()],
        }
        found |= {"prompt_tok": prompt, "prefill_ms": prefill[0], "draft_prefill_ms": prefill[1]}
        write_plan(run, found)
    plan = read_plan(run)
    try:
        costs = Costs.from_json(plan["costs"][0])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise RunError(f"{run.plan} is damaged ({error!r}); delete it, and the costs are measured again") from error
    log.info(
        "costs at context %d: T %.2f ms, V(%d) %.2f ms, draft %.2f + k * %.2f ms, sampling %.2f ms, host %.2f ms",
        *(costs.context, costs.T_ms, max(costs.V_ms), costs.V_ms[max(costs.V_ms)]),
        *(costs.d0_ms, costs.t_ms, costs.S_ms, costs.H_ms),
    )
    return Served(
        costs,
        recipe.eval.k,
        *served_warps(recipe.eval),
        plan.get("prefill_ms", 0.0),
        plan.get("draft_prefill_ms", 0.0),
        recipe.eval.max_new_tok,
    )


def read_plan(run: Run) -> dict[str, Any]:
    """The run's plan.json.

    Raises:
        RunError: it is damaged.
    """
    return read_object(run.plan, RunError, "plan", remedy="; delete it, and the costs are measured again")


def write_plan(run: Run, plan: dict[str, Any]) -> None:
    """Writes plan.json, whole or not at all."""
    write_json(run.plan, plan)


@dataclass(frozen=True)
class Ready:
    """A draft before its first step, with what judges it.

    Attributes:
        module: the draft, to be trained.
        validation: on held-out answers, at this shape's costs.
        facts: how the draft was made.
    """

    module: DraftModule
    validation: Validation
    facts: dict[str, Any]


def prepare(
    recipe: Recipe,
    run: Run,
    target: Target,
    model: PreTrainedModel,
    dataset: ResponseDataset,
    held_out: ResponseDataset,
    eos: Sequence[int],
    source: Source | None = None,
) -> Ready:
    """Makes the draft, measures what it costs, and puts it into its module.

    Args:
        recipe: its draft is one draft, not a race.
        run: holds plan.json.
        target, model: the target.
        dataset, held_out: its answers.
        eos: ids that end an answer.
        source: what the draft is cut from; None is the target.
    """
    stage = recipe.distill
    torch.manual_seed(recipe.seed)  # so that it does not matter what ran before, in this process or another
    shortlist = shortlist_of(recipe, target.config, dataset.rows, eos)
    if shortlist is not None:
        order = by_use(dataset.rows, target.config.vocab_size, eos)
        log.info("%s", coverage_line(order, shortlist, held_out.rows))
    made = make_draft(recipe, target, model, dataset, source)
    served = find_costs(recipe, run, model, made.model, shortlist, held_out, made.factors)
    if recipe.draft.lora is not None:
        add_lora(made.model, recipe.draft.lora)
    teacher = model.get_output_embeddings().weight.detach().clone()
    softcap = getattr(target.config, "final_logit_softcapping", None)
    live = model if stage.teacher == "live" else None
    reference = None if stage.reference is None else load_model(stage.reference, "float32", str(model.device))
    module = DraftModule(made.model, teacher, stage, recipe.seed, shortlist, made.factors, softcap, live, reference)
    validation = Validation(held_out, served, module.softcaps, stage.tokens_per_step, stage.chunk_tok)
    return Ready(module, validation, made.facts)


def trained_on(stage: Distill, dataset: ResponseDataset) -> ResponseDataset:
    """The answers as the loss reads them: what makes the draft wants the states, a top-k teacher keeps none."""
    return ResponseDataset(dataset.folder, stage.max_length, topk=True) if stage.teacher == "topk" else dataset


def _prefill_ms(runner: Runner, num_tok: int) -> float:
    ids = torch.arange(num_tok, device=runner.device) % runner.config.vocab_size
    spans = []
    for _ in range(4):
        started = time.perf_counter()
        runner.prefill(ids).float().sum().item()  # reading a number waits for the device
        spans.append(1e3 * (time.perf_counter() - started))
    return statistics.median(spans[1:])
