"""Time steps and blocks of drafts of an engine that serves nobody yet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from deepinfer.runtime.backend import Engine
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.memory import Holding, SequenceMemory
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.speculation.cost import CostCurve, rising

REPEATS = 5
SECONDS = 3.0  # after so long no size is timed a second time, and of the larger ones only the largest


def ladder(most: int) -> list[int]:
    """Sizes worth timing up to ``most``: powers of two and the middles between them, with the next size of each power
    of two, so that a step up behind it shows."""
    found = {1, most}
    size = 1
    while size < most:
        found |= {size, size + 1, size + size // 2}
        size *= 2
    return sorted(x for x in found if 1 <= x <= most)


def measure_costs(plan: EnginePlan, engine: Engine, memory: SequenceMemory, *, repeats: int = REPEATS,
                  seconds: float = SECONDS, now: Callable[[], float] = time.perf_counter) -> CostCurve:
    """The cost curve, from fresh sequences of zeros. Every slot and block that it takes is free again afterwards.

    Steps are as long as decoding makes them: 1 + m rows for each sequence at most.
    """
    block = plan.draft_tokens
    most = min(memory.slots.size, plan.limits["seq"], memory.free_slots, memory.free_blocks // max(
        1, plan.blocks_for(2 * block + 1)))
    limit = min(plan.limits[axis] for axis in ("step", "kept", "wanted"))
    holdings = [memory.open() for _ in range(most)]
    try:
        for holding in holdings:
            memory.prepare(holding, 0, 2 * block + 1)
        timer = _Timer(plan, engine, holdings, now)
        timer.measure(ladder(min(most * (block + 1), limit)), ladder(min(most, limit // block)), repeats,
                      now() + seconds)
        return CostCurve(*timer.curve("step"), *timer.curve("draft"))
    finally:
        for holding in holdings:
            memory.close(holding)


class _Timer:
    def __init__(self, plan: EnginePlan, engine: Engine, holdings: list[Holding], now: Callable[[], float]) -> None:
        self.plan, self.engine, self.holdings, self.now = plan, engine, holdings, now
        self.batch = Batch(plan)
        self.least: dict[tuple[str, int], float] = {}  # seconds by entry and size

    def measure(self, rows: list[int], sequences: list[int], repeats: int, end: float) -> None:
        """Time all sizes in turn, again and again: what else the machine does only ever adds to a time, and a spell of
        it is over when a size comes round again, so the least time of each counts. The largest step comes before any
        drafts and writes the rows that they read."""
        work = [("step", size) for size in rows] + [("draft", size) for size in sequences]
        needed = {("step", rows[0]), ("step", rows[-1]), ("draft", sequences[0]), ("draft", sequences[-1])}
        for _ in range(repeats):
            for item in work:
                if self.now() < end or (item in needed and item not in self.least):
                    self.least[item] = min(self._time(*item), self.least.get(item, math.inf))

    def curve(self, entry: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The sizes that there was time for, the smallest and the largest among them, and their seconds."""
        found = sorted((size, seconds) for (kind, size), seconds in self.least.items() if kind == entry)
        return tuple(size for size, _ in found), rising([seconds for _, seconds in found])

    def _time(self, entry: str, size: int) -> float:
        self._fill(self._rows(size) if entry == "step" else
                   [(holding, 1, self.plan.draft_tokens) for holding in self.holdings[:size]])
        began = self.now()
        self.engine.run(entry, self.batch)
        return self.now() - began

    def _rows(self, rows: int) -> list[tuple[Holding, int, int]]:
        """So many rows of a step, spread over as many sequences as there are."""
        used = self.holdings[:rows]
        return [(holding, 0, rows // len(used) + (i < rows % len(used))) for i, holding in enumerate(used)]

    def _fill(self, parts: list[tuple[Holding, int, int]]) -> None:
        self.batch.clear()
        for holding, c, q in parts:
            self.batch.add(np.zeros(q, np.int64), slot=holding.slot, c=c, blocks=holding.blocks, wanted=q,
                           before=np.zeros(c, np.int64))
