"""io_uring through its system calls: one thread keeps many reads under way. Containers often forbid it: probe first.

The rings are mapped memory and a call of the kernel lies between every store of ours and every read of its, which
orders them; no polling thread of the kernel is used. Writes are pwritev in the threads that publish.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.files import write_all
from deepinfer.runtime.store.points import Point
from deepinfer.runtime.store.reader import Reader, Run
from deepinfer.runtime.store.settings import URING, StoreSettings

_SETUP, _ENTER = 425, 426  # the same on every architecture
_SQ, _CQ, _SQES = 0, 0x8000000, 0x10000000  # offsets to map
_READ, _GETEVENTS = 22, 1
_DEPTH = 64
SQE = np.dtype([("opcode", "u1"), ("flags", "u1"), ("ioprio", "<u2"), ("fd", "<i4"), ("off", "<u8"), ("addr", "<u8"),
                ("len", "<u4"), ("rw_flags", "<u4"), ("user_data", "<u8"), ("spare", "V24")])
CQE = np.dtype([("user_data", "<u8"), ("res", "<i4"), ("flags", "<u4")])
_PARAMS = np.dtype([("sq_entries", "<u4"), ("cq_entries", "<u4"), ("spare", "<u4", (8,)), ("sq", "<u4", (10,)),
                    ("cq", "<u4", (10,))])
_HEAD, _TAIL, _MASK = 0, 1, 2  # words of the offsets of either ring
_SQ_ARRAY, _CQ_CQES = 6, 5


class Ring:
    """One io_uring of ``entries`` reads. For one thread."""

    def __init__(self, entries: int) -> None:
        params = np.zeros(1, dtype=_PARAMS)
        self.fd = _call(_SETUP, entries, params.ctypes.data)
        try:
            p = params[0]
            count, sq, cq = int(p["sq_entries"]), p["sq"], p["cq"]
            self._sq = mmap.mmap(self.fd, int(sq[_SQ_ARRAY]) + 4 * count, offset=_SQ)
            self._cq = mmap.mmap(self.fd, int(cq[_CQ_CQES]) + CQE.itemsize * int(p["cq_entries"]), offset=_CQ)
            self._entries = np.frombuffer(mmap.mmap(self.fd, SQE.itemsize * count, offset=_SQES), dtype=SQE)
        except OSError:
            os.close(self.fd)
            raise
        self._sq_tail, self._sq_mask = self._word(self._sq, sq[_TAIL]), int(self._word(self._sq, sq[_MASK])[0])
        self._array = np.frombuffer(self._sq, dtype="<u4", count=count, offset=int(sq[_SQ_ARRAY]))
        self._cq_head, self._cq_tail = self._word(self._cq, cq[_HEAD]), self._word(self._cq, cq[_TAIL])
        self._cq_mask = int(self._word(self._cq, cq[_MASK])[0])
        self._done = np.frombuffer(self._cq, dtype=CQE, count=int(p["cq_entries"]), offset=int(cq[_CQ_CQES]))
        self._prepared = 0

    @staticmethod
    def _word(area: mmap.mmap, offset: Any) -> NDArray[np.uint32]:
        return np.frombuffer(area, dtype="<u4", count=1, offset=int(offset))

    def prepare_read(self, fd: int, address: int, size: int, offset: int, tag: int) -> None:
        """Queue a read; at most ``entries`` between two calls of ``enter``."""
        tail = int(self._sq_tail[0])
        at = tail & self._sq_mask
        self._entries[at] = (_READ, 0, 0, fd, offset, address, size, 0, tag, b"")
        self._array[at] = at
        self._sq_tail[0] = (tail + 1) & 0xFFFFFFFF
        self._prepared += 1

    def enter(self, least: int) -> list[tuple[int, int]]:
        """Submit what is queued, wait for ``least`` results; (tag, bytes or negative errno) of all there are."""
        self._prepared -= _call(_ENTER, self.fd, self._prepared, least, _GETEVENTS if least else 0, None, 0)
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        results = []
        while head != tail:
            entry = self._done[head & self._cq_mask]
            results.append((int(entry["user_data"]), int(entry["res"])))
            head = (head + 1) & 0xFFFFFFFF
        self._cq_head[0] = head
        return results

    def close(self) -> None:
        os.close(self.fd)


class UringMover:
    """One thread with a ring; up to 64 records under way."""

    name = URING
    run_length = 1

    def __init__(self, settings: StoreSettings, arena: Arena, reader: Reader) -> None:
        self._reader, self._arena = reader, arena
        self._slots = arena.take(min(_DEPTH, max(1, arena.count // 2)))
        self._ring = Ring(_DEPTH)
        self._queue: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="store-ring")
        self._thread.start()

    def submit(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._queue.put(run)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        write_all(self._reader.files, fd, views, offset, Point.RECORD)

    def close(self, patience: float) -> None:
        self._queue.put(None)
        self._thread.join(patience)
        if not self._thread.is_alive():
            self._ring.close()

    def _work(self) -> None:
        under_way: dict[int, tuple[Run, memoryview, int]] = {}
        free, tag, ending = self._slots.copy(), 0, False
        while not ending or under_way:
            while free and not ending and len(under_way) < _DEPTH:
                try:
                    run = self._queue.get(block=not under_way)
                except queue.Empty:
                    break
                ending = run is None
                if run is not None and (started := self._start(run, free, tag)) is not None:
                    under_way[tag] = run, *started
                    tag += 1
            for done, result in self._entered(under_way):
                run, view, slot = under_way.pop(done)
                if slot >= 0:
                    free.append(slot)
                self._ended(run, view, result)

    def _start(self, run: Run, free: list[int], tag: int) -> tuple[memoryview, int] | None:
        """Queue a run's read; (its memory, slot of ours or -1), or None when it ended at once."""
        try:
            place = self._reader.begin(run)
        except Exception as failure:
            self._reader.fail(run, failure)
            return None
        if place is None:
            return None
        own = run.reads[0].slot
        slot = -1 if own is not None else free.pop()
        view = self._arena.view(slot) if own is None else own
        self._ring.prepare_read(place[0], _address(view), len(view), place[1], tag)
        return view, slot

    def _entered(self, under_way: dict[int, tuple[Run, memoryview, int]]) -> list[tuple[int, int]]:
        if not under_way:
            return []
        try:
            return self._ring.enter(1)
        except OSError as failure:
            return [(tag, -(failure.errno or errno.EIO)) for tag in under_way]

    def _ended(self, run: Run, view: memoryview, result: int) -> None:
        try:
            self._reader.finish(run, [view], result)
        except Exception as failure:
            self._reader.fail(run, failure)


@cache
def uring_refusal() -> str:
    """Why no ring can be set up here; "" when one can and reads through it."""
    try:
        ring = Ring(2)
    except OSError as failure:
        return failure.strerror or "no io_uring"
    fd = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = bytearray(b"x" * 8)
        ring.prepare_read(fd, _address(memoryview(data)), len(data), 0, 7)
        return "" if ring.enter(1) == [(7, 8)] and not any(data) else "a ring was set up and does not read"
    except OSError as failure:
        return failure.strerror or "a ring was set up and cannot be entered"
    finally:
        os.close(fd)
        ring.close()


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _call(number: int, *arguments: int | None) -> int:
    libc = _libc()
    while True:
        result = libc.syscall(ctypes.c_long(number),
                              *(ctypes.c_void_p(a) if a is None else ctypes.c_long(a) for a in arguments))
        if result >= 0:
            return int(result)
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
