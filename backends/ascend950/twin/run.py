"""Launches of kernels on the twin from Python: for tests and for looking at one kernel."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError

# How a parameter type of backends/signature.py is packed; addresses are 8 bytes.
_FORMATS = {"i32": ("i", 4), "i64": ("q", 8)}
_ROOM = 1 << 14
# ``Did`` of machine.h: calls of vector functions, instructions on registers, copies started, bytes copied from memory,
# to memory, from UB to L1, from L1 to L0, from L0C, and products of 16 rows and columns and 32 bytes of features.
DID = ("functions", "instructions", "copies", "bytes_in", "bytes_out", "bytes_to_l1", "bytes_to_l0",
       "bytes_of_results", "products")


class TwinError(InternalError):
    """What the twin found wrong with a launch, one sentence a line."""


def packed(values: Sequence[tuple[str, NDArray[np.generic] | int]]) -> bytes:
    """Arguments as a launch takes them: each at a multiple of its size and of 4, 8-byte steps in all."""
    out = b""
    for kind, value in values:
        form, size = _FORMATS.get(kind, ("Q", 8))
        out += b"\0" * (-len(out) % size)
        out += struct.pack(f"<{form}", value.ctypes.data if isinstance(value, np.ndarray) else value)
    return out + b"\0" * (-len(out) % 8)


class Twin:
    """A library that ``build_twin`` made."""

    def __init__(self, library: Path) -> None:
        self._dll = ctypes.CDLL(str(library))
        self._dll.di_twin_launch.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64,
                                             ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64]
        self._did = (ctypes.c_int64 * (2 * len(DID)))()

    def did(self) -> tuple[dict[str, int], dict[str, int]]:
        """What the cube cores and the vector cores of all blocks did in the last launch, by the names of ``DID``."""
        self._dll.di_twin_did(self._did)
        return dict(zip(DID, self._did, strict=False)), dict(zip(DID, self._did[len(DID):], strict=True))

    def complaints(self, function: str, blocks: int, values: Sequence[tuple[str, NDArray[np.generic] | int]]) -> str:
        """Runs a kernel; ``values``: (type, array or integer) of each parameter, the arrays being all the memory it may
        touch. Returns what is wrong with it, one sentence a line."""
        arguments = packed(values)
        arrays = [v for _, v in values if isinstance(v, np.ndarray)]
        extents = np.array([x for a in arrays for x in (a.ctypes.data, a.nbytes)], np.uint64)
        said = ctypes.create_string_buffer(_ROOM)
        self._dll.di_twin_launch(function.encode(), blocks, arguments, len(arguments), extents.ctypes.data, len(arrays),
                                 said, _ROOM)
        return said.value.decode(errors="replace")

    def launch(self, function: str, blocks: int, values: Sequence[tuple[str, NDArray[np.generic] | int]]) -> None:
        """The same; raises TwinError."""
        wrong = self.complaints(function, blocks, values)
        if wrong:
            raise TwinError(wrong)
