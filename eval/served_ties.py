"""Where a speculating server's text leaves the baseline's: how close the two tokens were to the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.tokens import answer_end, encode_prompt
from eval.served import BASELINE, SPECULATIVE, ServedRow


@dataclass(frozen=True)
class Parting:
    """The first difference between two greedy answers to one prompt.

    Attributes:
        request_id, load: whose.
        place: index of the first differing token in the answer.
        margin: the target's logit (float32) of the baseline's token less that of the server's; near 0 is a tie.
        below: the target's largest logit less the larger of these two; 0 when one of them is its choice.
        typical: median gap between the target's two largest logits over the common answer and this place.
    """

    request_id: str
    load: str
    place: int
    margin: float
    below: float
    typical: float


def pairs_of(rows: Sequence[ServedRow]) -> list[tuple[ServedRow, ServedRow]]:
    """The baseline's and the server's answer to each prompt at each load, where both came."""
    good = [row for row in rows if row.error is None and not row.warmup]
    base = {(row.load, row.request_id): row for row in good if row.arm == BASELINE}
    mine = [row for row in good if row.arm == SPECULATIVE and (row.load, row.request_id) in base]
    return [(base[row.load, row.request_id], row) for row in mine]


def partings(
    pairs: Sequence[tuple[ServedRow, ServedRow]],
    prompts: Mapping[str, Sequence[dict[str, str]]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    eos: Sequence[int],
) -> Iterator[Parting]:
    """Forces each pair's common text on the target and looks at what it says of the two tokens that follow.

    The texts are tokenised again: where a server wrote tokens that the tokenizer would not choose, the place is one
    that the server did not decide at, and the figures show it (`below` is large).

    Args:
        pairs: of `pairs_of`.
        prompts: messages by request id.
        model: the target, in float32.
        tokenizer: the target's.
        eos: ids that end an answer.
    """
    for first, second in pairs:
        if first.text == second.text:
            continue
        prompt = encode_prompt(tokenizer, prompts[first.request_id])
        ours, theirs = (_ids(row, tokenizer, eos) for row in (first, second))
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        if place >= min(len(ours), len(theirs)):
            continue  # one was cut shorter: nothing was decided otherwise
        logits = _logits(model, [*prompt, *ours[:place]], place + 1)
        here, best = logits[-1], logits.topk(2, -1).values
        mine, other = float(here[ours[place]]), float(here[theirs[place]])
        gaps = (best[:, 0] - best[:, 1]).tolist()
        yield Parting(
            first.request_id, first.load, place, mine - other, float(best[-1, 0]) - max(mine, other), median(gaps)
        )


def summary(pairs: Sequence[tuple[ServedRow, ServedRow]], found: Sequence[Parting]) -> dict[str, Any]:
    """What serving.json says: all differences, and the largest margin among them."""
    return {
        "num_pairs": len(pairs),
        "num_differ": sum(first.text != second.text for first, second in pairs),
        "margin_max": max((abs(p.margin) for p in found), default=None),
        "below_max": max((p.below for p in found), default=None),
        "typical": median(p.typical for p in found) if found else None,
        "partings": [asdict(p) for p in found],
    }


@torch.inference_mode()
def _logits(model: PreTrainedModel, ids: list[int], last: int) -> torch.Tensor:
    """Logits after each of the last so many tokens, float32 [last, V]."""
    text = torch.tensor([ids], device=model.device)
    return model(text, logits_to_keep=last).logits[0].float()


def _ids(row: ServedRow, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]) -> list[int]:
    """The answer's tokens, with its end where it has one."""
    ids = list(tokenizer(row.text, add_special_tokens=False)["input_ids"])
    return [*ids, answer_end(tokenizer, eos)] if row.finish == "stop" else ids
