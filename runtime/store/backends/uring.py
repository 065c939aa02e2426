"""Threads that read through an io_uring each: a thread keeps several records under way and proves one while the others
come. Containers often forbid it: opening says so, and plain threads do the work.

Records are written with pwritev, and what is read into a caller's own memory with preadv, as in threads.py.
"""

from __future__ import annotations

import errno

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.backends.threads import ThreadMover
from deepinfer.runtime.store.bulk import Piece
from deepinfer.runtime.store.native.library import NativeRecords, NativeRing
from deepinfer.runtime.store.reader import Reader
from deepinfer.runtime.store.settings import URING, StoreSettings

_DEPTH = 8  # records under way in a thread


class UringMover(ThreadMover):
    """``settings.threads`` threads with a ring each. Raises OSError where one cannot be had."""

    name = URING
    slots_each = _DEPTH

    def __init__(self, settings: StoreSettings, arena: Arena, reader: Reader, native: NativeRecords | None) -> None:
        if native is None:
            raise OSError(errno.ENOSYS, "no native part, which holds the ring")
        self._rings: list[NativeRing] = []
        try:
            for _ in range(settings.threads):
                self._rings.append(native.open_ring(_DEPTH))
        except OSError:
            self._close_rings(self._rings)
            raise
        super().__init__(settings, arena, reader)

    def read(self, piece: Piece, slots: NDArray[np.uint64], number: int) -> None:
        piece.read(slots, self._rings[number])

    def close(self, patience: float) -> None:
        super().close(patience)
        hanging = {i for i, thread in enumerate(self._threads) if thread.is_alive()}
        self._close_rings([ring for i, ring in enumerate(self._rings) if i not in hanging])

    @staticmethod
    def _close_rings(rings: list[NativeRing]) -> None:
        for ring in rings:
            ring.close()
