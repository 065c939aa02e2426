"""A file layer that records every change, breaks one of them, and can say what a disk holds after a power cut."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from deepinfer.runtime.store.files import Files
from deepinfer.runtime.store.layout import PAGE
from deepinfer.runtime.store.points import Point

SECTOR = 512


class Killed(BaseException):
    """The process ends here: nothing after it runs."""


class Fault(StrEnum):
    KILL = "kill"
    POWER = "power cut"
    TORN = "torn page"
    FULL = "ENOSPC"
    IO = "EIO"
    SHORT = "short write"


@dataclass
class Op:
    """One change. ``kind``: create, allocate, write, punch, sync, sync_folder, rename, unlink, mkdir, point, note."""

    kind: str
    point: Point
    path: Path | None = None
    target: Path | None = None
    offset: int = 0
    data: Any = b""
    inode: int = -1
    wall: float = 0.0


class Recording(Files):
    """Records under ``root``; ``at``: number of the operation that ``fault`` happens at."""

    def __init__(self, root: Path, at: int = -1, fault: Fault = Fault.KILL, seed: int = 0) -> None:
        self.root, self.at, self.fault, self.seed = root, at, fault, seed
        self.ops: list[Op] = []
        self.hit = False
        self.wall: Callable[[], float] = lambda: 0.0
        self._inode_of: dict[Path, int] = {}
        self._fds: dict[int, int] = {}
        self._count = 0

    # ---- the layer ------------------------------------------------------------------------------------------------
    def open(self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False,
             point: Point = Point.OTHER) -> int:
        if create:
            self._count += 1
            self._step(Op("create", point, path, inode=self._count))
            self._inode_of[path] = self._count
        fd = super().open(path, write=write, create=create, direct=direct, point=point)
        if write:
            self._fds[fd] = self._inode_of.get(path, -1)
        return fd

    def allocate(self, fd: int, size: int, point: Point) -> None:
        self._step(Op("allocate", point, offset=size, inode=self._fds[fd]))
        super().allocate(fd, size, point)

    def punch(self, fd: int, offset: int, size: int, point: Point) -> None:
        self._step(Op("punch", point, offset=offset, data=size, inode=self._fds[fd]))
        super().punch(fd, offset, size, point)

    def write(self, fd: int, buffers: Sequence[Any], offset: int, point: Point) -> int:
        data = b"".join(bytes(b) for b in buffers)
        op = Op("write", point, offset=offset, data=data, inode=self._fds[fd])
        if self._now(op):
            if self.fault is Fault.SHORT:
                keep = len(data) // 2 // PAGE * PAGE or len(data) // 2
                self.ops[-1].data = data[:keep]
                return os.pwrite(fd, _aligned(data[:keep]), offset) if keep else 0
            if self.fault is Fault.TORN:
                self.ops[-1].data = self._tear(fd, data, offset)
                raise Killed
            self._fail()
        return super().write(fd, buffers, offset, point)

    def sync(self, fd: int, point: Point) -> None:
        self._step(Op("sync", point, inode=self._fds[fd]))

    def sync_folder(self, path: Path, point: Point) -> None:
        self._step(Op("sync_folder", point, path))

    def rename(self, source: Path, target: Path, point: Point) -> None:
        if source.exists():
            self._step(Op("rename", point, source, target))
            if source in self._inode_of:
                self._inode_of[target] = self._inode_of.pop(source)
        super().rename(source, target, point)

    def unlink(self, path: Path, point: Point) -> None:
        if path.exists():
            self._step(Op("unlink", point, path))
            self._inode_of.pop(path, None)
        super().unlink(path, point)

    def mkdir(self, path: Path, point: Point) -> None:
        self._step(Op("mkdir", point, path))
        super().mkdir(path, point)

    def point(self, point: Point) -> None:
        self._step(Op("point", point))

    def note(self, what: str, data: Any) -> None:
        """What the scenario knows at this place."""
        self.ops.append(Op("note", Point.OTHER, data=(what, data)))

    def rot(self, path: Path, offset: int) -> None:
        """A disk changes bytes by itself."""
        rotten = b"rot" * 100
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(rotten)
        inode = self._inode_of[path]
        self.ops += [Op("write", Point.OTHER, offset=offset, data=rotten, inode=inode, wall=self.wall()),
                     Op("sync", Point.OTHER, inode=inode, wall=self.wall())]

    # ---- faults ---------------------------------------------------------------------------------------------------
    def _now(self, op: Op) -> bool:
        op.wall = self.wall()
        self.ops.append(op)
        if len(self.ops) - 1 == self.at and not self.hit:
            self.hit = True
            return True
        return False

    def _step(self, op: Op) -> None:
        if self._now(op):
            self._fail()

    def _fail(self) -> None:
        if self.fault in (Fault.KILL, Fault.POWER, Fault.TORN):
            self.ops.pop()
            raise Killed
        if self.fault is Fault.SHORT or self.ops[-1].kind == "point":
            return  # nothing is written here
        self.ops.pop()
        code = errno.ENOSPC if self.fault is Fault.FULL else errno.EIO
        raise OSError(code, os.strerror(code))

    def _tear(self, fd: int, data: bytes, offset: int) -> bytes:
        rng, old = random.Random(self.seed), _pread(fd, len(data), offset)
        torn = b"".join((data if rng.random() < 0.5 else old)[i : i + SECTOR] for i in range(0, len(data), SECTOR))
        os.pwrite(fd, _aligned(torn), offset)
        return torn

def _aligned(data: bytes) -> memoryview:
    area = mmap.mmap(-1, max(len(data), 1))
    area[: len(data)] = data
    return memoryview(area)[: len(data)]


def _pread(fd: int, size: int, offset: int) -> bytes:
    view = _aligned(bytes(size))
    got = os.preadv(fd, [view], offset)
    return bytes(view[:got]).ljust(size, b"\0")


# ---- what a disk holds -----------------------------------------------------------------------------------------------
def materialise(ops: Sequence[Op], root: Path, target: Path, power: random.Random | None) -> None:
    """Write what ``root`` holds after ``ops`` into ``target``.

    ``power``: chooses which unsynced pages reach the disk, torn ones among them, and how many of the unsynced changes
    of names; None: the machine runs on, everything does.
    """
    data: dict[int, bytearray] = {}
    pending: dict[int, list[Op]] = {}
    entries: dict[Path, int] = {}
    unsynced: dict[Path, list[Op]] = {}
    for op in ops:
        if op.kind in ("write", "allocate", "punch"):
            pending.setdefault(op.inode, []).append(op)
        elif op.kind == "sync":
            _apply(data, pending.pop(op.inode, []), op.inode, None)
        elif op.kind in ("create", "rename", "unlink", "mkdir"):
            assert op.path is not None
            unsynced.setdefault(op.path.parent, []).append(op)
        elif op.kind == "sync_folder":
            assert op.path is not None
            _rename(entries, unsynced.pop(op.path, []))
    for waiting in unsynced.values():
        kept = len(waiting) if power is None else power.randint(0, len(waiting))
        _rename(entries, waiting[:kept])
    for inode, writes in pending.items():
        _apply(data, writes, inode, power)
    for path, inode in sorted(entries.items()):
        place = target / path.relative_to(root)
        if inode < 0:
            place.mkdir(0o700, parents=True, exist_ok=True)
        elif place.parent.is_dir():
            place.write_bytes(data.get(inode, b""))


def _rename(entries: dict[Path, int], ops: Sequence[Op]) -> None:
    for op in ops:
        assert op.path is not None
        if op.kind == "mkdir":
            entries[op.path] = -1
        elif op.kind == "create":
            entries[op.path] = op.inode
        elif op.kind == "unlink":
            entries.pop(op.path, None)
        elif op.path in entries and op.target is not None:
            entries[op.target] = entries.pop(op.path)


def _apply(data: dict[int, bytearray], ops: Sequence[Op], inode: int, power: random.Random | None) -> None:
    held = data.setdefault(inode, bytearray())
    for op in ops:
        if op.kind == "allocate":
            if power is None or power.random() < 0.7:
                held.extend(bytes(max(0, op.offset - len(held))))
            continue
        content = bytes(op.data) if op.kind == "punch" else op.data
        for at in range(0, len(content), PAGE):
            page = content[at : at + PAGE]
            fate = 1.0 if power is None else power.random()
            if fate < 0.4:
                continue
            if fate < 0.5:
                page = page[: len(page) // 2 // SECTOR * SECTOR or len(page) // 2]
            end = op.offset + at + len(page)
            held.extend(bytes(max(0, end - len(held))))
            held[op.offset + at : end] = page
