"""What the comparing scripts share: options, the target and its draft, held-out prompts, the JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint import Draft, read_draft
from distill.fields import BUNDLED_DOMAINS
from distill.models import load_model, load_tokenizer, resolve
from distill.schema import Traffic
from distill.tokens import encode_prompt, eos_ids
from distill.traffic import load_prompts


@dataclass(frozen=True)
class Pair:
    """A target and a draft, both loaded.

    Attributes:
        tokenizer: the target's.
        target, draft: in the dtype that was asked for.
        about: the draft's folder.
        eos: ids that end an answer.
    """

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    draft: PreTrainedModel
    about: Draft
    eos: tuple[int, ...]


def parser_of(doc: str | None, num: int, max_new: int, max_prompt: int | None) -> argparse.ArgumentParser:
    """A parser with the options that all of them take.

    Args:
        doc: of the script.
        num, max_new, max_prompt: the defaults; a `max_prompt` of None is no option.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="a draft folder")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", nargs="+", default=["bundled"], help="files or globs of held-out prompts")
    parser.add_argument("--num", type=int, default=num, help="prompts of each domain")
    parser.add_argument("--max-new", type=int, default=max_new, help="tokens of an answer at most")
    if max_prompt is not None:
        parser.add_argument("--max-prompt", type=int, default=max_prompt, help="tokens of a prompt at most")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser


def add_domains(parser: argparse.ArgumentParser) -> None:
    """For scripts that look at several domains."""
    parser.add_argument("--domains", nargs="+", default=list(BUNDLED_DOMAINS))


def check_ranges(parser: argparse.ArgumentParser, args: argparse.Namespace, **ranges: tuple[int, int]) -> None:
    """Ends with a message where a number is out of its range (both ends included); None is left alone."""
    for name, (low, high) in {
        "num": (1, 1 << 20),
        "max_new": (2, 1 << 20),
        "max_prompt": (1, 1 << 20),
        **ranges,
    }.items():
        value = getattr(args, name, None)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and not low <= each <= high:
                parser.error(f"--{name.replace('_', '-')} {each}: allowed are {low:,} to {high:,}")


def load_pair(args: argparse.Namespace) -> Pair:
    """Loads what the options name; the draft is read first, as it is the one that is mistyped.

    Raises:
        ValueError: a checkpoint that can not be used.
    """
    about, folder = read_draft(args.draft), resolve(args.target)
    tokenizer, target = load_tokenizer(folder), load_model(folder, args.dtype)
    eos = eos_ids(target.config, target.generation_config, tokenizer)
    return Pair(tokenizer, target, load_model(str(args.draft), args.dtype), about, tuple(eos))


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, sources: Sequence[str], domain: str, num: int, max_tok: int
) -> list[tuple[str, list[int]]]:
    """Ids and tokens of a domain's first held-out prompts that are not too long.

    Raises:
        ValueError: there is none.
    """
    traffic = Traffic(domain=domain, heldout=tuple(sources), num_heldout=8 * num)
    found = load_prompts(traffic, "heldout", 0, (domain,))
    coded = ((p.id, encode_prompt(tokenizer, list(p.messages))) for p in found)
    kept = [(name, ids) for name, ids in coded if len(ids) <= max_tok][:num]
    if not kept:
        raise ValueError(f"{', '.join(sources)}: no held-out prompt of {domain} has {max_tok} tokens or less")
    return kept


def write_result(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """The figures with the settings that they were measured at, where a file is asked for."""
    if args.out:
        settings = {name: str(value) for name, value in vars(args).items()}
        args.out.write_text(json.dumps({**result, "settings": settings}, indent=1) + "\n", encoding="utf-8")
