"""Every change that a store makes to its folder, one call each, so that a test can record, break and replay them."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer.runtime.store.layout import PAGE
from deepinfer.runtime.store.points import Point

FILE_MODE, FOLDER_MODE = 0o600, 0o700
_DIRECT = getattr(os, "O_DIRECT", 0)
_PUNCH = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class Files:
    """The file system. ``point`` says what a change is for."""

    def open(self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False,
             point: Point = Point.OTHER) -> int:
        """A descriptor; ``direct`` past the page cache where the file system can, ``create``: must not exist."""
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            return os.open(path, flags | (_DIRECT if direct else 0), FILE_MODE)
        except OSError as failure:
            if not direct or failure.errno != errno.EINVAL:
                raise
            # A file system without direct I/O may have made the file before it refused the flag.
            return os.open(path, flags & ~os.O_EXCL, FILE_MODE)

    def close(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            os.close(fd)

    def allocate(self, fd: int, size: int, point: Point) -> None:
        """Reserve ``size`` bytes, so that a full disk shows now and not in the middle of a record."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as failure:
            if failure.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, size)

    def punch(self, fd: int, offset: int, size: int, point: Point) -> None:
        """Give unused space back to the disk, where the file system can."""
        _fallocate(fd, _PUNCH, offset, size)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One preadv; bytes read, fewer at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[Any], offset: int, point: Point) -> int:
        """One pwritev; bytes written, perhaps fewer than given."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int, point: Point) -> None:
        os.fdatasync(fd)

    def sync_folder(self, path: Path, point: Point) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path, point: Point) -> None:
        os.rename(source, target)

    def unlink(self, path: Path, point: Point) -> None:
        os.unlink(path)

    def make_folder(self, path: Path, within: Path | None = None, point: Point = Point.OTHER) -> None:
        """The folder and those above it that are missing, for the owner alone; nothing at or above ``within``: the
        place of a mount that is absent is not filled in."""
        missing = [p for p in (path, *path.parents) if not p.exists()]
        if within is not None and within in missing:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(within))
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self.mkdir(folder, point)
                self.sync_folder(folder.parent, point)

    def mkdir(self, path: Path, point: Point) -> None:
        os.mkdir(path, FOLDER_MODE)

    def point(self, point: Point) -> None:
        """Passed where a change begins that is none of files: the tests stop here."""

    def names(self, path: Path) -> list[str]:
        """Names in a folder; none where it is missing."""
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def stat(self, path: Path) -> os.stat_result:
        return os.stat(path)


def write_all(files: Files, fd: int, buffers: Sequence[memoryview], offset: int, point: Point) -> None:
    """Write everything, whatever the number of short writes; OSError when a write gets nowhere.

    Continues at a page, as direct I/O asks.
    """
    total = sum(len(b) for b in buffers)
    done, stuck = 0, 0
    while done < total:
        count = files.write(fd, _from(buffers, done), offset + done, point)
        further = done + count if done + count >= total else (done + count) // PAGE * PAGE
        stuck = stuck + 1 if further <= done else 0
        if stuck > 2:
            raise OSError(errno.EIO, "writes get nowhere")
        done = max(done, further)


def read_all(files: Files, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read until the buffers are full or the file ends; bytes read."""
    total = sum(len(b) for b in buffers)
    done = 0
    while done < total:
        count = files.read(fd, _from(buffers, done), offset + done)
        further = done + count if done + count >= total else (done + count) // PAGE * PAGE
        if count == 0 or further <= done:
            return done + count
        done = further
    return done


def read_bytes(files: Files, fd: int, offset: int, size: int) -> bytes:
    """Buffered read of up to ``size`` bytes."""
    data = bytearray(size)
    return bytes(data[: read_all(files, fd, [memoryview(data)], offset)])


def write_aside(files: Files, path: Path, data: bytes, point: Point, durable: bool = False) -> None:
    """Replace a small file at once: a reader meets the old bytes or the new."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        files.unlink(aside, point)
    fd = files.open(aside, write=True, create=True, point=point)
    try:
        write_all(files, fd, [memoryview(data)], 0, point)
        if durable:
            files.sync(fd, point)
    finally:
        files.close(fd)
    files.rename(aside, path, point)


def _from(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: int, mode: int, offset: int, size: int) -> None:
    call = getattr(_libc(), "fallocate", None)
    if call is not None:
        call(ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(size))
