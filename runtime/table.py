"""The host's state of the sequences that have a slot, in columns indexed by slot: what every step reads or changes.

What happens once in the life of a sequence stays with its ``Sequence``; what happens in every step is done here for
all sequences at once, so that a step costs the host a few operations on arrays, not a loop over sequences.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError
from deepinfer.runtime.clock import ClockTable
from deepinfer.runtime.executor import DECODE, NO_LOGPROBS, NO_TOKEN, ROW, words_of
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sequence import Sequence, nothing

FREE, PROMPT, ANSWER, ENDED = 0, 1, 2, 3
_PULL = 128  # steps after which every list of tokens has been brought up to date
_ENDS = 8  # ids that end an answer and are looked for in arrays; answers with more are looked at one by one
_WORD_ORDER = 1 if sys.byteorder == "little" else -1
Slots = NDArray[np.integer[Any]]


class SequenceTable:
    """Columns by slot.

    Attributes:
        state: FREE; PROMPT: the host sends its rows; ANSWER: the executor knows its next row; ENDED: nothing of it
            counts any more, and its memory is kept until no step in flight touches it.
        serial: number of the sequence in the slot, counted over the engine's life.
        inflight: steps in flight that touch the slot; ``drawing``: those of them that choose a token.
        emitted, most: tokens of the answer, and how many it may have.
        fresh: [slots, some] token k of an answer lies at k modulo the length until ``pull`` puts it into the answer's
            list. Appending to a list for each sequence would cost more than everything else of a step.
        ends: [8, slots] ids that end the answer, padded with -1.
        watched: tokens of this sequence are looked at after each step: one by one (text, log-probabilities, grammar),
            or because somebody waits for them.
        alone: planned only when nothing of it is in flight (grammar: the next mask needs the tokens).
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
        self.state = np.zeros(slots, np.int8)
        self.serial = np.zeros(slots, np.int64)
        flight = np.zeros((slots, 2), np.int32)
        self._flight = flight.view(np.int64).reshape(slots)  # both counts, changed at once
        self.inflight, self.drawing = flight.T[::_WORD_ORDER]
        self.emitted = np.zeros(slots, np.int64)
        self.most = np.zeros(slots, np.int64)
        length = 1 << ((_PULL + 2) * (plan.draft_tokens + 1)).bit_length()
        self.fresh = np.zeros((slots, length), np.int64)
        self._cells, self._base = self.fresh.reshape(-1), np.arange(slots) * length
        self._pulled = 0
        self.ends = np.full((_ENDS, slots), NO_TOKEN, np.int64)
        self.watched = np.zeros(slots, bool)
        self.alone = np.zeros(slots, bool)
        self.proposed = np.zeros((slots, plan.draft_tokens + 1), np.int64)
        self.accepted = np.zeros((slots, plan.draft_tokens + 1), np.int64)
        self.last = np.full(slots, np.nan)
        self.template = np.zeros(slots, ROW)
        self.template["slot"] = np.arange(slots)
        self.template["kind"] = DECODE
        self.template["rows"] = 1
        self.template["draws"] = 1
        self.template["prompt_logprobs"] = NO_LOGPROBS
        self.template["blocks"] = memory.tables.ctypes.data + np.arange(slots, dtype=np.uint64) * np.uint64(
            memory.tables.strides[0])
        self.words = words_of(self.template)
        self.most_ends = 0  # of any answer so far
        self.constrained = 0  # slots whose sequence has a grammar
        self._serial = 0

    def open(self, s: Sequence) -> int:
        """A sequence that has a holding takes its slot; it is in state PROMPT or ANSWER by what its clock says."""
        assert s.holding is not None
        slot, r = s.holding.slot, s.request
        self._serial += 1
        s.serial = self.serial[slot] = self._serial
        self.sequences[slot] = s
        s.pull = partial(self.pull, slot, s.output.token_ids)
        s.clock.move(self.clocks, slot)
        self._flight[slot] = 0
        self.emitted[slot], self.most[slot] = len(s.output.token_ids), r.most_tokens
        ends = sorted(r.ends)[:_ENDS]
        self.ends[:, slot] = ends + [NO_TOKEN] * (_ENDS - len(ends))
        self.most_ends = max(self.most_ends, len(ends))
        alone = self.alone[slot] = s.constraint is not None
        self.constrained += int(alone)
        self.watched[slot] = (r.stream or s.read_eagerly or r.params.logprobs is not None or alone
                              or len(r.ends) > _ENDS)
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
        s.pull()
        s.pull = nothing
        self.constrained -= int(self.alone[slot])
        self.alone[slot] = False
        s.last_time = None if np.isnan(self.last[slot]) else float(self.last[slot])
        s.proposed, s.accepted = self.proposed[slot].copy(), self.accepted[slot].copy()
        s.clock.move()
        self.state[slot] = FREE
        self.serial[slot] = 0
        self.sequences[slot] = None

    def end(self, slot: int) -> None:
        """Nothing that steps in flight bring for the slot counts any more."""
        self.state[slot] = ENDED
        self.serial[slot] = 0

    # ---- tokens -----------------------------------------------------------------------------------------------------
    def append(self, slots: Slots, emitted: Slots, tokens: NDArray[np.int64]) -> None:
        """Tokens [k, m + 1] of one step, the first of which are behind the ``emitted`` ones; how many of them count is
        said by ``emitted`` afterwards."""
        mask, base = self.fresh.shape[1] - 1, self._base[slots]
        if tokens.shape[1] == 1:
            self._cells[base + (emitted & mask)] = tokens[:, 0]
        else:
            self._cells[base[:, None] + ((emitted[:, None] + np.arange(tokens.shape[1])) & mask)] = tokens

    def pull(self, slot: int, tokens: list[int]) -> None:
        """Bring the list of an answer up to date."""
        stop = int(self.emitted[slot])
        if len(tokens) < stop:
            row, mask = self.fresh[slot], self.fresh.shape[1] - 1
            first, last = len(tokens) & mask, stop & mask
            tokens += row[first:last].tolist() if first < last else row[first:].tolist() + row[:last].tolist()

    def newest(self, slots: Slots, first: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens ``first`` .. ``stop`` - 1 of each answer, one answer after the other; those of the last steps only."""
        counts, mask = stop - first, self.fresh.shape[1] - 1
        if len(slots) and int(counts.max()) > mask + 1:
            raise InternalError(f"{int(counts.max())} tokens were not fetched in time")
        begins = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(first - begins, counts)
        out: NDArray[np.int64] = self._cells[np.repeat(self._base[slots], counts) + (places & mask)]
        return out

    def pull_some(self) -> None:
        """Called once a step: after some steps every list was brought up to date, a few at a time."""
        size = len(self.sequences)
        for _ in range(-(-size // _PULL)):
            s = self.sequences[self._pulled]
            if s is not None:
                s.pull()
            self._pulled = (self._pulled + 1) % size

    def send(self, slots: Slots, draws: Any) -> None:
        """A step that touches ``slots`` was planned. ``draws``: whether each chooses a token, 0 or 1."""
        self._flight[slots] += 1 + (draws << 32)

    def retire(self, slots: Slots, draws: Any) -> None:
        """That step has ended."""
        self._flight[slots] -= 1 + (draws << 32)

    def forget_flights(self) -> None:
        """No step is in flight."""
        self._flight[:] = 0
