"""Time steps and blocks of drafts of an engine that serves nobody yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

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
        timer = _Timer(plan, engine, holdings, repeats, now, now() + seconds)
        rows, step = timer.climb(ladder(min(most * (block + 1), limit)), timer.step)
        sequences, draft = timer.climb(ladder(min(most, limit // block)), timer.draft)
        return CostCurve(rows, rising(step), sequences, rising(draft))
    finally:
        for holding in holdings:
            memory.close(holding)


class _Timer:
    def __init__(self, plan: EnginePlan, engine: Engine, holdings: list[Holding], repeats: int,
                 now: Callable[[], float], end: float) -> None:
        self.plan, self.engine, self.holdings = plan, engine, holdings
        self.repeats, self.now, self.end = repeats, now, end
        self.batch = Batch(plan)

    def climb(self, sizes: list[int], time_of: Callable[[int], float]) -> tuple[tuple[int, ...], list[float]]:
        """The sizes that there was time for, the smallest and the largest among them, and their seconds."""
        done, seconds = list[int](), list[float]()
        for size in sizes:
            if not done or size == sizes[-1] or self.now() < self.end:
                done.append(size)
                seconds.append(time_of(size))
        return tuple(done), seconds

    def step(self, rows: int) -> float:
        """Seconds of a step of so many rows, spread over as many sequences as there are."""
        used = self.holdings[:rows]
        each = [rows // len(used) + (i < rows % len(used)) for i in range(len(used))]
        self._fill([(holding, 0, q) for holding, q in zip(used, each, strict=True)])
        return self._time("step")

    def draft(self, sequences: int) -> float:
        used = self.holdings[:sequences]
        self._fill([(holding, 0, 1) for holding in used])
        self.engine.run("step", self.batch)
        self._fill([(holding, 1, self.plan.draft_tokens) for holding in used])
        return self._time("draft")

    def _fill(self, parts: list[tuple[Holding, int, int]]) -> None:
        self.batch.clear()
        for holding, c, q in parts:
            self.batch.add(np.zeros(q, np.int64), slot=holding.slot, c=c, blocks=holding.blocks, wanted=q,
                           before=np.zeros(c, np.int64))

    def _time(self, entry: str) -> float:
        found = []
        for _ in range(self.repeats):
            began = self.now()
            self.engine.run(entry, self.batch)
            found.append(self.now() - began)
            if self.now() > self.end:
                break
        return median(found)
