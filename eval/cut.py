"""A prompt that is too long, without the middle of its last question."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from distill.tokens import Messages, encode_prompt

# Texts that are joined at the cut are tokenized anew, which may take a token more or less: tries, and tokens that a
# prompt may stay below the limit.
TRIES, SLACK_TOK = 8, 4
# What the rest of a character decodes to that the cut went through.
BROKEN = "\ufffd"


def cut_middle(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, system: str | None, limit: int
) -> tuple[tuple[dict[str, str], ...], list[int]] | None:
    """Takes tokens out of the middle of the user's last message until the templated prompt fits.

    Instructions and questions stand at the beginning or the end, which stay. The other messages stay as they are.

    Args:
        tokenizer: the target's.
        messages: of a prompt over the limit.
        system: as in `tokens.encode_prompt`.
        limit: tokens of the whole prompt.

    Returns:
        the messages and their ids, `limit` or a few less; None where the rest alone is over the limit.

    Source: LongBench (arXiv 2308.14508) shortens prompts in the middle for the same reason.
    """
    turns = [dict(message) for message in messages]
    last = next((place for place in reversed(range(len(turns))) if turns[place]["role"] == "user"), None)
    if last is None:
        return None
    content = tokenizer(turns[last]["content"], add_special_tokens=False)["input_ids"]
    keep = len(content) - (len(encode_prompt(tokenizer, turns, system)) - limit)
    best: tuple[tuple[dict[str, str], ...], list[int]] | None = None
    for _ in range(TRIES):
        if not 2 <= keep < len(content):  # nothing stays of a beginning and an end; or nothing is cut
            break
        turns[last] = {**turns[last], "content": _without_middle(tokenizer, content, keep)}
        ids = encode_prompt(tokenizer, turns, system)
        room = limit - len(ids)
        if room >= 0 and (best is None or len(ids) > len(best[1])):
            best = tuple(turns), ids
        if 0 <= room <= SLACK_TOK:
            break
        keep += room
    return best


def _without_middle(tokenizer: PreTrainedTokenizerBase, ids: list[int], keep: int) -> str:
    """Text of the first and the last of `keep` tokens; a character that the cut goes through is dropped."""
    head, tail = (
        tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for part in (ids[: (keep + 1) // 2], ids[len(ids) - keep // 2 :])
    )
    return f"{head.rstrip(BROKEN)}{tail.lstrip(BROKEN)}"
