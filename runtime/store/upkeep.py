"""What a store does beside serving: see new segments, sync, seal, adopt orphans, expire, keep the quota, compact."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deepinfer.runtime import events
from deepinfer.runtime.store.catalog import Catalog, Segment
from deepinfer.runtime.store.compaction import Compaction
from deepinfer.runtime.store.files import FOLDER_MODE, Files
from deepinfer.runtime.store.health import PUBLISHING, READING, Health
from deepinfer.runtime.store.layout import segment_size
from deepinfer.runtime.store.lease import Leases
from deepinfer.runtime.store.log import put_entry
from deepinfer.runtime.store.metrics import StoreMetrics
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.segment import BAD, DEAD, LOG, OPEN, SEALED, SegmentName, parse_name
from deepinfer.runtime.store.settings import HOUR, StoreSettings
from deepinfer.runtime.store.writer import Writers, finish

_MINUTE = 60.0
_BAD_SECONDS = 24 * HOUR  # a damaged segment is kept for whoever wants to look at it
_BLOCK = 512  # unit of st_blocks


class _Stranger(NamedTuple):
    """A segment of another namespace that nobody writes any more, known by its name alone."""

    path: Path
    name: SegmentName
    number: int = -1  # no index here knows its records, or how often they were used


class Upkeep:
    """One thread's work; ``tick`` is one round of it. ``compaction`` is set by the store."""

    compaction: Compaction

    def __init__(self, settings: StoreSettings, files: Files, catalog: Catalog, writers: Writers, leases: Leases,
                 health: Health, metrics: StoreMetrics) -> None:
        self.settings, self.files, self.catalog, self.writers = settings, files, catalog, writers
        self.leases, self.health, self.metrics = leases, health, metrics
        self.expired = 0
        self._swept = b""
        self._due: dict[str, float] = {}

    def tick(self) -> None:
        """What is due now. A failure of the folder ends its part of the round, nothing else."""
        self._try(self.see, READING)
        self._try(self.writers.sync, PUBLISHING)
        self._try(self.writers.rotate, PUBLISHING)
        self._try(self._compact, PUBLISHING)
        if self._is_due("beat", self.settings.heartbeat_seconds):
            self._try(self.beat, PUBLISHING)
        if self._is_due("minute", _MINUTE):
            self.everything()

    def everything(self) -> None:
        """Adopt, expire, keep the quota, unlink, tidy the index."""
        if not self.reachable():
            return
        parts: tuple[Callable[[], object], ...] = (self.adopt, self.expire, self.keep_quota, self.unlink_dead,
                                                   self.sweep)
        for act in parts:
            self._try(act, PUBLISHING)

    def _try(self, act: Callable[[], object], what: str) -> None:
        try:
            act()
        except OSError as failure:
            self.health.failed(what, failure, off=False)

    def _is_due(self, name: str, every: float) -> bool:
        if time.monotonic() < self._due.get(name, 0.0):
            return False
        self._due[name] = time.monotonic() + every
        return True

    def see(self) -> None:
        """Bring what others wrote into the index; move to a new index when this one broke."""
        if self.catalog.index.renew():
            self.catalog.renumber()
        if self.reachable() and self.catalog.refresh():
            self.catalog.ingest()

    def reachable(self) -> bool:
        """Whether the folder is there. Only its last part is made: the place of an absent mount is not filled."""
        folder = self.settings.folder
        try:
            with contextlib.suppress(FileNotFoundError):
                self.files.stat(folder)
                return True
            os.mkdir(folder, FOLDER_MODE)
            return True
        except OSError as failure:
            self.catalog.drop_all()
            self.health.failed(READING, failure, off=False)
            self.health.failed(PUBLISHING, failure)
            return False

    def beat(self) -> None:
        """Say that we live."""
        if self.writers.leased:
            self.leases.renew(self.catalog.guard.now())
        self.catalog.guard.save()

    def _compact(self) -> None:
        self.compaction.plan()
        self.compaction.work(self.settings.compact_share * self.settings.tick_seconds)

    # ---- orphans --------------------------------------------------------------------------------------------------
    def adopt(self) -> None:
        """Seal the open segments of dead writers; of several adopters one wins the rename."""
        now, me = self.catalog.guard.now(), self.leases.writer.name
        for segment in list(self.catalog.by_stem.values()):
            name = segment.name
            if name.state == OPEN and name.owner != me and self.leases.dead(name.owner, now):
                self._adopt(segment)
        owners = {s.name.owner for s in self.catalog.by_stem.values() if s.name.state == OPEN}
        self.leases.forget_dead(owners, now)

    def _adopt(self, segment: Segment) -> None:
        mine = segment.name.having(OPEN, self.leases.writer.name)
        self.writers.take_lease()
        try:
            self.files.rename(segment.path, segment.folder / mine.file, Point.ADOPT)
        except FileNotFoundError:
            return  # another adopter won
        self.catalog.add(mine, segment.folder, segment.cls, segment.number)
        self.seal_orphan(segment)

    def seal_orphan(self, segment: Segment) -> None:
        """Seal a segment that was adopted, with the records that its log or headers name and that prove themselves."""
        block = segment.block or self.catalog.superblock(segment)
        entries = None
        if block is not None:
            entries = self.catalog.whole_ones(segment, block, self.catalog.sealed_puts(segment, block))
        if block is None or entries is None or not len(entries):
            self.remove(segment, "orphan without records")
            return
        rows = [put_entry(e["key"].tobytes(), e["parent"].tobytes(), int(e["slot"]), e["flags"], int(e["head"]),
                          int(e["used"])) for e in entries]
        fd = self.files.open(segment.path, write=True, direct=True)
        try:
            self.files.sync(fd, Point.REORDERED)
            finish(self.files, block, fd, rows, int(entries["slot"].max()) + 1)
        finally:
            self.files.close(fd)
        sealed = segment.name.having(SEALED)
        self.files.rename(segment.path, segment.folder / sealed.file, Point.SEALED)
        self.catalog.add(sealed, segment.folder, segment.cls, segment.number)
        self.files.sync_folder(segment.folder, Point.RENAMED)
        self.metrics.adopted.add()
        events.info("store_adopted", segment=sealed.file, records=len(rows))

    # ---- ends -----------------------------------------------------------------------------------------------------
    def expire(self) -> None:
        """Give up segments whose hour has come, but no more than the clock may be trusted with.

        Those of other namespaces too: after a change of model nobody else may be left to do it.
        """
        guard, found = self.catalog.guard, self._unwritten()
        due = sorted((s for s in found if s.name.hour <= guard.hour), key=lambda s: s.name.hour)
        for segment in due[: guard.may_expire(len(found), self.expired)]:
            self._end(segment, "expired")
            self.expired += 1

    def keep_quota(self) -> None:
        """Give up the segments that end first, fewest uses first, until the folder is within its quota."""
        over = self.usage() - self.settings.quota
        if over > 0:
            self.free(over)

    def usage(self) -> int:
        """Bytes on disk of all segments of the folder, of every namespace."""
        total = 0
        for path in self._segments():
            with contextlib.suppress(OSError):
                total += self.files.stat(path).st_blocks * _BLOCK
        self.metrics.usage.set(total)
        return total

    def free(self, size: int) -> int:
        """Give up segments until ``size`` bytes are free or nothing is left to give; bytes freed."""
        freed = self.unlink_dead(everything=True)
        if freed >= size:
            return freed
        used = self.compaction.counts()[1]
        for segment in sorted(self._unwritten(), key=lambda s: (s.name.hour, used.get(s.number, 0), s.name.stem)):
            if freed >= size:
                break
            with contextlib.suppress(OSError):
                held = self.files.stat(segment.path).st_blocks * _BLOCK
                self._unlink(self._end(segment, "quota"))
                freed += held
        return freed

    def make_room(self) -> bool:
        """The disk is full: give up what ends first. Whether that freed anything."""
        layout = self.catalog.layout
        return self.free(segment_size(layout.stride, layout.capacity(self.settings.segment_bytes))) > 0

    def set_aside(self, segment: Segment) -> None:
        """A segment with too much damage: nothing reads it again, it is kept for a day."""
        self.remove(segment, "damaged", BAD, Point.BAD)

    def remove(self, segment: Segment, why: str, state: str = DEAD, point: Point = Point.EXPIRE) -> Path:
        """Rename a segment out of the way; readers that have it open read on."""
        target = self._give_up(segment, why, state, point)
        self.catalog.drop(segment)
        return target

    def _end(self, segment: Segment | _Stranger, why: str) -> Path:
        return self.remove(segment, why) if isinstance(segment, Segment) else self._give_up(segment, why)

    def _give_up(self, segment: Segment | _Stranger, why: str, state: str = DEAD, point: Point = Point.EXPIRE) -> Path:
        target = segment.path.with_name(segment.name.having(state).file)
        with contextlib.suppress(FileNotFoundError):
            self.files.rename(segment.path, target, point)
            self.metrics.evicted.add(label=why)
            events.info("store_segment_removed", segment=segment.name.file, why=why)
        return target

    def unlink_dead(self, everything: bool = False) -> int:
        """Unlink segments that were given up, after a grace in which readers may still open them; bytes freed."""
        freed = 0
        for path in self._segments():
            name = parse_name(path.name)
            if name is None or name.state in (OPEN, SEALED):
                continue
            with contextlib.suppress(OSError):
                found = self.files.stat(path)
                keep = self.settings.grace_seconds if name.state == DEAD else _BAD_SECONDS
                if everything or not 0 <= time.time() - found.st_ctime < keep:
                    self._unlink(path)
                    freed += found.st_blocks * _BLOCK
        return freed

    def _unlink(self, path: Path) -> None:
        name = parse_name(path.name)
        self.files.unlink(path, Point.UNLINK)
        if name is not None:
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(path.with_name(name.log), Point.UNLINK)

    def sweep(self) -> None:
        """Take hints of segments that are gone out of the index, a piece at a time."""
        known = self.catalog.index.segments()
        if self.catalog.refresh(force=True):  # after the above: a segment has its file before it has its number
            for stem in known.keys() - self.catalog.by_stem.keys():
                self.catalog.index.forget(stem)
        self._swept = self.catalog.index.sweep(self._swept, 65536)[1]

    def _unwritten(self) -> list[Segment | _Stranger]:
        """Segments that may be given up: sealed ones of every namespace that are not pinned here; of other namespaces
        also the open ones of dead writers, which nobody may be left to adopt."""
        now, ours = self.catalog.guard.now(), self.catalog.folder
        found: list[Segment | _Stranger] = [s for s in list(self.catalog.by_stem.values())
                                            if s.name.state == SEALED and not s.pins]
        for path in self._segments():
            name = parse_name(path.name)
            if name is None or path.parent.parent == ours:
                continue
            if name.state == SEALED or (name.state == OPEN and self.leases.dead(name.owner, now)):
                found.append(_Stranger(path, name))
        return found

    def _segments(self) -> list[Path]:
        """Segments and logs of every namespace."""
        root, found = self.settings.folder, []
        for namespace in self.files.names(root):
            for cls in self.files.names(root / namespace):
                folder = root / namespace / cls
                found += [folder / file for file in self.files.names(folder)
                          if parse_name(file) is not None or file.endswith(f".{LOG}")]
        return found
