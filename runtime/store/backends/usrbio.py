"""The user-space ring of 3FS (USRBIO), through the Python wrapper that 3FS publishes; used where it can be imported
and the store lies on a 3FS mount.

Tested against a stand-in with the wrapper's call shapes only: no 3FS cluster was at hand.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.reader import Reader, Run
from deepinfer.runtime.store.settings import USRBIO, StoreSettings

MODULE = "hf3fs_fuse.io"
HOLES_ARE_ERRORS = 2  # flag of make_ioring: a hole in a file is no zeros
_DEPTH = 64
_Job = TypeVar("_Job")


def usrbio_refusal(folder: Path) -> str:
    """Why the ring of 3FS is not used for a folder; "" when it can be."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        return f"no module {MODULE}"
    except Exception as failure:  # a native module of another system fails as it likes
        return f"{MODULE} does not load: {failure}"
    try:
        mount = module.extract_mount_point(str(folder))
    except (OSError, ValueError, RuntimeError) as failure:
        return f"the folder is on no 3FS mount: {failure}"
    return "" if mount else "the folder is on no 3FS mount"


class UsrbioMover:
    """One thread that reads through a ring, and a ring for writes that the publishing threads take in turn."""

    name = USRBIO
    run_length = 1

    def __init__(self, settings: StoreSettings, arena: Arena, reader: Reader) -> None:
        self._io: Any = importlib.import_module(MODULE)
        self._reader, self._arena = reader, arena
        mount = self._io.extract_mount_point(str(settings.folder))
        shared = SimpleNamespace(name=arena.name, buf=memoryview(arena.memory), size=arena.bytes)
        self._iov = self._io.make_iovec(shared, mount, 0, arena.numa)
        self._reads = self._io.make_ioring(mount, _DEPTH, True, 0, None, None, arena.numa, HOLES_ARE_ERRORS)
        self._writes = self._io.make_ioring(mount, _DEPTH, False, 0, None, None, arena.numa, HOLES_ARE_ERRORS)
        self._writing = threading.Lock()
        self._tags = itertools.count(1)
        self._slots = arena.take(min(_DEPTH, max(1, arena.count // 2)))
        self._queue: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="store-usrbio")
        self._thread.start()

    def submit(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._queue.put(run)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        with self._writing, self._descriptor(fd):
            pending: dict[int, int] = {}
            for view in views:
                tag = next(self._tags)
                self._writes.prepare(self._slice(view), False, fd, offset, userdata=tag)
                pending[tag] = len(view)
                offset += len(view)
            self._writes.submit()
            for size, result in self._results(self._writes, pending):
                if result < 0:
                    raise OSError(-result, os.strerror(-result))
                if result != size:
                    raise OSError(errno.EIO, "a write of 3FS was short")

    def close(self, patience: float) -> None:
        self._queue.put(None)
        self._thread.join(patience)

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, ending = [first], False
            while len(batch) < len(self._slots) and not self._queue.empty():
                run = self._queue.get()
                if run is None:
                    ending = True
                    break
                batch.append(run)
            self._read(batch)
            if ending:
                return

    def _read(self, batch: list[Run]) -> None:
        pending: dict[int, tuple[Run, int]] = {}
        came: list[tuple[tuple[Run, int], int]] = []
        failure: Exception | None = None
        try:
            self._move(batch, pending, came)
        except Exception as raised:
            failure = raised
        for (run, slot), result in came:
            try:
                self._ended(run, self._arena.view(slot), result)
            except Exception as raised:  # a bug must not end the thread that reads
                self._reader.fail(run, raised)
        if failure is not None:
            # What did not come back may come yet: its memory is not used again.
            lost = {slot for _, slot in pending.values()}
            self._slots = [slot for slot in self._slots if slot not in lost]
            done = {id(run) for (run, _), _ in came}
            for run in batch:
                if id(run) not in done:
                    self._reader.fail(run, failure)

    def _move(self, batch: list[Run], pending: dict[int, tuple[Run, int]],
              came: list[tuple[tuple[Run, int], int]]) -> None:
        """The bytes of a batch; what is ``pending`` at the end did not come. No descriptor stays registered: runs that
        end may close theirs."""
        known: set[int] = set()  # the client of 3FS takes each only once
        if not self._slots:
            raise OSError(errno.EIO, "the ring of 3FS lost all reads that were given to it")
        try:
            for run, slot in zip(batch, self._slots, strict=False):
                place = self._reader.begin(run)
                if place is None:
                    continue
                if place[0] not in known:
                    self._io.register_fd(place[0])
                    known.add(place[0])
                tag = next(self._tags)
                pending[tag] = run, slot
                self._reads.prepare(self._slice(self._arena.view(slot)), True, *place, userdata=tag)
            if pending:
                self._reads.submit()
            for end in self._results(self._reads, pending):
                came.append(end)  # one by one: those that came count, whatever happens to the next
        finally:
            while known:
                self._io.deregister_fd(known.pop())

    def _ended(self, run: Run, view: memoryview, result: int) -> None:
        # A slot of another arena is not registered with this ring: read into ours, then copied.
        own = run.reads[0].slot
        if own is not None:
            own[:] = view
        self._reader.finish(run, [view if own is None else own], result)

    @staticmethod
    def _results(ring: Any, pending: dict[int, _Job]) -> Iterator[tuple[_Job, int]]:
        """What was pending, and how it ended: bytes or a negative errno. A wait may bring fewer than it was asked for,
        and results of a batch that was given up. OSError when one brings none."""
        while pending:
            results = ring.wait(min_results=len(pending))
            if not results:
                raise OSError(errno.EIO, "the ring of 3FS brought no results")
            for done in results:
                job = pending.pop(done.userdata, None)
                if job is not None:
                    yield job, int(done.result)

    def _slice(self, view: memoryview) -> Any:
        offset = self._offset(view)
        return self._iov[offset : offset + len(view)]

    def _offset(self, view: memoryview) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return address - ctypes.addressof(ctypes.c_char.from_buffer(self._arena.memory))

    def _descriptor(self, fd: int) -> Any:
        return _Registered(self._io.register_fd, self._io.deregister_fd, fd)


class _Registered:
    """A descriptor that the client of 3FS knows, for the time of a write."""

    def __init__(self, register: Callable[[int], object], deregister: Callable[[int], object], fd: int) -> None:
        self._register, self._deregister, self._fd = register, deregister, fd

    def __enter__(self) -> None:
        self._register(self._fd)

    def __exit__(self, *_: object) -> None:
        self._deregister(self._fd)
