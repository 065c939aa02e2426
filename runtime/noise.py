"""Counter-based random numbers: a draw is a function of (seed, answer, position, token id) alone.

No generator is advanced, so that batch order, chunk sizes and the number of drafts cannot change a draw. The mixing
function is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(*words: int) -> int:
    """64 bits from any whole numbers, each taken modulo 2^64; the order counts."""
    z = 0
    for word in words:
        z = (z + word + _GOLDEN) & _MASK
        z = ((z ^ (z >> 30)) * _FIRST) & _MASK
        z = ((z ^ (z >> 27)) * _SECOND) & _MASK
        z ^= z >> 31
    return z


def uniform(key: int) -> float:
    """The middle of one of 2^52 parts of 0 .. 1, so neither 0 nor 1."""
    return ((key >> 12) + 0.5) * 2.0**-52


def gumbel(key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """One standard Gumbel number -log(-log(u)) per token id; u is the middle of one of 2^52 parts of 0 .. 1."""
    z = np.uint64(key) + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    z ^= z >> np.uint64(31)
    uniform = ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # exact, so neither 0 nor 1
    out: NDArray[np.float64] = -np.log(-np.log(uniform))
    return out
