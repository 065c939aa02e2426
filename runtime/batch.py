"""The sequences of one step, in arrays that are sized once and refilled for every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from deepinfer.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# DiSeq of runtime/native/abi.h
SEQUENCE = np.dtype([
    ("slot", "i4"), ("rows", "i4"), ("kept", "i4"), ("wanted", "i4"), ("c", "i8"), ("floor", "i8"),
    ("start_step", "i8"), ("start_kept", "i8"), ("blocks", "u8"), ("num_blocks", "i4"), ("reserved", "i4")])


class StepSizes(Protocol):
    """``limits``: most rows of each axis; ``lookback``: ids before a row that it reads."""

    @property
    def limits(self) -> Mapping[str, int]: ...

    @property
    def lookback(self) -> int: ...


class Batch:
    """A step under construction: ``clear``, then ``add`` once per sequence, then ``NativeEngine.run``.

    ``count`` sequences with ``rows`` rows in all are in ``sequences[:count]``, ``token_ids[:rows]`` and
    ``lookback[:rows]`` (newest first, -1 before the start of the sequence).
    """

    def __init__(self, sizes: StepSizes) -> None:
        self.limits = dict(sizes.limits)
        self.width = sizes.lookback + 1
        self.sequences = np.zeros(self.limits["seq"], SEQUENCE)
        self.token_ids = np.zeros(self.limits["step"], np.int64)
        self.lookback = np.zeros((self.limits["step"], self.width), np.int64)
        self._tables: list[NDArray[np.int32]] = []
        self.count = self.rows = 0

    def clear(self) -> None:
        self._tables.clear()
        self.count = self.rows = 0

    def add(self, ids: Sequence[int] | NDArray[np.int64], *, slot: int, c: int, blocks: NDArray[np.int32],
            kept: int | None = None, wanted: int = 0, floor: int = 0, start_step: int = 0, start_kept: int = 0,
            before: Sequence[int] | NDArray[np.int64] = ()) -> None:
        """Appends a sequence: ``ids`` at positions c .. c + q - 1 (all meanings as DiSeq of the native ABI).

        ``blocks``: the sequence's block table, i32, contiguous; it is referred to, not copied. ``kept``: rows on
        the kept axis (None: all). ``before``: ids at positions below c, oldest first; the last ``lookback`` of
        them are used.
        Raises PlanError when the engine was compiled for fewer sequences or rows.
        """
        q = len(ids)
        stop = self.rows + q
        for what, need, axis in (("sequences", self.count + 1, "seq"), ("rows", stop, "step")):
            if need > self.limits[axis]:
                raise PlanError(f"a step has more {what} than the engine was compiled for", found=need,
                                allowed=self.limits[axis])
        if blocks.dtype != np.int32 or not blocks.flags.c_contiguous:
            raise TypeError("a block table is a contiguous int32 array")
        self._tables.append(blocks)
        self.token_ids[self.rows : stop] = ids
        look_back(self.lookback[self.rows : stop], self.token_ids[self.rows : stop], before)
        self.sequences[self.count] = (slot, q, q if kept is None else kept, wanted, c, floor, start_step, start_kept,
                                      blocks.ctypes.data, len(blocks), 0)
        self.count += 1
        self.rows = stop


def look_back(out: NDArray[np.int64], ids: Sequence[int] | NDArray[np.int64],
              before: Sequence[int] | NDArray[np.int64]) -> None:
    """Fill ``out`` [rows, width] with each row's id and the ids before it, newest first, -1 before the start.

    ``before``: ids before the first row, oldest first; the last width - 1 of them are used.
    """
    width = out.shape[1]
    known = before[max(0, len(before) - width + 1):]
    history = np.full(width - 1 + len(ids), -1, np.int64)
    history[width - 1 - len(known): width - 1] = known
    history[width - 1:] = ids
    for back in range(width):
        out[:, back] = history[width - 1 - back: width - 1 - back + len(ids)]
