"""Servers' answers as training needs them: ids, and the hidden states of the local target, which reads them once.

That reading also tells whether the endpoints serve this target: without sampling, what they wrote is its first choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.completion import Reply, ids_of
from distill.schema import Responses
from distill.server_responses import ask
from distill.worklist import Worklist
from engine.model import Runner

log = logging.getLogger(__name__)

# Ties of low precision and other kernels cost a few tokens in a thousand; another model or a penalty costs most.
AGREED_FRAC = 0.95


def server_answers(
    name: str,
    system: str | None,
    looping: Callable[[Sequence[int]], bool],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stage: Responses,
    seed: int,
    eos: Sequence[int],
    work: Worklist,
) -> Iterator[tuple[int, Reply, list[int], str, dict[str, Any], Tensor]]:
    """Answers of the endpoints; at the end it is logged how many greedy tokens are the target's first choice.

    Args:
        name: of the served model.
        system: system message of prompts that have none.
        looping: does a text end in a loop? The answer is cut there, as the engine cuts its own.
        model: the target, which reads the answers once for its hidden states.
        tokenizer: the target's.
        stage, seed: as `ask`.
        eos: ids that end an answer.
        work: prompts.

    Yields:
        place in the work, reply, ids (none for a dropped prompt), finish, what the row says besides, hidden states
        [A, H].

    Raises:
        EndpointError, ServersDown: as `ask`.
    """
    runner = Runner(model, 1, work.longest + stage.max_new_tok)
    agreed = greedy = 0
    for number, reply in ask(work, stage, name, seed, system):
        ids, finish, facts = ids_of(tokenizer, reply, eos, stage.max_new_tok)
        if cut := next((n for n in range(1, len(ids) + 1) if looping(ids[:n])), None):
            ids, finish = ids[:cut], "loop"
        states = torch.empty(0)
        if ids:
            with torch.inference_mode():
                text = torch.tensor([*reply.prompt_ids, *ids[:-1]], device=runner.device)
                states = runner.prefill(text)[len(reply.prompt_ids) - 1 :]
            if reply.temperature == 0 and not facts["recut"]:
                written = len(ids) - (finish == "eos")  # the end was appended here
                agreed += first_choices(model, states[:written], ids[:written])
                greedy += written
        yield number, reply, ids, finish, facts | {"endpoint": reply.endpoint, "retried": reply.retried}, states
    if greedy:
        known = agreed >= AGREED_FRAC * greedy
        log.log(
            logging.INFO if known else logging.WARNING,
            "%.1f%% of %d greedy tokens from the endpoints are the target's first choice%s",
            *(100 * agreed / greedy, greedy),
            "" if known else ": they serve another model, or apply sampling defaults of its checkpoint (a penalty)",
        )


@torch.inference_mode()
def first_choices(model: PreTrainedModel, states: Tensor, ids: Sequence[int]) -> int:
    """How many of the ids [A] have the largest logit of all, by the hidden states [A, H] before them."""
    if not ids:
        return 0
    logits = model.get_output_embeddings()(states)
    return int((logits.argmax(-1) == torch.tensor(ids, device=logits.device)).sum())
