"""Long prompts without the middle of their last question: they fit, keep both ends, and the rest of the chat."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from distill.tokens import encode_prompt
from eval.cut import SLACK_TOK, cut_middle

LONG = "First, read this. " + " ".join(f"line{n} of the file;" for n in range(300)) + " What does it do?"


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


@pytest.mark.parametrize("limit", [150, 151, 333, 1000])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_cut_prompt_has_the_limits_tokens_or_a_few_less(
    tok_a: PreTrainedTokenizerFast, limit: int, system: str | None
) -> None:
    messages = chat("hello", "good day", LONG)
    assert len(encode_prompt(tok_a, messages, system)) > limit
    found = cut_middle(tok_a, messages, system, limit)
    assert found is not None and found == cut_middle(tok_a, messages, system, limit)
    cut, ids = found
    assert limit - SLACK_TOK <= len(ids) <= limit and ids == encode_prompt(tok_a, cut, system)
    assert cut[:2] == tuple(messages[:2]) and cut[2]["role"] == "user" and messages[2]["content"] == LONG
    head = next(n for n in range(len(LONG)) if not cut[2]["content"].startswith(LONG[: n + 1]))
    assert head >= 4 and LONG.endswith(cut[2]["content"][head:]) and cut[2]["content"].endswith("do?")


def test_a_chat_whose_other_turns_are_too_long_is_not_cut(tok_a: PreTrainedTokenizerFast) -> None:
    assert cut_middle(tok_a, chat(LONG, "good day", LONG), None, 200) is None
    assert cut_middle(tok_a, chat(LONG, "good day", "Why?"), None, 200) is None
    assert cut_middle(tok_a, [{"role": "system", "content": LONG}], None, 200) is None
    assert cut_middle(tok_a, chat(LONG), None, 1) is None


def test_a_cut_through_a_character_leaves_no_half_of_it(tok_a: PreTrainedTokenizerFast) -> None:
    """Byte tokens: a character of several tokens lies on the cut for some limit."""
    text = "\u4f60\u597d\u00e9\U0001f600" * 60
    for limit in range(80, 100):
        found = cut_middle(tok_a, chat(text), None, limit)
        assert found is not None and len(found[1]) <= limit
        assert "\ufffd" not in found[0][0]["content"] and set(found[0][0]["content"]) <= set(text)
