"""Steps of a started engine, timed launch by launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.backends.base import Roof
from deepinfer.codegen.plan.cost import StepShape
from deepinfer.codegen.report.model import STEP_ENTRY, EngineFacts, Measured, Shape, Step
from deepinfer.errors import RequestError
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.native_engine import NativeEngine
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.trace_file import lane_names, write_trace

_SEED = 1


@dataclass(frozen=True)
class Need:
    """Slots and blocks that the steps of a profile take."""

    slots: int
    blocks: int


def need(plan: EnginePlan, shapes: Sequence[Shape]) -> Need:
    """What to start an engine with; RequestError for a step that it was not compiled for."""
    for shape in shapes:
        s = shape.step
        for what, found, most in (("sequences", s.sequences, plan.limits["seq"]),
                                  ("rows of a step", s.sequences * s.rows, plan.limits["step"]),
                                  ("tokens of a sequence", s.context + s.rows, plan.max_model_len)):
            if found > most:
                raise RequestError(f"the engine was compiled for fewer {what}", where=shape.name, found=found,
                                   allowed=f"at most {most}", next_step="ask for less, or compile with larger limits")
    slots = max(s.step.sequences for s in shapes)
    longest = max(s.step.context + s.step.rows for s in shapes)
    return Need(slots, slots * plan.blocks_for(longest))


class Profiler:
    """Runs steps of given shapes on an engine with random tokens, all sequences filled up to their context first."""

    def __init__(self, plan: EnginePlan, engine: NativeEngine, shapes: Sequence[Shape]) -> None:
        self.plan, self.engine = plan, engine
        wanted = need(plan, shapes)
        per = wanted.blocks // wanted.slots
        self._tables = [np.arange(i * per, (i + 1) * per, dtype=np.int32) for i in range(wanted.slots)]
        longest = max(s.step.context + s.step.rows for s in shapes)
        draw = np.random.default_rng(_SEED)
        self._ids = draw.integers(0, plan.vocab_size, (wanted.slots, longest), dtype=np.int64)
        self._filled = [0] * wanted.slots
        self._batch = Batch(plan)

    def measure(self, shape: Shape, repeats: int, roof: Roof,
                step: Callable[[], None] = lambda: None) -> Measured:
        """Median microseconds of each launch over ``repeats`` steps; ``step`` is called after each."""
        s = shape.step
        for slot in range(s.sequences):
            self._fill(slot, s.context)
        times: list[NDArray[np.float64]] = []
        for i in range(repeats + 1):  # the first one warms the caches
            self._run([(slot, s.context, s.rows) for slot in range(s.sequences)], s)
            if i:
                times.append(self.engine.profile())
            step()
        self.engine.profile(False)
        return Measured(shape, STEP_ENTRY, tuple(map(float, np.median(times, axis=0))), roof)

    def _fill(self, slot: int, upto: int) -> None:
        while self._filled[slot] < upto:
            at = self._filled[slot]
            rows = min(self.plan.limits["step"], upto - at)
            self._run([(slot, at, rows)], StepShape(1, rows, at, rows, 0))
            self._filled[slot] = at + rows

    def _run(self, parts: Sequence[tuple[int, int, int]], shape: StepShape) -> None:
        self.engine.profile(True)
        batch = self._batch
        batch.clear()
        for slot, c, rows in parts:
            ids = self._ids[slot]
            batch.add(ids[c:c + rows], slot=slot, c=c, blocks=self._tables[slot], kept=min(rows, shape.kept),
                      wanted=shape.wanted, before=ids[max(0, c - self.plan.lookback):c])
        self.engine.run(STEP_ENTRY, batch)


def trace(file: Path, facts: EngineFacts) -> None:
    """Write the measured steps as a trace: one process a shape, one lane of launches and one of layers."""
    events: list[dict[str, Any]] = []
    for pid, m in enumerate(facts.measured, 1):
        events += lane_names(("kernels", "layers"), pid, m.shape.name)
        at = 0.0
        layer, layer_start = ("", -1), 0.0
        for step, us in zip(facts.steps(m.entry), m.microseconds, strict=True):
            if step.layer != layer:
                events += _layer(pid, layer, layer_start, at)
                layer, layer_start = step.layer, at
            events.append({"ph": "X", "pid": pid, "tid": 0, "ts": at, "dur": us, **_span(facts, m, step, us)})
            at += us
        events += _layer(pid, layer, layer_start, at)
    write_trace(file, events)


def _layer(pid: int, layer: tuple[str, int], start: float, stop: float) -> list[dict[str, Any]]:
    name = layer[0] if layer[1] < 0 else f"{layer[0]}.{layer[1]}"
    return [{"ph": "X", "pid": pid, "tid": 1, "ts": start, "dur": stop - start, "name": name}] if stop > start else []


def _span(facts: EngineFacts, m: Measured, step: Step, us: float) -> dict[str, Any]:
    if not step.is_kernel:
        return {"name": f"commit {step.raw['commit']}", "args": {"scope": step.scope}}
    kernel = facts.kernels[step.raw["kernel"]]
    moved, macs = step.cost.bytes(m.shape.step), step.cost.macs(m.shape.step)
    share = m.roof.seconds(moved, macs) * 1e6 / us if us else None
    return {"name": f"{step.scope}: {kernel['family']}",
            "args": {"kernel": kernel["symbol"], "rows": step.raw["rows"], "bytes": round(moved),
                     "multiply_adds": round(macs), "of_the_roof": share, "ends_because": step.raw["why"]}}
