"""Threads with preadv and pwritev, past the page cache where the file system can: works everywhere.

A thread that hangs on a mount keeps its memory, so that a late answer lands where nobody else reads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.bulk import Piece
from deepinfer.runtime.store.files import write_all
from deepinfer.runtime.store.native.library import address_of
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.reader import Reader, Run
from deepinfer.runtime.store.settings import INLINE, THREADS, StoreSettings

_RUN = 4  # records a read: few, so that all threads have work


class InlineMover:
    """Everything in the caller's thread: for commands and for tests that enumerate crashes."""

    name = INLINE

    def __init__(self, arena: Arena, reader: Reader) -> None:
        self._reader = reader
        self.run_length = max(1, min(2, arena.count // 2))
        self._views = [arena.view(slot) for slot in arena.take(self.run_length)]

    def submit(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._reader.execute(run, self._views)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        write_all(self._reader.files, fd, views, offset, Point.RECORD)

    def close(self, patience: float) -> None:
        return


class ThreadMover:
    """``settings.threads`` threads that read: runs in Python, pieces in one call of the native part."""

    name = THREADS
    slots_each = 2 * _RUN  # one half is read into while the other is proved

    def __init__(self, settings: StoreSettings, arena: Arena, reader: Reader) -> None:
        self._reader = reader
        self._queue: queue.SimpleQueue[Run | Piece | None] = queue.SimpleQueue()
        self.run_length = max(1, min(_RUN, arena.count // (2 * settings.threads)))
        each = max(1, min(self.slots_each, arena.count // (2 * settings.threads)))
        self._threads = [threading.Thread(target=self._work, args=([arena.view(s) for s in slots], i), daemon=True,
                                          name=f"store-read-{i}")
                         for i in range(settings.threads) if (slots := arena.take(each))]
        for thread in self._threads:
            thread.start()

    def submit(self, runs: Sequence[Run | Piece]) -> None:
        for run in runs:
            self._queue.put(run)

    @property
    def idle(self) -> int:
        """Threads that nothing is waiting for yet, as far as can be seen."""
        return max(0, len(self._threads) - self._queue.qsize())

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        write_all(self._reader.files, fd, views, offset, Point.RECORD)

    def close(self, patience: float) -> None:
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def read(self, piece: Piece, slots: NDArray[np.uint64], number: int) -> None:
        """A piece in thread ``number``, into memory at ``slots``."""
        piece.read(slots)

    def _work(self, views: list[memoryview], number: int) -> None:
        slots = np.array([address_of(view) for view in views], dtype=np.uint64)
        while (job := self._queue.get()) is not None:
            if isinstance(job, Piece):
                self.read(job, slots, number)
            else:
                self._reader.execute(job, views)
