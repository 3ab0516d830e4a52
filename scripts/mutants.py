"""python -m scripts.mutants [WORD ...]: plants known faults, one at a time, and asks the tests to find each.

Every fault is one edit in a copy of the tree. WORD runs those whose file or name holds it. Exit code 0: all were
found; 1: some survived, named; 2: an edit does not fit the code any more and must be written anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ACCEPT = ("tests/engine/test_accept.py", "tests/trials/test_decoding.py")
JOINT = ("tests/engine/test_speculate.py::test_samples_follow_the_target_joint_distribution",)
TREE = ("tests/engine/test_accept_tree.py", "tests/engine/test_tree_cycle.py")
MASK = ("tests/engine/test_attention.py",)
LOSS = ("tests/distill/test_losses.py", "tests/distill/test_module.py")
CLIP = ("tests/distill/test_clip.py",)
PHASE = ("tests/eval/test_stats.py", "tests/eval/test_records.py")
CLOCK = ("tests/trials/test_phases.py", "tests/engine/test_bench.py", "tests/eval/test_measure.py")
VERDICT = ("tests/trials/test_thresholds.py", "tests/eval/test_verdict.py")


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file` the text `old`, which stands there once, becomes `new`; `tests` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def rule(name: str, old: str, new: str) -> Mutant:
    """A threshold of the table of rules."""
    start = f'Rule("{name}"'
    text = (ROOT / "eval/rules.py").read_text(encoding="utf-8")
    line = text[max(0, text.find(start)) :].split("\n    Rule(")[0].split("\n)")[0]
    return Mutant(f"threshold of {name}", "eval/rules.py", line, line.replace(old, new, 1), VERDICT)


MUTANTS = (
    # -- the accept rule --
    Mutant("greedy: agrees with the next position", "engine/accept.py",
           "agree = proposed == best[:, :-1]", "agree = proposed == best[:, 1:]", ACCEPT),
    Mutant("greedy: counts after a miss", "engine/accept.py",
           "accepted = agree.long().cumprod(1).sum(1)", "accepted = agree.long().sum(1)", ACCEPT),
    Mutant("greedy: the correction is one early", "engine/accept.py",
           "best.gather(1, accepted[:, None])[:, 0]", "best.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]",
           ACCEPT),
    Mutant("greedy: proposals that are none count", "engine/accept.py",
           "device=agree.device) < count[:, None]", "device=agree.device) <= count[:, None]", ACCEPT),
    Mutant("a rejected token is replaced from p", "engine/accept.py",
           "left = (p - q).clamp_(min=0)", "left = p.clone()", ACCEPT),
    Mutant("residual of the wrong sign", "engine/accept.py",
           "left = (p - q).clamp_(min=0)", "left = (q - p).clamp_(min=0)", ACCEPT),
    Mutant("acceptance without q", "engine/accept.py",
           "keep = u_accept * q_of < p_of", "keep = u_accept < p_of", ACCEPT),
    Mutant("acceptance without chance", "engine/accept.py",
           "keep = u_accept * q_of < p_of", "keep = q_of <= p_of", ACCEPT),
    Mutant("sampled: counts after a miss", "engine/accept.py",
           "accepted = keep.long().cumprod(1).sum(1)", "accepted = keep.long().sum(1)", ACCEPT),
    Mutant("sampled: proposals that are none count", "engine/accept.py",
           "device=keep.device) < count[:, None]", "device=keep.device) <= count[:, None]", ACCEPT),
    Mutant("the bonus comes from the residual", "engine/accept.py",
           "final_p = torch.where(rejected[:, None], residual(scaled, final_q), final_p)",
           "final_p = residual(scaled, final_q)", ACCEPT),
    Mutant("a short block's bonus comes from the residual", "engine/accept.py",
           "rejected = accepted < (torch.full_like(accepted, k) if count is None else count)",
           "rejected = accepted < k", ACCEPT),
    Mutant("a fixed proposal is no one-hot q", "engine/accept.py",
           "final_q.scatter_(1, proposed.gather(1, place[:, None]), 1.0)",
           "final_q.scatter_(1, proposed.gather(1, place[:, None]), 0.0)", ACCEPT),
    Mutant("shortlist columns taken for ids", "engine/accept.py",
           "torch.searchsorted(rows, proposed)", "proposed.clamp(max=q.shape[2] - 1)", ACCEPT),
    Mutant("block: weights over 1", "engine/accept.py",
           "(weight[:, i] * p_of[:, i] / q_of[:, i]).clamp_(max=1.0)", "weight[:, i] * p_of[:, i] / q_of[:, i]",
           ACCEPT),
    Mutant("block: chance without the kept weight", "engine/accept.py",
           "both = gain + 1 - kept", "both = gain + 1", ACCEPT),
    Mutant("accept and final share their noise", "engine/speculate.py",
           "u_final = noise.uniform(self.seed, keys[:, None], ahead, noise.FINAL)",
           "u_final = noise.uniform(self.seed, keys[:, None], ahead, noise.ACCEPT)", JOINT),
    Mutant("top-p drops the token that crosses p", "engine/warp.py",
           "before >= top_p", "before + ordered > top_p", ("tests/engine/test_warp.py",)),
    Mutant("tree: later siblings see the first p", "engine/accept_tree.py",
           "left = torch.where(lost, residual(left, this), left)", "left = left + 0 * this", TREE),
    Mutant("tree: siblings drawn with replacement", "engine/accept_tree.py",
           "chance = None if chance is None else chance.scatter(1, token, 0.0)", "chance = chance", TREE),
    # -- the mask --
    Mutant("a token does not see itself", "engine/ring.py",
           "seen = there <= query", "seen = there < query", MASK),
    Mutant("a token sees the next slot", "engine/ring.py",
           "seen = there <= query", "seen = there <= query + 1", MASK),
    Mutant("sliding layers see one token more", "engine/ring.py",
           "seen &= there > query - sliding", "seen &= there >= query - sliding", (*MASK, *TREE)),
    Mutant("a single query of a sliding layer sees all", "engine/attention.py",
           "if self.sees_all and (sliding is None or self.extent <= sliding):", "if self.sees_all:", MASK),
    Mutant("a long prefill of a sliding layer sees all", "engine/attention.py",
           "near = min(tokens, sliding_window or tokens, tokens if", "near = min(tokens, tokens if", MASK),
    Mutant("tree: nodes see what lies behind", "engine/attention.py",
           # What lies behind is at later positions too, which alone would hide it.
           "places)\n    return torch.where(inside[:, None], allowed, (places < root)[:, None]), there",
           "places.minimum(root))\n    return torch.where(inside[:, None], allowed, True), there",
           TREE),
    Mutant("tree: slots taken for positions", "engine/attention.py",
           "torch.where(inside, root + nodes.depth[node], places)", "places", TREE),
    Mutant("prefill is not causal", "engine/dense.py",
           "is_causal=True", "is_causal=False", MASK),
    Mutant("bf16 prefill sees the next token", "engine/dense.py",
           ".triu_(1)", ".triu_(2)", MASK),
    Mutant("a long bf16 prefill sees its whole block", "engine/dense.py",
           "scores[..., first:] += later[:own, :own]", "pass", MASK),
    Mutant("a slab forgets nothing", "engine/cache.py",
           "self._lay_out(min(self.capacity, -(-max(positions, 1) // STEP) * STEP))", "self.ensure(positions)", MASK),
    Mutant("many keys are read without a mask", "engine/attention.py",
           "scores if mask is None else scores.add_(mask)", "scores", MASK),
    # -- the loss's denominator --
    Mutant("the window's first batch is the denominator", "distill/module.py",
           "torch.tensor([sum(lengths), sum(map(self._num_trained, lengths))]",
           "torch.tensor([lengths[0], self._num_trained(lengths[0])]", LOSS),
    Mutant("each batch is its own denominator", "distill/module.py",
           "teacher, labels, num_trained, batch.place", "teacher, labels, len(labels), batch.place", LOSS),
    Mutant("mean of a chunk", "distill/losses.py",
           "total += (value * factor).sum()", "total += (value * factor).mean()", LOSS),
    Mutant("nothing supervised is 0 / 0", "distill/losses.py",
           "scale = torch.where(scale > 0, 1 / scale, 0)", "scale = 1 / scale", LOSS),
    Mutant("the gradient is not divided", "distill/losses.py",
           "factor = grad_loss * scale", "factor = grad_loss + 0 * scale", LOSS),
    Mutant("ignored positions count", "distill/losses.py",
           "keep_all = labels != IGNORE", "keep_all = labels == labels", LOSS),
    Mutant("no square of the temperature", "distill/loss_block.py",
           '"forward_kl": 2', '"forward_kl": 1', LOSS),
    # -- clipping by the rows that have a gradient --
    Mutant("clipping leaves the table", "distill/clip.py",
           "part.mul_(factor)", "part", CLIP),
    Mutant("the norm leaves the table out", "distill/clip.py",
           "if p.grad is not None), *parts.values()])", "if p.grad is not None)])", CLIP),
    Mutant("the embedding's rows are not cleared", "distill/clip.py",
           "torch.cat([ids, words.ids]).unique()", "ids", CLIP),
    # -- the sums of phases --
    Mutant("a phase keeps its last span only", "engine/clock.py",
           "self._sum[name] = self._sum.get(name, 0.0) + (", "self._sum[name] = 0.0 + (", CLOCK),
    Mutant("phases are not reset", "engine/clock.py",
           "totals, self._sum = self._sum, {}", "totals = self._sum", CLOCK),
    Mutant("host time holds the phases", "eval/flow.py",
           "max(0.0, cycles_ms - sum(phases.values()))", "max(0.0, cycles_ms)", CLOCK),
    Mutant("shares of a row, not of time", "eval/stats.py",
           "for r in kept) / wall for name in PHASES}", "for r in kept) / len(kept) for name in PHASES}", PHASE),
    Mutant("no closure error", "eval/stats.py",
           "return share, abs(1.0 - sum(share.values()))", "return share, 0.0", PHASE),
    Mutant("accepted tokens are waste", "eval/stats.py",
           "total += (c.proposed - c.accepted) * costs.t_ms", "total += c.proposed * costs.t_ms", PHASE),
    Mutant("end to end without the draft's prefill", "eval/records.py",
           "return self.prefill_ms + self.draft_prefill_ms + self.stall_ms", "return self.prefill_ms + self.stall_ms",
           PHASE),
    Mutant("shortened cycles count for acceptance", "eval/records.py",
           "if not c.cut and not shortened:", "if not c.cut:", PHASE),
    Mutant("tau without the bonus token", "engine/cycle.py",
           "total, all_before = 1.0, 1.0", "total, all_before = 0.0, 1.0", ("tests/engine/test_costs.py",)),
    # -- the verdict --
    Mutant("at the threshold is a failure", "eval/rules.py",
           'passed = figure >= threshold if', 'passed = figure > threshold if', VERDICT),
    Mutant("any passed rule is a go", "eval/verdict.py",
           'go = all(r["passed"]', 'go = any(r["passed"]', VERDICT),
    Mutant("a domain pays whatever its interval", "eval/rivals.py",
           'and low is not None and low >= 1.0', 'and low is not None', VERDICT),
    rule("requests measured", '"needed"', "2.0"),
    rule("end-to-end speedup by the objective", '"min_speedup"', "1.0"),
    rule("low end of its 95% interval, against no speculation", "1.0", "0.9"),
    rule("draft against prompt look-up", "1.0", "0.8"),
    rule("same text as the baseline (greedy, float32)", "1.0", "0.5"),
    rule("ceiling of a perfect, free draft", '"min_speedup"', "0.5"),
    rule("acceptance above break-even", "0.0", "-0.5"),
    rule("acceptance of the first proposed token", "0.40", "0.30"),
    rule("draft share of time", "0.25", "0.35"),
    rule("launch-bound index of the draft", "0.50", "0.70"),
    rule("prefix KV share of time", "0.20", "0.40"),
    rule("host share of time", "0.10", "0.20"),
    rule("share of time wasted on rejected tokens", "0.25", "0.50"),
    rule("acceptance lost from the training domain to the worst", "0.15", "0.30"),
    rule("requests made slower", "0.10", "0.30"),
    rule("spread of repeated baselines", "0.05", "0.20"),
    rule("phase closure error", "0.02", "0.20"),
    rule("error of the predicted speedup", "0.05", "0.20"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=(__doc__ or "").split(": ")[1])
    parser.add_argument("words", nargs="*", metavar="WORD", help="run the faults whose file or name holds a word")
    args = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if not args.words or any(w in f"{m.file} {m.name}" for w in args.words)]
    unfit = stale(chosen)
    for mutant in unfit:
        print(f"{mutant.file}: {mutant.name!r} does not fit: its text must stand there once")
    if unfit or not chosen:
        return 2
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info"))
        survivors = [m for m in chosen if not killed(m, copy)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults were found")
    return 1 if survivors else 0


def stale(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Those that do not fit the code any more."""
    return [m for m in mutants if m.old == m.new or (ROOT / m.file).read_text(encoding="utf-8").count(m.old) != 1]


def killed(mutant: Mutant, copy: Path) -> bool:
    """Plants the fault, runs its tests until one fails, and takes it out again."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    # Two edits may leave size and second alike, so that stale bytecode would be run.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    path.write_text(text, encoding="utf-8")
    found = done.returncode == 1
    failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    print(f"{'found   ' if found else 'SURVIVED'} {mutant.file}: {mutant.name}  {failed[:110]}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
