"""A server's answer as ids: its own where it gives them and they say its text, else those of the text, or none."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill.completion import Reply, ids_of, read_answer
from distill.endpoint import Completion, Trouble
from distill.prompt import Prompt

EOS = (1, 4)
PROMPT = [3, 40, 41]


def answered(*chunks: tuple[str, list[int]], finish: str = "stop", **more: Any) -> Completion:
    """What vLLM streams with `return_token_ids`: the prompt's ids once, an answer's piece by piece, then its counts."""
    whole = Completion()
    whole.take({"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": more.get("prompt_ids", PROMPT)})
    for text, ids in chunks:
        whole.take({"choices": [{"delta": {"content": text}, "finish_reason": None, "token_ids": ids}]})
    num = more.get("num_tok", sum(len(ids) for _, ids in chunks))
    whole.take({"choices": [{"delta": {}, "finish_reason": finish, "token_ids": None}]})
    whole.take({"choices": [], "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": num}})
    return whole


def reply(completion: Completion) -> Reply:
    prompt = Prompt("p", "qa", ({"role": "user", "content": "?"},), None, "t")
    text, finish, num_tok, own = read_answer(completion, PROMPT)
    return Reply(prompt, PROMPT, 0.0, text, finish, num_tok, own)


def test_a_servers_own_ids_are_kept_however_its_text_would_be_cut(tok_a: PreTrainedTokenizerFast) -> None:
    """The letters of "the" are three tokens there and another cut of the text here; the end it wrote stays the end."""
    letters = [tok_a.convert_tokens_to_ids(letter) for letter in "the"]
    assert tok_a("the", add_special_tokens=False)["input_ids"] != letters
    chunks = [("t", letters[:1]), ("he", letters[1:]), ("", [1])]
    assert ids_of(tok_a, reply(answered(*chunks)), EOS, 9) == ([*letters, 1], "eos", {"recut": False, "own_ids": True})
    # Without ids (or with fewer than it counted) the text is tokenised again, and the row says so.
    for less in ([(text, []) for text, _ in chunks], chunks[1:]):
        text = "the" if less[0][0] == "t" else "he"
        ids, finish, facts = ids_of(tok_a, reply(answered(*less, num_tok=4)), EOS, 9)
        assert ids == [*tok_a(text, add_special_tokens=False)["input_ids"], 4]
        assert finish == "eos" and facts == {"recut": True, "own_ids": False}


def test_an_end_that_the_server_left_out_is_put_back_and_long_answers_are_cut(tok_a: PreTrainedTokenizerFast) -> None:
    letters = [tok_a.convert_tokens_to_ids(letter) for letter in "the"]
    own = reply(answered(("the", letters)))
    assert ids_of(tok_a, own, EOS, 9)[:2] == ([*letters, 4], "eos")  # <|im_end|>: the template's end of a turn
    assert ids_of(tok_a, own, EOS, 3)[:2] == (letters, "length")
    assert ids_of(tok_a, reply(answered(("the", letters), finish="length")), EOS, 9)[:2] == (letters, "length")
    assert ids_of(tok_a, reply(answered(("", [4]))), EOS, 9)[:2] == ([4], "eos")


def test_a_character_cut_in_two_keeps_its_tokens(tok_a: PreTrainedTokenizerFast) -> None:
    """The server holds half of it back, or writes a mark in its place; the ids are the target's own all the same."""
    ids = tok_a("fox 🦊", add_special_tokens=False)["input_ids"][:-1]
    for text in ("fox ", "fox \ufffd"):
        got = ids_of(tok_a, reply(answered((text, ids), finish="length")), EOS, 99)
        assert got == (ids, "length", {"recut": False, "own_ids": True})


@pytest.mark.parametrize("ids", [[40, 41, 42], [499, 4, 499], [100_000], [-1]])
def test_ids_that_do_not_say_the_text_are_dropped(tok_a: PreTrainedTokenizerFast, ids: list[int]) -> None:
    assert ids_of(tok_a, reply(answered(("the", ids), finish="length")), EOS, 9) == ([], "", {"dropped": "ids_differ"})


def test_a_decoder_that_drops_the_first_space_is_read_after_the_prompt() -> None:
    core = Tokenizer(models.WordLevel({"<s>": 0, "▁a": 1, "▁b": 2, "</s>": 3, "[": 4, "]": 5}, unk_token="<s>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    assert tokenizer.decode([2]) == "b"
    prompt = Prompt("p", "qa", ({"role": "user", "content": "?"},), None, "t")
    own = Reply(prompt, [0, 4, 1, 5], 0.0, " b a", "eos", 3, [2, 1, 3])
    assert ids_of(tokenizer, own, [3], 9)[:2] == ([2, 1, 3], "eos")
    assert ids_of(tokenizer, Reply(prompt, [0, 4], 0.0, " a a", "eos", 3, [2, 1, 3]), [3], 9)[2] == {
        "dropped": "ids_differ"
    }


def test_another_prompt_of_the_same_length_is_found_by_its_ids() -> None:
    with pytest.raises(
        Trouble, match=r"differ from number 1 on: \[50, 41\] there, \[40, 41\] by the target's"
    ) as raised:
        read_answer(answered(("a", [60]), prompt_ids=[3, 50, 41]), PROMPT)
    assert raised.value.kind == "refused"


@pytest.mark.parametrize("ids", ["ab", [1.5], [True], 7])
def test_ids_that_are_no_numbers_break_the_answer(ids: Any) -> None:
    for event in ({"choices": [{"delta": {}, "token_ids": ids}]}, {"choices": [], "prompt_token_ids": ids}):
        with pytest.raises(Trouble, match="no list of numbers"):
            Completion().take(event)
