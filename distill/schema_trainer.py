"""The recipe's stages of where training runs and who watches it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from distill.fields import Positive, Processes, Stage, Text


class Track(Stage):
    """Weights & Biases: offline by default, no network."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    project: Text = "specdraft"
    entity: Text | None = None
    tags: tuple[Text, ...] = ()


class TrainerStage(Stage):
    """Where it runs.

    Attributes:
        accelerator, precision: of Lightning's Trainer.
        devices: processes that train together, each with the whole draft.
        num_nodes: 1; several machines are not built.
        strategy: of Lightning's Trainer; with several devices auto or ddp.
        num_threads: CPU threads; null leaves torch's choice.
        graph: capture CUDA graphs when the device is CUDA.
        compile: run the evaluation's steps through torch.compile; each shape takes half a minute on a CPU.
    """

    accelerator: Literal["cpu", "cuda", "auto"] = "auto"
    devices: Processes = 1
    num_nodes: Processes = 1
    strategy: Text = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    num_threads: Positive | None = None
    graph: bool = True
    compile: bool = False

    def clashes(self) -> Iterator[tuple[str, str]]:
        if self.num_nodes > 1:
            yield "num_nodes", f"= {self.num_nodes}: training on several machines is not built; use 1"
        if self.devices > 1 and self.strategy not in ("auto", "ddp"):
            yield "strategy", f"= {self.strategy!r} with several devices: allowed is ddp (or auto)"
