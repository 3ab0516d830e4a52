"""Prompts of a domain, from the bundled generators or the user's own files: read, checked, de-duplicated, sampled."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

from distill.bundled import bundled_prompts
from distill.fields import BUNDLED_DOMAINS, sources
from distill.prompt import Prompt
from distill.readers import Row, TrafficError, read_rows
from distill.sample import Sample, Sieve, unique_ids
from distill.schema import Traffic

__all__ = ["Prompt", "TrafficError", "load_prompts", "stream_prompts"]

log = logging.getLogger(__name__)

Split = Literal["train", "heldout"]
ROLES = ("system", "user", "assistant")
HALVES = re.compile("[\ud800-\udfff]")  # JSON can write half of a surrogate pair, and Unicode has no such text


def load_prompts(traffic: Traffic, split: Split, seed: int, domains: Sequence[str] | None = None) -> list[Prompt]:
    """Reads the prompts of one split, without duplicates, and samples as many as the recipe asks for.

    The sample depends on the seed and the prompts' text alone, not on the order of files or rows. A training prompt
    that is also held out (the same text, or the same block of code under another instruction) is left out.

    Args:
        traffic: the recipe's stage.
        split: "train" gives up to num_train prompts of traffic.domain (of all domains when that is "mixed", as many of
            each where all are bundled); "heldout" gives up to num_heldout prompts for each domain.
        seed: of the sample.
        domains: held-out domains wanted; None is all there are. Ignored for "train", where the recipe names the domain.

    Returns:
        Prompts in random order; held-out ones grouped by domain.

    Raises:
        TrafficError: a file that is missing or broken, with line and column; or no prompt left.
        OSError: there is no room for temporary files.
    """
    if split == "train":
        return list(stream_prompts(traffic, seed))
    counts: Counter[str] = Counter()
    samples: dict[str, Sample] = {}
    for prompt in _distinct(_prompts(traffic, split, domains, counts), Sieve(), counts):
        if prompt.domain not in samples:
            samples[prompt.domain] = Sample(traffic.num_heldout, seed)
        samples[prompt.domain].add(prompt)
    for domain in sorted(set(domains or ()) - samples.keys()):
        log.warning("no held-out prompt of domain %s; there are %s", domain, ", ".join(sorted(samples)) or "none")
    chosen: list[Prompt] = []
    for domain in list(domains) if domains is not None else sorted(samples):
        sample = samples.get(domain, ())
        _report(f"{split} {domain}", counts, len(sample), traffic.num_heldout)
        chosen += sample
    _require(bool(chosen), traffic, split, counts)
    return list(unique_ids(chosen))


def stream_prompts(traffic: Traffic, seed: int) -> Iterator[Prompt]:
    """The training prompts of `load_prompts`, one at a time; memory does not grow with their number.

    All are read and checked before the first one comes, since the sample depends on every one.

    Args:
        traffic: the recipe's stage.
        seed: of the sample.

    Raises:
        TrafficError, OSError: as `load_prompts`.
    """
    counts: Counter[str] = Counter()
    wanted = None if traffic.domain == "mixed" else (traffic.domain,)
    sieve, sample = Sieve(), Sample(traffic.num_train, seed)
    for prompt in _prompts(traffic, "heldout", wanted, Counter()):
        sieve.hold(prompt)
    # How many prompts a bundled domain has says nothing of anybody's traffic, so a mixed draft takes as many of each.
    even = wanted is None and sources(traffic.train) == ("bundled",)
    share = -(-traffic.num_train // len(BUNDLED_DOMAINS))
    shares = {domain: Sample(share, seed) for domain in BUNDLED_DOMAINS} if even else {}
    for prompt in _distinct(_prompts(traffic, "train", wanted, counts), sieve, counts):
        shares.get(prompt.domain, sample).add(prompt)
    for part in shares.values():
        for prompt in part:
            sample.add(prompt)
    del sieve  # its file may be large
    _report("train", counts, len(sample), traffic.num_train)
    _require(len(sample) > 0, traffic, "train", counts)
    yield from unique_ids(sample)


def first_prompts(traffic: Traffic, split: Split, num: int) -> list[Prompt]:
    """The first rows of every file of a split, checked as `load_prompts` checks them; bundled prompts are left out.

    Args:
        traffic: the recipe's stage.
        split: which one.
        num: rows a source.

    Raises:
        TrafficError: a file that is missing or broken, with line and column; or no row in any of them.
    """
    hub_split = traffic.split_train if split == "train" else traffic.split_heldout
    found: list[Prompt] = []
    named = sources(traffic.train if split == "train" else traffic.heldout)
    own = [name for name in named if name != "bundled"]
    rows = 0
    for source in own:
        for row in islice(read_rows(source, hub_split, traffic, Counter()), num):
            rows += 1
            try:
                found.append(_prompt(row, traffic))
            except TrafficError:
                if traffic.on_bad_line == "refuse":
                    raise
    if not rows and len(own) == len(named):
        raise TrafficError(f"{', '.join(own)}: no row that can be read; give a file with prompts")
    return found


def _prompts(traffic: Traffic, split: Split, domains: Sequence[str] | None, counts: Counter[str]) -> Iterator[Prompt]:
    """All prompts of the split that belong to `domains` (None is every domain); counts what is left out."""
    hub_split = traffic.split_train if split == "train" else traffic.split_heldout
    for source in sources(traffic.train if split == "train" else traffic.heldout):
        if source == "bundled":
            for domain in BUNDLED_DOMAINS:
                if domains is None or domain in domains:
                    for prompt in bundled_prompts(domain, split):
                        counts["read"] += 1
                        yield prompt
            continue
        for row in read_rows(source, hub_split, traffic, counts):
            counts["read"] += 1
            try:
                prompt = _prompt(row, traffic)
            except TrafficError:
                if traffic.on_bad_line == "refuse":
                    raise
                counts["bad row"] += 1
                continue
            counts[f"domain {prompt.domain}"] += 1
            if domains is not None and prompt.domain not in domains:
                counts["other domain"] += 1
            else:
                yield prompt


def _prompt(row: Row, traffic: Traffic) -> Prompt:
    """Checks one row; an assistant's turn at its end becomes the reference."""
    messages = row.values.get(traffic.messages_column)
    text = row.values.get(traffic.prompt_column)
    reference = _text(row, traffic.response_column)
    if messages is not None:
        turns = _turns(row, traffic.messages_column, messages)
        if turns[-1]["role"] == "assistant":
            *turns, last = turns
            reference = last["content"] if reference is None else reference
        column = traffic.messages_column
    elif text is not None:
        turns = [{"role": "user", "content": _text(row, traffic.prompt_column) or ""}]
        column = traffic.prompt_column
    else:
        raise TrafficError(
            f"{row.place}: neither column {traffic.messages_column!r} nor {traffic.prompt_column!r} has a value; "
            f"the row has {', '.join(map(repr, row.values)) or 'no column'}. Name yours: traffic.prompt_column=NAME"
        )
    if not turns or turns[-1]["role"] != "user":
        raise TrafficError(f"{row.place}, column {column!r}: there is no user's turn to answer at the end")
    if not turns[-1]["content"].strip():
        raise TrafficError(f"{row.place}, column {column!r}: the prompt is empty")
    for turn in turns:
        if half := HALVES.search(turn["content"]):
            raise TrafficError(
                f"{row.place}, column {column!r}: holds half a character, {half[0]!a}; no tokenizer reads it"
            )
    return Prompt(
        id=str(row.values.get("id") or row.name),
        domain=_text(row, "domain") or traffic.domain,
        messages=tuple(turns),
        reference=reference,
        source=_text(row, "source") or row.file,
    )


def _turns(row: Row, column: str, messages: object) -> list[dict[str, str]]:
    where = f"{row.place}, column {column!r}"
    if not isinstance(messages, list) or not messages:
        found = "empty" if messages == [] else type(messages).__name__
        raise TrafficError(f"{where}: is {found}, must be a list of messages with role and content")
    turns = []
    for number, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise TrafficError(f"{where}, message {number}: role {role!r}; allowed are {', '.join(ROLES)}")
        if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
        if not isinstance(content, str):
            raise TrafficError(f"{where}, message {number}: content is {type(content).__name__}, must be text")
        turns.append({"role": role, "content": content})
    return turns


def _text(row: Row, column: str) -> str | None:
    value = row.values.get(column)
    if value is not None and not isinstance(value, str):
        raise TrafficError(f"{row.place}, column {column!r}: is {type(value).__name__}, must be text")
    return value


def _distinct(prompts: Iterable[Prompt], sieve: Sieve, counts: Counter[str]) -> Iterator[Prompt]:
    for prompt in prompts:
        if reason := sieve.reject(prompt):
            counts[reason] += 1
        else:
            yield prompt


def _report(what: str, counts: Counter[str], taken: int, asked: int) -> None:
    left_out = [f"{counts[name]} {name}" for name in ("other domain", "bad row", "duplicate", "also held out")]
    log.info(
        "%s prompts: %d read, %s; taken: %d of %d asked for", what, counts["read"], ", ".join(left_out), taken, asked
    )
    if taken < asked:
        log.warning("%s: %d prompts asked for, only %d there", what, asked, taken)


def _require(found: bool, traffic: Traffic, split: Split, counts: Counter[str]) -> None:
    if found:
        return
    if not counts["read"]:
        named = ", ".join(sources(traffic.train if split == "train" else traffic.heldout))
        raise TrafficError(f"{named}: no row that can be read; give a file with prompts")
    domains = sorted(name.removeprefix("domain ") for name in counts if name.startswith("domain "))
    remedy = "Give other prompts"
    if counts["also held out"]:
        remedy = "Give training prompts that are not held out"
    elif counts["other domain"]:
        remedy = f"Set {'traffic.domain' if split == 'train' else 'eval.domains'} to one of these"
    raise TrafficError(
        f"traffic.{split}: no prompt left of {counts['read']} rows ({counts['other domain']} of another domain, "
        f"{counts['duplicate']} duplicates, {counts['also held out']} also held out, {counts['bad row']} bad); "
        f"domains found: {', '.join(domains) or 'none'}. {remedy}"
    )
