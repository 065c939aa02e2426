"""``store.so``, opened for the records of one layout. What it does is what record.py does, a batch at a time."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.store.layout import FORMAT, MOST_SECTIONS, Layout
from deepinfer.runtime.store.record import seed_of
from deepinfer.runtime.store.tier import Flags

_ABI = 4
_SUMS = ("XXH3_64bits_withSeed_dispatch", "XXH3_64bits_withSeed")  # the first chooses its instructions by itself
KEY = "V16"
WANT = np.dtype([("fd", "<i4"), ("slot", "<u4"), ("offset", "<u8"), ("seed", "<u8"), ("uuid", KEY), ("key", KEY),
                 ("extra", KEY), ("ids", "<u8"), ("into", "<u8"), ("parts", "<u8"), ("exact", "<u4"),
                 ("flags", "<u4"), ("state", "<i4"), ("status", "<i4"), ("got", "<i8")])
MAKE = np.dtype([("record", "<u8"), ("ids", "<u8"), ("from", "<u8"), ("parts", "<u8"), ("seed", "<u8"),
                 ("written", "<u8"), ("sum", "<u8"), ("uuid", KEY), ("key", KEY), ("parent", KEY), ("extra", KEY),
                 ("number", "<u4"), ("slot", "<u4"), ("flags", "<u4"), ("spare", "<u4")])
_LAYOUT = np.dtype([("stride", "<u8"), ("sections", "<u8"), ("tokens", "<u8"), ("format", "<u8"),
                    ("offsets", "<u8", (MOST_SECTIONS + 1,)), ("space", KEY)])
ENDED = 2  # in ``state``: nothing is to be read for it


class Content(Protocol):
    """What is in a record, as publisher.py queues it."""

    key: bytes
    parent: bytes
    number: int
    ids: bytes
    payload: Sequence[memoryview]
    flags: Flags
    extra: bytes
    written: int | None


class Ended(IntEnum):
    """``status`` of a record that was read."""

    PENDING = 0
    OK = 1
    MISS = 2
    OTHER = 3  # a whole record of another key: the index was wrong
    DAMAGED = 4
    IO_ERROR = 5
    CANCELLED = 6


class NativeRecords:
    """See the module. Calls run without the interpreter's lock; arrays given to them stay where they are.

    Raises OSError where the library cannot be loaded, or is of another version.
    """

    def __init__(self, library: Path, layout: Layout) -> None:
        self._dll = ctypes.CDLL(str(library))
        sizes = (ctypes.c_uint64 * 3)()
        try:
            self._dll.store_sizes(sizes)
            abi = int(self._dll.store_abi())
        except AttributeError as failure:
            raise OSError(f"{library}: {failure}") from None
        if (abi, *sizes) != (_ABI, _LAYOUT.itemsize, WANT.itemsize, MAKE.itemsize):
            raise OSError(f"{library} is of another version")
        for function in (self._dll.store_read, self._dll.store_read_ring, self._dll.store_make):
            function.restype = ctypes.c_int64
        self._dll.store_ring_open.restype = self._dll.store_gate_open.restype = ctypes.c_void_p
        self._sum = _sum_address()
        self._layout = np.zeros(1, dtype=_LAYOUT)
        self._layout["stride"], self._layout["sections"] = layout.stride, len(layout.sections)
        self._layout["tokens"], self._layout["format"] = layout.block_tokens, FORMAT
        self._layout["offsets"][0, : len(layout.offsets)] = layout.offsets
        self._layout["space"] = np.void(layout.namespace)
        self._at = _pointer(self._layout)

    def read(self, wants: NDArray[np.void], slots: NDArray[np.uint64], gate: NativeGate | None = None) -> int:
        """Read, prove and hand over records; what became of each is in its ``status``. Returns bytes read.

        Args:
            wants: [n] of WANT; neighbours of one file are read together.
            slots: addresses of [stride] areas that are read into.
            gate: passed by each read.
        """
        passed = None if gate is None else gate.at
        return int(self._dll.store_read(passed, self._at, _pointer(wants), ctypes.c_int64(len(wants)), _pointer(slots),
                                        ctypes.c_int64(len(slots)), self._sum))

    def read_ring(self, ring: NativeRing, wants: NDArray[np.void], slots: NDArray[np.uint64]) -> int:
        """As ``read``, through a ring of this thread's: as many records are under way as there are slots."""
        return int(self._dll.store_read_ring(ring.at, self._at, _pointer(wants), ctypes.c_int64(len(wants)),
                                             _pointer(slots), ctypes.c_int64(len(slots)), self._sum))

    def open_gate(self, reads: int) -> NativeGate:
        """A gate for ``reads`` reads at a time, of all threads that are given it."""
        at = self._dll.store_gate_open(ctypes.c_uint32(reads))
        if not at:
            raise MemoryError("a gate of the store")
        return NativeGate(self._dll, ctypes.c_void_p(at))

    def open_ring(self, reads: int) -> NativeRing:
        """A ring for ``reads`` reads under way; OSError where the machine has none, or forbids it."""
        error = ctypes.c_int32()
        at = self._dll.store_ring_open(ctypes.c_uint32(reads), ctypes.byref(error))
        if not at:
            raise OSError(error.value, os.strerror(error.value))
        return NativeRing(self._dll, ctypes.c_void_p(at))

    def prove(self, wants: NDArray[np.void], record: memoryview) -> None:
        """The same for one record ([1] of WANT) whose bytes are there."""
        self._dll.store_prove(self._at, _pointer(wants), ctypes.c_void_p(address_of(record)), self._sum)

    def give_up(self, wants: NDArray[np.void]) -> None:
        """After this nobody writes to the buffers of records that were not handed over before."""
        self._dll.store_give_up(_pointer(wants), ctypes.c_int64(len(wants)))

    def assemble(self, uuid: bytes, slots: Sequence[int], writes: Sequence[Content], views: Sequence[memoryview],
                 now: int, fd: int = -1, offset: int = 0) -> tuple[list[int], int]:
        """Fill ``views`` with the records of ``slots`` of a segment, and write them to its file ``fd``, if any.

        Returns the header sums, which name these very records, and the bytes written: fewer than all where the file
        took fewer, or a negative errno.
        """
        makes = np.zeros(len(writes), dtype=MAKE)
        parts, first = parts_of([write.payload for write in writes])
        makes["record"] = [address_of(view) for view in views[: len(writes)]]
        ids = b"".join(write.ids for write in writes)
        makes["ids"] = np.arange(len(writes), dtype=np.uint64) * np.uint64(len(ids) // max(1, len(writes)))
        makes["ids"] += np.uint64(address_of(memoryview(ids)))
        makes["from"], makes["parts"] = first, [len(write.payload) for write in writes]
        makes["seed"] = np.array(slots, dtype=np.uint64) + np.uint64(seed_of(uuid, 0))  # modulo 2^64, as seed_of does
        makes["written"] = [now if write.written is None else write.written for write in writes]
        makes["uuid"] = np.void(uuid)
        for name in ("key", "parent", "extra"):
            makes[name] = np.frombuffer(b"".join(getattr(write, name) for write in writes), dtype=KEY)
        makes["number"], makes["slot"] = [write.number for write in writes], slots
        makes["flags"] = [int(write.flags) for write in writes]
        written = int(self._dll.store_make(self._at, _pointer(makes), ctypes.c_int64(len(makes)), ctypes.c_int(fd),
                                           ctypes.c_uint64(offset), self._sum))
        del parts, ids  # lived until here
        return [int(total) for total in makes["sum"].tolist()], written


class NativeGate:
    """Lets a number of reads pass at a time."""

    def __init__(self, dll: ctypes.CDLL, at: ctypes.c_void_p) -> None:
        self._dll, self.at = dll, at

    def close(self) -> None:
        """With nobody at it."""
        self._dll.store_gate_close(self.at)
        self.at = ctypes.c_void_p()


class NativeRing:
    """An io_uring, for one thread."""

    def __init__(self, dll: ctypes.CDLL, at: ctypes.c_void_p) -> None:
        self._dll, self.at = dll, at

    def close(self) -> None:
        """With nothing under way."""
        self._dll.store_ring_close(self.at)
        self.at = ctypes.c_void_p()


def open_native(library: Path | None, layout: Layout) -> tuple[NativeRecords | None, str]:
    """The library, or None and why records are handled in Python."""
    if library is None:
        return None, "no engine with a native part"
    if sys.byteorder != "little":
        return None, "a big-endian machine"
    try:
        return NativeRecords(library, layout), ""
    except OSError as failure:
        return None, str(failure)


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous buffer lie."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def parts_of(buffers: Sequence[Sequence[memoryview]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Addresses and sizes of buffers, and for each of the sequences the address of its first pair.

    The first array has to live as long as the second is used.
    """
    flat = np.array([(address_of(part), len(part)) for parts in buffers for part in parts], dtype=np.uint64)
    counts = np.array([0, *(len(parts) for parts in buffers)], dtype=np.uint64)
    first = np.cumsum(counts, dtype=np.uint64)[:-1] * np.uint64(16) + np.uint64(flat.ctypes.data)
    return flat, first


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@cache
def _sum_address() -> ctypes.c_void_p:
    """xxh3-64 of the xxhash package, the one that record.py calls."""
    library = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    for name in _SUMS:
        found = getattr(library, name, None)
        if found is not None:
            return ctypes.cast(found, ctypes.c_void_p)
    raise OSError("the xxhash package exports no xxh3")
