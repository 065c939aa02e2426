"""The reference interpreter behind the runtime's engine interface, for small models.

Interpreter states are immutable values, so a slot or block holds the number of a value: copying its bytes copies the
state, which is all that forks and spills do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.dsl.interpreter import Interpreter, Ring, StepRows
from deepinfer.dsl.interpreter.state import Entries, SequenceState
from deepinfer.runtime.backend import block_table
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.plan import RING, EnginePlan

NONE = -1


class InterpreterEngine:
    """One interpreter, many sequences; each runs on its own."""

    def __init__(self, plan: EnginePlan, interpreter: Interpreter, slots: int, blocks: int) -> None:
        self.plan, self.interpreter = plan, interpreter
        self.checkpoint: Path | None = None
        self.values: list[Any] = []
        self.held = {s.name: np.full(slots if s.kind == RING else blocks, NONE, dtype=np.int64) for s in plan.states}

    def state(self, name: str, unit: int) -> NDArray[np.uint8]:
        return self.held[name][unit : unit + 1].view(np.uint8)

    def close(self) -> None:
        self.values.clear()

    def run(self, entry: str, batch: Batch, pins: Mapping[str, NDArray[np.int32]] | None = None) -> dict[str, Any]:
        out: dict[str, list[Tensor]] = {}
        row = 0
        for s in batch.sequences[: batch.count]:
            rows = slice(row, row + int(s["rows"]))
            row = rows.stop
            result = self._sequence(entry, s, batch.token_ids[rows], batch.lookback[rows], pins or {})
            for name, value in result.items():
                out.setdefault(name, []).append(value)
        return {name: torch.cat(values).numpy() for name, values in out.items()}

    def _sequence(self, entry: str, s: np.void, ids: NDArray[np.int64], look: NDArray[np.int64],
                  pins: Mapping[str, NDArray[np.int32]]) -> dict[str, Tensor]:
        c, q, kept, floor = (int(s[k]) for k in ("c", "rows", "kept", "floor"))
        starts = {"T": int(s["start_step"]), "T_kept": int(s["start_kept"])}
        before = [int(t) for t in look[0, 1:] if t >= 0][::-1]
        step = StepRows(
            ids.tolist(), c, prompt_end=c + q, keep=kept, wanted=int(s["wanted"]), write_floor=floor, history=before,
            window_start={r.name: starts[r.axis] for r in self.plan.rings})
        state = self._gather(s, c, floor)
        given = {k: torch.cat((torch.full((q - len(v), v.shape[1]), -1), torch.from_numpy(v).long()))
                 for k, v in pins.items()}
        outputs = self.interpreter.run(entry, state, step, given).outputs
        if entry == "step":
            self._scatter(s, state, c, floor)
        return outputs

    def _gather(self, s: np.void, c: int, floor: int) -> SequenceState:
        """Values of a sequence: rings by slot, entries from the blocks of its table."""
        values: dict[str, Any] = {}
        for r in self.plan.rings:
            number = self.held[r.name][int(s["slot"])]
            if number != NONE and c > 0:
                values[r.name] = self.values[number]
        for p in self.plan.paged:
            count = max(c, floor) // p.ratio
            parts = [self.values[self.held[p.name][b]] for b in block_table(s)[: -(-count // p.rows)]]
            if parts:
                values[p.name] = Entries(torch.cat(parts)[:count])
        return SequenceState(values)

    def _scatter(self, s: np.void, state: SequenceState, c: int, floor: int) -> None:
        for r in self.plan.rings:
            value = state.values.get(r.name)
            if isinstance(value, Ring):
                self.held[r.name][int(s["slot"])] = self._keep(value)
        for p in self.plan.paged:
            entries = state.values.get(p.name)
            if not isinstance(entries, Entries):
                continue
            table = block_table(s)
            for b in range(max(c, floor) // p.ratio // p.rows, -(-len(entries.rows) // p.rows)):
                self.held[p.name][table[b]] = self._keep(entries.rows[b * p.rows : (b + 1) * p.rows])

    def _keep(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1
