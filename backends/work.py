"""How long a kernel keeps the units of a processor busy, as its backend predicts it: for reports, never for code.

A launch has items, dealt to units of one kind. Each unit has pipes that run beside each other: where copies of buffers
let them overlap, a launch takes as long as its busiest pipe, else as long as all of them one after the other. Memory is
one more pipe: all units share its rate, and one unit cannot draw more than ``Roof.reach``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.backends.base import Roof

Pipes = tuple[tuple[str, float], ...]  # (pipe, cycles)


@dataclass(frozen=True)
class Work:
    """``grid``: of, per, plus, times, fixed of the items (``min(n of, ceil(n of / per) + plus) times``, or fixed).

    ``item``, ``row``, ``padded``, ``key``: cycles of each pipe for an item, for an input row of an item, for one of at
    least ``least_rows`` input rows, and for a key that a row meets; ``overlapped``: whether the pipes run beside each
    other.
    """

    unit: str
    grid: tuple[int, int, int, int, int]
    item: Pipes = ()
    row: Pipes = ()
    padded: Pipes = ()
    key: Pipes = ()
    least_rows: int = 1
    overlapped: bool = True

    def items(self, rows: float) -> float:
        of, per, plus, times, fixed = self.grid
        return fixed or min(rows * of, -(-rows * of // per) + plus) * times

    def seconds(self, roof: Roof, rows: float, keys: float, size: float) -> float:
        """Predicted time of a launch for ``rows`` rows that meet ``keys`` keys each and move ``size`` bytes."""
        units, items = dict(roof.units)[self.unit], self.items(rows)
        if not items:
            return 0.0
        inputs = rows * self.grid[0] / max(1.0, items / self.grid[3])
        busy: dict[str, float] = {}
        for pipes, count in ((self.item, items), (self.row, items * inputs), (self.key, keys * rows),
                             (self.padded, items * max(inputs, self.least_rows))):
            for pipe, cycles in pipes:
                busy[pipe] = busy.get(pipe, 0.0) + cycles * count
        used = min(units, items)
        waves = -(-items // units) * units / items  # the last items leave units idle
        times = [c / used / roof.clock * (waves if items > units else 1.0) for c in busy.values()]
        times.append(size / min(roof.read, used * roof.reach))
        return roof.launch + (max(times) if self.overlapped else sum(times))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Work:
        """What ``as_dict`` wrote, also through JSON."""
        nested = {k: tuple(map(tuple, raw[k])) for k in ("item", "row", "padded", "key")}
        return Work(**{**raw, **nested, "grid": tuple(raw["grid"])})
