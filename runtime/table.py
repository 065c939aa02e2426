"""The host's state of the sequences that have a slot, in columns indexed by slot: what every step reads or changes.

What happens once in the life of a sequence stays with its ``Sequence``; what happens in every step is done here for
all sequences at once, so that a step costs the host a few operations on arrays, not a loop over sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.clock import ClockTable
from deepinfer.runtime.executor import DECODE, NO_LOGPROBS, NO_TOKEN, ROW, words_of
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sequence import Sequence

FREE, PROMPT, ANSWER, ENDED = 0, 1, 2, 3
_ENDS = 8  # ids that end an answer and are looked for in arrays; answers with more are looked at one by one
Slots = NDArray[np.integer[Any]]


class SequenceTable:
    """Columns by slot.

    Attributes:
        state: FREE; PROMPT: the host sends its rows; ANSWER: the executor knows its next row; ENDED: nothing of it
            counts any more, and its memory is kept until no step in flight touches it.
        serial: number of the sequence in the slot, counted over the engine's life.
        inflight: steps in flight that touch the slot; ``drawing``: those of them that choose a token.
        emitted, most: tokens of the answer, and how many it may have.
        ends: [slots, 8] ids that end the answer, padded with -1.
        single: tokens of this sequence are looked at one by one (text, log-probabilities, grammar).
        alone: planned only when nothing of it is in flight (grammar: the next mask needs the tokens).
        streamed: somebody waits for each step's tokens.
        proposed, accepted: [slots, m + 1], how often so many drafts were verified and stayed.
        last: time of the last token; NaN before the first.
        template: the sequence's DECODE row; the scheduler fills in what changes from step to step.
        words: the same memory.
    """

    def __init__(self, plan: EnginePlan, memory: SequenceMemory) -> None:
        slots = memory.slots.size
        self.memory = memory
        self.clocks = ClockTable(plan, slots)
        self.sequences: list[Sequence | None] = [None] * slots
        self.answers: list[list[int]] = [[] for _ in range(slots)]
        self.state = np.zeros(slots, np.int8)
        self.serial = np.zeros(slots, np.int64)
        self.inflight = np.zeros(slots, np.int32)
        self.drawing = np.zeros(slots, np.int32)
        self.emitted = np.zeros(slots, np.int64)
        self.most = np.zeros(slots, np.int64)
        self.ends = np.full((slots, _ENDS), NO_TOKEN, np.int64)
        self.single = np.zeros(slots, bool)
        self.alone = np.zeros(slots, bool)
        self.streamed = np.zeros(slots, bool)
        self.proposed = np.zeros((slots, plan.draft_tokens + 1), np.int64)
        self.accepted = np.zeros((slots, plan.draft_tokens + 1), np.int64)
        self.last = np.full(slots, np.nan)
        self.template = np.zeros(slots, ROW)
        self.template["slot"] = np.arange(slots)
        self.template["kind"] = DECODE
        self.template["draws"] = 1
        self.template["prompt_logprobs"] = NO_LOGPROBS
        self.template["forced"] = NO_TOKEN
        self.template["blocks"] = memory.tables.ctypes.data + np.arange(slots, dtype=np.uint64) * np.uint64(
            memory.tables.strides[0])
        self.words = words_of(self.template)
        self.most_ends = 0  # of any answer so far
        self._serial = 0

    def open(self, s: Sequence) -> int:
        """A sequence that has a holding takes its slot; it is in state PROMPT or ANSWER by what its clock says."""
        assert s.holding is not None
        slot, r = s.holding.slot, s.request
        self._serial += 1
        s.serial = self.serial[slot] = self._serial
        self.sequences[slot], self.answers[slot] = s, s.output.token_ids
        s.clock.move(self.clocks, slot)
        self.inflight[slot] = self.drawing[slot] = 0
        self.emitted[slot], self.most[slot] = len(s.output.token_ids), r.most_tokens
        self.ends[slot] = NO_TOKEN
        ends = sorted(r.ends)[:_ENDS]
        self.ends[slot, : len(ends)] = ends
        self.most_ends = max(self.most_ends, len(ends))
        self.alone[slot] = s.constraint is not None
        self.single[slot] = s.read_eagerly or r.params.logprobs is not None or self.alone[slot] or len(r.ends) > _ENDS
        self.streamed[slot] = r.stream
        self.proposed[slot], self.accepted[slot] = s.proposed, s.accepted
        s.proposed, s.accepted = self.proposed[slot], self.accepted[slot]  # views, as long as it stays
        self.last[slot] = np.nan if s.last_time is None else s.last_time
        row = self.template[slot]
        row["logprobs"] = s.logprobs_wanted
        self.settle(slot)
        return slot

    def settle(self, slot: int) -> None:
        """The clock was moved by a transition of its own: state and template follow it."""
        c = self.clocks
        answering = c.t[slot] == c.n[slot] + 1 == c.row[slot] + 1 and self.emitted[slot] > 0
        self.state[slot] = ANSWER if answering else PROMPT
        row = self.template[slot]
        row["floor"], row["start_step"], row["start_kept"] = c.h[slot], c.start_step[slot], c.start_kept[slot]

    def close(self, s: Sequence) -> None:
        """The sequence leaves its slot, whose memory somebody else gives back."""
        assert s.holding is not None
        slot = s.holding.slot
        s.last_time = None if np.isnan(self.last[slot]) else float(self.last[slot])
        s.proposed, s.accepted = self.proposed[slot].copy(), self.accepted[slot].copy()
        s.clock.move()
        self.state[slot] = FREE
        self.serial[slot] = 0
        self.sequences[slot], self.answers[slot] = None, []

    def send(self, slots: Slots, draws: Any) -> None:
        """A step that touches ``slots`` was planned. ``draws``: whether each chooses a token, 0 or 1."""
        self.inflight[slots] += 1
        self.drawing[slots] += draws

    def retire(self, slots: Slots, draws: Any) -> None:
        """That step has ended."""
        self.inflight[slots] -= 1
        self.drawing[slots] -= draws
