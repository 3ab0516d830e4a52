"""A chat completion as an answer to learn from: checked against the prompt, its ids kept or found, and verified."""

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
        ids: all token ids of the answer as the server gives them; None when it does not.
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
    ids: list[int] | None = None
    endpoint: str = ""
    retried: int = 0
    dropped: str = ""


def read_answer(completion: Completion, prompt_ids: Sequence[int]) -> tuple[str, str, int | None, list[int] | None]:
    """Text, finish, token count and token ids of a chat completion.

    Args:
        completion: whole.
        prompt_ids: the prompt's tokens with the target's own template.

    Raises:
        Trouble: it has no end or no usage, or the endpoint did not read the same prompt.
    """
    if not completion.finish:
        raise Trouble("failed", "the answer has no finish_reason: it was cut short")
    theirs, num_tok = (completion.usage.get(key) for key in ("prompt_tokens", "completion_tokens"))
    if not isinstance(theirs, int):
        raise Trouble("failed", "the answer has no usage.prompt_tokens, so the prompt can not be verified")
    if theirs != len(prompt_ids):
        raise Trouble(
            "refused",
            f"the prompt has {theirs} tokens there and {len(prompt_ids)} by the target's chat template and tokenizer: "
            "the endpoint serves another model or template",
        )
    if completion.prompt_ids is not None and completion.prompt_ids != list(prompt_ids):
        pairs = list(zip(completion.prompt_ids, prompt_ids))
        at = next((place for place, (there, here) in enumerate(pairs) if there != here), len(pairs))
        raise Trouble(
            "refused",
            f"the prompt's tokens differ from number {at} on: {completion.prompt_ids[at : at + 3]} there, "
            f"{list(prompt_ids[at : at + 3])} by the target's chat template and tokenizer: the endpoint serves another "
            "model or template",
        )
    if completion.reasoning:
        raise Trouble("refused", "it cuts reasoning out of the answer; start it without a reasoning parser")
    if completion.finish not in FINISHES:
        raise Trouble("refused", f"finish_reason {completion.finish!r}: no plain end of an answer")
    num_tok = num_tok if isinstance(num_tok, int) else None
    # Ids that came with pieces which the server held back would be fewer than it counts.
    whole = completion.token_ids and len(completion.token_ids) == num_tok
    return completion.text, FINISHES[completion.finish], num_tok, completion.token_ids if whole else None


def check_ids(
    tokenizer: PreTrainedTokenizerBase, reply: Reply, eos: Sequence[int], max_new_tok: int
) -> tuple[list[int], str]:
    """The server's own ids and the finish, verified: they decode to the text that came with them.

    Args:
        tokenizer: the target's.
        reply: with ids.
        eos: ids that end an answer; the one that ends a turn is appended to one that the server cut before its end.
        max_new_tok: longest answer.

    Raises:
        TextError: the ids are another tokenizer's, or go on after an end.
    """
    assert reply.ids is not None
    ended = reply.finish == "eos" and reply.ids[-1] in eos
    body = reply.ids[:-1] if ended else reply.ids
    if {*eos} & {*body} or not all(0 <= index < len(tokenizer) for index in body):
        raise TextError("ids_differ")
    # What a server writes leaves special tokens out, and a character that was cut in two.
    text = reply.text.replace(UNREADABLE, "")
    if _decode(tokenizer, body) != text:
        # Some decoders drop the space before the first word of a text: it is there after a prompt.
        before = _decode(tokenizer, reply.prompt_ids)
        if _decode(tokenizer, [*reply.prompt_ids, *body]) != before + text:
            raise TextError("ids_differ")
    ids = [*body, reply.ids[-1] if ended else answer_end(tokenizer, eos)] if reply.finish == "eos" else body
    return (ids, reply.finish) if len(ids) <= max_new_tok else (ids[:max_new_tok], "length")


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text).replace(UNREADABLE, "")


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
        if reply.ids is not None:
            ids, finish = check_ids(tokenizer, reply, eos, max_new_tok)
            return ids, finish, {"recut": False, "own_ids": True}
        ids, finish, recut = tokenise(tokenizer, reply, eos, max_new_tok)
    except TextError as error:
        return [], "", {"dropped": str(error)}
    return ids, finish, {"recut": recut, "own_ids": False}
