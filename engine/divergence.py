"""Where speculative and plain greedy decoding part in low precision, and whether that is a tie or a bug.

A target that verifies k + 1 tokens at once multiplies other shapes than one that reads token by token, so in bf16 its
logits differ by rounding, and two tokens that are about as likely may swap. At the first difference both ways are
forced over the same text: it is a tie if the margin between the two tokens is within what the logits differ by anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from engine.draft import Drafter
from engine.model import Runner
from engine.request import Request
from engine.speculate import Decoder


@dataclass(frozen=True)
class Divergence:
    """The first difference of one request.

    Attributes:
        request: its id.
        place: index of the first differing token in the answer.
        margin: the one-token way's logit of its own token less that of the other way's.
        noise: largest difference between the two ways' logits over the common text.
        noise_here: the same at this place alone.
        tie: margin <= noise.
    """

    request: str
    place: int
    margin: float
    noise: float
    noise_here: float
    tie: bool


@torch.inference_mode()
def forced_logits(target: Runner, prompt: Sequence[int], answer: Sequence[int], width: int) -> Tensor:
    """Logits before each token of an answer, read `width` tokens a step; float32 [len(answer), R].

    The steps end at the prompt's last token and at every further token but the last. The first one starts in the
    prompt, so that all have `width` tokens.

    Args:
        target: its first row is overwritten.
        prompt: at least `width` tokens.
        answer: the tokens that are forced.
        width: tokens of a step: 1, or k + 1 as in a verify pass.

    Raises:
        ValueError: the prompt is shorter than a step.
    """
    if len(prompt) < width:
        raise ValueError(f"the prompt has {len(prompt)} tokens; forcing steps of {width} needs as many at least")
    text = torch.tensor([*prompt, *answer], device=target.device)[None]
    wanted, last = len(answer), len(prompt) + len(answer) - 1
    # The first step of the text's end: steps of `width` tokens back from `last`, down to the prompt's last token.
    num = -(-wanted // width)
    first = last - num * width
    if first:
        target.prefill(text[0, :first])
    rows = []
    for start in range(first, last, width):
        at = torch.tensor([start], device=target.device)
        hidden = target.step(text[:, start : start + width], at, target.extent(start + width, last))
        rows.append(target.logits(hidden)[0].float())
    return torch.cat(rows)[-wanted:]


def classify(
    target: Runner, request: str, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], k: int
) -> Divergence | None:
    """The first difference of two answers, or None when there is none.

    Args:
        target: the target.
        request: name of the request.
        prompt: its tokens, at least k + 1.
        plain: the answer token by token.
        other: the answer with k proposals a cycle.
        k: proposals.
    """
    place = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if place is None:
        return None
    common = plain[: place + 1]  # the logits before the token that differs are the last row
    single = forced_logits(target, prompt, common, 1)
    block = forced_logits(target, prompt, common, k + 1)
    noise = (single - block).abs().amax(1)
    margin = float(single[-1, plain[place]] - single[-1, other[place]])
    most = float(noise.max())
    return Divergence(request, place, margin, most, float(noise[-1]), margin <= most)


def compare_greedy(
    target: Runner, drafter: Drafter, prompts: Sequence[Sequence[int]], k: int, max_new: int, graph: bool = False
) -> dict[str, Any]:
    """Plain against speculative greedy answers, one request at a time.

    Args:
        target: the target.
        drafter: what proposes.
        prompts: token ids.
        k: proposals a cycle.
        max_new: tokens an answer.
        graph: capture the target's steps.

    Returns:
        k, num_tok (compared up to the first difference), accept_frac, ties, bugs, divergences_per_1000_tok, and each
        divergence.
    """
    plain, speculative = Decoder(target, (), graph=graph), Decoder(target, (), drafter, k, graph=graph)
    found, num_tok, proposed, accepted = [], 0, 0, 0
    for index, prompt in enumerate(prompts):
        request = Request(str(index), tuple(prompt), max_new)
        first, second = (next(iter(decoder.run([request]))) for decoder in (plain, speculative))
        proposed += sum(c.proposed for c in second.cycles)
        accepted += sum(c.accepted for c in second.cycles)
        found.append(classify(target, request.id, prompt, first.tokens, second.tokens, k))
        num_tok += max_new if found[-1] is None else found[-1].place + 1
    real = [d for d in found if d is not None]
    return {
        "k": k,
        "graph": graph,
        "num_requests": len(prompts),
        "num_tok": num_tok,
        "accept_frac": accepted / proposed if proposed else None,
        "ties": sum(d.tie for d in real),
        "bugs": sum(not d.tie for d in real),
        "divergences_per_1000_tok": 1e3 * len(real) / num_tok,
        "divergences": [asdict(d) for d in real],
    }
