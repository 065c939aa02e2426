"""Cache blocks and ring slots: who holds which, counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError


class Pool:
    """``size`` equal units (blocks or slots), each free or held a number of times."""

    def __init__(self, size: int, what: str) -> None:
        self.size, self.what = size, what
        self._holders = np.zeros(size, dtype=np.int32)
        self._free = list(range(size - 1, -1, -1))  # the lowest unit is taken first

    @property
    def free(self) -> int:
        """Units that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free unit, now held once. InternalError when there is none: callers ask ``free`` first."""
        if not self._free:
            raise InternalError(f"no free {self.what}")
        unit = self._free.pop()
        self._holders[unit] = 1
        return unit

    def take_some(self, count: int) -> list[int]:
        """``count`` free units; InternalError when there are fewer."""
        if len(self._free) < count:
            raise InternalError(f"no {count} free {self.what}s")
        keep = len(self._free) - count
        units = self._free[keep:][::-1]
        del self._free[keep:]
        self._holders[units] = 1
        return units

    def share(self, unit: int) -> None:
        """One more holder of a held unit."""
        if not self._holders[unit]:
            raise InternalError(f"{self.what} {unit} is shared and nobody holds it")
        self._holders[unit] += 1

    def share_all(self, units: list[int]) -> None:
        """One more holder of each of several different units, all of them held."""
        if not units:
            return
        holders = self._holders[units]
        if not holders.all():
            raise InternalError(f"{self.what}s among {units[:8]} are shared and nobody holds them")
        self._holders[units] = holders + 1

    def give_back(self, unit: int) -> None:
        """One holder less; the last one frees the unit."""
        if not self._holders[unit]:
            raise InternalError(f"{self.what} {unit} is given back and nobody holds it")
        self._holders[unit] -= 1
        if not self._holders[unit]:
            self._free.append(unit)

    def give_back_all(self, units: list[int]) -> None:
        """One holder less of each of several different units."""
        if not units:
            return
        left = self._holders[units] - 1
        if (left < 0).any():
            raise InternalError(f"{self.what}s among {units[:8]} are given back and nobody holds them")
        self._holders[units] = left
        self._free += [unit for unit, holders in zip(units, left.tolist(), strict=True) if not holders]

    def shared(self, unit: int) -> bool:
        """Whether more than one holds the unit."""
        return bool(self._holders[unit] > 1)

    def alone(self, units: list[int]) -> int:
        """How many of the units have no more than one holder."""
        return int(np.count_nonzero(self._holders[units] <= 1))

    def held_once(self, of: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[size] the units among ``of`` that have one holder."""
        out: NDArray[np.bool_] = of & (self._holders == 1)
        return out

    def check(self, held: Iterable[int] = ()) -> None:
        """The books against the holders' own lists; InternalError when they differ (run when the engine is idle)."""
        counts = np.bincount(np.fromiter(held, np.int64), minlength=self.size)
        wrong = np.flatnonzero(self._holders != counts).tolist()
        free = np.flatnonzero(self._holders == 0)
        if wrong or not np.array_equal(np.sort(np.array(self._free, np.int64)), free):
            raise InternalError(f"the books of the {self.what}s are wrong: {len(wrong)} counted differently, first "
                                f"{wrong[:5]}, {len(self._free)} on the free list and {len(free)} without a holder")
