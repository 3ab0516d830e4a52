"""The LightningModule: glue between the draft, the losses and the trainer."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill import attention, ranks, sharded
from distill.adapt import fold_head
from distill.clip import clear, clip, touched_rows
from distill.loss_topk import TopK
from distill.loss_weights import num_selected, select
from distill.losses import LossStats, check_losses
from distill.optimizers import learning_rate, make_optimizer
from distill.rows import HeadRows, draw_rows
from distill.schema import Distill
from distill.step_loss import step_loss
from distill.teacher import Batch
from distill.validation import FittedTemperature, Score, Validation
from distill.words import Words, states_of

log = logging.getLogger(__name__)

T = TypeVar("T")


class TrainingDiverged(ValueError):
    """A loss or gradient that is not finite."""


class DraftModule(pl.LightningModule):
    """Trains a draft on the target's cached hidden states.

    One training batch is one optimizer step: a window of `accumulate` micro-batches, so that the loss of each can be
    divided by the supervised tokens of the whole window, and a checkpoint never falls between two of them.

    Args:
        draft: the draft; its weights are brought to float32 (bf16 ones are too coarse for small updates).
        teacher_head: [V, H] the target's head; not trained and in no checkpoint. Where the draft's has another number
            of rows (padding), both are limited to the rows they share, and the softmax with them.
        stage: training settings.
        seed: of the rows drawn outside the shortlist.
        shortlist: [S] head rows the engine will use; None is every row.
        factors: (A [V, r], B [r, h]) of a low-rank head, trained in place of the draft's own; None trains that one.
        teacher_softcap: the target's final logit cap, or None.
        live: the target itself, where its states are not taken from the batches (teacher: live).
        reference: a distilled draft with the target's tokens, whose loss tells which positions to train on.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        teacher_head: Tensor,
        stage: Distill,
        seed: int = 0,
        shortlist: Tensor | None = None,
        factors: tuple[Tensor, Tensor] | None = None,
        teacher_softcap: float | None = None,
        live: PreTrainedModel | None = None,
        reference: PreTrainedModel | None = None,
    ) -> None:
        super().__init__()
        check_losses(stage.loss, stage.temperature, stage.jsd_beta)
        self.automatic_optimization = False
        self.stage, self.seed = stage, seed
        self.draft = draft.float().train()
        attention.use(draft)
        self.softcaps = (teacher_softcap, getattr(draft.config, "final_logit_softcapping", None))
        # Where padding and end of text share an id, torch would keep that id's embedding from ever moving.
        draft.get_input_embeddings().padding_idx = None
        self.left = self.right = None
        if factors is not None:
            self.left, self.right = (nn.Parameter(value.detach().float().clone()) for value in factors)
            draft.set_output_embeddings(nn.Identity())  # `export` puts the folded head back
        self.num_rows = min(self.table.shape[0], teacher_head.shape[0])
        if self.table.shape[0] != teacher_head.shape[0]:
            log.info(
                "the target's head has %d rows, the draft's %d: the losses are over the %d they share",
                *(teacher_head.shape[0], self.table.shape[0], self.num_rows),
            )
        self.register_buffer("teacher_head", teacher_head.detach()[: self.num_rows], persistent=False)
        # Kept in the checkpoint: a warm start must use these rows, not rows counted anew.
        self.register_buffer("shortlist", shortlist)
        self.taken: dict[str, float] = {}
        self._whole: tuple[Any, ...] | None = None
        # In a dictionary: a submodule would be trained, saved and moved.
        self._frozen = {name: model for name, model in (("live", live), ("reference", reference)) if model is not None}
        if reference is not None and (rows := reference.get_output_embeddings().weight.shape[0]) < self.num_rows:
            raise ValueError(f"the reference's head has {rows} rows; the losses need {self.num_rows}")
        for model in self._frozen.values():
            attention.use(model.eval())

    def configure_model(self) -> None:
        """With trainer.strategy fsdp (which gives the module a mesh): leaves each process its part of the draft.

        A live target's body is cut as well. The reference, a draft, stays whole.
        """
        if self.device_mesh is None or self.sharded:
            return
        mesh = self.device_mesh["data_parallel"]
        if self.trainer.is_global_zero:  # what is exported in the end; it waits on the CPU
            own = self.left, self.right
            self._whole = (copy.deepcopy(self.draft).cpu(), *(None if value is None else value.cpu() for value in own))
        self.left, self.right = sharded.shard(self.draft, mesh, self.left, self.right)
        if "live" in self._frozen:
            self._frozen["live"].set_output_embeddings(nn.Identity())  # its head is `teacher_head`
            sharded.shard(self._frozen["live"], mesh)

    @property
    def sharded(self) -> bool:
        """Has this process only a part of the draft?"""
        return sharded.is_sharded(self.table)

    def gather(self) -> None:
        """After a sharded training, in the first process: a whole draft again, with the weights from before it."""
        if self._whole is not None:
            self.draft, self.left, self.right = self._whole
            self._whole = None
            self.to(self.teacher_head.device)

    @property
    def table(self) -> nn.Parameter:
        """[V, h], or [V, r] of a low-rank head: what a row of the head is."""
        return self.draft.get_output_embeddings().weight if self.left is None else self.left

    def hidden(self, batch: Batch, words: Words | None = None) -> Tensor:
        """[N, h] what the head multiplies, at the supervised positions; `words` stand for the embedding's rows.

        Right padding needs no mask: a causal model never looks at what comes later, and without a mask the fused
        causal kernel is used.
        """
        states = states_of(self.draft, batch, words)
        return states if self.right is None else states @ sharded.whole(self.right).T

    def rows(self, window: Sequence[Batch]) -> HeadRows:
        """Head rows of this step: the same for every micro-batch and process, a function of seed and step."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.global_step)
        labels = torch.cat([batch.labels for batch in window])
        if self.shortlist is None:
            return draw_rows(None, labels, self.num_rows, self.stage.outside_rows)
        everyones = ranks.gather(labels)
        rows = draw_rows(self.shortlist, torch.cat(everyones), self.num_rows, self.stage.outside_rows, generator)
        own = rows.labels.split([len(part) for part in everyones])[ranks.place()]
        return replace(rows, labels=own)

    def training_step(self, window: Sequence[Batch], index: int) -> None:
        """One optimizer step. Raises TrainingDiverged where loss or gradient is not finite."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        # Of dropout: a function of step and process, so that a resumed run needs no state of any process.
        torch.manual_seed(self.seed * 1_000_003 + self.global_step + (ranks.place() << 40))
        rate = learning_rate(self.global_step, self.stage)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = self.rows(window)
        weight, teacher = self._head(rows)
        embedding = self.draft.get_input_embeddings()
        words = Words.read(embedding, [batch.input_ids for batch in window])
        lengths = [len(batch.labels) for batch in window]
        counts = torch.tensor([sum(lengths), sum(map(self._num_trained, lengths))], device=self.device)
        num_tok, num_trained = ranks.total(counts).tolist()
        sums = torch.zeros(3, device=self.device)
        reference_ms = 0.0
        for batch, labels in zip(window, rows.labels.split(lengths)):
            states, target = self.hidden(batch, words), self.target(batch)
            stats = None
            if "reference" in self._frozen:
                started = time.perf_counter()
                kept, stats = self._select(batch, rows, states, weight, target, teacher, labels)
                states, target, labels = states[kept], target[kept], labels[kept]
                reference_ms += 1e3 * (time.perf_counter() - started)
            loss, trained = step_loss(
                self.stage, self.softcaps, rows.shift, states, weight, target, teacher, labels, num_trained, batch.place
            )
            # Not manual_backward: in a run of several processes it would exchange gradients at every micro-batch.
            loss.backward()
            stats = stats or trained
            sums += torch.stack([loss.detach(), stats.alpha_sum, stats.match_sum])
        if weight is not self.table and weight.grad is not None:
            sharded.add_gradient(self.table, rows.ids, weight.grad)
        if words is not None:
            words.give_back(embedding)
        if not self.sharded:
            ranks.sum_gradients(self.parameters())
        ranks.total(sums)
        touched = (
            {} if weight is self.table or ranks.several() else touched_rows(self.table, rows.ids, embedding, words)
        )
        norm = float(sharded.whole(clip(self.parameters(), self.stage.grad_clip or math.inf, touched)))
        total, alpha, match = sums.tolist()
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise TrainingDiverged(
                f"step {self.global_step + 1}: loss {total}, gradient norm {norm}. The last checkpoint is whole; "
                f"start again with a lower distill.lr (now {self.stage.lr:g}) or distill.grad_clip"
            )
        optimizer.step()
        clear(self.parameters(), touched)
        self.taken = {"loss": total, "alpha": alpha / num_tok, "match": match / num_tok}
        self.taken |= {"lr": rate, "grad_norm": norm, "num_tok": num_tok}
        if "reference" in self._frozen:
            self.taken |= {"num_trained": num_trained, "reference_ms": reference_ms}

    @torch.no_grad()
    def target(self, batch: Batch) -> Tensor | TopK:
        """The target at the supervised positions: its final states, or its likeliest tokens.

        Branches have their states from their verification, whatever the teacher of the other steps.
        """
        if batch.topk is not None:
            return batch.topk
        live = "live" in self._frozen and not batch.verified
        return states_of(self._frozen["live"], batch) if live else batch.hidden_target

    def _num_trained(self, num_tok: int) -> int:
        return num_selected(num_tok, self.stage.select_frac) if "reference" in self._frozen else num_tok

    @torch.no_grad()
    def _select(
        self,
        batch: Batch,
        rows: HeadRows,
        states: Tensor,
        weight: Tensor,
        target: Tensor | TopK,
        teacher: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, LossStats]:
        """Positions to train on, and the draft's figures over all of them."""
        reference = self._frozen["reference"]
        head = reference.get_output_embeddings().weight[: self.num_rows]
        head = head if rows.shift is None else head[rows.ids]
        _, theirs = step_loss(
            self.stage, self.softcaps, rows.shift, states_of(reference, batch), head, target, teacher, labels, 1
        )
        _, ours = step_loss(self.stage, self.softcaps, rows.shift, states, weight, target, teacher, labels, 1)
        return select(ours.loss, theirs.loss, self.stage.select_frac), ours

    def _head(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        """This step's rows of both heads. The draft's are a leaf of their own.

        Indexing the table inside the graph would make a gradient of the whole table for every micro-batch, only to
        add it to the embedding's: 65 ms of a step at 49,152 rows of width 576. They are added once a step.
        """
        if rows.shift is None and self.num_rows == self.table.shape[0] and not self.sharded:
            return self.table, self.teacher_head
        own = sharded.take_rows(self.table, rows.ids)
        return own.requires_grad_(self.table.requires_grad), self.teacher_head[rows.ids]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The recipe's optimizer; embeddings and heads, low-rank ones included, are AdamW's in any case."""
        tables = [self.draft.get_input_embeddings().weight, self.table]
        tables += [factor for factor in (self.left, self.right) if factor is not None]
        return make_optimizer(self.parameters(), tables, self.stage, learning_rate(0, self.stage))

    def validate(self, validation: Validation) -> list[Score]:
        """Scores the draft as it stands, in the precision it is trained in."""
        return self._scored(validation.run)

    def fit_temperature(self, validation: Validation) -> FittedTemperature:
        """The temperature at which the draft as it stands overlaps the target most."""
        return self._scored(validation.fit_temperature)

    @torch.no_grad()
    def _scored(self, score: Callable[..., T]) -> T:
        every = torch.arange(self.num_rows, device=self.device)
        head = sharded.take_rows(self.table, every) if self.sharded else self.table.detach()[: self.num_rows]
        if self.trainer.precision == "bf16-mixed":
            head = head.bfloat16()
        self.draft.eval()
        with self.trainer.precision_plugin.forward_context():
            found = score(self.hidden, head, self.teacher_head, self.shortlist)
        self.draft.train()
        return found

    def export(self) -> tuple[PreTrainedModel, tuple[Tensor, Tensor] | None]:
        """The whole ordinary model, and the factors of a low-rank head, which is folded to a dense one."""
        model = copy.deepcopy(self.draft).eval()
        if self.left is None or self.right is None:
            return model, None
        fold_head(model, self.left, self.right)
        return model, (self.left.detach(), self.right.detach())
