"""python -m scripts.hardware_check --out FILE [--target NAME] [--draft DIR] [--budget SECONDS]: one run, one JSON.

On a GPU: captured runs equal eager ones, divergences of bf16 are ties, and what a step costs, eager and captured, from
135M to 32B, against the measured copy bandwidth. On a CPU: what needs no GPU; the rest is listed as skipped, with the
reason. The file is written anew after every part, so a run that is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.bench import copy_bandwidth
from engine.divergence import compare_greedy
from engine.draft import ModelDrafter
from engine.hardware import (
    PAIRS,
    SHORTLISTS,
    Part,
    attention_table,
    captured_against_eager,
    pair_costs,
    problems,
    random_model,
    run_parts,
    shallow,
)
from engine.model import Runner

TEXTS = (
    'def merge_sorted(first: list[int], second: list[int]) -> list[int]:\n    """Merges two sorted lists."""\n',
    "Question: A train leaves at 9:40 and arrives at 13:05. How long is the journey? Answer step by step.\n",
    "The history of the printing press begins long before the fifteenth century. In East Asia, woodblock printing",
    "Write a letter to a neighbour who lent you a ladder and explain politely why you return it a week late.\n\nDear",
)
NO_CUDA = "no CUDA device: torch sees none"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.hardware_check", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="bundled name, folder or hub id, or none")
    parser.add_argument("--draft", help="a draft folder; else a shallow one with random weights")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=9, help="measured cycles of each cost")
    args = parser.parse_args(argv)
    if not 0 <= args.budget < float("inf"):
        parser.error(f"--budget {args.budget}: a number of seconds, 0 or more")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    try:
        name, args.target = args.target, find(args)
        prepare(args.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
        },
        "num_threads": torch.get_num_threads(),
        "budget_s": args.budget,
        "target": name,
        "draft": args.draft,
    }

    def write(rows: dict[str, dict[str, Any]]) -> None:
        result = {**report, "seconds": time.perf_counter() - start, "problems": problems(rows), "parts": rows}
        temporary = args.out.with_name(f".{args.out.name}.tmp")
        temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
        temporary.replace(args.out)
        name, row = list(rows.items())[-1]
        print(
            f"{row['seconds']:7.1f} s  {row['status']:8}{name}  {row.get('reason', row.get('error', ''))}", flush=True
        )

    rows = run_parts(parts_for(args, device), args.budget, write)
    for problem in problems(rows):
        print(f"look at: {problem}")
    return 1 if problems(rows) else 0


def prepare(out: Path) -> None:
    """Makes the folder of the JSON file, and finds out that the file can be written before any work is done.

    Raises:
        ValueError: `out` is a folder.
        OSError: it cannot be written.
    """
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it, for example {out / 'check.json'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.write_text("", encoding="utf-8")
    temporary.unlink()


def find(args: argparse.Namespace) -> str:
    """The target's folder ("none" stays), after a look at the draft's.

    Raises:
        ValueError: the target or the draft is not there, or is of a kind that cannot be used.
    """
    if args.draft is not None:
        from distill.checkpoint import read_draft

        read_draft(Path(args.draft))
    if args.target == "none" or (Path(args.target) / "config.json").is_file():
        return str(args.target)
    from distill.models import resolve  # only a name needs what finds and converts checkpoints

    return resolve(args.target)


def parts_for(args: argparse.Namespace, device: torch.device) -> list[Part]:
    """All parts, the most important first; those that can not run here carry the reason."""
    cuda = device.type == "cuda"
    no_cuda, no_target = ("" if cuda else NO_CUDA), ("--target none" if args.target == "none" else "")
    bf16, bandwidth = torch.bfloat16, [0.0]

    def measure_bandwidth() -> dict[str, float]:
        bandwidth[0] = copy_bandwidth(device, None if cuda else 1 << 26)
        return {"bytes_per_s": bandwidth[0]}

    def attention(kernels: Sequence[str], contexts: Sequence[int], batches: Sequence[int]) -> Callable[[], Any]:
        dtype = bf16 if cuda else torch.float32
        shapes = [(32, 8, 128), (9, 3, 64)] if cuda else [(4, 2, 16)]
        return lambda: [
            {"shape": list(shape), **row}
            for shape in shapes
            for row in attention_table(device, dtype, kernels, shape, batches, contexts, (1, 5), bandwidth[0])
        ]

    def exact(name: str, batch: int, dtype: torch.dtype, kernel: str, spread: float, ks: Sequence[int]) -> Part:
        def run() -> Any:
            target, draft = (
                Runner(random_model(s.config(), device, dtype, 0, spread), batch, 250, attention=kernel)
                for s in PAIRS[name]
            )
            return captured_against_eager(target, draft, ks, (0.0, 0.9), 24)

        return Part(f"captured equals eager: {name} {kernel} batch {batch}", 45, run, no_cuda)

    def costs(name: str, batch: int, contexts: Sequence[int], need_s: float) -> Part:
        def run() -> Any:
            dtype = bf16 if cuda else torch.float32
            target, draft = (random_model(shape.config(), device, dtype) for shape in PAIRS[name])
            rows = torch.arange(SHORTLISTS[name]) if name in SHORTLISTS else None
            ks = (1, 2, 4, 8) if cuda else (1, 3)
            return pair_costs(target, draft, ks, contexts, batch, args.rounds, name, rows)

        return Part(f"costs: {name} batch {batch}", need_s, run, "" if name == "tiny" else no_cuda)

    parts = [
        Part("copy bandwidth", 10, measure_bandwidth),
        exact("tiny", 1, torch.float32, "split", 0.5, (0, 1, 4)),
        exact("tiny", 4, torch.float32, "split", 0.5, (0, 1, 4)),
        exact("tiny", 4, torch.float32, "sdpa", 0.5, (0, 4)),
        exact("135M", 2, bf16, "split", 0.05, (0, 4)),
        Part("divergence: tiny", 20, lambda: tiny_divergence(device)),
        Part("divergence: target", 60, lambda: target_divergence(args, device), no_target),
        Part("costs: target", 60, lambda: target_costs(args, device), no_target),
        Part("loss memory", 30, lambda: loss_memory(device), no_cuda),
        Part("attention", 40, attention(("sdpa", "split"), (1024, 8192, 32768) if cuda else (512,), (1, 8))),
    ]
    if not cuda:
        parts.append(costs("tiny", 1, (64,), 20))
    long, short = (512, 4096, 16384), (512, 4096)
    parts += [costs(name, 1, long, need) for name, need in (("135M", 40), ("1B", 40), ("8B", 60), ("32B", 90))]
    parts.append(Part("attention: flex", 90, attention(("split", "flex"), (8192,), (1,)), no_cuda))
    parts += [costs(name, 16, short, need) for name, need in (("135M", 40), ("1B", 40), ("8B", 60), ("32B", 90))]
    return parts


def tiny_divergence(device: torch.device) -> list[dict[str, Any]]:
    """A random model in bf16 that drafts for itself: the only differences are those of 1 and k + 1 tokens a step."""
    model = random_model(PAIRS["tiny"][0].config(), device, torch.bfloat16, 0, 0.3)
    graph = device.type == "cuda"
    num, new = (4, 96) if graph else (2, 32)
    prompts = torch.randint(0, 512, (num, 24), generator=torch.Generator().manual_seed(1)).tolist()
    drafter = ModelDrafter(Runner(model, 1, 160), graph=graph)
    return [{"drafter": "self", **compare_greedy(Runner(model, 1, 160), drafter, prompts, 4, new, graph)}]


def loss_memory(device: torch.device, width: int = 896, limit: float = 2.3e9) -> list[dict[str, Any]]:
    """The loss over 151,936 rows and 8,192 positions: its peak beyond its inputs, and its value against plain logits.

    Raises:
        AssertionError: more than `limit` bytes, or another value.
    """
    from distill.loss_reference import divergence
    from distill.losses import chunked_loss

    rows, num, few = 151_936, 8192, 64
    torch.manual_seed(0)
    head = (torch.randn(rows, width, device=device) / width**0.5).requires_grad_()
    hidden = torch.randn(num, width, device=device, requires_grad=True)
    target, theirs = torch.randn(num, width, device=device), torch.randn(rows, width, device=device) / width**0.5
    theirs = theirs.bfloat16()
    labels = torch.zeros(num, dtype=torch.long, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        before, _ = torch.cuda.memory_allocated(), torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss, stats = chunked_loss(hidden, head, target, theirs, labels, {"forward_kl": 1.0}, num)
        loss.backward()
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated() - before
        with torch.no_grad():
            plain = divergence("forward_kl", target[:few] @ theirs.T.to(target.dtype), hidden[:few] @ head.T)
    torch.testing.assert_close(stats.loss[:few], plain, rtol=2e-2, atol=2e-2)
    assert peak < limit, f"the loss took {peak / 1e9:.2f} GB beyond its inputs; {limit / 1e9:.1f} are allowed"
    return [{"rows": rows, "positions": num, "width": width, "peak_bytes": peak, "seconds": seconds}]


def load(args: argparse.Namespace, device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel, Any]:
    """The target, a draft, and the draft's shortlist."""
    target = load_weights(args.target, device)
    if args.draft is None:
        return target, random_model(shallow(target.config), device, torch.bfloat16), None
    from distill.checkpoint import read_draft

    return target, load_weights(args.draft, device), read_draft(Path(args.draft)).shortlist


def load_weights(folder: str, device: torch.device) -> PreTrainedModel:
    """A model in bf16, from safetensors only."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True)
    return model.to(device).eval()


def target_divergence(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The real target in bf16, with itself and with the draft as drafter."""
    target, draft, shortlist = load(args, device)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    graph, new, found = device.type == "cuda", 128 if device.type == "cuda" else 16, []
    runner = Runner(target, 1, 400)
    for name, drafter in (("self", Runner(target, 1, 400)), ("draft", Runner(draft, 1, 400, shortlist))):
        for k in (1, 4, 8):
            compared = compare_greedy(runner, ModelDrafter(drafter, graph=graph), prompts, k, new, graph)
            found.append({"drafter": name, **compared})
    return found


def target_costs(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """What a cycle of the real pair costs."""
    target, draft, shortlist = load(args, device)
    contexts = (128, 1024, 4096) if device.type == "cuda" else (128,)
    return pair_costs(target, draft, (1, 2, 4, 8), contexts, 1, args.rounds, "target", shortlist)


if __name__ == "__main__":
    sys.exit(main())
