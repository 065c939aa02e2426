"""Window snapshots: what new rows behind the edge of a block read of the rings, in a bounded pool of host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError
from deepinfer.runtime.plan import EnginePlan, StatePlan

State = Callable[[str, int], NDArray[np.uint8]]


class WindowPool:
    """``units`` snapshots, all memory taken at the start; the least recently used one gives way.

    A snapshot at position p holds rows p - k .. p - 1 of every ring that new rows read (k: ``StatePlan.snapshot``), by
    position and not by ring slot. A *whole* one also holds those of the rings that only kept rows extend, which the end
    of a prompt fills again otherwise.
    """

    def __init__(self, plan: EnginePlan, units: int) -> None:
        self.rings = [s for s in plan.rings if s.resume]
        self.kept_rings = [s for s in plan.rings if s.snapshot and not s.resume]
        self.kept_reach = max((s.snapshot for s in self.kept_rings), default=0)
        self.units = units
        # written and not only asked for: else the system hands it out page by page while serving
        self._data = {s.name: np.full((units, s.snapshot, s.record_bytes), 0, np.uint8)
                      for s in (*self.rings, *self.kept_rings)}
        self._whole = np.zeros(units, bool)
        self._free = list(range(units - 1, -1, -1))
        self._owners: OrderedDict[int, Any] = OrderedDict()

    def attach(self, state: State) -> None:
        """``state``: bytes of one ring slot by name, ``Engine.state``."""
        self._state = state

    @property
    def bytes(self) -> int:
        """Memory of the pool."""
        return sum(a.nbytes for a in self._data.values())

    @property
    def held(self) -> int:
        """Snapshots that are taken."""
        return len(self._owners)

    @property
    def slack(self) -> int:
        """Rows that may have been written behind a position and still leave its window rows in the rings."""
        return min((s.rows - s.snapshot for s in (*self.rings, *self.kept_rings)), default=0)

    def take(self, owner: Any, slot: int, at: int, whole: bool = False) -> tuple[int, Any]:
        """Copy the window rows in front of position ``at`` from a ring slot that no step in flight touches. ``whole``:
        those of kept rows are those of a run that keeps every row.

        Returns: the snapshot's number, and the owner whose snapshot gave way, if one did.
        """
        number, lost = self._number(owner)
        self._whole[number] = whole
        for s in self._part(number):
            rows = _rows(s, at)
            self._data[s.name][number, s.snapshot - len(rows):] = self._ring(s, slot)[rows % s.rows]
        return number, lost

    def whole(self, number: int) -> bool:
        """Whether a snapshot fills all rings."""
        return bool(self._whole[number])

    def _part(self, number: int) -> list[StatePlan]:
        return [*self.rings, *self.kept_rings] if self._whole[number] else self.rings

    def _number(self, owner: Any) -> tuple[int, Any]:
        lost = None
        if not self._free:
            number, lost = self._owners.popitem(last=False)
            self._free.append(number)
        number = self._free.pop()
        self._owners[number] = owner
        return number, lost

    def payload(self, number: int) -> NDArray[np.uint8]:
        """A copy of a snapshot as one piece, ring after ring, without those of kept rows."""
        return np.concatenate([self._data[s.name][number].reshape(-1) for s in self.rings])

    def put(self, owner: Any, payload: NDArray[np.uint8]) -> tuple[int, Any]:
        """A snapshot that was ``payload`` once; returns what ``take`` does."""
        number, lost = self._number(owner)
        self._whole[number] = not self.kept_rings
        first = 0
        for s in self.rings:
            size = s.resume * s.record_bytes
            self._data[s.name][number] = payload[first : first + size].reshape(s.resume, s.record_bytes)
            first += size
        return number, lost

    def restore(self, number: int, slot: int, at: int) -> None:
        """Write a snapshot at position ``at`` into the rings of a slot."""
        self.touch(number)
        for s in self._part(number):
            rows = _rows(s, at)
            self._ring(s, slot)[rows % s.rows] = self._data[s.name][number, s.snapshot - len(rows):]

    def touch(self, number: int) -> None:
        """It was used just now."""
        self._owners.move_to_end(number)

    def give_back(self, number: int) -> None:
        """Nobody needs a snapshot any more."""
        if self._owners.pop(number, None) is None:
            raise InternalError(f"window snapshot {number} is given back and nobody holds it")
        self._free.append(number)

    def check(self) -> None:
        """The books: every snapshot is free or owned; InternalError otherwise."""
        if sorted([*self._free, *self._owners]) != list(range(self.units)):
            raise InternalError("the books of the window snapshots are wrong")

    def _ring(self, s: StatePlan, slot: int) -> NDArray[np.uint8]:
        return self._state(s.name, slot).reshape(s.rows, s.record_bytes)


def _rows(s: StatePlan, at: int) -> NDArray[np.int64]:
    return np.arange(max(0, at - s.snapshot), at)
