"""A store's folder without an engine: every segment says by itself what it holds. For the commands.

Nothing here changes a folder but ``purge`` and ``tidy``; both are safe while servers run on it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG

from deepinfer.errors import ArtifactError
from deepinfer.runtime.store.files import Files, read_all, read_bytes
from deepinfer.runtime.store.layout import LOG_ENTRY_BYTES, PAGE, Layout
from deepinfer.runtime.store.lease import FOLDER as WRITERS
from deepinfer.runtime.store.log import DAMAGED, Entries, entries_of, read_entries, standing
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.record import read_head, whole
from deepinfer.runtime.store.salts import FOLDER as SALTS
from deepinfer.runtime.store.segment import (
    DEAD,
    OPEN,
    SEALED,
    SegmentName,
    Superblock,
    parse_name,
    read_footer,
    read_superblock,
)
from deepinfer.runtime.store.settings import INLINE, StoreSettings
from deepinfer.runtime.store.store import Store

_BLOCK = 512


@dataclass(frozen=True)
class Found:
    """A segment file. ``block`` is None where its superblock is damaged; ``records``: that its footer or log names."""

    path: Path
    name: SegmentName
    cls: str
    namespace: str
    bytes: int
    block: Superblock | None
    records: int
    marked: int
    sealed_well: bool

    @property
    def expires(self) -> int:
        """Seconds."""
        return self.name.hour * 3600


def survey(folder: Path, files: Files | None = None) -> Iterator[Found]:
    """All segments of a store, by namespace, class and expiry. ArtifactError when the folder is none."""
    files = files or Files()
    if not folder.is_dir():
        raise ArtifactError("no store here", where=folder, found="no folder",
                            next_step="name the folder of a store: it holds folders of 32 hex digits")
    names = files.names(folder)
    if names and not any(name in (WRITERS, SALTS) or len(name) == 32 for name in names):
        raise ArtifactError("no store here", where=folder, found=f"a folder of {', '.join(sorted(names)[:3])}",
                            next_step="name the folder of a store: it holds folders of 32 hex digits")
    for namespace in sorted(names):
        if len(namespace) != 32 or not (folder / namespace).is_dir():
            continue
        for cls in sorted(files.names(folder / namespace)):
            place = folder / namespace / cls
            for file in sorted(files.names(place)):
                name = parse_name(file)
                if name is not None:
                    with contextlib.suppress(FileNotFoundError):  # it went while we looked
                        if S_ISREG(files.stat(place / file).st_mode):
                            yield _found(files, place / file, name, cls, namespace)


def _found(files: Files, path: Path, name: SegmentName, cls: str, namespace: str) -> Found:
    size = files.stat(path).st_blocks * _BLOCK
    fd = files.open(path)
    try:
        block = read_superblock(read_bytes(files, fd, 0, PAGE))
        if block is None:
            return Found(path, name, cls, namespace, size, None, 0, 0, False)
        entries, marked, well = _entries(files, fd, path, block)
        return Found(path, name, cls, namespace, size, block, len(entries), marked, well)
    finally:
        files.close(fd)


def _entries(files: Files, fd: int, path: Path, block: Superblock) -> tuple[Entries, int, bool]:
    """(records, damage marks, whether the footer is whole) of a segment."""
    name = parse_name(path.name)
    assert name is not None
    beside = path.with_name(name.log)
    data = beside.read_bytes()[: 4 * block.capacity * LOG_ENTRY_BYTES] if beside.is_file() else b""
    logged = read_entries(data, block.uuid)
    footer = read_footer(block, read_bytes(files, fd, block.footer, block.size - block.footer))
    puts = standing(logged) if footer is None else read_entries(footer, block.uuid)
    return puts, int((logged["kind"] == DAMAGED).sum()), footer is not None


def records_of(found: Found, files: Files) -> Entries:
    """Log entries of a segment's records."""
    fd = files.open(found.path)
    try:
        return entries_of([]) if found.block is None else _entries(files, fd, found.path, found.block)[0]
    finally:
        files.close(fd)


def verify(found: Found, files: Files | None = None) -> tuple[int, list[int]]:
    """Read every record of a segment that its footer or log names; (whole ones, slots of damaged ones)."""
    files, block = files or Files(), found.block
    if block is None:
        return 0, []
    record = memoryview(mmap.mmap(-1, block.layout.stride))
    good, bad = 0, []
    try:
        entries, fd = records_of(found, files), files.open(found.path, direct=True)
    except FileNotFoundError:
        return 0, []
    try:
        for entry in entries:
            slot = int(entry["slot"])
            got = read_all(files, fd, [record], block.offset(slot))
            head = read_head(block.layout, record, block.uuid, slot) if got == len(record) else None
            right = head is not None and head.key == entry["key"].tobytes() and head.sum == entry["head"]
            if right and whole(block.layout, record, block.uuid, slot):
                good += 1
            else:
                bad.append(slot)
    finally:
        files.close(fd)
    return good, bad


def purge(found: Found, files: Files | None = None) -> bool:
    """Give a segment up, its writer's open one too; servers see it within a second. False when it went already."""
    files = files or Files()
    try:
        if found.name.state in (OPEN, SEALED):
            target = found.path.with_name(found.name.having(DEAD).file)
            files.rename(found.path, target, Point.EXPIRE)
        else:
            target = found.path
        files.unlink(target, Point.UNLINK)
    except FileNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):
        files.unlink(found.path.with_name(found.name.log), Point.UNLINK)
    return True


def tidy(settings: StoreSettings, told: Callable[[str], None]) -> dict[str, int]:
    """Adopt orphans, expire, compact and keep the quota, in every namespace; what was done, by name."""
    layouts: dict[str, Layout] = {}
    for found in survey(settings.folder):
        if found.block is not None:
            layouts.setdefault(found.namespace, found.block.layout)
    done = {"adopted": 0, "carried": 0}
    for namespace, layout in layouts.items():
        told(namespace)
        with tempfile.TemporaryDirectory(prefix="deepinfer-gc-") as index:
            store = Store(_for_tidying(settings, Path(index)), layout)
            try:
                store.upkeep.everything()
                store.upkeep.compaction.plan(now_due=True)
                while store.upkeep.compaction.busy:
                    store.upkeep.compaction.work(1.0)
                    store.writers.rotate()
                store.upkeep.everything()
            finally:
                store.close()
            metrics = store.metrics()
            done["adopted"] += int(metrics.adopted.value)
            done["carried"] += int(metrics.carried.value)
            for why, count in metrics.evicted.values.items():
                done[f"removed: {why}"] = done.get(f"removed: {why}", 0) + int(count)
    return done


def _for_tidying(settings: StoreSettings, index: Path) -> StoreSettings:
    return replace(settings, index=index, backend=INLINE, threads=1, background=False, arena_bytes=PAGE)


def leases(folder: Path) -> list[dict[str, object]]:
    """What the writers of a store say of themselves; a lease that cannot be read says nothing."""
    out: list[dict[str, object]] = []
    for path in sorted((folder / WRITERS).glob("*.lease")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            said = json.loads(path.read_bytes())
            out.append(said | {"heartbeat": int(said["heartbeat"])})
    return out
