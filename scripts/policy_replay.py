"""python -m scripts.policy_replay --draft DIR [--prompts FILE ...] [--domains NAME ...]: adaptive against each fixed k.

The target answers held-out prompts greedily; of each answer it is recorded where the draft would have said the same.
On these recordings every fixed k and the adaptive policy are replayed at this device's measured costs (or those of
--plan), domain by domain and as one mixed stream: what is compared is choices, not a machine's noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from engine.bench import measure_costs
from engine.costs import Costs
from engine.model import Runner
from engine.policy import Adaptive
from engine.request import Answer, Request
from engine.speculate import Decoder
from eval.entry import guarded, table_console, whole
from eval.plan import read_plan
from eval.replay import Trace, mixed, speedup
from scripts.pair import add_domains, check_ranges, load_pair, parser_of, prompts_of, write_result

ROWS = 16


@torch.inference_mode()
def trace_of(answer: Answer, domain: str, draft: Runner) -> Trace:
    """Where the draft would have said what the target said."""
    request = answer.request
    ids = torch.tensor([*request.ids, *answer.tokens][:-1], device=draft.device)
    hidden = draft.prefill(ids)[len(request.ids) - 1 :]
    said = draft.token(draft.logits(hidden).argmax(-1)).tolist()
    return Trace(request.id, domain, len(request.ids), tuple(a == b for a, b in zip(said, answer.tokens, strict=True)))


def compare(traces: Sequence[Trace], costs: Costs, most: int, off: float = 0.0) -> dict[str, dict[str, Any]]:
    """Speedups by domain and of the mixed stream: fixed k from 0 to `most`, and the adaptive policy.

    Args:
        traces: recorded answers.
        costs: what cycles take.
        most: largest k.
        off: the policy is told that drafting and verifying take so much more (less, where negative), as a part.
    """
    told = {k: v * (1 + off if k else 1.0) for k, v in costs.V_ms.items()}
    believed = replace(costs, V_ms=told, t_ms=costs.t_ms * (1 + off))
    streams = {d: [t for t in traces if t.domain == d] for d in dict.fromkeys(t.domain for t in traces)}
    found = {}
    for name, stream in {**streams, "mixed": mixed(traces)}.items():
        fixed = {k: speedup(stream, costs, k) for k in range(most + 1)}
        best = max(fixed, key=lambda k: fixed[k])
        adaptive = speedup(stream, costs, Adaptive([believed], most, kinds={t.request: t.domain for t in stream}))
        found[name] = {
            "answers": len(stream),
            "fixed": fixed,
            "best_k": best,
            "adaptive": adaptive,
            "against_best": adaptive / fixed[best] - 1,
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, num=32, max_new=96, max_prompt=500)
    add_domains(parser)
    parser.add_argument("--most", type=int, default=5, help="largest k")
    parser.add_argument("--plan", type=Path, help="costs of a plan.json, the first in it (default: measure them)")
    parser.add_argument(
        "--off",
        type=float,
        default=0.0,
        help="tell the policy that drafting and verifying cost so much more than they do: 0.05 is 5%%, -0.05 less",
    )
    args = parser.parse_args(argv)
    check_ranges(parser, args, most=(1, 16))
    if not -0.5 <= args.off <= 1:
        parser.error(f"--off {args.off}: allowed is -0.5 to 1")
    return guarded(lambda: replay(args))


def replay(args: argparse.Namespace) -> int:
    """Records the target's answers, replays them, prints the table.

    Raises:
        ValueError: the models, the prompts or the plan cannot be used.
    """
    planned = None
    if args.plan is not None:
        with whole(args.plan, "plan"):
            planned = Costs.from_json(read_plan(args.plan)["costs"][0])
    pair = load_pair(args)
    requests, domains = [], {}
    for domain in args.domains:
        for name, ids in prompts_of(pair.tokenizer, args.prompts, domain, args.num, args.max_prompt):
            requests.append(Request(f"{domain}/{name}", tuple(ids), args.max_new))
            domains[requests[-1].id] = domain
    capacity = args.max_prompt + args.max_new + 220
    target = Runner(pair.target, ROWS, capacity)
    draft = Runner(pair.draft, 1, capacity, pair.about.shortlist, factors=pair.about.factors)
    costs = planned
    if costs is None:
        context = round(statistics.median(len(r.ids) for r in requests)) + args.max_new // 2
        (costs,) = measure_costs(target, draft, list(range(1, args.most + 1)), [context], rounds=15)
    traces = [trace_of(answer, domains[answer.request.id], draft) for answer in Decoder(target, pair.eos).run(requests)]
    rows = compare(traces, costs, min(args.most, costs.ks[-1]), args.off)
    table = Table(
        "stream", "answers", "best fixed k", "its speedup", "adaptive", "against it", title="replayed, greedy"
    )
    for name, row in rows.items():
        best = row["fixed"][row["best_k"]]
        figures = f"{row['best_k']}", f"{best:.3f}x", f"{row['adaptive']:.3f}x", f"{row['against_best']:+.1%}"
        table.add_row(name, f"{row['answers']}", *figures)
    table_console().print(table)
    write_result(args, {"streams": rows, "costs": costs.to_json()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
