"""The segments of one namespace as this process knows them, and how their records get into the index."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.store.files import Files, read_bytes
from deepinfer.runtime.store.health import READING, Health
from deepinfer.runtime.store.index import TOUCHED, Index, hints_of
from deepinfer.runtime.store.layout import LOG_ENTRY_BYTES, PAGE, Layout
from deepinfer.runtime.store.log import DAMAGED, ENTRY, PUT, Entries, entries_of, put_entry, read_entries, standing
from deepinfer.runtime.store.metrics import StoreMetrics
from deepinfer.runtime.store.record import Head, read_head, whole
from deepinfer.runtime.store.segment import (
    OPEN,
    SEALED,
    SegmentName,
    Superblock,
    in_order,
    parse_name,
    read_footer,
    read_superblock,
)
from deepinfer.runtime.store.time_guard import TimeGuard

COMPLETE = 1 << 62  # "bytes of the log that are in", for a segment that gets no more records
_OPEN_FILES = 256
_RENAMES = 3  # that a segment may see while it is opened
_TOGETHER = 65_536  # records of one transaction of a rebuild
_LIST_SECONDS = 5.0
_SETTLED_SECONDS = 0.1  # a folder's time of change is coarse: within a tick of the kernel two changes look like one


@dataclass(frozen=True)
class _Listing:
    """``stamp``: the folder's time of change, first seen at ``since``; ``at``: when names were read. Both in seconds
    of the monotonic clock."""

    stamp: int = -1
    since: float = 0.0
    at: float = -math.inf

    def misses(self, stamp: int, now: float) -> bool:
        """Whether the folder may hold names that were not read."""
        return (stamp != self.stamp or self.at - self.since <= _SETTLED_SECONDS  # more may have come in the same tick
                or now - self.at > _LIST_SECONDS)


class Segment:
    """One segment file. ``number`` stands for it in the index; a descriptor is open while somebody uses it."""

    def __init__(self, name: SegmentName, folder: Path, cls: str, number: int) -> None:
        self.name, self.folder, self.cls, self.number = name, folder, cls, number
        self.block: Superblock | None = None
        self.damaged = self.pins = self.users = 0
        self.gone = False
        self.fd = -1
        self.opening = threading.Lock()  # held while the file is opened: whoever waits for it wants this very file

    @property
    def path(self) -> Path:
        return self.folder / self.name.file

    @property
    def log_path(self) -> Path:
        return self.folder / self.name.log


@dataclass(frozen=True, eq=False)
class Ingested:
    """What was read of a segment's log or footer; ``reached``: bytes of the log that are read now."""

    segment: Segment
    puts: Entries
    marks: Entries
    reached: int


class Catalog:
    """See the module. ``refresh`` and ``ingest`` belong to whoever does the upkeep; the rest is for all threads."""

    def __init__(self, folder: Path, layout: Layout, classes: Iterable[str], files: Files, index: Index, health: Health,
                 guard: TimeGuard, metrics: StoreMetrics) -> None:
        self.folder, self.layout, self.files, self.index = folder, layout, files, index
        self.health, self.guard, self.metrics = health, guard, metrics
        self.classes = list(classes)
        self.by_stem: dict[str, Segment] = {}
        self.by_number: dict[int, Segment] = {}
        self._expires: NDArray[np.uint32] = np.zeros(64, dtype=np.uint32)
        self._opened: OrderedDict[int, Segment] = OrderedDict()
        self._lock = threading.Lock()
        self._listed: dict[str, _Listing] = {}

    # ---- what is alive --------------------------------------------------------------------------------------------
    def alive(self, numbers: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Whether the segments of these numbers are there and not expired; no I/O."""
        table = self._expires
        inside = np.minimum(numbers, len(table) - 1)
        return np.asarray((table[inside] > self.guard.hour) & (numbers < len(table)))

    def add(self, name: SegmentName, folder: Path, cls: str, number: int) -> Segment:
        """Make a segment known; reads of it may begin."""
        with self._lock:
            segment = self.by_stem.get(name.stem)
            if segment is None:
                segment = Segment(name, folder, cls, number)
                self.by_stem[name.stem] = self.by_number[number] = segment
            segment.name = name
            if number >= len(self._expires):
                grown = np.zeros(max(2 * len(self._expires), number + 1), dtype=np.uint32)
                grown[: len(self._expires)] = self._expires
                self._expires = grown
            self._expires[number] = name.hour
            return segment

    def drop(self, segment: Segment) -> None:
        """Forget a segment; reads that began end as they may, its descriptor closes after the last."""
        with self._lock:
            self.by_stem.pop(segment.name.stem, None)
            self.by_number.pop(segment.number, None)
            self._expires[segment.number] = 0
            segment.gone = True
            if not segment.users:
                self._shut(segment)

    def drop_all(self) -> None:
        """The folder is gone; its segments are known again when it is back."""
        for segment in list(self.by_stem.values()):
            self.drop(segment)
        self._listed.clear()

    def renumber(self) -> None:
        """The index is a new one: all segments get new numbers, and their records are to be ingested again."""
        with self._lock:
            self.by_number.clear()
            self._opened.clear()
            self._expires = np.zeros(64, dtype=np.uint32)
        for segment in list(self.by_stem.values()):
            segment.number = self.index.number(segment.name.stem)
            self.by_number[segment.number] = segment
            self.add(segment.name, segment.folder, segment.cls, segment.number)

    def pin(self, numbers: Iterable[int]) -> list[Segment]:
        """Keep segments from being given up."""
        with self._lock:
            pinned = [self.by_number[n] for n in set(numbers) if n in self.by_number]
            for segment in pinned:
                segment.pins += 1
        return pinned

    def unpin(self, pinned: Iterable[Segment]) -> None:
        with self._lock:
            for segment in pinned:
                segment.pins -= 1

    # ---- reading a segment ----------------------------------------------------------------------------------------
    def acquire(self, segment: Segment) -> tuple[int, Superblock]:
        """Its descriptor and superblock; give them back with ``release``. OSError as the folder has it;
        FileNotFoundError also where the file is none of this namespace."""
        with self._lock:
            segment.users += 1
        try:
            with segment.opening:
                if segment.fd < 0 or segment.block is None:
                    self._open(segment)
                block, fd = segment.block, segment.fd
            if block is None:
                raise FileNotFoundError(f"no segment of this store: {segment.path}")
            return fd, block
        except OSError:
            self.release(segment)
            raise

    def release(self, segment: Segment) -> None:
        with self._lock:
            segment.users -= 1
            if segment.gone and not segment.users:
                self._shut(segment)

    def _open(self, segment: Segment) -> None:
        block = segment.block or self.superblock(segment)
        if block is None or block.layout.namespace != self.layout.namespace:
            return
        fd = self._descriptor(segment, direct=True)
        with self._lock:
            segment.block, segment.fd = block, fd
            self._opened[segment.number] = segment
            for number, other in list(self._opened.items()):
                if len(self._opened) <= _OPEN_FILES:
                    break
                if not other.users:
                    self._shut(other)
                    self._opened.pop(number, None)

    def superblock(self, segment: Segment) -> Superblock | None:
        fd = self._descriptor(segment)
        try:
            return read_superblock(read_bytes(self.files, fd, 0, PAGE))
        finally:
            self.files.close(fd)

    def _descriptor(self, segment: Segment, direct: bool = False) -> int:
        for _ in range(_RENAMES):
            with contextlib.suppress(FileNotFoundError):
                return self.files.open(segment.path, direct=direct)
            self.refresh(force=True)  # it was sealed or adopted under another name
            segment = self.by_stem.get(segment.name.stem, segment)
        return self.files.open(segment.path, direct=direct)

    def _shut(self, segment: Segment) -> None:
        self._opened.pop(segment.number, None)
        if segment.fd >= 0:
            self.files.close(segment.fd)
            segment.fd = -1

    # ---- the folder -----------------------------------------------------------------------------------------------
    def class_folder(self, cls: str) -> Path:
        return self.folder / cls

    def refresh(self, force: bool = False) -> bool:
        """Look at the folder's names; returns whether it could."""
        try:
            for cls in sorted({*self.classes, *self.files.names(self.folder)}):
                folder = self.class_folder(cls)
                try:
                    stamp = self.files.stat(folder).st_mtime_ns
                except (FileNotFoundError, NotADirectoryError):
                    self._seen(cls, folder, [])
                    continue
                listed, now = self._listed.get(cls, _Listing()), self.guard.up
                if force or listed.misses(stamp, now):
                    self._listed[cls] = _Listing(stamp, listed.since if stamp == listed.stamp else now, now)
                    names = (parse_name(file) for file in self.files.names(folder))
                    self._seen(cls, folder, [n for n in names if n is not None])
            return True
        except OSError as failure:
            self.health.failed(READING, failure)
            return False

    def _seen(self, cls: str, folder: Path, names: list[SegmentName]) -> None:
        living = {n.stem: n for n in in_order(names) if n.state in (OPEN, SEALED)}
        for segment in [s for s in self.by_stem.values() if s.cls == cls and s.name.stem not in living]:
            self.drop(segment)
        for stem, name in living.items():
            known = self.by_stem.get(stem)
            if known is not None:
                if known.name != name:
                    self.add(name, folder, cls, known.number)
            elif number := self.index.number(stem):
                self.add(name, folder, cls, number)
        self.metrics.segments.set(len(self.by_stem))

    # ---- into the index -------------------------------------------------------------------------------------------
    def ingest(self) -> int:
        """Bring records that are not in the index yet into it, as a rule those of other hosts; returns how many."""
        known, marks, added = self.index.segments(), [], 0
        found: list[Ingested] = []
        for segment in list(self.by_stem.values()):
            consumed = known.get(segment.name.stem, (0, 0))[1]
            if consumed >= COMPLETE:
                continue
            try:
                new = self._read_new(segment, consumed)
            except OSError as failure:
                self.health.failed(READING, failure, off=False)
                continue
            if new is None:
                continue
            found.append(new)
            marks += [new.marks] if len(new.marks) else []
            if sum(len(f.puts) for f in found) >= _TOGETHER:
                added += self._put(found)
                found = []
        added += self._put(found)
        for entries in marks:
            self._mark(entries)
        return added

    def _put(self, found: list[Ingested]) -> int:
        """Records of several segments into the index, in one transaction."""
        if not found:
            return 0
        keys = [f.puts["key"].tobytes() for f in found]
        hints = [hints_of(k, f.segment.number, f.puts["slot"], f.puts["head"], f.puts["used"], f.puts["flags"])
                 for k, f in zip(keys, found, strict=True)]
        self.index.put(b"".join(keys), np.concatenate(hints), self.alive,
                       [(f.segment.name.stem, f.segment.number, f.reached) for f in found])
        return sum(map(len, hints))

    def _read_new(self, segment: Segment, consumed: int) -> Ingested | None:
        """What of one segment is not in the index yet."""
        if segment.block is None:
            segment.block = self.superblock(segment)
        block, sealed = segment.block, segment.name.state == SEALED
        if block is None or block.layout.namespace != self.layout.namespace:
            return Ingested(segment, entries_of([]), entries_of([]), COMPLETE) if sealed else None
        position = consumed // LOG_ENTRY_BYTES
        if sealed:
            return Ingested(segment, self.sealed_puts(segment, block), self._marks(segment, block, position), COMPLETE)
        entries = self.log_entries(segment, block, position)
        if not len(entries):
            return None
        puts = entries["kind"] == PUT
        return Ingested(segment, entries[puts], entries[~puts], (position + len(entries)) * LOG_ENTRY_BYTES)

    def _marks(self, segment: Segment, block: Superblock, position: int) -> Entries:
        """Marks of use and damage in a sealed segment's log from ``position`` on; only they are proved."""
        data = self._log(segment, block, position)
        raw = np.frombuffer(data, dtype=ENTRY, count=len(data) // LOG_ENTRY_BYTES)
        if not len(raw) or (raw["kind"] == PUT).all():
            return entries_of([])
        entries = read_entries(data, block.uuid, position)
        marks: Entries = entries[entries["kind"] != PUT]
        return marks

    def log_entries(self, segment: Segment, block: Superblock, position: int = 0) -> Entries:
        """Whole entries of a segment's log; none where there is no log."""
        return read_entries(self._log(segment, block, position), block.uuid, position)

    def _log(self, segment: Segment, block: Superblock, position: int) -> bytes:
        try:
            fd = self.files.open(segment.log_path)
        except FileNotFoundError:
            return b""
        try:
            size = 4 * block.capacity * LOG_ENTRY_BYTES
            size = max(0, min(size, os.fstat(fd).st_size - position * LOG_ENTRY_BYTES))
            return read_bytes(self.files, fd, position * LOG_ENTRY_BYTES, size)
        finally:
            self.files.close(fd)

    def sealed_puts(self, segment: Segment, block: Superblock) -> Entries:
        """Records of a sealed (or abandoned) segment: by its footer, else its log, else the headers themselves."""
        fd = self.files.open(segment.path)
        try:
            data = read_bytes(self.files, fd, block.footer, block.size - block.footer)
            footer = read_footer(block, data)
            if footer is not None:
                proved: Entries = np.frombuffer(footer, dtype=ENTRY)  # as a whole
                return proved
            entries = standing(self.log_entries(segment, block))
            return entries if len(entries) else self._scan(fd, block)
        finally:
            self.files.close(fd)

    def _scan(self, fd: int, block: Superblock) -> Entries:
        """Every record that proves itself, without being told where one is."""
        rows = []
        for slot in range(block.capacity):
            head = self._proved(fd, block, slot)
            if head is not None:
                rows.append(put_entry(head.key, head.parent, slot, head.flags, head.sum, head.written))
        return entries_of(rows)

    def _proved(self, fd: int, block: Superblock, slot: int) -> Head | None:
        record = memoryview(read_bytes(self.files, fd, block.offset(slot), block.layout.stride))
        if len(record) < block.layout.stride:
            return None
        head = read_head(block.layout, record, block.uuid, slot)
        return head if head is not None and whole(block.layout, record, block.uuid, slot) else None

    def whole_ones(self, segment: Segment, block: Superblock, entries: Entries) -> Entries:
        """Those of a log's puts whose record proves itself: after a power cut a log may know more than the disk."""
        fd = self.files.open(segment.path)
        try:
            heads = [self._proved(fd, block, int(slot)) for slot in entries["slot"]]
        finally:
            self.files.close(fd)
        right = [h is not None and h.sum == int(e["head"]) for h, e in zip(heads, entries, strict=True)]
        kept: Entries = entries[right]
        return kept

    def _mark(self, entries: Entries) -> None:
        for entry in entries:
            key = entry["key"].tobytes()
            hint = self.index.get(key)
            if hint is None or hint["head"] != entry["head"]:
                continue
            if entry["kind"] == DAMAGED:
                self.index.replace(key, hint, None)
            elif entry["used"] > hint["used"]:
                self.index.replace(key, hint, hints_of([key], hint["number"], hint["slot"], hint["head"], entry["used"],
                                                       hint["flags"] | TOUCHED))

