"""python -m scripts.window_check --draft DIR [--prompts FILE ...] [--out FILE]: a window of the past against all of it.

Greedy, batch 1. The target answers long prompts; each draft (that keeps all, or its first tokens and some recent ones)
is forced over the same answers, and agrees where its most likely token is the target's. Then a step of each is timed at
a short and a long context, all in turns. A window pays if its long step takes at most 1.15 of its short one, and it
keeps 95% of the whole draft's agreement.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from distill.provenance import collect
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder
from eval.bootstrap import interval, resamples
from eval.entry import guarded, table_console
from eval.window import agreement, step_times_ms
from scripts.pair import add_domains, check_ranges, load_pair, parser_of, prompts_of, write_result

MOST_TIME, LEAST_AGREEMENT = 1.15, 0.95


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, num=4, max_new=64, max_prompt=None)
    add_domains(parser)
    parser.add_argument("--recent", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs=2, default=[512, 7500], metavar=("SHORT", "LONG"))
    parser.add_argument("--rounds", type=int, default=60, help="steps timed for each draft and context")
    args = parser.parse_args(argv)
    check_ranges(parser, args, recent=(1, 1 << 20), sinks=(0, 1 << 20), contexts=(1, 1 << 20), rounds=(1, 1 << 20))
    if args.contexts[0] >= args.contexts[1]:
        parser.error(f"--contexts {args.contexts}: a short and a longer one are needed")
    return guarded(lambda: check(args))


def check(args: argparse.Namespace) -> int:
    """Forces and times each draft, prints the table.

    Raises:
        ValueError: the models or the prompts cannot be used.
    """
    console = Console(stderr=True)
    pair = load_pair(args)
    about, draft = pair.about, pair.draft
    longest = getattr(pair.target.config, "max_position_embeddings", 1 << 20)
    if args.contexts[1] >= longest:
        raise ValueError(
            f"--contexts {args.contexts[1]}: the target has {longest} positions; the longer one must be less"
        )
    prompts = [
        found
        for domain in args.domains
        for found in prompts_of(pair.tokenizer, args.prompts, domain, args.num, longest - args.max_new)
    ]
    capacity = max(args.contexts[1] + 1, max(len(ids) for _, ids in prompts) + args.max_new)
    unlimited = Runner(copy.deepcopy(draft), 1, capacity, about.shortlist, factors=about.factors)
    runners = {"whole": unlimited}
    for recent in args.recent:
        small = copy.deepcopy(draft)
        runner = Runner(small, 1, capacity, about.shortlist, recent=recent, sinks=args.sinks, factors=about.factors)
        runners[f"{args.sinks} + {recent}"] = runner
    decoder = Decoder(Runner(pair.target, 1, capacity), pair.eos)
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
    table_console().print(table)
    result = {
        "drafts": rows,
        "prompts": len(prompts),
        "prompt_tok_median": statistics.median(len(ids) for _, ids in prompts),
        "answer_tok": int(num.sum()),
        "provenance": collect(0, str(decoder.target.device)),
    }
    write_result(args, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
