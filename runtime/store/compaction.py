"""Compaction: records that are still wanted move out of segments that are mostly dead, and records that are used move
out of segments that end soon.

Nothing lives for ever by moving: a record that nobody used since it was written is moved only as long as it ends
within two retentions of that moment.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from deepinfer.runtime.store.catalog import Catalog, Segment
from deepinfer.runtime.store.files import Files, read_all
from deepinfer.runtime.store.health import READING
from deepinfer.runtime.store.index import TOUCHED
from deepinfer.runtime.store.layout import HEADER_BYTES, PAGE
from deepinfer.runtime.store.publisher import Publisher, Write
from deepinfer.runtime.store.record import Head, read_head, whole
from deepinfer.runtime.store.segment import SEALED, Superblock
from deepinfer.runtime.store.settings import HOUR, StoreSettings
from deepinfer.runtime.store.tier import Flags, Status, Ticket

LAST_PART = 0.25  # of a retention: a use in it lets a record live on
_CARRY_PART = LAST_PART / 2  # when those are moved
_PLAN_SECONDS = 600.0

Hinted = tuple[bytes, np.void]


@dataclass(eq=False)
class _Move:
    """Records of one segment that are to be copied. ``retire``: the segment is given up afterwards."""

    segment: Segment
    records: list[Hinted]
    retire: bool
    tickets: list[Ticket] = field(default_factory=list)


class Compaction:
    """``plan`` looks for work now and then, ``work`` does a little of it. ``retire`` gives a segment up."""

    def __init__(self, settings: StoreSettings, files: Files, catalog: Catalog, publisher: Publisher,
                 sync: Callable[[], None], retire: Callable[[Segment, str], object]) -> None:
        self.settings, self.files, self.catalog, self.publisher = settings, files, catalog, publisher
        self._sync, self._retire = sync, retire
        self._moves: list[_Move] = []
        self._carried: set[str] = set()  # stems whose used records were moved
        self._planned = -_PLAN_SECONDS
        self._record = memoryview(mmap.mmap(-1, catalog.layout.stride))

    @property
    def busy(self) -> bool:
        return bool(self._moves)

    def counts(self) -> tuple[dict[int, int], dict[int, int]]:
        """(records, records that were used late in their life) that the index knows, by segment number."""
        live: dict[int, int] = {}
        used: dict[int, int] = {}
        for _, hints in self.catalog.index.scan():
            for numbers, counts in ((hints["number"], live), (hints["number"][hints["flags"] & TOUCHED > 0], used)):
                for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                    counts[int(number)] = counts.get(int(number), 0) + int(count)
        return live, used

    def plan(self, now_due: bool = False) -> None:
        """Find segments whose living records take less than the settings' part of their bytes, or that end soon."""
        if self._moves or (not now_due and time.monotonic() - self._planned < _PLAN_SECONDS):
            return
        self._planned = time.monotonic()
        live, used = self.counts()
        sealed = [s for s in list(self.catalog.by_stem.values()) if s.name.state == SEALED and not s.pins
                  and s.cls in self.settings.retention]
        moves = {s.number: _Move(s, [], True) for s in sealed if self._hollow(s, live.get(s.number, 0))}
        moves |= {s.number: _Move(s, [], False) for s in sealed if s.number not in moves and used.get(s.number)
                  and self._ends_soon(s) and s.name.stem not in self._carried}
        if moves:
            wanted = np.array(list(moves), dtype=np.uint32)
            for keys, hints in self.catalog.index.scan():
                for i in np.nonzero(np.isin(hints["number"], wanted))[0].tolist():
                    move = moves[int(hints["number"][i])]
                    if move.retire or hints["flags"][i] & TOUCHED:
                        move.records.append((keys[i], hints[i].copy()))
        self._moves = list(moves.values())

    def work(self, seconds: float) -> None:
        """Move records for about ``seconds``."""
        until = time.monotonic() + seconds
        while self._moves and time.monotonic() < until:
            move = self._moves[0]
            if move.records:
                self._copy(move, *move.records.pop())
            elif all(ticket.done for ticket in move.tickets):
                self._moves.pop(0)
                self._end(move)
            else:
                return  # its copies are still being written

    def _hollow(self, s: Segment, live: int) -> bool:
        """Whether living records take little of what the segment's records take; superblock and footer do not count."""
        try:
            block = s.block = s.block or self.catalog.superblock(s)
            held = self.files.stat(s.path).st_blocks * 512
        except OSError as failure:  # one that cannot be read keeps no other from being emptied
            self.catalog.health.failed(READING, failure, off=False)
            return False
        if block is None:
            return False
        size = held - PAGE - (block.size - block.footer)
        return live * block.layout.stride < self.settings.compact_below * size

    def _ends_soon(self, s: Segment) -> bool:
        return s.name.hour * HOUR - self.catalog.guard.now() < _CARRY_PART * self.settings.retention[s.cls]

    def _copy(self, move: _Move, key: bytes, hint: np.void) -> None:
        """Copy one record if it proves itself; its hint is swapped when the copy is announced."""
        fd, block = self.catalog.acquire(move.segment)
        try:
            slot = int(hint["slot"])
            if read_all(self.files, fd, [self._record], block.offset(slot)) < len(self._record):
                return
            head = read_head(block.layout, self._record, block.uuid, slot)
            if head is None or head.key != key or not whole(block.layout, self._record, block.uuid, slot):
                return
        finally:
            self.catalog.release(move.segment)
        used = bool(hint["flags"] & TOUCHED)
        if not used and self.catalog.guard.now() > head.written + self.settings.retention[move.segment.cls]:
            return
        ticket = Ticket(1)
        move.tickets.append(ticket)
        self.publisher.submit(self._write(move, head, hint, ticket, block, used))

    def _write(self, move: _Move, head: Head, hint: np.void, ticket: Ticket, block: Superblock, used: bool) -> Write:
        ids_end = HEADER_BYTES + block.layout.ids_bytes
        return Write(head.key, head.parent, head.number, bytes(self._record[HEADER_BYTES:ids_end]),
                     [memoryview(bytes(self._record[ids_end : block.layout.record_bytes]))], Flags(head.flags),
                     move.segment.cls, head.extra, ticket, replaces=hint,
                     written=int(self.catalog.guard.now()) if used else head.written)

    def _end(self, move: _Move) -> None:
        self._carried.add(move.segment.name.stem)
        if not move.retire or any(t.statuses[0] is not Status.OK for t in move.tickets):
            return  # what could not be copied stays where it is
        if move.tickets:
            self._sync()
        self._retire(move.segment, "compacted")
