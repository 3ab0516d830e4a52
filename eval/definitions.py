"""The words of the report, one sentence each; docs/metrics.md has the formulas."""

from __future__ import annotations

DEFINITIONS: tuple[tuple[str, str], ...] = (
    ("k", "tokens that the draft proposes in a cycle; k = 0 is the baseline, the same engine without a draft."),
    ("cycle", "propose, verify, accept: it accepts a of k tokens and emits a + 1, the last being the target's own."),
    ("alpha", "acceptance: accepted over proposed tokens, pooled. Cycles cut by the end of the answer are left out."),
    ("A_j, c_j", "chance that the first j proposals are accepted; that the j-th is, given those before it."),
    ("tau", "acceptance length: tokens a cycle, the correction or bonus token included, the prefill's token not."),
    ("alpha*", "break-even: the alpha at which the measured costs make speculation exactly as fast as the baseline."),
    ("T, V, D, S, H", "milliseconds: a baseline token; and verify, draft, sampling and host gap of a cycle."),
    ("share", "a phase's part of decode time, from rows timed by phase; prefix KV lies inside verify."),
    ("waste", "time spent on drafting and verifying tokens that were then rejected; a cross-cut, not a phase."),
    ("speedup", "baseline over speculation, end to end with both prefills, paired by request; gmean, p5, p50, p95."),
    ("interval", "95% percentile bootstrap over requests; of the p50 unless the objective is named."),
    ("slower", "share of requests that speculation made slower."),
    ("ceiling", "speedup of a perfect draft that costs nothing, at the best measured k: 1 / (1 - s)."),
    ("realised", "(speedup - 1) / (ceiling - 1), all requests together."),
    ("predicted", "speedup by the cost model, with costs measured elsewhere and the acceptance measured here."),
    ("tallest bar", "the phase with the largest share of decode time."),
    ("what if", "speedup by the cost model with one thing changed; not answered far from what was measured."),
    ("grid regret", "loss against the best arm of the whole grid, each pair on the requests that both answered."),
    ("level", "the 95% interval of the draft over prompt look-up holds 1: no difference was shown."),
    ("TTFT, TPOT, E2E", "time to first token; time a token after it; whole request. p50 and p95."),
    ("throughput", "answer tokens a second: one request after another; above batch 1 while no row is empty."),
    ("closure", "decode time that the phases do not explain; above 2% the shares are unreliable."),
    ("regret", "expected loss of the chosen arm against the best of the grid, over resampled requests."),
    ("held out", "value of the best arm of each resample on requests it did not see: free of the winner's luck."),
    ("insufficient", "fewer requests than eval.min_requests (20 for p95): no figure is shown."),
)
