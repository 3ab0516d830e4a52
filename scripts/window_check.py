"""python -m scripts.window_check --draft DIR [--prompts FILE ...] [--out FILE]: a window of the past against all of it.

Greedy, batch 1. The target answers long prompts; each draft (that keeps all, or its first tokens and some recent ones)
is forced over the same answers, and agrees where its most likely token is the target's. Then a step of each is timed at
a short and a long context, all in turns. A window pays if its long step takes at most 1.15 of its short one, and it
keeps 95% of the whole draft's agreement.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from distill.checkpoint import read_draft
from distill.models import load_model, load_tokenizer, resolve
from distill.provenance import collect
from distill.schema import Traffic
from distill.tokens import encode_prompt, eos_ids
from distill.traffic import load_prompts
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from eval.bootstrap import interval, resamples
from eval.window import agreement, step_times_ms

MOST_TIME, LEAST_AGREEMENT = 1.15, 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="a draft folder")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", nargs="+", default=["bundled"], help="files or globs of long prompts")
    parser.add_argument("--domains", nargs="+", default=["code", "math", "qa"])
    parser.add_argument("--num", type=int, default=4, help="prompts of each domain")
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--recent", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs=2, default=[512, 7500], metavar=("SHORT", "LONG"))
    parser.add_argument("--rounds", type=int, default=60, help="steps timed for each draft and context")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    if args.num < 1 or args.max_new < 1 or args.rounds < 1:
        parser.error(f"--num {args.num}, --max-new {args.max_new}, --rounds {args.rounds}: each must be at least 1")
    if not 0 < args.contexts[0] < args.contexts[1]:
        parser.error(f"--contexts {args.contexts}: a short and a longer one are needed, both above 0")
    console = Console(stderr=True)
    folder = resolve(args.target)
    tokenizer, plain = load_tokenizer(folder), load_model(folder, args.dtype)
    eos = eos_ids(plain.config, plain.generation_config, tokenizer)
    traffic = Traffic(domain=args.domains[0], heldout=tuple(args.prompts), num_heldout=4 * args.num)
    longest = getattr(plain.config, "max_position_embeddings", 1 << 20)
    prompts: list[tuple[str, list[int]]] = []
    for domain in args.domains:
        found = load_prompts(traffic, "heldout", 0, (domain,))
        coded = [(p.id, encode_prompt(tokenizer, list(p.messages))) for p in found]
        prompts += [(name, ids) for name, ids in coded if len(ids) + args.max_new <= longest][: args.num]
    if not prompts:
        raise ValueError(f"every prompt is longer than the target's {longest} positions, answer included")
    draft, about = load_model(str(args.draft), args.dtype), read_draft(args.draft)
    capacity = max(args.contexts[1] + 1, max(len(ids) for _, ids in prompts) + args.max_new)
    unlimited = Runner(copy.deepcopy(draft), 1, capacity, about.shortlist, factors=about.factors)
    runners = {"whole": unlimited}
    for recent in args.recent:
        small = copy.deepcopy(draft)
        runner = Runner(small, 1, capacity, about.shortlist, recent=recent, sinks=args.sinks, factors=about.factors)
        runners[f"{args.sinks} + {recent}"] = runner
    decoder = Decoder(Runner(plain, 1, capacity), eos)
    agreed: dict[str, list[list[bool]]] = {name: [] for name in runners}
    for number, (name, ids) in enumerate(prompts, 1):
        answer = next(iter(decoder.run([Request(name, tuple(ids), args.max_new)]))).tokens
        for arm, runner in runners.items():
            agreed[arm].append(agreement(runner, ids, answer))
        console.log(f"{number} of {len(prompts)}: {len(ids)} prompt tokens, {len(answer)} answer tokens")
    times = step_times_ms(runners, args.contexts, args.rounds)
    short, long = args.contexts
    draws = resamples(len(prompts), 2000, 0)
    num = np.array([len(x) for x in agreed["whole"]])
    whole = np.array([sum(x) for x in agreed["whole"]])
    rows = {}
    for arm, runner in runners.items():
        mine = np.array([sum(x) for x in agreed[arm]])
        low, high = interval(mine[draws].sum(1) / np.maximum(1, whole[draws].sum(1)))
        rows[arm] = {
            "alpha": float(mine.sum() / num.sum()),
            "alpha_frac": float(mine.sum() / max(1, whole.sum())),
            "low": low,
            "high": high,
            "slab_bytes": runner.slab.nbytes,
            "short_ms": times[arm][short],
            "long_ms": times[arm][long],
            "long_over_short": times[arm][long] / times[arm][short],
        }
    table = Table(
        "draft", "alpha", "of whole", "95%", f"ms at {short}", f"ms at {long}", "long / short", "KV MB", "pays"
    )
    for arm, row in rows.items():
        pays = row["long_over_short"] <= MOST_TIME and row["alpha_frac"] >= LEAST_AGREEMENT
        table.add_row(
            arm, f"{row['alpha']:.3f}", f"{row['alpha_frac']:.1%}", f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['short_ms']:.2f}", f"{row['long_ms']:.2f}", f"{row['long_over_short']:.2f}",
            f"{row['slab_bytes'] / 1e6:.1f}", "yes" if pays else "no",
        )  # fmt: skip
    Console().print(table)
    if args.out:
        result = {
            "drafts": rows,
            "prompts": len(prompts),
            "prompt_tok_median": statistics.median(len(ids) for _, ids in prompts),
            "answer_tok": int(num.sum()),
            "settings": {k: str(v) for k, v in vars(args).items()},
            "provenance": collect(0, str(decoder.target.device)),
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
