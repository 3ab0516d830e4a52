"""python -m scripts.policy_replay --draft DIR [--prompts FILE ...] [--domains NAME ...]: adaptive against each fixed k.

The target answers held-out prompts greedily; of each answer it is recorded where the draft would have said the same.
On these recordings every fixed k and the adaptive policy are replayed at this device's measured costs (or those of
--plan), domain by domain and as one mixed stream: what is compared is choices, not a machine's noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from distill.checkpoint import read_draft
from distill.models import load_model, load_tokenizer, resolve
from distill.schema import Traffic
from distill.tokens import encode_prompt, eos_ids
from distill.traffic import load_prompts
from engine.bench import measure_costs
from engine.costs import Costs
from engine.model import Runner
from engine.policy import Adaptive
from engine.request import Answer, Request
from engine.speculate import Decoder
from eval.replay import Trace, mixed, speedup

ROWS = 16


@torch.inference_mode()
def trace_of(answer: Answer, domain: str, draft: Runner) -> Trace:
    """Where the draft would have said what the target said."""
    request = answer.request
    ids = torch.tensor([*request.ids, *answer.tokens][:-1], device=draft.device)
    hidden = draft.prefill(ids)[len(request.ids) - 1 :]
    said = draft.token(draft.logits(hidden).argmax(-1)).tolist()
    return Trace(request.id, domain, len(request.ids), tuple(a == b for a, b in zip(said, answer.tokens, strict=True)))


def compare(traces: Sequence[Trace], costs: Costs, most: int) -> dict[str, dict[str, Any]]:
    """Speedups by domain and of the mixed stream: fixed k from 0 to `most`, and the adaptive policy."""
    streams = {d: [t for t in traces if t.domain == d] for d in dict.fromkeys(t.domain for t in traces)}
    found = {}
    for name, stream in {**streams, "mixed": mixed(traces)}.items():
        fixed = {k: speedup(stream, costs, k) for k in range(most + 1)}
        best = max(fixed, key=lambda k: fixed[k])
        adaptive = speedup(stream, costs, Adaptive([costs], most, kinds={t.request: t.domain for t in stream}))
        found[name] = {
            "answers": len(stream),
            "fixed": fixed,
            "best_k": best,
            "adaptive": adaptive,
            "against_best": adaptive / fixed[best] - 1,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="a draft folder")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", nargs="+", default=["bundled"], help="files or globs of held-out prompts")
    parser.add_argument("--domains", nargs="+", default=["code", "math", "qa"])
    parser.add_argument("--num", type=int, default=32, help="prompts a domain")
    parser.add_argument("--max-new", type=int, default=96)
    parser.add_argument("--max-prompt", type=int, default=500)
    parser.add_argument("--most", type=int, default=5, help="largest k")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--plan", type=Path, help="costs of a plan.json, the first in it (default: measure them)")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    if args.num < 1 or args.max_new < 2 or not 1 <= args.most <= 16:
        parser.error(f"--num {args.num}, --max-new {args.max_new}, --most {args.most}: at least 1, 2, and 1 to 16")
    folder = resolve(args.target)
    tokenizer, model = load_tokenizer(folder), load_model(folder, args.dtype)
    eos = eos_ids(model.config, model.generation_config, tokenizer)
    traffic = Traffic(domain=args.domains[0], heldout=tuple(args.prompts), num_heldout=8 * args.num)
    requests, domains = [], {}
    for domain in args.domains:
        prompts = load_prompts(traffic, "heldout", 0, (domain,))
        coded = [(p.id, tuple(encode_prompt(tokenizer, list(p.messages)))) for p in prompts]
        for name, ids in [c for c in coded if len(c[1]) <= args.max_prompt][: args.num]:
            requests.append(Request(f"{domain}/{name}", ids, args.max_new))
            domains[requests[-1].id] = domain
    capacity = args.max_prompt + args.max_new + 220
    target = Runner(model, ROWS, capacity)
    about = read_draft(args.draft)
    small = load_model(str(args.draft), args.dtype)
    draft = Runner(small, 1, capacity, about.shortlist, factors=about.factors)
    if args.plan:
        costs = Costs.from_json(json.loads(args.plan.read_text(encoding="utf-8"))["costs"][0])
    else:
        context = round(statistics.median(len(r.ids) for r in requests)) + args.max_new // 2
        (costs,) = measure_costs(target, draft, list(range(1, args.most + 1)), [context], rounds=15)
    traces = [trace_of(answer, domains[answer.request.id], draft) for answer in Decoder(target, eos).run(requests)]
    rows = compare(traces, costs, min(args.most, costs.ks[-1]))
    table = Table(
        "stream", "answers", "best fixed k", "its speedup", "adaptive", "against it", title="replayed, greedy"
    )
    for name, row in rows.items():
        best = row["fixed"][row["best_k"]]
        figures = f"{row['best_k']}", f"{best:.3f}x", f"{row['adaptive']:.3f}x", f"{row['against_best']:+.1%}"
        table.add_row(name, f"{row['answers']}", *figures)
    Console().print(table)
    if args.out:
        settings = {k: str(v) for k, v in vars(args).items()}
        text = json.dumps({"streams": rows, "costs": costs.to_json(), "settings": settings}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
