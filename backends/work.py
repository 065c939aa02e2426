"""How long a kernel keeps the units of a processor busy, as its backend predicts it: for reports, never for code.

A launch has items, dealt to units of one kind. Each unit has pipes that run beside each other: where copies of buffers
let them overlap, a launch takes as long as its busiest pipe, else as long as all of them one after the other. Memory is
one more pipe, which all units share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.backends.base import Roof

Pipes = tuple[tuple[str, float], ...]  # (pipe, cycles)
MEMORY = "HBM"
SHARED = ("L2", MEMORY)  # paths that carry what pipes ask for: they never come after those


@dataclass(frozen=True)
class Work:
    """``grid``: of, per, plus, times, fixed of the items (``min(n of, ceil(n of / per) + plus) times``, or fixed).

    ``item``, ``row``, ``padded``, ``key``: cycles of each pipe for an item, for an input row of an item, for one of at
    least ``least_rows`` input rows, and for a key that a row meets; ``start``: of a unit for a launch; ``overlapped``:
    whether the pipes run beside each other; ``launches``: of which the kernel consists.
    """

    unit: str
    grid: tuple[int, int, int, int, int]
    item: Pipes = ()
    row: Pipes = ()
    padded: Pipes = ()
    key: Pipes = ()
    least_rows: int = 1
    overlapped: bool = True
    start: Pipes = ()
    launches: int = 1

    def items(self, rows: float) -> float:
        of, per, plus, times, fixed = self.grid
        return fixed or min(rows * of, -(-rows * of // per) + plus) * times

    def cycles(self, roof: Roof, rows: float, keys: float, size: float) -> dict[str, float]:
        """Cycles that each pipe of the busiest unit, and memory, works in a launch for ``rows`` rows that meet ``keys``
        keys each and move ``size`` bytes; {} where there is nothing to do."""
        units, items = dict(roof.units)[self.unit], self.items(rows)
        if not items:
            return {}
        inputs = rows * self.grid[0] / max(1.0, items / self.grid[3])
        used = min(units, items)
        waves = -(-items // units) * units / items if items > units else 1.0  # the last items leave units idle
        busy: dict[str, float] = {}
        for pipes, count in ((self.item, items), (self.row, items * inputs), (self.key, keys * rows),
                             (self.padded, items * max(inputs, self.least_rows)), (self.start, used / waves)):
            for pipe, each in pipes:
                busy[pipe] = busy.get(pipe, 0.0) + each * count / used * waves
        return busy | {MEMORY: size / roof.read * roof.clock}

    def seconds(self, roof: Roof, rows: float, keys: float, size: float) -> float:
        """Predicted time of the same."""
        busy = self.cycles(roof, rows, keys, size)
        if not busy:
            return 0.0
        own = [c for pipe, c in busy.items() if pipe not in SHARED]
        longest = max(busy.values()) if self.overlapped else max(sum(own), *(busy.get(p, 0.0) for p in SHARED))
        return roof.launch * self.launches + longest / roof.clock

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Work:
        """What ``as_dict`` wrote, also through JSON."""
        nested = {k: tuple(map(tuple, raw[k])) for k in ("item", "row", "padded", "key", "start")}
        return Work(**{**raw, **nested, "grid": tuple(raw["grid"])})
