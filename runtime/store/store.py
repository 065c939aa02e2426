"""The store: a tier on a folder that processes and hosts share. docs/store.md describes format, life and operations."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakSet

import lmdb
import numpy as np

from deepinfer.errors import RequestError
from deepinfer.runtime import events
from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.backends import open_mover
from deepinfer.runtime.store.backends.threads import ThreadMover
from deepinfer.runtime.store.bulk import Bulk, Wishes
from deepinfer.runtime.store.catalog import Catalog, Segment
from deepinfer.runtime.store.compaction import LAST_PART, Compaction
from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.health import READING, Health
from deepinfer.runtime.store.index import HINT, TOUCHED, Hints, Index, hints_of, map_size_for
from deepinfer.runtime.store.layout import Layout
from deepinfer.runtime.store.lease import Leases, Writer
from deepinfer.runtime.store.log import DAMAGED, TOUCH, mark_entry
from deepinfer.runtime.store.metrics import StoreMetrics
from deepinfer.runtime.store.native.library import NativeRecords, open_native
from deepinfer.runtime.store.publisher import Publisher, Write
from deepinfer.runtime.store.reader import Ended, Read, Reader, runs_of
from deepinfer.runtime.store.record import Head, Wanted, id_bytes, scatter
from deepinfer.runtime.store.salts import Salts
from deepinfer.runtime.store.segment import SEALED
from deepinfer.runtime.store.settings import HOUR, INLINE, StoreSettings
from deepinfer.runtime.store.tier import NO_EXTRA, Buffer, Flags, Ids, Keys, Status, Ticket, view_of
from deepinfer.runtime.store.time_guard import TimeGuard
from deepinfer.runtime.store.upkeep import Upkeep
from deepinfer.runtime.store.writer import Writers

_PATIENCE = 10.0  # seconds that closing waits for what is under way


class Store:
    """A ``Tier``. Opening one never fails for the folder's sake: it serves what it can, and says what it cannot.

    ``library``: the native part of the store (``lib/store.so`` of an engine); without it records are handled in Python,
    which is right and slower. ``files``, ``wall``, ``monotonic`` and ``writer`` are for tests.
    """

    def __init__(self, settings: StoreSettings, layout: Layout, *, library: Path | None = None,
                 files: Files | None = None,
                 wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic,
                 writer: Writer | None = None) -> None:
        self.settings, self.layout, self.files = settings, layout, files or Files()
        layout.capacity(settings.segment_bytes)  # PlanError where a segment holds no record
        self._metrics = StoreMetrics()
        self.health = Health(settings.folder, settings.retry_seconds, self._metrics)
        self.index = _open_index(settings, layout, self.files)
        self.guard = TimeGuard(self.index.folder / "clock", self.files, wall, monotonic)
        self.catalog = Catalog(settings.folder / layout.namespace.hex(), layout, settings.retention, self.files,
                               self.index, self.health, self.guard, self._metrics)
        self.leases = Leases(settings, self.files, writer or Writer.mine())
        self.writers = Writers(settings, layout, self.files, self.catalog, self.leases, self.health)
        self.salts = Salts(settings.folder, self.files, self.health)
        self.upkeep = Upkeep(settings, self.files, self.catalog, self.writers, self.leases, self.health, self._metrics)
        self._arena = Arena(max(settings.arena_bytes, 2 * settings.threads * layout.stride), layout.stride)
        self.reader = Reader(self.catalog, self.files, self.health, self._metrics, self._damaged, self._stale)
        self.native = self._native(library)
        self.mover = open_mover(settings, self._arena, self.reader, self.native)
        self._arena.forget_name()
        self._bulk = self._bulk_of(self.native)
        self.publisher = Publisher(settings, layout, self._arena, self.mover, self.writers, self.catalog, self.health,
                                   self._metrics, self.upkeep.make_room, self.native)
        self.upkeep.compaction = Compaction(settings, self.files, self.catalog, self.publisher,
                                            lambda: self.writers.sync(now=True), self.upkeep.remove)
        self._late = 0
        self._fetches: WeakSet[Ticket] = WeakSet()
        self._closing, self._ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look_after, daemon=True, name="store-upkeep")
        if settings.background:
            self._thread.start()
        else:
            self.upkeep.tick()
            self._ready.set()

    # ---- the tier -------------------------------------------------------------------------------------------------
    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        return self.layout.sections

    @property
    def memory_bytes(self) -> int:
        """Host memory that the store takes, for the memory plan; the index is page cache."""
        return self._arena.bytes

    def ready(self, seconds: float) -> bool:
        """Wait until the folder was looked at once and what its logs say is in the index."""
        return self._ready.wait(seconds)

    def lookup(self, keys: Keys, exact: bool = False) -> int:
        """See ``Tier``."""
        begun = time.perf_counter()
        count = self._usable(self.index.leading(_split(keys)), exact) if self.health.works(READING) else 0
        self._metrics.lookup_seconds.observe(time.perf_counter() - begun)
        self._metrics.lookups.add(count, "present")
        self._metrics.lookups.add(len(keys) - count, "absent")
        return count

    def fetch(self, keys: Keys, ids: Ids, into: Sequence[Sequence[Buffer]], *, extra: Sequence[bytes] | None = None,
              exact: bool = False) -> Ticket:
        """See ``Tier``."""
        names, ticket, raw = _split(keys), Ticket(len(keys)), id_bytes(ids)
        views = self._checked(len(names), len(raw), into)
        self._fetches.add(ticket)
        hints = self.index.leading(names) if self.health.works(READING) else np.zeros(0, dtype=HINT)
        places, segments = self._places(ticket, hints)
        for i in range(len(hints), len(names)):
            self._end_fetch(ticket, i, Status.MISS)
        if places:
            wishes = Wishes(ticket, places, segments, hints, names, extra, raw, views, exact)
            if self._bulk is not None and isinstance(self.mover, ThreadMover):
                self.mover.submit(self._bulk.pieces(wishes, self.mover.idle))
            else:
                reads = [self._read(wishes, i) for i in places]
                self.mover.submit(runs_of(reads, self._run_length(len(reads))))
        return ticket

    def _places(self, ticket: Ticket, hints: Hints) -> tuple[list[int], dict[int, Segment]]:
        """Blocks whose segment is there and not expired, and these segments by number; the others end."""
        numbers, now = hints["number"].tolist(), self.guard.now()
        known = {number: self.catalog.by_number.get(number) for number in set(numbers)}
        good = {number: s for number, s in known.items() if s is not None and s.name.hour * HOUR > now}
        if len(good) < len(known):
            for i, number in enumerate(numbers):
                if number not in good:
                    self._end_fetch(ticket, i, Status.MISS if known[number] is None else Status.EXPIRED)
        return [i for i, number in enumerate(numbers) if number in good], good

    def _read(self, wishes: Wishes, i: int) -> Read:
        hint, width = wishes.hints[i], self.layout.ids_bytes
        wanted = Wanted(wishes.keys[i], wishes.ids[i * width : (i + 1) * width],
                        NO_EXTRA if wishes.extra is None else wishes.extra[i], wishes.exact)
        return Read(wishes.segments[int(hint["number"])], hint, int(hint["slot"]), wanted, self._ender(wishes, i),
                    partial(_pending, wishes.ticket, i))

    def poll(self, ticket: Ticket, deadline: float | None = None) -> Sequence[Status]:
        """See ``Tier``. A fetch that takes longer than the settings' timeout is cancelled here, and after the second
        in a row reading is left for a while: the mount does not answer."""
        if deadline is not None or time.monotonic() - ticket.begun > self.settings.timeout:
            until = min(deadline or 0.0, ticket.begun + self.settings.timeout)
            if ticket.wait(until):
                self._late = 0
            elif time.monotonic() - ticket.begun > self.settings.timeout:
                self._late += 1
                self.health.failed(READING, TimeoutError(f"no answer in {self.settings.timeout:g} s"),
                                   off=self._late > 1)
        return ticket.statuses

    def publish(self, key: bytes, parent: bytes, number: int, ids: Ids, payload: Sequence[Buffer], *,
                flags: Flags = Flags.NONE, cls: str = "chat", extra: bytes = NO_EXTRA) -> Ticket:
        """See ``Tier``."""
        if cls not in self.settings.retention:
            raise RequestError("unknown retention class", where="cache class", found=cls,
                               allowed=sorted(self.settings.retention))
        raw, ticket = id_bytes(ids), Ticket(1)
        views = self._checked(1, len(raw), [payload])
        self.publisher.submit(Write(key, parent, number, raw, views[0], flags, cls, extra, ticket))
        if not self.settings.background:
            self.writers.rotate()
        return ticket

    def pin(self, keys: Keys) -> StorePin:
        """See ``Tier``."""
        hints = self.index.leading(_split(keys))
        return StorePin(self.catalog, self.catalog.pin(hints["number"].tolist()))

    def metrics(self) -> StoreMetrics:
        return self._metrics

    def close(self) -> None:
        """See ``Tier``. Waits for a folder that hangs no longer than a few seconds."""
        self._closing.set()
        for ticket in list(self._fetches):
            ticket.wait(0.0)  # from here on their memory may go
        self.publisher.close(_PATIENCE)
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)
        if self.settings.backend == INLINE:
            self._leave()
            return
        last = threading.Thread(target=self._leave, daemon=True, name="store-close")
        last.start()
        last.join(_PATIENCE)

    def _leave(self) -> None:
        self.mover.close(_PATIENCE)
        with contextlib.suppress(OSError):
            self.writers.close()
        self.guard.save()
        with contextlib.suppress(OSError, lmdb.Error):
            self.index.close()
        self.catalog.drop_all()
        self._arena.close()

    # ---- beside the tier ------------------------------------------------------------------------------------------
    def tenant_salt(self, tenant: str) -> bytes:
        """[32] the secret that goes into a tenant's root key; see ``Salts``."""
        return self.salts.get(tenant)

    def locate(self, keys: Keys) -> list[tuple[Segment, np.void]]:
        """(segment, hint) of the leading keys that are present, for a ``Ring``."""
        hints = self.index.leading(_split(keys))
        return [(self.catalog.by_number[int(h["number"])], h) for h in hints[: self._usable(hints, False)]]

    def _native(self, library: Path | None) -> NativeRecords | None:
        """The native part, where there is one and the folder is a real one."""
        native, reason = open_native(library, self.layout) if type(self.files) is Files else (None, "a test's folder")
        if library is not None and native is None:
            events.warn("store_in_python", library=library, reason=reason, effect="slower reads and writes")
        else:
            events.info("store_records", native=native is not None, reason=reason or "native part of the engine")
        return native

    def _bulk_of(self, native: NativeRecords | None) -> Bulk | None:
        return None if native is None else Bulk(native, self.catalog, self.health, self._metrics, damaged=self._damaged,
                                                stale=self._stale, ends_soon=self._ends_soon, touched=self._touch,
                                                ended=self._fetched)

    def _usable(self, hints: Hints, exact: bool) -> int:
        right = self.catalog.alive(hints["number"])
        if exact:
            right &= hints["flags"] & Flags.REPLAYED == 0
        return len(hints) if right.all() else int(np.argmin(right))

    def _run_length(self, reads: int) -> int:
        """Long runs save calls, and all threads should have some."""
        return max(1, min(self.mover.run_length, reads // self.settings.threads))

    def _ender(self, wishes: Wishes, i: int) -> Ended:
        def ended(status: Status, head: Head | None, record: memoryview | None) -> None:
            copy = None if record is None else lambda: scatter(self.layout, record, wishes.into[i])
            self._end_fetch(wishes.ticket, i, status, Flags.NONE if head is None else head.flags, copy)
            if status is Status.OK and self._ends_soon(wishes.segments[int(wishes.hints["number"][i])]):
                self._touch(wishes.keys[i], wishes.hints[i])
        return ended

    def _end_fetch(self, ticket: Ticket, i: int, status: Status, flags: Flags = Flags.NONE,
                   copy: Callable[[], None] | None = None) -> None:
        if ticket.end(i, status, flags, copy):
            self._fetched(ticket, [status])

    def _fetched(self, ticket: Ticket, statuses: Sequence[Status]) -> None:
        for status, count in Counter(statuses).items():
            self._metrics.fetched.add(count, label=status)
        if statuses and ticket.done:
            self._metrics.fetch_seconds.observe(time.monotonic() - ticket.begun)

    def _ends_soon(self, segment: Segment) -> bool:
        return segment.name.hour * HOUR - self.guard.now() <= LAST_PART * self.settings.retention.get(segment.cls, 0)

    def _touch(self, key: bytes, hint: np.void) -> None:
        """A use late in a record's life is noted: such records are carried on, and go last."""
        if hint["flags"] & TOUCHED:
            return
        now = int(self.guard.now())
        new = hints_of([key], hint["number"], hint["slot"], hint["head"], now, hint["flags"] | TOUCHED)
        if self.index.replace(key, hint, new):
            self.writers.mark(mark_entry(TOUCH, key, int(hint["slot"]), int(hint["head"]), now))

    def _damaged(self, segment: Segment, key: bytes, hint: np.void) -> None:
        self._metrics.damaged.add()
        events.warn("store_damaged", segment=segment.name.file, slot=int(hint["slot"]))
        self.index.replace(key, hint, None)
        self.writers.mark(mark_entry(DAMAGED, key, int(hint["slot"]), int(hint["head"]), int(self.guard.now())))
        segment.damaged += 1
        if segment.damaged >= self.settings.bad_after and segment.name.state == SEALED:
            with contextlib.suppress(OSError):
                self.upkeep.set_aside(segment)

    def _stale(self, key: bytes, hint: np.void) -> None:
        """The index was wrong about where the record is."""
        self.index.replace(key, hint, None)

    def _checked(self, blocks: int, id_count: int, buffers: Sequence[Sequence[Buffer]]) -> list[list[memoryview]]:
        """The bytes of buffers: a caller's own mistake shows in its thread, not in ours."""
        if id_count != blocks * self.layout.ids_bytes or len(buffers) != blocks:
            raise ValueError(f"{blocks} keys come with {id_count // 4} ids and {len(buffers)} payloads")
        views = [[view_of(part) for part in parts] for parts in buffers]
        for parts in views:
            size = sum(map(len, parts))
            if size != self.layout.payload_bytes:
                raise ValueError(f"a payload of {size} bytes where {self.layout.payload_bytes} belong")
        return views

    def _look_after(self) -> None:
        while not self._closing.is_set():
            try:
                self.upkeep.tick()
            except Exception as failure:  # a bug must not end the thread that keeps the lease
                self.health.failed(READING, failure, off=False)
            self._ready.set()
            self._closing.wait(self.settings.tick_seconds)


class StorePin:
    """Segments that stay."""

    def __init__(self, catalog: Catalog, segments: list[Segment]) -> None:
        self._catalog, self._segments = catalog, segments

    def release(self) -> None:
        segments, self._segments = self._segments, []
        self._catalog.unpin(segments)


def _open_index(settings: StoreSettings, layout: Layout, files: Files) -> Index:
    """The index of this host, or a private one for this run where its folder does not work."""
    size = map_size_for(settings.quota, layout.stride)
    reason: Exception
    folder = settings.index_folder / layout.namespace.hex()
    try:
        return Index(folder, size, files)
    except (OSError, lmdb.Error) as failure:
        reason = failure
    try:
        private = Path(tempfile.mkdtemp(prefix="deepinfer-store-index-"))
        events.warn("store_index_private", folder=folder, reason=reason, instead=private)
        return Index(private, size, files)
    except (OSError, lmdb.Error) as failure:
        events.warn("store_index_missing", folder=folder, reason=failure, effect="the store is off")
        return Index(None, size, files)


def _pending(ticket: Ticket, i: int) -> bool:
    return ticket.statuses[i] is Status.PENDING


def _split(keys: Keys) -> list[bytes]:
    raw = keys.tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]
