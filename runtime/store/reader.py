"""Reads: runs of neighbouring records, moved by a backend, proved here, copied to whoever asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepinfer.runtime.store.catalog import Catalog, Segment
from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.health import READING, Health
from deepinfer.runtime.store.metrics import StoreMetrics
from deepinfer.runtime.store.record import Head, Wanted, prove
from deepinfer.runtime.store.segment import Superblock
from deepinfer.runtime.store.tier import Status

Ended = Callable[[Status, Head | None, memoryview | None], None]


@dataclass(eq=False)
class Read:
    """One record to be read and proved.

    Args:
        hint: what the index says of it; ``at``: the slot where it says it lies.
        ended: called once with how it ended, its header, and (when OK) its bytes, valid during the call.
        wanted_still: whether anybody waits for it.
        slot: memory of the caller to read into; None: the backend's own.
    """

    segment: Segment
    hint: np.void
    at: int
    wanted: Wanted
    ended: Ended
    wanted_still: Callable[[], bool]
    slot: memoryview | None = None


@dataclass(eq=False)
class Run:
    """Reads of consecutive slots of one segment: one system call."""

    reads: list[Read]
    fd: int = -1
    block: Superblock | None = None
    begun: float = field(default_factory=time.monotonic)

    @property
    def own_memory(self) -> bool:
        """Whether it goes into the callers' memory."""
        return self.reads[0].slot is not None


def runs_of(reads: Sequence[Read], most: int) -> list[Run]:
    """Neighbours together, up to ``most`` in a run; order kept."""
    runs: list[Run] = []
    for read in reads:
        last = runs[-1].reads[-1] if runs else None
        if last is not None and len(runs[-1].reads) < most and _neighbours(last, read):
            runs[-1].reads.append(read)
        else:
            runs.append(Run([read]))
    return runs


def _neighbours(a: Read, b: Read) -> bool:
    return (a.segment is b.segment and a.at + 1 == b.at
            and (a.slot is None) == (b.slot is None))


class Reader:
    """What a backend calls before and after it moved the bytes of a run. ``damaged`` and ``stale``
    are told of records that prove nothing, and of hints that were wrong."""

    def __init__(self, catalog: Catalog, files: Files, health: Health, metrics: StoreMetrics,
                 damaged: Callable[[Segment, bytes, np.void], None],
                 stale: Callable[[bytes, np.void], None]) -> None:
        self.catalog, self.files, self.health, self.metrics = catalog, files, health, metrics
        self._damaged, self._stale = damaged, stale

    def begin(self, run: Run) -> tuple[int, int] | None:
        """(descriptor, offset) to read from, or None when the run has ended already. May wait for the folder."""
        if not any(read.wanted_still() for read in run.reads):
            self._end_all(run, Status.CANCELLED)
            return None
        segment = run.reads[0].segment
        try:
            run.fd, run.block = self.catalog.acquire(segment)
        except FileNotFoundError:
            self._end_all(run, Status.MISS)  # given up meanwhile, perhaps only renamed: the hint may be right later
            return None
        except OSError as failure:
            self.health.failed(READING, failure)
            self._end_all(run, Status.IO_ERROR)
            return None
        return run.fd, run.block.offset(run.reads[0].at)

    def finish(self, run: Run, views: Sequence[memoryview], got: int) -> None:
        """The bytes are there: ``got`` of them, or a negative errno. ``views``: one [stride] a read."""
        block = run.block
        assert block is not None  # begin said so
        try:
            if got < 0:
                self.health.failed(READING, OSError(-got, os.strerror(-got)), off=False)
                self._end_all(run, Status.IO_ERROR)
                return
            self.metrics.read_bytes.add(got)
            stride = block.layout.stride
            for index, (read, view) in enumerate(zip(run.reads, views, strict=True)):
                self._end_one(read, view, block, whole=got >= (index + 1) * stride)
        finally:
            self._release(run)

    def execute(self, run: Run, views: Sequence[memoryview]) -> None:
        """All of it in this thread, with one preadv."""
        try:
            place = self.begin(run)
            if place is not None:
                own = [r.slot for r in run.reads if r.slot is not None]
                views = own if run.own_memory else views[: len(run.reads)]
                self.finish(run, views, self.move(place, views))
        except Exception as failure:
            self.fail(run, failure)

    def fail(self, run: Run, failure: Exception) -> None:
        """A backend gave up on a run: nobody is left waiting, and reading is left for a while."""
        self.health.failed(READING, failure)
        self._release(run)
        self._end_all(run, Status.IO_ERROR)

    def _release(self, run: Run) -> None:
        """A run that began needs its segment no longer."""
        if run.fd >= 0:
            run.fd = -1
            self.catalog.release(run.reads[0].segment)

    def move(self, place: tuple[int, int], views: Sequence[memoryview]) -> int:
        """Bytes read, or a negative errno."""
        done, total = 0, sum(len(v) for v in views)
        try:
            done = self.files.read(place[0], views, place[1])
            # A short read that is not the end of the file is tried once more, for what is missing of its record.
            if 0 < done < total:
                first = done // len(views[0])
                rest = self.files.read(place[0], views[first:], place[1] + first * len(views[0]))
                done = max(done, first * len(views[0]) + rest)
        except OSError as failure:
            return -(failure.errno or 5)
        return done

    def _end_one(self, read: Read, view: memoryview, block: Superblock, whole: bool) -> None:
        status, head = Status.DAMAGED, None
        if whole:
            status, head = prove(block.layout, view, block.uuid, read.at, read.wanted)
        if status is Status.DAMAGED:
            self._damaged(read.segment, read.wanted.key, read.hint)
        elif status is Status.MISS and head is not None and head.key != read.wanted.key:
            self._stale(read.wanted.key, read.hint)
        read.ended(status, head, view if status is Status.OK else None)

    def _end_all(self, run: Run, status: Status) -> None:
        for read in run.reads:
            read.ended(status, None, None)
