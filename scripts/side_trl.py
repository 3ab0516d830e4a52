"""TRL's side of scripts.compare_training: GKDTrainer on a student, a teacher and answers from files.

It runs in an interpreter of its own (`PYTHON scripts/side_trl.py JOB`), so it imports nothing of this project. The
answers are given (lmbda = 0), the loss is the forward KL (beta = 0), weights float32, products bf16 where the job says
so: what our side does. TRL's own collator would tokenise text again; the one here takes token ids.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl.experimental.gkd import GKDConfig, GKDTrainer


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows side by side, padded on the right; answer tokens alone are supervised. `prompts` is for sampling, unused."""
    longest = max(len(row["prompt"]) + len(row["answer"]) for row in rows)
    ids, mask, labels = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3))
    labels -= 100
    for at, row in enumerate(rows):
        start, end = len(row["prompt"]), len(row["prompt"]) + len(row["answer"])
        ids[at, :end] = torch.tensor(row["prompt"] + row["answer"])
        mask[at, :end] = 1
        labels[at, start:end] = ids[at, start:end]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "prompts": ids[:, :1]}


class Counting(GKDTrainer):
    """GKDTrainer that keeps the time and the supervised tokens of each step."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward; the optimizer's part is over when the next step starts."""
        self.starts.append((time.perf_counter(), time.process_time()))
        self.counts.append(int((inputs["labels"] != -100).sum()))
        return super().training_step(model, inputs, num_items_in_batch)


def train(job: dict[str, Any], student: PreTrainedModel, teacher: PreTrainedModel, steps: int) -> dict[str, Any]:
    """Trains for so many steps; seconds, supervised tokens and the last loss."""
    args = GKDConfig(
        output_dir=str(Path(job["folder"]) / "trl-out"),
        per_device_train_batch_size=job["sequences"],
        max_steps=steps,
        learning_rate=job["lr"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": job["min_lr_frac"]},
        warmup_steps=min(job["warmup_steps"], steps // 5),
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        weight_decay=job["weight_decay"],
        max_grad_norm=job["grad_clip"],
        lmbda=0.0,
        beta=0.0,
        temperature=1.0,
        bf16=job["bf16"],
        use_cpu=True,
        gradient_checkpointing=False,  # recomputing would only make it slower; the logits are what takes the memory
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job["seed"],
    )
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(job["target"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = Counting(
        model=student,
        teacher_model=teacher,
        args=args,
        data_collator=collate,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.starts, trainer.counts = [], []
    trainer.train()
    moments = [*trainer.starts, (time.perf_counter(), time.process_time())]
    spans = [after[0] - before[0] for before, after in pairwise(moments)]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {
        "steps": steps,
        "seconds": sum(spans),
        "cpu_s": moments[-1][1] - moments[0][1],
        "spans": spans,
        "supervised_tok": sum(trainer.counts),
        "loss": losses[-1],
    }


def main() -> None:
    """Finds the pace with two steps, trains for the job's minutes, and writes the student and what it took."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(job["seed"])
    teacher = AutoModelForCausalLM.from_pretrained(job["target"], dtype=getattr(torch, job["target_dtype"]))
    probe = train(job, AutoModelForCausalLM.from_pretrained(job["student"], dtype=torch.float32), teacher, 3)
    steps = max(1, int(60 * job["minutes"] / min(probe["spans"][1:])))
    student = AutoModelForCausalLM.from_pretrained(job["student"], dtype=torch.float32)
    found = train(job, student, teacher, steps)
    student.save_pretrained(Path(job["folder"]) / "trl")
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    found |= {"name": f"TRL {trl.__version__} GKDTrainer", "peak_bytes": peak}
    del found["spans"]
    (Path(job["folder"]) / "trl.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
