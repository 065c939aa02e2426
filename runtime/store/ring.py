"""Reads straight into a caller's arena, without a copy: prep, submit, poll. One ring a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.catalog import Segment
from deepinfer.runtime.store.reader import Read, runs_of
from deepinfer.runtime.store.record import Head, Wanted, id_bytes
from deepinfer.runtime.store.store import Store
from deepinfer.runtime.store.tier import NO_EXTRA, Ids, Keys, Status


@dataclass(frozen=True, eq=False)
class Locator:
    """Where a record lies, and what it has to prove; its segment stays until ``release``."""

    segment: Segment
    hint: np.void
    wanted: Wanted
    release: Callable[[], None]


def locate(store: Store, keys: Keys, ids: Ids, extra: bytes = NO_EXTRA) -> list[Locator]:
    """Locators of the leading keys that are present. ids: [n * B]."""
    raw, width = id_bytes(ids), store.layout.ids_bytes
    found = []
    for i, (segment, hint) in enumerate(store.locate(keys)):
        pinned = store.catalog.pin([segment.number])
        wanted = Wanted(keys[i].tobytes(), raw[i * width : (i + 1) * width], extra)
        found.append(Locator(segment, hint, wanted, partial(store.catalog.unpin, pinned)))
    return found


class Ring:
    """Reads of a store into the slots of an arena.

    Args:
        entries: most reads between two calls of ``submit``, and most under way.
        io_depth: 0: ``submit`` hands over what is prepared; n > 0: only whole batches of n; n < 0: batches of at most
            -n.
    """

    def __init__(self, store: Store, arena: Arena, entries: int = 1024, io_depth: int = 0) -> None:
        self._store, self._arena, self.entries, self.io_depth = store, arena, entries, io_depth
        self._prepared: list[Read] = []
        self._under_way: dict[int, Any] = {}
        self._results: list[tuple[object, Status]] = []
        self._changed = threading.Condition()
        self._count = 0

    def prep(self, slot: int, locator: Locator, tag: object) -> None:
        """Prepare a read into slot ``slot`` of the arena; ``tag`` comes back with its result."""
        with self._changed:
            if len(self._under_way) >= self.entries:
                raise RequestError("the ring is full", where="ring", found=self.entries,
                                   next_step="poll for results before more reads are prepared")
            number, self._count = self._count, self._count + 1
            self._under_way[number] = tag
        self._prepared.append(Read(locator.segment, locator.hint, int(locator.hint["slot"]), locator.wanted,
                                   lambda status, head, record: self._ended(number, status, head, record),
                                   lambda: number in self._under_way, self._arena.view(slot)))

    def submit(self) -> int:
        """Hand prepared reads to the backend; returns how many."""
        count = len(self._prepared)
        if self.io_depth > 0:
            count -= count % self.io_depth
        ready, self._prepared = self._prepared[:count], self._prepared[count:]
        step = abs(self.io_depth) or max(1, count)
        for first in range(0, count, step):
            self._store.mover.submit(runs_of(ready[first : first + step], self._store.mover.run_length))
        return count

    def poll(self, min_results: int, deadline: float) -> list[tuple[object, Status]]:
        """Results, after waiting for ``min_results`` of them or until ``time.monotonic()`` = deadline.

        A slot may be used again when its result came. Reads that miss a deadline come later; ``cancel`` gives up on
        them.
        """
        with self._changed:
            while len(self._results) < min_results and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            results, self._results = self._results, []
            return results

    def cancel(self) -> None:
        """Reads that are not begun end CANCELLED; those that are under way still come."""
        for read in self._prepared:
            read.ended(Status.CANCELLED, None, None)
        self._prepared = []

    def _ended(self, number: int, status: Status, head: Head | None, record: memoryview | None) -> None:
        with self._changed:
            if number not in self._under_way:
                return
            self._results.append((self._under_way.pop(number), status))
            self._changed.notify_all()


def open_arena(store: Store, size: int, numa: int = -1) -> Arena:
    """An arena whose slots take the store's records."""
    arena = Arena(size, store.layout.stride, numa)
    arena.forget_name()  # no backend registers an arena but the store's own
    return arena
