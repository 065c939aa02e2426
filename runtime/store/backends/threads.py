"""Threads with preadv and pwritev, past the page cache where the file system can: works everywhere.

A thread that hangs on a mount keeps its memory, so that a late answer lands where nobody else reads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import numpy as np

from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.bulk import Piece, Way
from deepinfer.runtime.store.files import write_all
from deepinfer.runtime.store.native.library import NativeRecords, address_of
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
    """Threads that read: runs in Python, pieces in one call of the native part.

    With a native part there are half as many threads again as ``settings.threads``, of which so many read at a time:
    the others prove what they have read, so that the folder is never left waiting for a proof.
    """

    name = THREADS
    slots_each = _RUN

    def __init__(self, settings: StoreSettings, arena: Arena, reader: Reader, native: NativeRecords | None) -> None:
        self._reader = reader
        half = max(1, arena.count // 2)  # the rest is for writes
        self._ways = self._open(native, settings.threads, half)
        self._queue: queue.SimpleQueue[Run | Piece | None] = queue.SimpleQueue()
        self.run_length = max(1, min(_RUN, half // settings.threads))
        each = max(1, min(self.slots_each, half // len(self._ways)))
        self._threads = [threading.Thread(target=self._work, args=([arena.view(s) for s in slots], way), daemon=True,
                                          name=f"store-read-{i}")
                         for i, way in enumerate(self._ways) if (slots := arena.take(each))]
        for thread in self._threads:
            thread.start()

    def _open(self, native: NativeRecords | None, threads: int, most: int) -> list[Way]:
        """What each thread reads through, of ``most`` at most."""
        if native is None:
            return [None] * min(threads, most)
        return [native.open_gate(threads)] * min(threads + -(-threads // 2), most)

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
        used = {way for way, thread in zip(self._ways, self._threads, strict=False) if thread.is_alive()}
        for way in set(self._ways) - used:
            if way is not None:
                way.close()

    def _work(self, views: list[memoryview], way: Way) -> None:
        slots = np.array([address_of(view) for view in views], dtype=np.uint64)
        while (job := self._queue.get()) is not None:
            if isinstance(job, Piece):
                job.read(slots, way)
            else:
                self._reader.execute(job, views)
