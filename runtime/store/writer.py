"""The segments that this process writes: slots are reserved, records announced, full segments sealed."""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from uuid import uuid4

from deepinfer.runtime.store.catalog import COMPLETE, Catalog, Segment
from deepinfer.runtime.store.files import Files, write_all
from deepinfer.runtime.store.health import PUBLISHING, Health
from deepinfer.runtime.store.index import hints_of
from deepinfer.runtime.store.layout import LOG_ENTRY_BYTES, PAGE, Layout
from deepinfer.runtime.store.lease import Leases
from deepinfer.runtime.store.log import PUT, entries_of, pack_entries, standing
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.segment import SEALED, SegmentName, Superblock, pack_footer
from deepinfer.runtime.store.settings import HOUR, StoreSettings

_SPANS = 24  # a segment stays open for at most this part of its class's retention
_MOST_LOG = 4  # entries of a log for each slot: marks of use beyond that are not kept

Row = tuple[object, ...]


class OpenSegment:
    """A segment that is being filled. ``fd`` writes past the page cache, ``log_fd`` through it."""

    def __init__(self, segment: Segment, block: Superblock, fd: int, log_fd: int) -> None:
        self.segment, self.block, self.fd, self.log_fd = segment, block, fd, log_fd
        self.synced = time.monotonic()
        self.lock = threading.Lock()
        self.next_slot = self.logged = self.in_flight = 0
        self.unsynced = 0
        self.named = False  # whether the folder's entry is durable
        self.lost = False  # whether somebody took the file away
        self.rows: list[Row] = []

    @property
    def full(self) -> bool:
        return self.next_slot >= self.block.capacity


class Writers:
    """The open segment of each class, and those that wait to be sealed."""

    def __init__(self, settings: StoreSettings, layout: Layout, files: Files, catalog: Catalog, leases: Leases,
                 health: Health) -> None:
        self.settings, self.layout, self.files = settings, layout, files
        self.catalog, self.leases, self.health = catalog, leases, health
        self.current: dict[str, OpenSegment] = {}
        self.sealing: list[OpenSegment] = []
        self._lock = threading.Lock()  # guards the two above; only opening a segment does I/O under it
        self._seq = 0
        self.leased = False

    # ---- filling --------------------------------------------------------------------------------------------------
    def reserve(self, cls: str, most: int) -> tuple[OpenSegment, list[int]]:
        """Consecutive slots, 1 to ``most``, of the class's open segment; each is written or lost, never given again.

        OSError when there is no open segment and none can be made.
        """
        with self._lock:
            open_segment = self.current.get(cls)
            if open_segment is None or open_segment.full:
                if open_segment is not None:
                    self.sealing.append(self.current.pop(cls))
                open_segment = self.current[cls] = self._open(cls)
            with open_segment.lock:
                first = open_segment.next_slot
                count = min(most, open_segment.block.capacity - first)
                open_segment.next_slot += count
                open_segment.in_flight += 1
            return open_segment, list(range(first, first + count))

    def done(self, open_segment: OpenSegment, written: int) -> None:
        """A reservation came to its end; ``written`` bytes reached the file."""
        with open_segment.lock:
            open_segment.in_flight -= 1
            open_segment.unsynced += written

    def announce(self, open_segment: OpenSegment, rows: list[Row]) -> None:
        """Append log entries of whole records, then tell the index. OSError: neither is announced."""
        keys, entries = [row[0] for row in rows], entries_of(rows)
        with open_segment.lock:
            position = open_segment.logged
            data = memoryview(pack_entries(entries, open_segment.block.uuid, position))
            write_all(self.files, open_segment.log_fd, [data], position * LOG_ENTRY_BYTES, Point.LOG)
            open_segment.logged += len(rows)
            open_segment.rows += [row for row in rows if row[3] == PUT]
            reached = open_segment.logged * LOG_ENTRY_BYTES
        puts = entries["kind"] == PUT
        number = open_segment.segment.number
        names = [bytes(key) for key, put in zip(keys, puts, strict=True) if put]  # type: ignore[call-overload]
        told = entries[puts]
        hints = hints_of(names, number, told["slot"], told["head"], told["used"], told["flags"])
        self.files.point(Point.INDEX)
        self.catalog.index.put(names, hints, self.catalog.alive,
                               [(open_segment.segment.name.stem, number, reached)])

    def mark(self, row: Row) -> None:
        """Note a use or a damage in whatever log of ours is open; without one it is forgotten."""
        with self._lock:
            open_segment = next(iter(self.current.values()), None)
        if open_segment is None or open_segment.logged >= _MOST_LOG * open_segment.block.capacity:
            return
        try:
            self.announce(open_segment, [row])
        except OSError as failure:
            self.health.failed(PUBLISHING, failure, off=False)

    def take_lease(self) -> None:
        """Before anything is ours there is a lease that says who we are."""
        if not self.leased:
            self.leases.renew(self.catalog.guard.now())
            self.leased = True

    # ---- opening --------------------------------------------------------------------------------------------------
    def _open(self, cls: str) -> OpenSegment:
        guard, name_of = self.catalog.guard, self.leases.writer.name
        if self.catalog.index.off:
            raise OSError(errno.ENODEV, "no index")
        self.take_lease()
        keep = self.settings.retention[cls]
        expires = int((guard.now() + keep + keep // _SPANS) // HOUR) + 1
        name = SegmentName(expires, name_of, self._seq)
        self._seq += 1
        folder = self.catalog.class_folder(cls)
        self.files.make_folder(folder, within=self.settings.folder)
        block = Superblock(self.layout, self.layout.capacity(self.settings.segment_bytes), uuid4().bytes, name_of, cls,
                           int(guard.now()), expires)
        fd = log_fd = -1
        try:
            fd = self.files.open(folder / name.file, write=True, create=True, direct=True, point=Point.ALLOCATE)
            self.files.allocate(fd, block.size, Point.ALLOCATE)
            write_all(self.files, fd, [_page(block.pack())], 0, Point.SUPERBLOCK)
            log_fd = self.files.open(folder / name.log, write=True, create=True, point=Point.LOG)
        except OSError:
            for opened, path in ((fd, folder / name.file), (log_fd, folder / name.log)):
                if opened >= 0:
                    self.files.close(opened)
                    with contextlib.suppress(OSError):
                        self.files.unlink(path, Point.ALLOCATE)
            raise
        segment = self.catalog.add(name, folder, cls, self.catalog.index.number(name.stem))
        segment.block = block
        return OpenSegment(segment, block, fd, log_fd)

    # ---- syncing and sealing --------------------------------------------------------------------------------------
    def sync(self, now: bool = False) -> None:
        """Make durable what waits for longer or is larger than the settings allow."""
        with self._lock:
            waiting = list(self.current.values())
        for s in waiting:
            due = now or s.unsynced >= self.settings.sync_bytes
            if s.unsynced and (due or time.monotonic() - s.synced >= self.settings.sync_seconds):
                self.sync_one(s)

    def sync_one(self, s: OpenSegment) -> None:
        """Data and log of one segment to the disk."""
        with s.lock:
            size, s.synced = s.unsynced, time.monotonic()
        try:
            self.files.sync(s.fd, Point.REORDERED)
            self.files.sync(s.log_fd, Point.REORDERED)
            if not s.named:
                self.files.sync_folder(s.segment.folder, Point.REORDERED)
                s.named = True
        except OSError as failure:
            self.health.failed(PUBLISHING, failure, off=False)
            return
        with s.lock:
            s.unsynced -= size

    def rotate(self, everything: bool = False) -> None:
        """Seal full segments and those that were open for long enough; ``everything``: all, for the end.

        One whose file is gone, as after a purge, is left: nobody would find what is written to it.
        """
        with self._lock:
            ours = [*self.current.values(), *self.sealing]
        for s in ours:
            s.lost = s.lost or (s.segment.gone and self._taken(s))
        with self._lock:
            for cls, s in list(self.current.items()):
                old = self.catalog.guard.now() - s.block.created > self.settings.retention[cls] / _SPANS
                if everything or s.full or old or s.lost:
                    self.sealing.append(self.current.pop(cls))
            ready = [s for s in self.sealing if not s.in_flight]
            self.sealing = [s for s in self.sealing if s.in_flight]
        for s in ready:
            try:
                if s.lost:
                    self._abandon(s)
                else:
                    self.seal(s)
            except OSError as failure:
                self.health.failed(PUBLISHING, failure, off=False)
                self._abandon(s)

    def _taken(self, s: OpenSegment) -> bool:
        """Whether a segment that the catalog forgot has no file any more. Not while the store's folder is away; and one
        that a listing only missed, or that came back with its mount, is made known again."""
        try:
            self.files.stat(self.settings.folder)
            there = s.segment.name.file in self.files.names(s.segment.folder)
        except OSError:
            return False
        number = self.catalog.index.number(s.segment.name.stem)
        if there and number:
            s.segment = self.catalog.add(s.segment.name, s.segment.folder, s.segment.cls, number)
            s.segment.block = s.block
        return not there

    def seal(self, s: OpenSegment) -> None:
        """Sync the records, write the footer, sync it, rename, sync the folder. An empty segment is removed."""
        if not s.rows:
            self._abandon(s)
            self.catalog.drop(s.segment)
            for path in (s.segment.path, s.segment.log_path):
                self.files.unlink(path, Point.UNLINK)
            return
        self.files.sync(s.fd, Point.REORDERED)
        self.files.sync(s.log_fd, Point.REORDERED)
        finish(self.files, s.block, s.fd, s.rows, s.next_slot)
        sealed = s.segment.name.having(SEALED)
        self.files.rename(s.segment.path, s.segment.folder / sealed.file, Point.SEALED)
        self.catalog.add(sealed, s.segment.folder, s.segment.cls, s.segment.number)
        self.files.sync_folder(s.segment.folder, Point.RENAMED)
        self.catalog.index.consume(sealed.stem, s.segment.number, COMPLETE)
        self._abandon(s)

    def _abandon(self, s: OpenSegment) -> None:
        self.files.close(s.fd)
        self.files.close(s.log_fd)

    def close(self) -> None:
        """Seal everything; the lease goes when nothing is left open."""
        self.rotate(everything=True)
        if self.leased and not self.sealing:
            self.leases.drop()


def finish(files: Files, block: Superblock, fd: int, rows: list[Row], used_slots: int) -> None:
    """Write and sync the footer of a segment whose records are ``rows``; unused space goes back to the disk."""
    if used_slots < block.capacity:
        files.punch(fd, block.offset(used_slots), block.footer - block.offset(used_slots), Point.FOOTER)
    entries = standing(entries_of(sorted(rows, key=_slot)))
    write_all(files, fd, [_page(pack_footer(block, pack_entries(entries, block.uuid, 0)))], block.footer, Point.FOOTER)
    files.sync(fd, Point.FOOTER)


def _slot(row: Row) -> int:
    slot = row[2]
    return slot if isinstance(slot, int) else 0


def _page(data: bytes) -> memoryview:
    """The bytes in memory that direct I/O takes."""
    area = mmap.mmap(-1, -(-len(data) // PAGE) * PAGE)
    area[: len(data)] = data
    return memoryview(area)
