"""Threads with preadv and pwritev, past the page cache where the file system can: works everywhere.

A thread that hangs on a mount keeps its memory, so that a late answer lands where nobody else reads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.files import write_all
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
    """``settings.threads`` threads that read."""

    name = THREADS

    def __init__(self, settings: StoreSettings, arena: Arena, reader: Reader) -> None:
        self._reader = reader
        self._queue: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self.run_length = max(1, min(_RUN, arena.count // (2 * settings.threads)))
        self._threads = [threading.Thread(target=self._work, args=([arena.view(s) for s in slots],), daemon=True,
                                          name=f"store-read-{i}")
                         for i in range(settings.threads) if (slots := arena.take(self.run_length))]
        for thread in self._threads:
            thread.start()

    def submit(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._queue.put(run)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        write_all(self._reader.files, fd, views, offset, Point.RECORD)

    def close(self, patience: float) -> None:
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self, views: list[memoryview]) -> None:
        while (run := self._queue.get()) is not None:
            self._reader.execute(run, views)
