"""Which split a source belongs to, and stable random choices."""

from __future__ import annotations

import hashlib
import random


def is_heldout(source: str, share: float = 0.1) -> bool:
    """Does this module, task, fact or template value belong to the held-out split? The same answer everywhere, always.

    Args:
        source: its name.
        share: part of all sources that is held out.
    """
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest()) < share * 2**64


def chooser(source: str) -> random.Random:
    """Random choices that depend on a name alone (`hash` of a text differs between processes)."""
    return random.Random(int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest()))
