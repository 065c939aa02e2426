"""The user-space ring of 3FS (USRBIO), through the Python wrapper that 3FS publishes; used where it can be imported
and the store lies on a 3FS mount.

Tested against a stand-in with the wrapper's call shapes only: no 3FS cluster was at hand.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepinfer.runtime.store.arena import Arena
from deepinfer.runtime.store.reader import Reader, Run
from deepinfer.runtime.store.settings import USRBIO, StoreSettings

MODULE = "hf3fs_fuse.io"
HOLES_ARE_ERRORS = 2  # flag of make_ioring: a hole in a file is no zeros
_DEPTH = 64


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
        self._slots = arena.take(min(_DEPTH, max(1, arena.count // 2)))
        self._queue: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="store-usrbio")
        self._thread.start()

    def submit(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._queue.put(run)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> None:
        with self._writing, self._descriptor(fd):
            for view in views:
                self._writes.prepare(self._slice(view), False, fd, offset, userdata=view)
                offset += len(view)
            for done in self._writes.submit().wait(min_results=len(views)):
                if done.result < 0:
                    raise OSError(-done.result, os.strerror(-done.result))
                if done.result != len(done.userdata):
                    raise OSError(5, "a write of 3FS was short")

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
        begun: list[tuple[Run, memoryview]] = []
        known: set[int] = set()  # descriptors that the client of 3FS knows at the moment
        try:
            for run, slot in zip(batch, self._slots, strict=False):
                place = self._reader.begin(run)
                if place is None:
                    continue
                # A slot of another arena is not registered with this ring: read into ours, then copy.
                job = (run, self._arena.view(slot))
                begun.append(job)
                if place[0] not in known:
                    known.add(place[0])
                    self._io.register_fd(place[0])
                self._reads.prepare(self._slice(job[1]), True, place[0], place[1], userdata=job)
            results = self._reads.submit().wait(min_results=len(begun)) if begun else ()
            while known:
                self._io.deregister_fd(known.pop())
            for done in results:
                run, view = done.userdata
                own = run.reads[0].slot
                if own is not None:
                    own[:] = view
                self._reader.finish(run, [view if own is None else own], int(done.result))
        except Exception as failure:
            while known:
                self._io.deregister_fd(known.pop())
            for run in batch:
                self._reader.fail(run, failure)

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
