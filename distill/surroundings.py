"""What surrounds a training run in its process: device, hub, first machine, train.log, the libraries' own chatter."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from distill.fields import paths, sources
from distill.recipe import Recipe, Target
from distill.runs import RunError


def choose_device(recipe: Recipe, num_gpus: int) -> str:
    """cpu or cuda.

    Args:
        recipe: its trainer stage asks for an accelerator and a number of processes.
        num_gpus: CUDA devices of this machine.

    Raises:
        RunError: more is asked for than there is.
    """
    trainer = recipe.trainer
    if trainer.accelerator == "cuda" and not num_gpus:
        raise RunError("trainer.accelerator = cuda, but no CUDA device is there; use cpu or auto")
    device = "cuda" if num_gpus and trainer.accelerator != "cpu" else "cpu"
    if device == "cuda" and trainer.devices > num_gpus:
        raise RunError(
            f"trainer.devices = {trainer.devices}: one CUDA device each, and {num_gpus} of them are there; use at most "
            f"{num_gpus}, or trainer.accelerator: cpu"
        )
    return device


def slow_products(recipe: Recipe, device: str, cpu_has_bf16: bool) -> str | None:
    """What to set where bf16 costs more than float32, None where it does not.

    Measured with AVX2 alone: 1,024 rows times 576 x 1,536 weights 106 ms in bf16, 15 in float32; steps of
    recipes/tiny.yaml 16 to 28 s and 0.7 to 1.7 s.
    """
    if device != "cpu" or cpu_has_bf16:
        return None
    keys = []
    if recipe.trainer.precision == "bf16-mixed":
        keys.append("trainer.precision=32-true")
    if recipe.target.dtype == "bfloat16":
        keys.append("target.dtype=float32")
    if not keys:
        return None
    return f"this CPU has no bf16 products of its own; float32's are many times as fast: set {' '.join(keys)}"


def stay_offline(recipe: Recipe) -> None:
    """Forbids the hub where the recipe does not need it. Must come before the first import that reads these."""
    bundled = Target.model_fields["model"].default
    drafts = [recipe.draft, *(recipe.draft.candidates or ())]
    models = [name for name in (recipe.target.model, *(draft.model for draft in drafts)) if name is not None]
    traffic = [*sources(recipe.traffic.train), *sources(recipe.traffic.heldout)]
    local = all(name == bundled or os.path.exists(os.path.expanduser(name)) for name in models)
    if local and all(name == "bundled" or paths(name) for name in traffic):
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def talk() -> None:
    """Sends the program's own messages to the terminal; its details go to train.log alone."""
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s", handlers=[terminal])
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("distill").setLevel(logging.DEBUG)
    logging.raiseExceptions = False  # a full disk is told once, not with a traceback for each line of train.log


def quiet() -> None:
    """Keeps the libraries' progress bars, tips and advice about loaders out of the log."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lightning.pytorch  # noqa: F401 - it sets its own level when it is first imported

    warnings.filterwarnings("ignore", module=r"lightning\..*")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "httpx", "httpx2", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def first_host(environment: Mapping[str, str]) -> str:
    """The machine of the first process of a SLURM step."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or "127.0.0.1"
    return str(SLURMEnvironment.resolve_root_node_address(nodes))


class RunLog(logging.FileHandler):
    """train.log. A disk that takes no more lines must not end the run in the middle of another message."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._said = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Says it once; the standard handler prints a traceback for every line."""
        if not self._said:
            self._said = True
            sys.stderr.write(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")

    def close(self) -> None:
        """Closes the file, whose last lines may be lost."""
        try:
            super().close()
        except OSError as error:
            sys.stderr.write(f"{self.baseFilename} is not whole: {error}\n")
