"""Reads of a whole fetch at once: pieces of it go to threads, each piece is one call of the native part.

What a block's status means, and what follows from it, is as in reader.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.store.catalog import Catalog, Segment
from deepinfer.runtime.store.health import READING, Health
from deepinfer.runtime.store.index import Hints
from deepinfer.runtime.store.layout import record_offset
from deepinfer.runtime.store.metrics import StoreMetrics
from deepinfer.runtime.store.native.library import (
    ENDED,
    KEY,
    WANT,
    Ended,
    NativeGate,
    NativeRecords,
    NativeRing,
    parts_of,
)
from deepinfer.runtime.store.record import seed_of
from deepinfer.runtime.store.segment import Superblock
from deepinfer.runtime.store.tier import Flags, Status, Ticket

Way = NativeRing | NativeGate | None
"""What a thread reads through: a ring of its own, a gate that it shares, or nothing."""
MOST = 32  # records of a piece: other requests' reads wait for no more than that
_OK = int(Ended.OK)
_STATUS = {Ended.OK: Status.OK, Ended.MISS: Status.MISS, Ended.OTHER: Status.MISS, Ended.DAMAGED: Status.DAMAGED,
           Ended.IO_ERROR: Status.IO_ERROR, Ended.CANCELLED: Status.CANCELLED, Ended.PENDING: Status.IO_ERROR}
_FLAGS = {int(flags): flags for flags in map(Flags, range(4))}


@dataclass(frozen=True, eq=False)
class Wishes:
    """The blocks of one ticket that the index knows.

    Args:
        places: their numbers in the ticket; the other sequences are of all its blocks.
        segments: by number, as hints name them. ``ids``: int32 bytes of all blocks.
    """

    ticket: Ticket
    places: Sequence[int]
    segments: Mapping[int, Segment]
    hints: Hints
    keys: Sequence[bytes]
    extra: Sequence[bytes] | None
    ids: bytes
    into: Sequence[Sequence[memoryview]]
    exact: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """Wishes as the native part reads them. ``numbers``: of their segments; ``kept``: what ``wants`` points into."""

    wishes: Wishes
    wants: NDArray[np.void]
    numbers: NDArray[np.uint32]
    kept: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """Some neighbours of a batch; ``read`` may wait for the folder."""

    bulk: Bulk
    batch: Batch
    first: int
    last: int

    def read(self, slots: NDArray[np.uint64], way: Way) -> None:
        """Into memory at ``slots``, areas of a record each. ``way``: see ``Way``."""
        try:
            self.bulk.read(self, slots, way)
        except Exception as failure:  # a bug must not end the thread that reads, nor leave anybody waiting
            self.bulk.health.failed(READING, failure)
            self.batch.wants["state"][self.first : self.last] = ENDED
            self.bulk.end(self, {i: Status.IO_ERROR for i in range(self.first, self.last)})


class Bulk:
    """See the module. ``damaged``, ``stale`` and ``touched`` (used while its segment ``ends_soon``) are told of
    records, ``ended`` of each end."""

    def __init__(self, native: NativeRecords, catalog: Catalog, health: Health, metrics: StoreMetrics, *,
                 damaged: Callable[[Segment, bytes, np.void], None], stale: Callable[[bytes, np.void], None],
                 ends_soon: Callable[[Segment], bool], touched: Callable[[bytes, np.void], None],
                 ended: Callable[[Ticket, Sequence[Status]], None]) -> None:
        self.native, self.catalog, self.health, self.metrics = native, catalog, health, metrics
        self._damaged, self._stale, self._ended = damaged, stale, ended
        self._ends_soon, self._touched = ends_soon, touched

    def pieces(self, wishes: Wishes, idle: int) -> list[Piece]:
        """Work for ``idle`` threads; where all are busy, pieces are as large as may be."""
        count, places = len(wishes.places), np.array(wishes.places, dtype=np.uint64)
        wants, hints = np.zeros(count, dtype=WANT), wishes.hints[places]
        raw = np.frombuffer(wishes.ids, dtype=np.uint8)
        into = [wishes.into[i] for i in wishes.places]
        parts, first = parts_of(into)
        wants["key"] = np.frombuffer(b"".join(wishes.keys), dtype=KEY)[places]
        if wishes.extra is not None:
            wants["extra"] = np.frombuffer(b"".join(wishes.extra), dtype=KEY)[places]
        wants["slot"], wants["exact"] = hints["slot"], wishes.exact
        wants["ids"] = places * np.uint64(self.catalog.layout.ids_bytes) + np.uint64(raw.ctypes.data)
        wants["into"], wants["parts"] = first, list(map(len, into))
        batch = Batch(wishes, wants, hints["number"], (raw, parts))
        wishes.ticket.guard = lambda: self.native.give_up(wants)
        step = max(1, min(MOST, -(-count // max(1, idle))))
        return [Piece(self, batch, at, min(at + step, count)) for at in range(0, count, step)]

    def read(self, piece: Piece, slots: NDArray[np.uint64], way: Way) -> None:
        """All of a piece, in this thread."""
        failed: dict[int, Status] = {}
        opened = self._open(piece, failed)
        try:
            wants = piece.batch.wants[piece.first : piece.last]
            if isinstance(way, NativeRing):
                got = self.native.read_ring(way, wants, slots)
            else:
                got = self.native.read(wants, slots, way)
            self.metrics.read_bytes.add(got)
            worst = int(wants["got"].min())
            if worst < 0:
                self.health.failed(READING, OSError(-worst, os.strerror(-worst)), off=False)
            self.end(piece, failed)
        finally:
            for segment in opened:
                self.catalog.release(segment)

    def _open(self, piece: Piece, failed: dict[int, Status]) -> list[Segment]:
        """Open the segments of a piece and say where its records lie; ``failed`` gets those that cannot be read."""
        opened: list[Segment] = []
        wants, numbers = piece.batch.wants[piece.first : piece.last], piece.batch.numbers[piece.first : piece.last]
        for number in set(numbers.tolist()):
            segment, places = piece.batch.wishes.segments[number], np.flatnonzero(numbers == number)
            try:
                fd, block = self.catalog.acquire(segment)
            except OSError as failure:
                status = Status.MISS  # given up meanwhile, perhaps only renamed: the hint may be right later
                if not isinstance(failure, FileNotFoundError):
                    status = Status.IO_ERROR
                    self.health.failed(READING, failure)
                wants["state"][places] = ENDED
                failed.update(zip((places + piece.first).tolist(), repeat(status)))
            else:
                opened.append(segment)
                _place(wants, places, fd, block)
        return opened

    def end(self, piece: Piece, failed: dict[int, Status]) -> None:
        """Tell the ticket how the records ended, and the store what follows."""
        batch, span = piece.batch, slice(piece.first, piece.last)
        wishes, places = batch.wishes, batch.wishes.places[span]
        codes, flags = batch.wants["status"][span].tolist(), batch.wants["flags"][span].tolist()
        statuses = [_STATUS[code] for code in codes]
        for i, status in failed.items():
            statuses[i - piece.first] = status
        for place, code in zip(places, codes, strict=True):
            if code == _OK:
                continue
            segment = wishes.segments[int(wishes.hints["number"][place])]
            if code == Ended.DAMAGED:
                self._damaged(segment, wishes.keys[place], wishes.hints[place])
            elif code == Ended.OTHER:
                self._stale(wishes.keys[place], wishes.hints[place])
        known = [_FLAGS[flag & 3] for flag in flags]
        self._ended(wishes.ticket, wishes.ticket.end_many(places, statuses, known))
        ending = {n for n in set(batch.numbers[span].tolist()) if self._ends_soon(wishes.segments[n])}
        for place, code in zip(places, codes, strict=True) if ending else ():
            if code == _OK and wishes.hints["number"][place] in ending:
                self._touched(wishes.keys[place], wishes.hints[place])


def _place(wants: NDArray[np.void], places: NDArray[np.int64], fd: int, block: Superblock) -> None:
    slots = wants["slot"][places].astype(np.uint64)
    wants["fd"][places] = fd
    wants["offset"][places] = np.uint64(record_offset(block.layout.stride, 0)) + slots * np.uint64(block.layout.stride)
    wants["seed"][places] = slots + np.uint64(seed_of(block.uuid, 0))  # modulo 2^64, as seed_of does
    wants["uuid"][places] = np.void(block.uuid)
