"""Aligned memory for records on their way: one shared-memory object, cut into slots of a record each.

A backend that wants registered memory (RDMA) registers the object once, by its name; then the name is taken away, so
that nothing of it outlives the process, however that ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from pathlib import Path

from deepinfer.errors import PlanError
from deepinfer.runtime.store.files import FILE_MODE
from deepinfer.runtime.store.layout import aligned

SHARED = Path("/dev/shm")


class Arena:
    """``count`` slots of ``stride`` bytes (a multiple of a page); a slot is held by one read or write at a time.

    ``numa``: node that a backend which can choose takes the memory from; -1: any. ``name``: of the object in POSIX
    shared memory, open to its owner alone; "" where the machine has none and the memory is private.
    """

    def __init__(self, size: int, stride: int, numa: int = -1) -> None:
        self.stride, self.count, self.numa = aligned(stride), size // aligned(stride), numa
        if self.count < 1:
            raise PlanError("an arena is smaller than one record", where="store: arena_bytes", found=size,
                            allowed=f"at least {self.stride}")
        self.name = f"deepinfer-{secrets.token_hex(8)}" if SHARED.is_dir() else ""
        try:
            self.memory = self._shared() if self.name else mmap.mmap(-1, self.bytes)
        except OSError as failure:
            self.forget_name()
            raise PlanError("no memory for the arena of the store", where=SHARED, found=failure.strerror,
                            next_step="give the machine more shared memory, or the store a smaller arena") from None
        self._views = memoryview(self.memory)
        self._free = list(range(self.count - 1, -1, -1))
        self._lock = threading.Lock()

    def _shared(self) -> mmap.mmap:
        fd = os.open(SHARED / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.posix_fallocate(fd, 0, self.bytes)  # reserved now: a page that is missing later would be a SIGBUS
            return mmap.mmap(fd, self.bytes)
        finally:
            os.close(fd)

    @property
    def bytes(self) -> int:
        """What it takes of the memory plan."""
        return self.count * self.stride

    def view(self, slot: int) -> memoryview:
        """[stride] the bytes of a slot."""
        return self._views[slot * self.stride : (slot + 1) * self.stride]

    def take(self, most: int = 1) -> list[int]:
        """0 to ``most`` slots: what is free."""
        with self._lock:
            return [self._free.pop() for _ in range(min(most, len(self._free)))]

    def give_back(self, slots: list[int]) -> None:
        with self._lock:
            self._free += slots

    @property
    def free(self) -> int:
        return len(self._free)

    def forget_name(self) -> None:
        """After registration: the memory lives as long as it is mapped, and nobody else can map it."""
        name, self.name = self.name, ""
        if name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SHARED / name)

    def close(self) -> None:
        """Give the memory back when the last view of it goes."""
        self.forget_name()
        self._views = memoryview(b"")
        with contextlib.suppress(BufferError):
            self.memory.close()
