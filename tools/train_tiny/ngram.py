"""The baseline: an interpolated 5-gram model with modified Kneser-Ney discounts on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
ORDER, BITS = 5, 12  # five ids of twelve bits fit one 64-bit key


@dataclass
class Level:
    """One order: its n-grams with counts, and per context the total and how many have count 1, 2, 3 or more."""

    keys: Ids
    counts: Ids
    contexts: Ids
    totals: Ids
    kinds: tuple[Ids, Ids, Ids]
    discounts: tuple[float, float, float]


def _keys(tokens: Ids, order: int) -> Ids:
    """Every n-gram as one integer, the oldest token highest."""
    count = tokens.size - order + 1
    key = np.zeros(count, dtype=np.int64)
    for i in range(order):
        key = (key << BITS) | tokens[i : i + count]
    return key


def _discounts(counts: Ids) -> tuple[float, float, float]:
    n1, n2, n3, n4 = (max(int((counts == i).sum()), 1) for i in range(1, 5))
    y = n1 / (n1 + 2 * n2)
    return 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3


def _level(keys: Ids, counts: Ids) -> Level:
    contexts, first = np.unique(keys >> BITS, return_index=True)
    kinds = (counts == 1, counts == 2, counts >= 3)
    totals = np.add.reduceat(counts, first)
    n1, n2, n3 = (np.add.reduceat(kind.astype(np.int64), first) for kind in kinds)
    return Level(keys, counts, contexts, totals, (n1, n2, n3), _discounts(counts))


def train(tokens: Ids) -> list[Level]:
    """Levels of order 1 to ORDER: raw counts at the top, numbers of distinct predecessors below."""
    keys, counts = np.unique(_keys(tokens, ORDER), return_counts=True)
    levels = [_level(keys, counts)]
    for order in range(ORDER - 1, 0, -1):
        keys, counts = np.unique(levels[-1].keys & ((1 << (BITS * order)) - 1), return_counts=True)
        levels.append(_level(keys, counts))
    return levels[::-1]


def _find(sorted_keys: Ids, wanted: Ids) -> tuple[Ids, NDArray[np.bool_]]:
    at = np.minimum(np.searchsorted(sorted_keys, wanted), sorted_keys.size - 1)
    return at, sorted_keys[at] == wanted


def losses(levels: list[Level], tokens: Ids, vocabulary: int) -> Floats:
    """-ln p of every token from the ORDER-th on, given the ORDER − 1 before it."""
    count = tokens.size - ORDER + 1
    p: Floats = np.full(count, 1.0 / vocabulary)
    for order, level in enumerate(levels, 1):
        keys = _keys(tokens[ORDER - order :], order)[:count]
        at, known = _find(level.keys, keys)
        seen = np.where(known, level.counts[at], 0)
        context, has_context = _find(level.contexts, keys >> BITS)
        total = np.where(has_context, level.totals[context], 1)
        d1, d2, d3 = level.discounts
        kept = np.maximum(seen - np.select([seen == 1, seen == 2, seen >= 3], [d1, d2, d3], 0.0), 0)
        n1, n2, n3 = (kind[context] for kind in level.kinds)
        back_off = (d1 * n1 + d2 * n2 + d3 * n3) / total
        p = np.where(has_context, kept / total + back_off * p, p)
    return -np.log(p)
