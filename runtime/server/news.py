"""New tokens of all requests of which nothing but tokens is wanted, collected in columns.

What a step brings hundreds of such requests is sent as three arrays: reading, packing and sending one object for each
would cost the engine's loop more than everything else that it does for them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.table import SequenceTable

_NOBODY = -1


class TokenNews:
    """Columns by slot of the table: ``keys`` of the requests whose tokens are sent so, the ``serials`` of their
    sequences, and how many tokens were ``sent``."""

    def __init__(self, table: SequenceTable) -> None:
        slots = len(table.sequences)
        self.table = table
        self.keys = np.full(slots, _NOBODY, np.int64)
        self.serials = np.zeros(slots, np.int64)
        self.sent = np.zeros(slots, np.int64)

    def follow(self, key: int, s: Sequence, sent: int) -> bool:
        """From now on the tokens of ``s`` behind the first ``sent`` ones come with ``take``; False: it has no slot."""
        if s.holding is None or not self.table.serial[s.holding.slot]:
            return False
        slot = s.holding.slot
        self.keys[slot], self.serials[slot], self.sent[slot] = key, s.serial, sent
        return True

    def gone(self) -> list[tuple[int, int]]:
        """Requests that are followed no longer, because they ended or lost their slot: (key, tokens sent) of each."""
        slots = np.flatnonzero((self.keys != _NOBODY) & (self.serials != self.table.serial))
        found = list(zip(self.keys[slots].tolist(), self.sent[slots].tolist(), strict=True))
        self.keys[slots] = _NOBODY
        return found

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Keys [k] of followed requests with new tokens, how many [k], and the tokens, one request after the other."""
        t = self.table
        slots = np.flatnonzero((self.keys != _NOBODY) & (t.emitted > self.sent))
        first, stop = self.sent[slots], t.emitted[slots]
        self.sent[slots] = stop
        return self.keys[slots], stop - first, t.newest(slots, first, stop)
