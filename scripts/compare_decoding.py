"""python -m scripts.compare_decoding --draft DIR [--prompts FILE ...] [--out FILE]: eight ways to decode one text.

Greedy, batch 1, one pair of models, one process, the arms interleaved request by request in an order that turns around.
transformers: `generate`, and `generate` with the draft as assistant (constant k, no confidence threshold). The engine:
baseline, chain with fixed k, adaptive k, prompt look-up, self-speculation by the target's first layers, and with
`--tree-nodes` the best tree, if it wins by what was measured on two further prompts. (The block rule is no arm: greedy
decoding accepts by equality.) The table of docs/measured/engine.md:

    python -m scripts.compare_decoding --draft DIR --prompts HELDOUT_CODE.jsonl.gz --num 12 --k 2 --tree-nodes 8

Decode speed counts the tokens after the first over the time after the first; acceptance is accepted over proposed
tokens, cycles cut by the end of the answer left out, for every arm from the sizes of its emitted blocks.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from distill.provenance import collect
from engine.bench import measure_costs
from engine.cache import bucket
from engine.clock import phased
from engine.model import Runner
from engine.request import Request
from eval.arms import Arm
from eval.bootstrap import interval, resamples
from eval.decoders import EvalRequest, Load
from eval.entry import guarded, table_console
from eval.measure import Bench
from eval.records import LOOKUP, SELF
from eval.trees import find_tree
from scripts.pair import check_ranges, load_pair, parser_of, prompts_of, write_result


@dataclass
class Run:
    """One request under one arm: emitted blocks, and milliseconds before and after the first token."""

    tokens: list[int]
    first_ms: float
    decode_ms: float
    proposed: int = 0
    accepted: int = 0
    phases_ms: dict[str, float] = field(default_factory=dict)

    @property
    def ms_per_tok(self) -> float:
        return self.decode_ms / max(1, len(self.tokens) - 1)


class Blocks(BaseStreamer):
    """Notes when transformers hands out tokens, and how many at once."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.blocks.append(value.flatten().tolist())

    def end(self) -> None:
        """Nothing is held back."""


def by_transformers(
    model: PreTrainedModel, assistant: PreTrainedModel | None, k: int, max_new: int, eos: Sequence[int]
) -> Callable[[str, list[int]], Run]:
    """`generate`, plain or assisted."""
    extra = {} if assistant is None else {"assistant_model": assistant}
    if assistant is not None:
        config = assistant.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, "constant"
        config.assistant_confidence_threshold = 0.0

    def run(name: str, ids: list[int]) -> Run:
        seen, text = Blocks(), torch.tensor([ids])
        model.generate(
            text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=max_new,
            eos_token_id=list(eos), pad_token_id=eos[0], streamer=seen, **extra,
        )  # fmt: skip
        # The first block is the prompt; the assistant's first one may hold several tokens.
        blocks, times = seen.blocks[1:], seen.times[1:]
        tokens = [t for block in blocks for t in block]
        first = len(blocks[0])
        made = Run(tokens, 1e3 * (times[0] - seen.times[0]), 1e3 * (times[-1] - times[0]))
        made.decode_ms *= (len(tokens) - 1) / max(1, len(tokens) - first)
        if assistant is not None:
            before = 0
            for block in blocks:
                room = max_new - before - 1
                if len(block) <= min(k, room) + 1 and block[-1] not in eos and room > 0:
                    made.proposed, made.accepted = made.proposed + min(k, room), made.accepted + len(block) - 1
                before += len(block)
        return made

    return run


def by_engine(bench: Bench, arm: Arm) -> Callable[[str, list[int]], Run]:
    """The engine, with phases (the clock's own cost is in the figures); one decoder for all requests.

    With fixed shapes, a request of a new bucket runs once before it is timed: its steps are compiled or captured there.
    """
    decoder, clock = bench.decoder(arm), phased(bench.target.device)
    decoder.clock = clock
    seen: set[int] = set()

    def run(name: str, ids: list[int]) -> Run:
        shape = bucket(len(ids) + bench.load.max_new)
        if bench.target.fixed and shape not in seen:
            seen.add(shape)
            run(name, ids)
        clock.totals_ms()  # what came before is not this run
        start = clock.now_ms()
        answer = decoder.admit(Request(name, tuple(ids), bench.load.max_new))
        first = clock.now_ms()
        while not answer.finish:
            decoder.cycle()
        end = clock.now_ms()
        decoder.retire()
        whole = [c for c in answer.cycles if not c.cut]
        return Run(
            answer.tokens,
            first - start,
            end - first,
            sum(c.proposed for c in whole),
            sum(c.accepted for c in whole),
            clock.totals_ms(),
        )

    return run


def compare(
    arms: dict[str, Callable[[str, list[int]], Run]], prompts: Sequence[tuple[str, list[int]]], console: Console
) -> dict[str, list[Run]]:
    """Every prompt under every arm, forwards and backwards in turns; the first prompt warms up and is run again."""
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for number, (name, ids) in enumerate([prompts[0], *prompts]):
        for arm in list(arms) if number % 2 else list(arms)[::-1]:
            run = arms[arm](name, ids)
            if number:
                runs[arm].append(run)
        console.log(f"{number} of {len(prompts)} prompts")
    return runs


def summary(runs: dict[str, list[Run]], base: str, floor_ms: float) -> dict[str, dict]:
    """A row for each arm: medians, the paired ratio to `base` with its interval, acceptance, texts, shares.

    `floor_frac` is the time in which the device could copy a step's weights and keys, over the time a token took.
    """
    rows = {}
    reference = np.array([r.ms_per_tok for r in runs[base]])
    for arm, mine in runs.items():
        each = np.array([r.ms_per_tok for r in mine])
        ratio = reference / each
        low, high = interval(np.median(ratio[resamples(len(ratio), 2000, 0)], 1))
        proposed, decode = sum(r.proposed for r in mine), sum(r.decode_ms for r in mine)
        phases = {n: sum(r.phases_ms.get(n, 0.0) for r in mine) / decode for n in ("draft", "verify", "sampling")}
        timed = any(r.phases_ms for r in mine)
        rows[arm] = {
            "ms_per_tok": float(np.median(each)),
            "tok_per_s": 1e3 / float(np.median(each)),
            "speedup": float(np.median(ratio)),
            "low": low,
            "high": high,
            "first_ms": statistics.median(r.first_ms for r in mine),
            "alpha": sum(r.accepted for r in mine) / proposed if proposed else None,
            "same_text": sum(a.tokens == b.tokens for a, b in zip(mine, runs[base], strict=True)) / len(mine),
            "shares": {**phases, "host": 1 - sum(phases.values())} if timed else None,
            "floor_frac": floor_ms / float(np.median(each)),
        }
    return rows


def show(rows: dict[str, dict], base: str) -> Table:
    """The summary as a terminal table."""
    columns = ["arm", "ms a token", "tokens/s", f"against {base}", "95%", "first ms", "alpha", "same text", "H + S"]
    table = Table(*columns, title="greedy, batch 1, median over prompts")
    table.columns[0].no_wrap = True
    for arm, row in rows.items():
        shares = row["shares"]
        table.add_row(
            arm, f"{row['ms_per_tok']:.1f}", f"{row['tok_per_s']:.1f}", f"{row['speedup']:.2f}x",
            f"{row['low']:.2f} to {row['high']:.2f}", f"{row['first_ms']:.0f}",
            "n/a" if row["alpha"] is None else f"{row['alpha']:.2f}", f"{row['same_text']:.0%}",
            "n/a" if shares is None else f"{shares['host'] + shares['sampling']:.1%}",
        )  # fmt: skip
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, num=12, max_new=64, max_prompt=1024)
    parser.add_argument("--domain", default="code")
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--most", type=int, default=5, help="largest k of the adaptive policy")
    parser.add_argument("--self-layers", type=int, default=6)
    parser.add_argument("--tree-nodes", type=int, help="proposals of a tree at most (default: no tree)")
    parser.add_argument("--compile", action="store_true", help="also baseline and chain with compiled steps")
    args = parser.parse_args(argv)
    check_ranges(parser, args, k=(1, 16), most=(1, 16), self_layers=(1, 1 << 10), tree_nodes=(2, 64))
    return guarded(lambda: run_all(args))


def run_all(args: argparse.Namespace) -> int:
    """Runs every arm on every prompt, prints the table.

    Raises:
        ValueError: the models or the prompts cannot be used.
    """
    pair = load_pair(args)
    plain, draft, about, eos = pair.target, pair.draft, pair.about, pair.eos
    if args.self_layers >= plain.config.num_hidden_layers:
        raise ValueError(
            f"--self-layers {args.self_layers}: the target has {plain.config.num_hidden_layers}; give fewer"
        )
    short = prompts_of(pair.tokenizer, args.prompts, args.domain, args.num + 2, args.max_prompt)
    prompts, spare = short[: args.num], short[args.num :]
    capacity = max(len(ids) for _, ids in prompts) + args.max_new + 220
    target = Runner(copy.deepcopy(plain), 1, capacity)
    small = Runner(copy.deepcopy(draft), 1, capacity, about.shortlist, factors=about.factors)
    context = statistics.median(len(ids) for _, ids in prompts) + args.max_new // 2
    ks = sorted({1, args.k, args.most})
    costs = measure_costs(target, small, ks, [int(context)])
    floor_ms = (costs[0].bandwidth_frac or 0.0) * costs[0].V_ms[0]
    bench = Bench(target, {"draft": small}, Load(args.max_new, eos), costs=[replace(costs[0], draft="draft")])
    ours = [
        Arm("", 0), Arm("draft", args.k), Arm("draft", args.most, "adaptive"), Arm(LOOKUP, 4),
        Arm(f"{SELF}{args.self_layers}", args.k),
    ]  # fmt: skip
    tree = None
    if args.tree_nodes is not None:
        texts = [EvalRequest(name, args.domain, "", tuple(ids)) for name, ids in spare]
        tree = find_tree(bench, "draft", texts, bench.costs[0], ks, args.tree_nodes)
        ours += [] if tree.arm is None else [tree.arm]
    arms = {
        "transformers generate": by_transformers(plain, None, 0, args.max_new, eos),
        "transformers assisted": by_transformers(plain, draft, args.k, args.max_new, eos),
        **{f"engine {arm.label}" if arm.k else "engine baseline": by_engine(bench, arm) for arm in ours},
    }
    if args.compile:
        runners = (
            Runner(copy.deepcopy(plain), 1, capacity, compile=True),
            Runner(copy.deepcopy(draft), 1, capacity, about.shortlist, factors=about.factors, compile=True),
        )
        fast = Bench(runners[0], {"draft": runners[1]}, bench.load, costs=bench.costs)
        arms |= {f"compiled {arm.label if arm.k else 'baseline'}": by_engine(fast, arm) for arm in ours[:2]}
    rows = summary(compare(arms, prompts, Console(stderr=True)), "transformers generate", floor_ms)
    table_console().print(show(rows, "transformers generate"))
    result = {
        "arms": rows,
        "costs": [c.to_json() for c in costs],
        "tree": None if tree is None else tree.about,
        "prompts": len(prompts),
        "provenance": collect(0, str(target.device)),
    }
    write_result(args, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
