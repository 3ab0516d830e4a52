"""The on-policy stage: the last steps train on the draft's own proposals, as verification judged them.

Draft and target answer training prompts together, by the engine that serves them. Each verify pass computes the
target's final state after every drafted token, refused ones included, because it can not know before which will be
refused; the stage keeps these states (`distill.branches` says which, and why they are valid) instead of throwing them
away, and trains on all of them: the answer's own positions and the branches', each with weight 1, divided by their
number like any other supervised positions.

What may be hoped for is limited by the rule of acceptance. A refused token ends its cycle, so no accepted token ever
follows it: with exact verification the text that a draft reads is always the target's own, and positions behind a
refusal are never served. They can help only by what the draft learns there for other places.

The stage's files lie in replay/ of the run, in the format of responses/. They are written by the weights of the last
step before it; shard after shard decodes a fixed set of prompts with nothing left over from the one before, so that an
interrupted run writes the same files as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.adapt import merge_lora
from distill.branches import Branch, Layout, Refused, lay_out
from distill.fit import checkpoint_step, fit
from distill.launch import ALONE, Place
from distill.models import load_model
from distill.module import DraftModule
from distill.prompt import Prompt
from distill.recipe import Recipe, Responses, longest_prompt
from distill.responses import Answered, answer_row, loops, write_responses
from distill.runs import Run, RunError, Stop
from distill.schema_replay import replay_start
from distill.shape import Target
from distill.shards import ResponsesError, read_manifest
from distill.teacher import Batch, Example, ResponseDataset
from distill.track import NullTracker
from distill.traffic import load_prompts
from distill.validation import Validation
from distill.worklist import Worklist
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder

log = logging.getLogger(__name__)


class ReplayDataset(ResponseDataset):
    """The rows of a replay folder: answers with their branches behind them.

    Args:
        folder: written by `write_replay`.
        max_length: tokens of prompt and answer that are kept; a branch stays when the position it leaves from does.

    Attributes:
        num_refused: positions on branches, of all that are supervised.
    """

    def __init__(self, folder: Path, max_length: int) -> None:
        super().__init__(folder, max_length)
        self._branches: list[list[tuple[Branch, int]]] = []  # with the place of each branch's states in the shard
        self.num_refused = 0
        for number, row in enumerate(self.rows):
            kept, at = [], row.offset + len(row.answer_ids)
            for branch in (Branch(*parts) for parts in row.branches):
                if branch.after < self.num_supervised[number]:
                    kept.append((branch, at))
                at += len(branch.ids)
            num = sum(len(branch.ids) for branch, _ in kept)
            self._branches.append(kept)
            self.num_supervised[number] += num
            self.lengths[number] += num
            self.num_refused += num

    def __getitem__(self, index: int) -> Example:
        """As of an answer: the supervised positions are the last ones of the row, the branches' behind the text's."""
        row, branches = self.rows[index], self._branches[index]
        refused = sum(len(branch.ids) for branch, _ in branches)
        answer = row.answer_ids[: self.num_supervised[index] - refused]
        ids = row.prompt_ids + answer[:-1] + [token for branch, _ in branches for token in branch.ids]
        labels = answer + [token for branch, _ in branches for token in branch.best]
        states = self._shard(row.shard)
        assert isinstance(states, Tensor)
        if row.offset + row.num_states > len(states):
            raise ResponsesError(f"{self._path(row.shard)} is cut; delete {self.folder} and resume the run")
        parts = [states[row.offset : row.offset + len(answer)]]
        parts += [states[at : at + len(branch.ids)] for branch, at in branches]
        return Example(torch.tensor(ids), torch.tensor(labels), torch.cat(parts))

    def collate(self, indices: Sequence[int]) -> Batch:
        """The batch of these rows, with the layout of their branches."""
        rows = []
        for index in indices:
            branches = [branch for branch, _ in self._branches[index]]
            num_text = self.lengths[index] - sum(len(branch.ids) for branch in branches)
            rows.append(lay_out(num_text, len(self.rows[index].prompt_ids), branches))
        batch = super().collate(indices)
        return replace(batch, layout=Layout.side_by_side(rows, batch.input_ids.shape[1]), verified=True)


def fit_with_replay(
    recipe: Recipe,
    run: Run,
    module: DraftModule,
    dataset: ResponseDataset,
    validation: Validation,
    stop: Stop,
    tracker: NullTracker,
    resume_from: Path | None,
    target: Target,
    eos: Sequence[int],
    device: str,
    place: Place = ALONE,
) -> dict[str, Any]:
    """`fit`, whose last steps train on proposals where the recipe asks for it.

    Args:
        recipe, run, module, dataset, validation, stop, tracker, resume_from: as for `fit`.
        target: answers the proposals.
        eos: ids that end an answer.
        device: that draft and target decode on.
        place: of this process among those of the run; the stage itself runs in one.

    Returns:
        The best validation of both parts.

    Raises:
        RunError: the run is past the stage's first step, but what it trained on is gone.
    """
    if recipe.distill.replay is None:
        return fit(recipe, run, module, dataset, validation, stop, tracker, resume_from, place=place)
    written = (run.replay / "manifest.json").exists()
    # A resumed run with more steps keeps the start that it had.
    start = replay_start(recipe.distill.max_steps, recipe.distill.replay.frac)
    start = read_manifest(run.replay)["settings"]["draft_step"] if written else start
    step = 0 if resume_from is None else checkpoint_step(resume_from)
    if step < start:
        until = min(start, recipe.distill.max_steps)
        best = fit(recipe, run, module, dataset, validation, stop, tracker, resume_from, until)
        stop.check()
        resume_from, step = run.newest_whole(), until
        if until == recipe.distill.max_steps:
            return best
    if not (written and read_manifest(run.replay)["complete"]):
        if step > start or resume_from is None:
            raise RunError(
                f"{run.replay} is gone or incomplete, and the run is at step {step}: the draft of step {start}, which "
                "wrote it, is no more; start a new run"
            )
        module.load_state_dict(torch.load(resume_from, weights_only=True)["state_dict"])
        write_replay(recipe, run, module, start, target, eos, device)
    proposals = ReplayDataset(run.replay, recipe.distill.max_length)
    log.info(
        "replay from step %d on: %d answers, %d supervised tokens, %d of them behind a refused proposal",
        *(start, len(proposals), sum(proposals.num_supervised), proposals.num_refused),
    )
    return fit(recipe, run, module, proposals, validation, stop, tracker, resume_from)


def replay_facts(recipe: Recipe, run: Run) -> dict[str, Any]:
    """What draft.json says of the stage; nothing where it is off, or where no step of it was taken."""
    if recipe.distill.replay is None or not (run.replay / "manifest.json").exists():
        return {}
    settings, rows = read_manifest(run.replay)["settings"], ReplayDataset(run.replay, recipe.distill.max_length)
    said: dict[str, Any] = {
        "step": settings["draft_step"],
        "k": settings["draft_k"],
        "temperature": settings["temperatures"][0],
    }
    said |= {"num_prompts": len(rows), "num_tok": sum(rows.num_supervised), "num_refused": rows.num_refused}
    return {"replay": said}


def write_replay(
    recipe: Recipe, run: Run, module: DraftModule, step: int, target: Target, eos: Sequence[int], device: str
) -> dict[str, Any]:
    """Answers prompts with draft and target, and keeps what verification computed; goes on where that stopped.

    Args:
        recipe: its replay stage, served temperature and answer length.
        run: gets replay/.
        module: the draft as it stands.
        step: steps that it has taken.
        target: answers.
        eos: ids that end an answer.
        device: of both models.

    Returns:
        The manifest.

    Raises:
        ResponsesError, OSError: as `write_responses`.
    """
    stage = recipe.distill.replay
    assert stage is not None
    draft, factors = module.export()
    if recipe.draft.lora is not None:
        draft = merge_lora(draft)
    digest = hashlib.sha256()
    for weight in draft.state_dict().values():
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    more = {"draft_sha256": digest.hexdigest(), "draft_step": step, "draft_k": stage.k}
    model = load_model(target.folder, recipe.target.dtype, device, recipe.target.trust_remote_code)
    draft = draft.to(model.dtype).to(device).eval()
    vocab = model.config.vocab_size
    small = partial(Runner, draft, shortlist=module.shortlist, vocab=vocab, factors=factors)
    temperature = recipe.eval.temperature if stage.temperature is None else stage.temperature
    served: dict[str, Any] = {"source": "target", "temperatures": (temperature,), "server": ()}
    served |= {"top_p": recipe.eval.top_p, "top_k": recipe.eval.top_k}
    log.info("replay: the draft of step %d proposes to %d prompts, k = %d", step, stage.num_prompts, stage.k)

    def progress(answered: int, asked: int, num_tok: int) -> None:
        if answered % 32 == 0 or answered == asked:
            log.info("replay: %d of %d prompts, %d answer tokens", answered, asked, num_tok)

    return write_responses(
        run.replay,
        model,
        target.tokenizer,
        drawn_prompts(recipe, stage.num_prompts),
        recipe.responses.model_copy(update=served),
        recipe.seed + 1,  # other samples than those of responses/
        eos,
        target.sha256,
        longest_prompt(recipe, target.positions),
        recipe.traffic.system,
        progress,
        answer=partial(_answer, small, stage.k),
        more=more,
    )


def drawn_prompts(recipe: Recipe, num: int) -> list[Prompt]:
    """So many of the training prompts, drawn by the seed, in their order."""
    prompts = load_prompts(recipe.traffic, "train", recipe.seed)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(recipe.seed))
    return [prompts[at] for at in sorted(order[:num].tolist())]


def _answer(
    small: partial[Runner],
    k: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stage: Responses,
    seed: int,
    eos: list[int],
    work: Worklist,
) -> Iterator[Answered]:
    """Answers with branches, shard by shard: rows and slabs of a shard are its own."""
    numbered = enumerate(work)
    while shard := list(islice(numbered, stage.shard_rows)):
        capacity = len(shard[-1][1][1]) + stage.max_new_tok + k
        batch = min(stage.batch_size, len(shard))
        refused = Refused(eos)
        decoder = Decoder(
            Runner(model, batch, capacity, vocab=model.config.vocab_size),
            eos,
            ModelDrafter(small(batch=batch, capacity=capacity), seed),
            k,
            seed,
            stage.top_k,
            stage.top_p,
            keep_hidden=True,
            stop=lambda tokens: loops(tokens, stage.loop_repeats),
            watch=refused,
        )
        by_id = {prompt.id: (number, prompt, heat) for number, (prompt, _, heat) in shard}
        requests = [Request(prompt.id, tuple(ids), stage.max_new_tok, heat) for _, (prompt, ids, heat) in shard]
        for answer in decoder.run(requests):
            number, prompt, heat = by_id[answer.request.id]
            finish = "loop" if answer.finish == "stop" else answer.finish
            found = refused.take(prompt.id)
            row = answer_row(prompt, list(answer.request.ids), answer.tokens, heat, finish, False)
            states = [torch.stack(answer.hidden), *(states for _, states in found)]
            yield number, row | {"branches": [branch for branch, _ in found]}, torch.cat(states)
