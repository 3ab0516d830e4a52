"""A chat completion as an answer to learn from: read, checked against the prompt, tokenised again and verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.endpoint import Completion, Trouble
from distill.prompt import Prompt
from distill.tokens import answer_end

FINISHES = {"stop": "eos", "length": "length"}
UNREADABLE = "\ufffd"  # what a decoder writes for bytes that are no character


class TextError(ValueError):
    """A text that the target's tokenizer can not give back; the message is a reason to count."""


@dataclass(frozen=True)
class Reply:
    """What became of one prompt.

    Attributes:
        prompt, prompt_ids, temperature: what was asked.
        text: the answer.
        finish: eos or length.
        num_tok: tokens of the answer by the server's count, the end included; None when it gives none.
        endpoint: address of the endpoint that answered.
        retried: requests that failed before.
        dropped: why there is no answer; "" when there is one.
    """

    prompt: Prompt
    prompt_ids: list[int]
    temperature: float
    text: str = ""
    finish: str = "eos"
    num_tok: int | None = None
    endpoint: str = ""
    retried: int = 0
    dropped: str = ""


def read_answer(completion: Completion, prompt_tok: int) -> tuple[str, str, int | None]:
    """Text, finish and token count of a chat completion.

    Args:
        completion: whole.
        prompt_tok: tokens that the prompt has with the target's own template.

    Raises:
        Trouble: it has no end or no usage, or the endpoint did not read the same prompt.
    """
    if not completion.finish:
        raise Trouble("failed", "the answer has no finish_reason: it was cut short")
    theirs, num_tok = (completion.usage.get(key) for key in ("prompt_tokens", "completion_tokens"))
    if not isinstance(theirs, int):
        raise Trouble("failed", "the answer has no usage.prompt_tokens, so the prompt can not be verified")
    if theirs != prompt_tok:
        raise Trouble(
            "refused",
            f"the prompt has {theirs} tokens there and {prompt_tok} by the target's chat template and tokenizer: "
            "the endpoint serves another model or template",
        )
    if completion.reasoning:
        raise Trouble("refused", "it cuts reasoning out of the answer; start it without a reasoning parser")
    if completion.finish not in FINISHES:
        raise Trouble("refused", f"finish_reason {completion.finish!r}: no plain end of an answer")
    return completion.text, FINISHES[completion.finish], num_tok if isinstance(num_tok, int) else None


def tokenise(
    tokenizer: PreTrainedTokenizerBase, reply: Reply, eos: Sequence[int], max_new_tok: int
) -> tuple[list[int], str, bool]:
    """Token ids of an answer, verified by decoding them again.

    Args:
        tokenizer: the target's.
        reply: with a text.
        eos: ids that end an answer; the one that ends a turn is appended to an answer that ended by itself.
        max_new_tok: longest answer.

    Returns:
        ids, finish, and whether the server's own tokens were others (by their number: text can be cut in many ways).

    Raises:
        TextError: the text is not what the ids say: unreadable bytes, or a text that does not survive the tokenizer.
    """
    text = reply.text.rstrip(UNREADABLE) if reply.finish == "length" else reply.text  # a character cut in two
    if UNREADABLE in text:
        raise TextError("not_text")
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    # A special token in the text was written as plain text there, and would end the answer here.
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text or {*eos, *tokenizer.all_special_ids} & {*ids}:
        raise TextError("text_differs")
    cut_in_two = len(text) < len(reply.text)
    if not ids and (reply.finish == "length" or reply.num_tok not in (None, 0, 1)):
        return [], reply.finish, False  # nothing, or nothing but tokens that the server does not show
    whole = len(ids) + (reply.finish == "eos")
    # Some servers leave the end out of their count.
    recut = not cut_in_two and reply.num_tok not in (None, len(ids), whole)
    if reply.finish == "length":
        return ids[:max_new_tok], "length", recut
    ids = [*ids, answer_end(tokenizer, eos)]
    return (ids, "eos", recut) if len(ids) <= max_new_tok else (ids[:max_new_tok], "length", recut)


def ids_of(
    tokenizer: PreTrainedTokenizerBase, reply: Reply, eos: Sequence[int], max_new_tok: int
) -> tuple[list[int], str, dict[str, Any]]:
    """Ids, finish, and what the row says besides; no ids and the reason for a dropped prompt."""
    if reply.dropped:
        return [], "", {"dropped": reply.dropped}
    try:
        ids, finish, recut = tokenise(tokenizer, reply, eos, max_new_tok)
    except TextError as error:
        return [], "", {"dropped": str(error)}
    return ids, finish, {"recut": recut}
