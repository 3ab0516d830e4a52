"""python -m scripts.peer_check WHAT [--draft DIR] [--prompts FILE ...]: the engine beside transformers.

greedy:   speculative greedy output against `generate(do_sample=False)`, token by token; a difference is a tie only
          when both, forced over the same text, put the top two within the measured noise. In float32 there are few.
baseline: the engine's k = 0 time per token against a bare loop over the plain model with transformers' own cache.
generate: the answers of many prompts, batched, against `generate` at the same batch.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from distill.checkpoint import read_draft
from distill.models import load_model, load_tokenizer, resolve
from distill.schema import Traffic
from distill.tokens import encode_prompt, eos_ids
from distill.traffic import load_prompts
from engine.draft import ModelDrafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from eval.entry import guarded


def plain_generate(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, max_new: int, eos: Sequence[int]
) -> torch.Tensor:
    """transformers' greedy generation; the checkpoint's own sampling defaults are overruled."""
    return model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new, eos_token_id=list(eos), pad_token_id=eos[0]
    )[:, ids.shape[1] :]


def check_greedy(args: argparse.Namespace, prompts: list[list[int]], eos: Sequence[int]) -> dict:
    """Counts prompts whose text differs, for each k, and classifies each difference."""
    plain = load_model(args.target, args.dtype)
    target, draft = copy.deepcopy(plain), load_model(str(args.draft), args.dtype)
    wanted = [
        plain_generate(plain, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long), args.max_new, eos)[
            0
        ].tolist()
        for ids in prompts
    ]
    longest = max(map(len, prompts)) + args.max_new
    runner, about = Runner(target, 1, longest), read_draft(args.draft)
    result: dict = {"prompts": len(prompts), "max_new": args.max_new, "dtype": args.dtype, "by_k": {}}
    small = Runner(draft, 1, longest, about.shortlist, factors=about.factors)
    for name, drafting in (("draft", small), ("self", Runner(copy.deepcopy(plain), 1, longest))):
        for k in args.k if name == "draft" else args.k[:1]:
            equal, ties, bugs, proposed, accepted = 0, 0, 0, 0, 0
            drafter = ModelDrafter(drafting)
            for i, ids in enumerate(prompts):
                answer = next(iter(Decoder(runner, eos, drafter, k).run([Request(str(i), tuple(ids), args.max_new)])))
                proposed += sum(c.proposed for c in answer.cycles if not c.cut)
                accepted += sum(c.accepted for c in answer.cycles if not c.cut)
                if answer.tokens == wanted[i]:
                    equal += 1
                elif is_tie(plain, runner, ids, answer.tokens, wanted[i], k):
                    ties += 1
                else:
                    bugs += 1
            row = {"equal": equal, "ties": ties, "bugs": bugs, "alpha": accepted / proposed}
            result["by_k"][f"{name}@k{k}"] = row
            print(f"{name} k={k}: {row}", flush=True)
    return result


@torch.inference_mode()
def is_tie(plain: PreTrainedModel, runner: Runner, ids: list[int], ours: list[int], theirs: list[int], k: int) -> bool:
    """At the first difference, is the plain model's top-2 margin under the noise between its path and the engine's?"""
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    text = torch.tensor([[*ids, *theirs[:place]]])
    logits = plain(text).logits[0, -1]
    margin = float(logits.topk(2).values.diff().abs())
    runner.prefill(text[0, : -k - 1])
    start = torch.tensor([text.shape[1] - k - 1])
    block = runner.logits(runner.step(text[:, -k - 1 :], start, text.shape[1]))[0, -1]
    return margin <= float((block - logits).abs().max())


def check_baseline(args: argparse.Namespace, prompts: list[list[int]], eos: Sequence[int]) -> dict:
    """Paired, interleaved: milliseconds per token of a bare loop and of the engine's baseline."""
    plain = load_model(args.target, args.dtype)
    runner = Runner(copy.deepcopy(plain), 1, max(map(len, prompts)) + args.max_new)
    bare, ours = [], []
    for i, ids in enumerate(prompts):
        for first in (i % 2, 1 - i % 2):
            if first:
                bare.append(bare_loop_ms(plain, ids, args.max_new))
            else:
                decoder = Decoder(runner, ())
                answer = decoder.admit(Request(str(i), tuple(ids), args.max_new))
                start = time.perf_counter()
                while not answer.finish:
                    decoder.cycle()
                ours.append((time.perf_counter() - start) * 1e3 / (args.max_new - 1))
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    return {
        "engine_ms": statistics.median(ours),
        "bare_loop_ms": statistics.median(bare),
        "median_ratio": statistics.median(ratios),
        "prompts": len(prompts),
        "dtype": args.dtype,
    }


@torch.inference_mode()
def bare_loop_ms(model: PreTrainedModel, ids: list[int], max_new: int) -> float:
    """The plain model and its own dynamic cache, argmax in a loop: milliseconds per token after the first."""
    out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    cache = next(out[name] for name in ("cache", "past_key_values") if out.get(name) is not None)
    name = "cache" if out.get("cache") is not None else "past_key_values"
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    start = time.perf_counter()
    for _ in range(max_new - 1):
        out = model(token, use_cache=True, logits_to_keep=1, **{name: cache})
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        token.item()
    return (time.perf_counter() - start) * 1e3 / (max_new - 1)


def check_generate(args: argparse.Namespace, prompts: list[list[int]], eos: Sequence[int]) -> dict:
    """Answer tokens per second over all prompts, greedy, at most `batch` rows at once, prompts sorted by length.

    transformers' `generate` takes them batch after batch (left padded; what follows an end of text does not count);
    the engine refills a row as soon as it is free.
    """
    prompts = sorted(prompts, key=len)
    plain = load_model(args.target, args.dtype)
    runner = Runner(copy.deepcopy(plain), min(args.batch, len(prompts)), len(prompts[-1]) + args.max_new)
    requests = [Request(str(i), tuple(ids), args.max_new) for i, ids in enumerate(prompts)]
    speeds: dict[str, list[float]] = {"generate": [], "engine": []}
    for _ in range(args.rounds):
        start, num = time.perf_counter(), 0
        for first in range(0, len(prompts), args.batch):
            part = prompts[first : first + args.batch]
            longest = len(part[-1])
            padded = torch.tensor([[eos[0]] * (longest - len(ids)) + ids for ids in part])
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in part])
            for row in plain_generate(plain, padded, mask, args.max_new, eos).tolist():
                num += next((j + 1 for j, t in enumerate(row) if t in eos), len(row))
        speeds["generate"].append(num / (time.perf_counter() - start))
        start = time.perf_counter()
        num = sum(len(a.tokens) for a in Decoder(runner, eos).run(requests))
        speeds["engine"].append(num / (time.perf_counter() - start))
        print(f"{speeds}", flush=True)
    best = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "tokens_per_s": best,
        "ratio": best["engine"] / best["generate"],
        "prompts": len(prompts),
        "mean_prompt_tok": statistics.mean(map(len, prompts)),
        "batch": args.batch,
        "max_new": args.max_new,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["greedy", "baseline", "generate"])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", nargs="+", default=["bundled"], help="files or globs of held-out prompts")
    parser.add_argument("--num", type=int, default=10, help="prompts a domain")
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 5, 8])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args(argv)
    for name, least in (("num", 1), ("max_new", 2), ("max_prompt", 1), ("batch", 1), ("rounds", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: at least {least}")
    if wrong := [k for k in args.k if not 1 <= k <= 16]:
        parser.error(f"--k {wrong[0]}: allowed are 1 to 16")
    if args.what == "greedy" and args.draft is None:
        parser.error("greedy needs --draft DIR: the draft that proposes")
    return guarded(lambda: compare(args))


def compare(args: argparse.Namespace) -> int:
    """Reads the prompts, runs the check that was asked for and prints its figures as JSON.

    Raises:
        ValueError: the target, the draft or the prompts cannot be used.
    """
    if args.draft is not None:
        read_draft(args.draft)
    args.target = resolve(args.target)
    tokenizer, model = load_tokenizer(args.target), load_model(args.target, "bfloat16")
    eos = eos_ids(model.config, model.generation_config, tokenizer)
    del model
    traffic = Traffic(domain="mixed", heldout=tuple(args.prompts), num_heldout=4 * args.num)
    prompts: list[list[int]] = []
    found = load_prompts(traffic, "heldout", 0)
    for domain in dict.fromkeys(p.domain for p in found):
        rows = (encode_prompt(tokenizer, list(p.messages)) for p in found if p.domain == domain)
        prompts += [ids for ids in rows if len(ids) <= args.max_prompt][: args.num]
    if not prompts:
        raise ValueError(f"--max-prompt {args.max_prompt}: no prompt is that short; raise it")
    check = {"greedy": check_greedy, "baseline": check_baseline, "generate": check_generate}[args.what]
    print(json.dumps(check(args, prompts, eos), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
