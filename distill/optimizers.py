"""The optimizers of a draft and their schedule: AdamW, or Muon for its matrices with AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from distill.schema import Distill


def learning_rate(step: int, stage: Distill) -> float:
    """Linear warm-up, then a cosine from `lr` down to `lr * min_lr_frac` at `max_steps`.

    A function of the step alone: a resumed run needs no scheduler state, and one that is resumed with more steps goes
    on along the longer cosine.

    Args:
        step: optimizer steps taken so far.
        stage: schedule of the recipe.

    Returns:
        The rate of the next step.
    """
    if step < stage.warmup_steps:
        return stage.lr * (step + 1) / stage.warmup_steps
    progress = (step - stage.warmup_steps) / max(1, stage.max_steps - stage.warmup_steps)
    low = stage.lr * stage.min_lr_frac
    return low + (stage.lr - low) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer: one step, one list of groups, one state in a checkpoint.

    Two optimizers would count every step twice in the trainer, whose step number decides schedule and checkpoints.

    Args:
        muon: for matrices.
        adamw: for the rest.

    Source:
        Muon: arXiv 2502.16982 (its scale 0.2 sqrt(max(rows, columns)) lets both share a learning rate).
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._muon, self._adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Both work on this optimizer's groups and state."""
        first = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:first], self.param_groups[first:]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over groups and state of a checkpoint."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None if closure is None else closure()
        self._muon.step()
        self._adamw.step()
        return loss


def make_optimizer(
    parameters: Iterable[nn.Parameter], tables: Iterable[Tensor], stage: Distill, lr: float
) -> torch.optim.Optimizer:
    """AdamW, fused; norms and biases (one dimension) are not decayed. With `muon`, Muon for the matrices.

    Fused: over a whole table of 49,152 x 576 it takes 16 ms on one core, where the other implementations take over
    100 ms, so the table needs no sparse treatment.

    Args:
        parameters: of the draft.
        tables: embeddings and heads: rows that are looked up and not multiplied as a map, so AdamW's in any case.
        stage: optimizer, weight decay, betas.
        lr: learning rate of the first step.

    Returns:
        An optimizer; its groups are Muon's matrices, if there are any, what is decayed, and what is not.
    """
    trained = [p for p in parameters if p.requires_grad]
    apart = {id(table) for table in tables}
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in apart] if stage.optimizer == "muon" else []
    others = {id(p) for p in trained} - {id(p) for p in matrices}
    groups = [
        {"params": [p for p in trained if id(p) in others and p.dim() > 1], "weight_decay": stage.weight_decay},
        {"params": [p for p in trained if id(p) in others and p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=stage.betas, fused=True)
    if stage.optimizer == "adamw":
        return adamw
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=stage.weight_decay, adjust_lr_fn="match_rms_adamw")
    return MuonAdamW(muon, adamw)
