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
        accelerator, precision: of Lightning's Trainer; precision auto is bf16-mixed, or 32-true on a CPU without bf16
            products.
        devices: processes on each machine that train together.
        num_nodes: machines; more than one needs torchrun or srun on each.
        strategy: single is one process; ddp gives each the whole draft; fsdp gives each a part of its weights,
            gradients and optimizer state, and of a live target; auto is single or ddp.
        gpu: name in the device table (`distill/published/devices.json`) that --check and eval.plan predict for; it
            changes nothing that runs, but that auto is bf16 then.
        num_threads: CPU threads; null leaves torch's choice.
        graph: capture CUDA graphs when the device is CUDA.
        compile: run the evaluation's steps through torch.compile; each shape takes half a minute on a CPU.
    """

    accelerator: Literal["cpu", "cuda", "auto"] = "auto"
    devices: Processes = 1
    num_nodes: Processes = 1
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    gpu: Text | None = None
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    num_threads: Positive | None = None
    graph: bool = True
    compile: bool = False

    @property
    def num_processes(self) -> int:
        """Of the whole run."""
        return self.devices * self.num_nodes

    def clashes(self) -> Iterator[tuple[str, str]]:
        if self.num_processes > 1 and self.strategy == "single":
            yield (
                "strategy",
                f"= 'single' is one process, but devices = {self.devices} and num_nodes = {self.num_nodes}; use ddp or "
                "fsdp",
            )
        if self.num_processes == 1 and self.strategy in ("ddp", "fsdp"):
            yield (
                "strategy",
                f"= {self.strategy!r} is for several processes, but devices = 1 and num_nodes = 1; use auto",
            )
