"""Drives an executor by hand: prompts fed in one step, then decodes, with block tables that never move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer import LLM
from deepinfer.runtime.executor import (
    COUPLED,
    DECODE,
    GREEDY,
    NO_LOGPROBS,
    PREFILL,
    Executor,
    SequenceStart,
    StepPlan,
    StepResult,
)
from deepinfer.runtime.sampling_params import SamplingParams

Ids = NDArray[np.int64]


@dataclass
class Stepper:
    """Slot s holds blocks s*k .. s*k + k - 1 of the engine, k being what the longest sequence takes."""

    llm: LLM
    executor: Executor
    starts: dict[int, SequenceStart] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = self.llm.plan
        per = self.plan.blocks_per_sequence
        self.tables = np.arange(self.plan.max_num_seqs * per, dtype=np.int32).reshape(-1, per)
        self.steps = [StepPlan(self.plan), StepPlan(self.plan)]
        self.turn = 0

    def begin(self, slot: int, prompt: Sequence[int], params: SamplingParams, mode: int | None = None, key: int = 5,
              **more: Any) -> None:
        mode = (GREEDY if params.greedy else COUPLED) if mode is None else mode
        self.starts[slot] = SequenceStart(params, mode, key, np.array(prompt, np.int64), **more)
        self.executor.begin(slot, self.starts[slot])

    def prefill(self, slots: Sequence[int], chunk: int | None = None, **fields: Any) -> StepResult:
        """All prompts; ``chunk``: rows of a step."""
        longest = max(len(self.starts[s].prompt) for s in slots)
        chunk = chunk or longest
        for c in range(0, longest, chunk):
            rows = []
            for s in slots:
                ids = self.starts[s].prompt
                q = min(chunk, len(ids) - c)
                if q > 0:
                    last = c + q == len(ids)
                    rows.append({"slot": s, "kind": PREFILL, "c": c, "rows": q, "kept": q, "draws": int(last),
                                 "wanted": int(last), "want_draft": int(last), **fields})
            out = self.run(rows)
        return out

    def decode(self, slots: Sequence[int], drafts: int = 0, budget: int = -1,
               by_slot: Mapping[int, Mapping[str, Any]] | None = None, **fields: Any) -> StepResult:
        return self.run(self.decodes(slots, drafts, by_slot, **fields), budget)

    @staticmethod
    def decodes(slots: Sequence[int], drafts: int = 0, by_slot: Mapping[int, Mapping[str, Any]] | None = None,
                **fields: Any) -> list[dict[str, Any]]:
        return [{"slot": s, "kind": DECODE, "rows": 1 + drafts, "draws": 1, "want_draft": int(drafts > 0), **fields,
                 **(by_slot or {}).get(s, {})} for s in slots]

    def run(self, rows: Sequence[Mapping[str, Any]], budget: int = -1) -> StepResult:
        return self.executor.wait(self.submit(rows, budget))

    def submit(self, rows: Sequence[Mapping[str, Any]], budget: int = -1) -> int:
        step = self.steps[self.turn]
        self.turn = 1 - self.turn
        step.clear()
        step.budget = budget
        for i, given in enumerate(rows):
            row = step.rows[i]
            row["logprobs"] = row["prompt_logprobs"] = NO_LOGPROBS
            row["c"] = row["floor"] = row["start_step"] = row["start_kept"] = row["mask"] = row["want_draft"] = 0
            for name, value in given.items():
                if name == "mask":
                    step.masks[i] = value
                    value = value.ctypes.data
                row[name] = value
            table = self.tables[given["slot"]]
            row["blocks"], row["num_blocks"] = table.ctypes.data, len(table)
            if row["kind"] == PREFILL:
                self._ids(step, row, self.starts[given["slot"]].prompt)
        step.count = len(rows)
        return self.executor.submit(step)

    def _ids(self, step: StepPlan, row: np.void, prompt: Ids) -> None:
        c, q, first, back = int(row["c"]), int(row["rows"]), step.ids, self.plan.lookback
        row["first"] = first
        step.token_ids[first : first + q] = prompt[c : c + q]
        padded = np.concatenate((np.full(back, -1), prompt[: c + q]))
        for k in range(back + 1):
            step.lookback[first : first + q, k] = padded[back + c - k : back + c + q - k]
        step.ids += q

    def copy(self, source: int, target: int, first_row: int = 0) -> None:
        """Everything that slot ``source`` holds, blocks from the one of row ``first_row`` on."""
        state = self.executor.state
        for s in self.plan.rings:
            state(s.name, target)[:] = state(s.name, source)
        state("sequence", target)[:] = state("sequence", source)
        for s in self.plan.paged:
            for a, b in list(zip(self.tables[source], self.tables[target], strict=True))[first_row // 128 :]:
                state(s.name, int(b))[:] = state(s.name, int(a))


def answers(stepper: Stepper, slots: Sequence[int], tokens: int, drafts: int = 0, budget: int = -1,
            **fields: Any) -> list[list[int]]:
    """``tokens`` tokens of each slot behind its prompt; a slot that has them waits for the others."""
    found: dict[int, list[int]] = {s: [] for s in slots}

    def take(live: Sequence[int], out: StepResult) -> None:
        for i, s in enumerate(live):
            assert not out.errors and out.finite[i]
            found[s] += out.tokens[i, : out.count[i]].tolist()

    take(slots, stepper.prefill(slots, **fields))
    while live := [s for s in slots if len(found[s]) < tokens]:
        take(live, stepper.decode(live, drafts, budget, **fields))
    return [found[s][:tokens] for s in slots]
