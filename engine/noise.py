"""Counter-based uniforms: a draw depends on (seed, request, position, purpose) and on nothing else.

So a request gets the same noise alone or in a batch, eager or captured, resumed or not. A position that is drafted
again after a rejection meets its old noise again; that is exact, because no decision that was kept has read it.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

DRAFT, ACCEPT, FINAL = 0, 1, 2  # purposes: draw a draft token, accept it, draw the correction or bonus token

NUM_PURPOSES = 3

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of splitmix64, as a signed integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def request_key(request_id: str) -> int:
    """A 63-bit integer from a request's name (Python's own hash changes from process to process)."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1


def sibling(purpose: int, rank: int) -> int:
    """The purpose of a draw for the sibling of this rank in a tree; rank 0 has the chain's own noise.

    Siblings are drawn and tried one after the other at one position, so each needs its own. Cousins share: of their
    parents one at most is reached, by decisions at earlier positions.
    """
    return purpose + NUM_PURPOSES * rank


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniform(seed: int, request: Tensor, position: Tensor, purpose: int) -> Tensor:
    """Uniforms in [0, 1) of 53 bits.

    Args:
        seed: the run's seed.
        request: int64 keys, broadcastable against `position`.
        position: int64 absolute positions of the tokens that the draws decide.
        purpose: DRAFT, ACCEPT or FINAL, or one of them for a sibling in a tree.

    Returns:
        float64 tensor of the broadcast shape.
    """
    x = _mix(request + (seed * 2 + 1) * _GOLDEN % (1 << 62))
    x = _mix(x + position * _GOLDEN)
    x = _mix(x + (purpose + 1) * _GOLDEN % (1 << 62))
    return _shift(x, 11).to(torch.float64) * 2.0**-53


def fresh(request: Tensor, cycle: Tensor) -> Tensor:
    """Keys [B] for one cycle alone, where a decision reads draws that a later cycle would use again."""
    return _mix(request + (cycle + 1) * _GOLDEN)
