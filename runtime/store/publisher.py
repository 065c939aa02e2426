"""Publishing: blocks wait in a queue, threads of their own write them; one more announces what was written, several
writes at a time, and ends the tickets. So the disk has work while logs and index are told."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.backends.mover import Mover
from deepinfer.runtime.store.backends.threads import ThreadMover
from deepinfer.runtime.store.catalog import Catalog
from deepinfer.runtime.store.health import PUBLISHING, Health, is_full
from deepinfer.runtime.store.index import hints_of
from deepinfer.runtime.store.layout import Layout
from deepinfer.runtime.store.log import put_entry
from deepinfer.runtime.store.metrics import StoreMetrics
from deepinfer.runtime.store.native.library import NativeRecords
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.record import write_record
from deepinfer.runtime.store.settings import INLINE, StoreSettings
from deepinfer.runtime.store.tier import Flags, Status, Ticket
from deepinfer.runtime.store.writer import OpenSegment, Row, Writers

_BATCH = 32  # records of one write, one log entry each in one more, and one transaction of the index
_LINGER = 0.002  # seconds that a block waits for others to share these with


@dataclass(eq=False)
class Write:
    """One block on its way to the disk.

    ``written``: store time of a record that is carried on, None: now; ``replaces``: its hint, swapped afterwards.
    """

    key: bytes
    parent: bytes
    number: int
    ids: bytes
    payload: Sequence[memoryview]
    flags: Flags
    cls: str
    extra: bytes
    ticket: Ticket
    written: int | None = None
    replaces: np.void | None = None
    begun: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class Written:
    """Records that reached the file of a segment, with their log entries, and are not announced yet."""

    segment: OpenSegment
    writes: list[Write]
    rows: list[Row]


class Publisher:
    """``make_room`` is called once when the disk is full, and says whether trying again makes sense."""

    def __init__(self, settings: StoreSettings, layout: Layout, arena: Arena, mover: Mover, writers: Writers,
                 catalog: Catalog, health: Health, metrics: StoreMetrics, make_room: Callable[[], bool],
                 native: NativeRecords | None = None) -> None:
        self.settings, self.layout, self.mover, self.writers = settings, layout, mover, writers
        self.catalog, self.health, self.metrics, self._make_room = catalog, health, metrics, make_room
        self._native = native
        self._waiting: deque[Write] = deque()
        self._twins: dict[bytes, list[Write]] = {}  # writes of a block that is being written, by key
        self._changed = threading.Condition()
        self._ending = self._left = False  # nothing more is taken; nobody's payload may be looked at any more
        self._inline = settings.backend == INLINE
        count = 1 if self._inline else settings.threads
        each = max(1, min(_BATCH, arena.free // count))
        self._views = [[arena.view(slot) for slot in arena.take(each)] for _ in range(count)]
        self._threads = [threading.Thread(target=self._work, args=(views,), daemon=True, name=f"store-write-{i}")
                         for i, views in enumerate(self._views) if not self._inline]
        self._written: queue.SimpleQueue[Written | None] = queue.SimpleQueue()
        self._announcer = threading.Thread(target=self._announce_all, daemon=True, name="store-announce")
        for thread in (*self._threads, *(() if self._inline else (self._announcer,))):
            thread.start()

    def submit(self, write: Write) -> None:
        """Queue a block, or end its ticket at once when the store cannot take it."""
        if self._ending or not self.health.works(PUBLISHING) or len(self._waiting) >= self.settings.queue:
            self._end([write], Status.FULL)
            return
        with self._changed:
            twins = self._twins.get(write.key)
            if twins is not None:
                twins.append(write)
                return
            self._twins[write.key] = []
            self._waiting.append(write)
            if len(self._waiting) == 1 or len(self._waiting) % _BATCH == 0:
                self._changed.notify()
        if self._inline:
            self.settle()

    def settle(self) -> None:
        """Write what waits in this thread, a record at a time (without threads only)."""
        while self._waiting:
            self._do([self._waiting.popleft()], self._views[0])

    def close(self, patience: float) -> None:
        """Let what is queued be written, for at most ``patience`` seconds; the rest ends CANCELLED."""
        until = time.monotonic() + patience
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._written.put(None)  # else: a thread that hangs may still come and want its records announced
        if not self._inline:
            self._announcer.join(max(0.0, until - time.monotonic()))
        with self._changed:
            self._left = True
            rest = [*self._waiting, *(twin for twins in self._twins.values() for twin in twins)]
            self._waiting.clear()
        self._end(rest, Status.CANCELLED)

    # ---- in the threads -------------------------------------------------------------------------------------------
    def _work(self, views: list[memoryview]) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if len(self._waiting) < _BATCH and not self._ending:
                    self._changed.wait(_LINGER)
                if not self._waiting:
                    if self._ending:
                        return
                    continue
                batch = [self._waiting.popleft()]
                while self._waiting and len(batch) < len(views) and self._waiting[0].cls == batch[0].cls:
                    batch.append(self._waiting.popleft())
            self._do(batch, views)

    def _do(self, batch: list[Write], views: list[memoryview]) -> None:
        status = Status.IO_ERROR
        try:
            there = self._there(batch)
            self._finished([write for write, known in zip(batch, there, strict=True) if known], Status.OK)
            batch = [write for write, known in zip(batch, there, strict=True) if not known]
            while batch:
                written = self._store(batch, views)
                batch = batch[len(written.writes) :]
                if self._inline:
                    self._announce([written])
                else:
                    self._written.put(written)
        except OSError as failure:
            status = Status.FULL if is_full(failure) else Status.IO_ERROR
            self.health.failed(PUBLISHING, failure)
        except Exception as failure:  # a bug must not end the thread that writes
            self.health.failed(PUBLISHING, failure)
        self._finished(batch, status)

    def _there(self, batch: list[Write]) -> list[bool]:
        """Whether a record that is as good is in the store, for each."""
        hints = self.catalog.index.find([write.key for write in batch])
        return [hint is not None and self._as_good(write, hint) for write, hint in zip(batch, hints, strict=True)]

    def _as_good(self, write: Write, hint: np.void) -> bool:
        if write.replaces is not None or not self.catalog.alive(hint["number"].reshape(1))[0]:
            return False
        return not hint["flags"] & Flags.REPLAYED or Flags.REPLAYED in write.flags

    def _store(self, batch: list[Write], views: list[memoryview]) -> Written:
        """Write the first few of a batch: as many as its segment has room for."""
        try:
            open_segment, slots = self.writers.reserve(batch[0].cls, len(batch))
        except OSError as failure:
            if not is_full(failure) or not self._make_room():
                raise
            open_segment, slots = self.writers.reserve(batch[0].cls, len(batch))
        try:
            return Written(open_segment, batch[: len(slots)], self._write(open_segment, slots, batch, views))
        except BaseException:
            self.writers.done(open_segment, 0)
            raise

    def _announce_all(self) -> None:
        """In a thread: what several threads wrote meanwhile shares a log write and a transaction."""
        ending = False
        while not ending and (first := self._written.get()) is not None:
            group = [first]
            while len(group) < self.settings.threads and not self._written.empty():
                following = self._written.get()
                if following is None:
                    ending = True
                    break
                if following.segment is not group[0].segment:
                    self._announce(group)
                    group = []
                group.append(following)
            self._announce(group)

    def _announce(self, group: list[Written]) -> None:
        """Append the log entries of records of one segment, tell the index, end the tickets."""
        s, status = group[0].segment, Status.IO_ERROR
        writes, rows = [w for each in group for w in each.writes], [r for each in group for r in each.rows]
        try:
            self.writers.files.point(Point.BETWEEN)
            self.writers.announce(s, rows)
            self._swap(s, writes, rows)
            status = Status.OK
            self.health.recovered(PUBLISHING)
        except OSError as failure:
            status = Status.FULL if is_full(failure) else Status.IO_ERROR
            self.health.failed(PUBLISHING, failure)
        except Exception as failure:  # a bug must not end the thread that announces
            self.health.failed(PUBLISHING, failure)
        finally:
            for each in group:
                self.writers.done(s, len(each.rows) * self.layout.stride)
        self.metrics.written_bytes.add(len(rows) * self.layout.stride)
        self._finished(writes, status)

    def _write(self, s: OpenSegment, slots: list[int], batch: list[Write],
               views: list[memoryview]) -> list[Row]:
        if self._left:
            raise OSError(errno.ECANCELED, "the store was closed while its folder did not answer")
        now = int(self.catalog.guard.now())
        writes, views = batch[: len(slots)], views[: len(slots)]
        offset, written = s.block.offset(slots[0]), 0
        if self._native is not None:
            file = s.fd if isinstance(self.mover, ThreadMover) else -1
            heads, written = self._native.assemble(s.block.uuid, slots, writes, views, now, file, offset)
        else:
            heads = [self._assembled(s.block.uuid, slot, write, view, now)
                     for slot, write, view in zip(slots, writes, views, strict=True)]
        if written < len(slots) * self.layout.stride:  # not by the native part, or not all: again, or with its error
            self.mover.write(s.fd, views, offset)
        rows = [put_entry(write.key, write.parent, slot, write.flags, head, now)
                for write, slot, head in zip(writes, slots, heads, strict=True)]
        if self.settings.durable:
            self.writers.files.sync(s.fd, Point.REORDERED)
        return rows

    def _assembled(self, uuid: bytes, slot: int, write: Write, view: memoryview, now: int) -> int:
        return write_record(self.layout, view, uuid=uuid, slot=slot, key=write.key, parent=write.parent,
                            number=write.number, ids=write.ids, payload=write.payload, flags=write.flags,
                            extra=write.extra, written=now if write.written is None else write.written)

    def _swap(self, s: OpenSegment, writes: list[Write], rows: list[Row]) -> None:
        """Point the index at copies, where it still points at what they are copies of."""
        for write, row in zip(writes, rows, strict=True):
            if write.replaces is None:
                continue
            self.writers.files.point(Point.COPIED)
            hint = hints_of([write.key], s.segment.number, row[2], row[6], row[7], row[4])
            self.catalog.index.replace(write.key, write.replaces, hint)
            self.metrics.carried.add()
            self.writers.files.point(Point.SWAPPED)

    # ---- ends -----------------------------------------------------------------------------------------------------
    def _finished(self, writes: list[Write], status: Status) -> None:
        """End writes and those that wait for the same block."""
        with self._changed:
            twins = [twin for write in writes for twin in self._twins.pop(write.key, [])]
        again = [t for t in twins if status is Status.OK and Flags.REPLAYED not in t.flags
                 and any(w.key == t.key and Flags.REPLAYED in w.flags for w in writes)]
        self._end([*writes, *(t for t in twins if t not in again)], status)
        for write in again:  # an exact block that came while a replayed one was written
            self.submit(write)

    def _end(self, writes: Sequence[Write], status: Status) -> None:
        now = time.monotonic()
        ended = [write.begun for write in writes if write.ticket.end(0, status)]
        if ended:
            self.metrics.published.add(len(ended), label=status)
        for begun in ended:
            self.metrics.publish_seconds.observe(now - begun)


def arena_slots(settings: StoreSettings) -> int:
    """Least slots of an arena: every thread that reads or writes has memory of its own."""
    return 2 * settings.threads
