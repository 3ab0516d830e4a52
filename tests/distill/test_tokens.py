"""Prompt ids, end ids and the shared-tokenizer check."""

from __future__ import annotations

import logging

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast

from distill.tokens import TokenizerMismatch, check_shared, encode_prompt, eos_ids, fingerprint
from tests.conftest import CHATML, make_config, make_tokenizer

USER = [{"role": "user", "content": "hi"}]


def test_t02_rows_that_do_not_cover_the_ids_are_refused(tok_a: PreTrainedTokenizerFast) -> None:
    check_shared(tok_a, tok_a, 512, 512)
    check_shared(tok_a, tok_a, 500, 500)
    with pytest.raises(TokenizerMismatch, match=r"draft's embedding table has 499 rows, but id 499"):
        check_shared(tok_a, tok_a, 512, 499)
    with pytest.raises(TokenizerMismatch, match=r"target's embedding table has 480 rows"):
        check_shared(tok_a, tok_a, 480, 512)


def test_t01_padded_rows_of_equal_tokenizers_are_told_not_refused(
    tok_a: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_shared(tok_a, tok_a, 576, 512)
    assert "576" in caplog.text and "512" in caplog.text and "499" in caplog.text


def test_t03_another_merge_list_is_refused_with_the_first_id_that_differs(tok_a: PreTrainedTokenizerFast) -> None:
    other = make_tokenizer(size=480)
    target, draft = ({index: token for token, index in tok.get_vocab().items()} for tok in (tok_a, other))
    first = next(index for index in range(500) if target.get(index) != draft.get(index))
    with pytest.raises(TokenizerMismatch) as caught:
        check_shared(tok_a, other, 512, 512)
    assert f"id {first} is {target[first]!r} for the target and {draft[first]!r} for the draft" in str(caught.value)
    assert "500 and 480 entries" in str(caught.value)


def test_t04_an_extra_special_token_is_named(tok_a: PreTrainedTokenizerFast, tok_b: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TokenizerMismatch, match=r"id 500 is '<\|tool\|>' for the target and unused for the draft"):
        check_shared(tok_b, tok_a, 512, 512)
    with pytest.raises(TokenizerMismatch, match=r"id 500 is unused for the target"):
        check_shared(tok_a, tok_b, 512, 512)


@pytest.mark.parametrize("prepend_bos", [False, True])
def test_t05_a_template_with_bos_and_a_tokenizer_that_prepends_it_give_one(prepend_bos: bool) -> None:
    tokenizer = make_tokenizer(prepend_bos=prepend_bos, template="{{ '<s>' }}" + CHATML)
    assert encode_prompt(tokenizer, USER)[:2] == [0, 3]
    doubled = make_tokenizer(prepend_bos=prepend_bos, template="{{ '<s><s>' }}" + CHATML)
    assert encode_prompt(doubled, USER) == encode_prompt(tokenizer, USER)


@pytest.mark.parametrize("prepend_bos", [False, True])
def test_t06_raw_text_starts_with_one_bos(prepend_bos: bool) -> None:
    tokenizer = make_tokenizer(prepend_bos=prepend_bos, template=None)
    ids = encode_prompt(tokenizer, USER)
    assert ids[0] == 0 and ids.count(0) == 1
    assert tokenizer.decode(ids[1:]) == "hi"
    tokenizer.bos_token = None
    assert encode_prompt(tokenizer, USER) == ids[1:]


def test_t07_the_template_decides_and_the_generation_prompt_ends_it(tok_a: PreTrainedTokenizerFast) -> None:
    ids = encode_prompt(tok_a, USER)
    assert tok_a.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    # An answer is whatever comes after these ids, so no marker in the template is needed to find it.
    answer = tok_a("yes", add_special_tokens=False)["input_ids"] + [4]
    whole = tok_a.apply_chat_template([*USER, {"role": "assistant", "content": "yes"}], tokenize=False)
    whole_ids = tok_a(whole, add_special_tokens=False)["input_ids"]
    assert whole_ids[: len(ids) + len(answer)] == ids + answer


def test_a_system_message_is_put_first_unless_there_is_one(tok_a: PreTrainedTokenizerFast) -> None:
    assert tok_a.decode(encode_prompt(tok_a, USER, "Be brief.")).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    own = [{"role": "system", "content": "Mine."}, *USER]
    assert encode_prompt(tok_a, own, "Be brief.") == encode_prompt(tok_a, own)
    assert USER == [{"role": "user", "content": "hi"}]


def test_a_template_that_refuses_the_roles_is_an_error_with_its_reason() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHATML
    with pytest.raises(ValueError, match=r"roles \['system', 'user'\]: no system turn"):
        encode_prompt(make_tokenizer(template=template), USER, "Be brief.")


def test_nothing_to_encode_is_an_error() -> None:
    tokenizer = make_tokenizer(template=None)
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match="without any token"):
        encode_prompt(tokenizer, [{"role": "user", "content": ""}])


def test_t08_every_end_is_found_the_templates_turn_end_too(tok_a: PreTrainedTokenizerFast) -> None:
    config = make_config()
    assert eos_ids(config, None, tok_a) == (1, 4)
    assert eos_ids(config, GenerationConfig(eos_token_id=[7, 1]), tok_a) == (1, 4, 7)
    assert eos_ids(config, GenerationConfig(eos_token_id=9), make_tokenizer(template=None)) == (1, 9)
    # A template that adds a think block before the content does not make its tokens an end.
    think = CHATML.replace("message['content']", "'<think>\\n</think>\\n' + message['content']")
    assert eos_ids(config, None, make_tokenizer(template=think)) == (1, 4)


def test_no_end_at_all_is_an_error() -> None:
    config = make_config()
    config.eos_token_id = None
    tokenizer = make_tokenizer(template=None)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token_id"):
        eos_ids(config, None, tokenizer)


def test_the_fingerprint_sees_meaning_not_the_last_call(tok_b: PreTrainedTokenizerFast) -> None:
    tokenizer = make_tokenizer()
    before = fingerprint(tokenizer)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert fingerprint(tokenizer) == before == fingerprint(make_tokenizer())
    assert fingerprint(tok_b)["tokenizer_sha256"] != before["tokenizer_sha256"]
    assert fingerprint(make_tokenizer(size=480))["tokenizer_sha256"] != before["tokenizer_sha256"]
    tokenizer.chat_template = "{{ messages }}"
    assert fingerprint(tokenizer)["template_sha256"] != before["template_sha256"]
    assert fingerprint(tokenizer)["tokenizer_sha256"] == before["tokenizer_sha256"]
