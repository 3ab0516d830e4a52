"""The shared-tokenizer contract: prompt ids, ids that end an answer, and an id that means the same to both models."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# A template is a program from outside, run in transformers' sandbox: beside its own errors it may raise any of these.
TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

Messages = Sequence[dict[str, str]]


class TokenizerMismatch(ValueError):
    """Target and draft do not mean the same text by the same id."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, system: str | None = None) -> list[int]:
    """The ids every run (training, baseline, speculation) starts from.

    With a chat template the ids are those of the template's text, which alone decides whether there is a BOS; a second
    one, from the tokenizer or the template, is dropped. Without a template the messages' text is taken as it is, after
    one BOS when the tokenizer has one.

    Args:
        tokenizer: the target's.
        messages: chat messages, `role` and `content`.
        system: put before messages that have no system message.

    Returns:
        Token ids, ready for the answer's first token.

    Raises:
        ValueError: nothing to encode, or the template refuses these messages.
    """
    turns = with_system(messages, system)
    if tokenizer.chat_template is None:
        ids = list(tokenizer("\n\n".join(turn["content"] for turn in turns), add_special_tokens=False)["input_ids"])
        ids = ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
    else:
        ids = list(tokenizer(_render(tokenizer, turns, True), add_special_tokens=False)["input_ids"])
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        del ids[0]
    if not ids:
        raise ValueError("a prompt without any token: give the message some content, or use a tokenizer with a BOS")
    return ids


def with_system(messages: Messages, system: str | None) -> list[dict[str, str]]:
    """Copies of the messages, after the system message unless they have one of their own."""
    turns = [dict(message) for message in messages]
    if system is not None and not any(turn["role"] == "system" for turn in turns):
        turns.insert(0, {"role": "system", "content": system})
    return turns


def eos_ids(
    model_config: PreTrainedConfig, generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Every id that ends an answer, ascending.

    Args:
        model_config: its `eos_token_id` (a number, a list or nothing).
        generation_config: the same, where there is one.
        tokenizer: its EOS, and the token that its chat template writes after an assistant's turn.

    Raises:
        ValueError: no source names one; generation would never end.
    """
    found: set[int] = set()
    for value in (
        getattr(model_config, "eos_token_id", None),
        getattr(generation_config, "eos_token_id", None),
        tokenizer.eos_token_id,
        end_of_turn(tokenizer),
    ):
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if wrong := [index for index in ids if type(index) is not int or index < 0]:
            raise ValueError(f"eos_token_id holds {wrong[0]!r} in config.json or generation_config.json; ids are >= 0")
        found.update(ids)
    if not found:
        raise ValueError(
            "neither the model's config, its generation config nor the tokenizer names an end-of-sequence id; "
            "set eos_token_id in the checkpoint's generation_config.json"
        )
    return tuple(sorted(found))


def check_shared(
    target_tok: PreTrainedTokenizerBase, draft_tok: PreTrainedTokenizerBase, target_rows: int, draft_rows: int
) -> None:
    """Checks that a draft's ids are the target's ids.

    Rows are padded to different multiples, so their number may differ while the tokenizers are equal (it is logged
    then); it only has to cover every id in use.

    Args:
        target_tok: the target's tokenizer.
        draft_tok: the draft's tokenizer.
        target_rows: rows of the target's embedding table.
        draft_rows: rows of the draft's.

    Raises:
        TokenizerMismatch: naming the first id that differs, or the rows that do not cover the ids.
    """
    target, draft = (_by_id(tokenizer) for tokenizer in (target_tok, draft_tok))
    for index in sorted(target.keys() | draft.keys()):
        ours, theirs = target.get(index), draft.get(index)
        if ours != theirs:
            raise TokenizerMismatch(
                f"id {index} is {_name(ours)} for the target and {_name(theirs)} for the draft "
                f"({len(target)} and {len(draft)} entries): a draft needs the target's tokenizer; "
                "prune one from the target, or choose a checkpoint of the same family"
            )
    for who, rows in (("target", target_rows), ("draft", draft_rows)):
        if rows <= max(target):
            raise TokenizerMismatch(
                f"the {who}'s embedding table has {rows} rows, but id {max(target)} ({_name(target[max(target)])}) "
                f"is in use: it needs at least {max(target) + 1}; the checkpoint was cut, take the whole one"
            )
    if target_rows != draft_rows:
        log.warning(
            "target has %d embedding rows, draft %d; ids in use end at %d", target_rows, draft_rows, max(target)
        )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes (SHA-256, hex) of what decides ids: tokenizer_sha256 and template_sha256."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        core = json.loads(backend.to_str())
        # Padding and truncation are the last call's settings, not the tokenizer's.
        core = {key: value for key, value in core.items() if key not in ("padding", "truncation")}
    else:
        core = tokenizer.get_vocab()
    return {
        "tokenizer_sha256": _sha256(json.dumps(core, sort_keys=True)),
        "template_sha256": _sha256(json.dumps(tokenizer.chat_template, sort_keys=True)),
    }


def _render(tokenizer: PreTrainedTokenizerBase, turns: Messages, generation: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(turns), add_generation_prompt=generation, tokenize=False))
    except TEMPLATE_ERRORS as error:
        roles = [turn["role"] for turn in turns]
        raise ValueError(f"the chat template refuses messages with the roles {roles}: {error}") from error


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the template writes right after an assistant's turn."""
    if tokenizer.chat_template is None:
        return None
    mark = "specdraft"
    text = _render(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}], False)
    after = tokenizer(text[text.rfind(mark) + len(mark) :], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return next((index for index in after if index in special), None)


def answer_end(tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]) -> int:
    """The id to end an answer with that is given as text: what the template ends a turn with, else the tokenizer's EOS.

    Args:
        tokenizer: the target's.
        eos: ids that end an answer; the result is one of them.
    """
    for end in (end_of_turn(tokenizer), tokenizer.eos_token_id):
        if end is not None and end in eos:
            return int(end)
    return eos[0]


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _name(token: str | None) -> str:
    return "unused" if token is None else repr(token)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_class(folder: str) -> str | None:
    """The class that a checkpoint's own files name."""
    path = Path(folder) / "tokenizer_config.json"
    return json.loads(path.read_text()).get("tokenizer_class") if path.is_file() else None
