"""Which rows run next: continuous batching, chunked prefill beside decoding, admission and preemption.

Turns: a request's turn is its arrival, moved by ``PATIENCE`` seconds for each step of priority; the smaller goes first.
So a request waits for those of higher priority that came at most ``PATIENCE`` times the difference after it and for no
later one: nobody starves.

In a step the sequences that decode come first, each with the drafts that the policy grants and the limits leave; where
the limits do not leave a row for each, they take turns. Then come unfinished prompts in order, as many of their rows
as the limits and the chunk budget allow, then new requests: one is admitted when its whole prompt has blocks, one more
is free, and every answer has a slot. Blocks that only the prefix cache holds count as free. The head of the queue is
never overtaken, except while blocks of it are on their way from a tier. Where it does not fit and sequences with later
turns run, as many of those give way as it needs.

When a sequence needs a block and none is free, the last sequence in order gives up its memory: it is moved to the host,
or, when the host's share is used up, its rows run again later. Memory that a step in flight may touch is not moved and
not given away: ``blocked`` then asks the loop to let the steps in flight end.
"""

from __future__ import annotations

from bisect import bisect, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError
from deepinfer.runtime.cost import ChunkBudget
from deepinfer.runtime.executor import StepPlan
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.interface import PrefixCache
from deepinfer.runtime.residence import Entry, Residence
from deepinfer.runtime.sequence import Sequence
from deepinfer.runtime.speculation.interface import DraftPolicy
from deepinfer.runtime.table import ANSWER, PROMPT, SequenceTable

PATIENCE = 60.0  # seconds of waiting that one step of priority is worth


@dataclass
class Left:
    """What is left of a step's limits."""

    step: int
    kept: int
    wanted: int
    seq: int


class Scheduler:
    """Queues of one engine: ``waiting`` without memory, ``running`` with, both in order of turns."""

    def __init__(self, plan: EnginePlan, memory: SequenceMemory, table: SequenceTable, residence: Residence,
                 prefix: PrefixCache, policy: DraftPolicy, chunks: ChunkBudget, metrics: Metrics) -> None:
        self.plan, self.memory, self.table, self.metrics = plan, memory, table, metrics
        self.residence, self.prefix, self.policy, self.chunks = residence, prefix, policy, chunks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.blocked = False
        self.decoding = self.prompt_rows = 0  # rows of the last plan
        self.chunk_cut = False  # whether the chunk budget was what ended its prompt rows
        self._order = np.zeros(0, np.int64)  # slots of the running ones
        self._turn = 0
        self._alternate = False
        self._preempted = False

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    # ---- queues -----------------------------------------------------------------------------------------------------
    def add(self, s: Sequence) -> None:
        """Queue a sequence without memory."""
        insort(self.waiting, s, key=_rank)

    def add_running(self, s: Sequence) -> None:
        """A sequence that has a slot."""
        if s.holding is None:
            raise InternalError("a running sequence without memory")
        place = bisect(self.running, s.rank, key=_rank)
        self.running.insert(place, s)
        self._order = np.concatenate((self._order[:place], (s.holding.slot,), self._order[place:]))
        self.residence.promise()

    def drop(self, s: Sequence) -> None:
        """Forget a finished sequence and give its memory back, as soon as no step in flight touches it."""
        if s in self.waiting:
            self.waiting.remove(s)
        if s in self.running:
            self._stop(s)
        self.residence.leave(s)
        self.residence.promise()

    # ---- a step -----------------------------------------------------------------------------------------------------
    def schedule(self, step: StepPlan) -> bool:
        """Fill ``step``; False: there is nothing to run now. Every row has the memory it needs, whatever the steps in
        flight bring."""
        step.clear()
        self._preempted = self.blocked = self.chunk_cut = False
        if self.waiting and self.running and self.waiting[0].rank < self.running[-1].rank and not self._make_way():
            return False
        left = Left(**{k: self.plan.limits[k] for k in ("step", "kept", "wanted", "seq")})
        self.decoding = self._decode(step, left)
        most = self.chunks.chunk(self.decoding, left.step)
        self.chunk_cut, left.step = most < left.step, most
        order = self.order()
        for slot in order[self.table.state[order] == PROMPT].tolist():
            unfinished = self.table.sequences[slot]
            if unfinished is not None:
                self._prefill(unfinished, step, left)
        resumed = self._admit(step, left)
        self.prompt_rows = most - left.step
        self.chunk_cut = self.chunk_cut and not left.step
        return step.count > 0 or ((resumed or self._preempted) and self.schedule(step))

    def _admit(self, step: StepPlan, left: Left) -> bool:
        """Requests from the queue, as far as memory and limits go; whether one was brought back that decodes."""
        resumed, place, patient = False, 0, False  # in front of the place are those whose blocks are on their way
        while place < len(self.waiting) and not self._preempted and not self.blocked and left.seq and left.step:
            s = self.waiting[place]
            entry = self.residence.enter(s, spare=bool(self.running), patient=patient)
            if entry is not Entry.ENTERED:
                place += 1
                if entry is Entry.LOADING and place < len(self.waiting):
                    continue
                if patient or self.running:
                    break
                if entry is Entry.FULL:
                    self.prefix.wait()  # loads for others may hold what it needs
                place, patient = 0, True  # nothing else is to do than to wait for blocks
                continue
            del self.waiting[place]
            self.add_running(s)
            if s.holding is not None and self.table.state[s.holding.slot] == PROMPT:
                self._prefill(s, step, left)
            else:
                resumed = True  # it decodes from the next step on
        return resumed

    def _make_way(self) -> bool:
        """The head of the queue comes before some that run: where it does not fit, the last of those are preempted, if
        that makes it fit. False: a step in flight has to end before."""
        head = self.waiting[0]
        later = self.running[bisect(self.running, head.rank, key=_rank):]
        if not self.residence.fits_without(head, later):
            return True
        while later and not self.residence.fits_without(head, []):
            victim = later.pop()
            if victim.holding is None:
                raise InternalError("a running sequence without memory")
            if self.residence.leaving or self.table.inflight[victim.holding.slot]:
                self.blocked = True
                return False
            self._stop(victim)
            self.residence.preempt_for(head, victim)
            self.add(victim)
            self.residence.promise()
        return True

    def order(self) -> NDArray[np.int64]:
        """Slots of the running sequences, first turn first."""
        return self._order

    def _stop(self, s: Sequence) -> None:
        place = self.running.index(s)
        del self.running[place]
        self._order = np.concatenate((self._order[:place], self._order[place + 1:]))

    # ---- decoding ---------------------------------------------------------------------------------------------------
    def _decode(self, step: StepPlan, left: Left) -> int:
        """Rows of the sequences whose next row the executor knows; how many rows that are at most."""
        t, order = self.table, self.order()
        goes_on = (t.state == ANSWER) & (t.emitted + t.drawing < t.most)
        slots = order[goes_on[order]]
        if t.constrained:
            held_up = t.alone[slots] & (t.inflight[slots] > 0)
            self.metrics.held_up.add(int(held_up.sum()))
            slots = slots[~held_up]
        if not len(slots):
            return 0
        room = min(left.step, left.kept, left.wanted)
        most = min(room, left.seq)
        if len(slots) >= most:
            most = self._shared(most)
        if len(slots) > most:
            slots = np.roll(slots, -(self._turn % len(slots)))[:most]
            self._turn += most
            if not most:
                return 0
        rows, budget = np.ones(len(slots), np.int64), -1
        if self.plan.draft_tokens:
            drafts = np.minimum(self.policy.most(slots), t.most[slots] - t.emitted[slots] - t.drawing[slots] - 1)
            drafts = np.maximum(drafts, 0)
            budget = self._budget(drafts, room - len(slots))
            rows += drafts
        slots, rows = self._with_blocks(slots, rows)
        k = len(slots)
        out = step.rows[:k]
        np.take(t.words, slots, axis=0, out=step.words[:k], mode="clip")
        out["num_blocks"] = self.memory.counts[slots]
        if self.plan.draft_tokens:
            out["rows"] = rows
            out["want_draft"] = self.policy.wanted(slots)
        step.count, step.decoding, step.budget = k, k, budget
        if t.constrained:
            self._constrain(step)
        t.clocks.verify(slots, rows)
        t.send(slots, 1)
        used = k + (budget if budget >= 0 else int(rows.sum()) - k)
        left.step, left.kept, left.wanted = left.step - used, left.kept - used, left.wanted - used
        left.seq -= k
        return used

    def _shared(self, most: int) -> int:
        """Of so many rows those for decoding: one is left for prompts, if there are any, or every second step."""
        order = self.order()
        if not (self.table.state[order] == PROMPT).any():
            return most
        self._alternate = not self._alternate
        return most - 1 if most > 1 else int(self._alternate)

    def _budget(self, drafts: NDArray[np.int64], room: int) -> int:
        """Drafts that the step verifies in all: what the policy wants of them beside the prompt rows that are to come,
        and what the limits leave when half of the rest is for prompts, if there are any; -1: all."""
        total, prompts = int(drafts.sum()), self._prompts()
        if total > room // 2:
            room -= min(prompts, (room + 1) // 2)
        beside = min(prompts, self.chunks.chunk(len(drafts), room))
        wanted = self.policy.budget(drafts.astype(np.int32), len(drafts) + beside)
        allowed = min(room, total if wanted < 0 else wanted)
        return -1 if allowed >= total else allowed

    def _prompts(self) -> int:
        """Rows that the prompts of running sequences, and of those that may enter now, still want."""
        t, order = self.table, self.order()
        at = order[t.state[order] == PROMPT]
        entering = self.waiting[: max(0, self.memory.free_slots)]
        return int((t.clocks.t[at] - t.clocks.row[at]).sum()) + sum(s.known for s in entering if s.spilled is None)

    def _with_blocks(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Give every sequence the blocks for its rows; those left for which there are some."""
        t, size = self.table, self.plan.block_tokens
        base, counts = t.clocks.row[slots] + t.clocks.verifying[slots], self.memory.counts[slots]
        if not (base + rows > counts * np.int64(size)).any():
            return slots, rows
        need = -(-(base + rows) // size) - counts
        if self.residence.free(int(need[need > 0].sum())):
            for i in np.flatnonzero(need > 0).tolist():
                s = t.sequences[int(slots[i])]
                if s is not None and s.holding is not None:
                    self.memory.grow(s.holding, int(need[i]))
            return slots, rows
        gone = np.zeros(len(slots), bool)
        for i in np.flatnonzero(need > 0).tolist():
            slot = int(slots[i])
            s = t.sequences[slot]
            if s is None or s.holding is None:  # preempted for one before it
                continue
            fits = int(self.memory.counts[slot]) * size - int(base[i])
            if fits > 0 and not self.residence.free(int(need[i])):
                rows[i] = fits  # fewer drafts rather than somebody's memory
            elif self._room(int(need[i]), s):
                self.memory.grow(s.holding, int(need[i]))
            else:
                gone[i] = True
        gone |= t.state[slots] != ANSWER
        return slots[~gone], rows[~gone]

    def _constrain(self, step: StepPlan) -> None:
        """Masks of the rows whose tokens have to fit a grammar."""
        for i in np.flatnonzero(self.table.alone[step.rows["slot"][: step.count]]).tolist():
            s = self.table.sequences[int(step.rows["slot"][i])]
            assert s is not None
            drafts = s.drafts[: int(step.rows["rows"][i]) - 1]
            self._mask(s, step, i, drafts)

    def _mask(self, s: Sequence, step: StepPlan, i: int, drafts: list[int]) -> None:
        mask = None if s.constraint is None else s.constraint.mask(drafts)
        if mask is not None:
            step.masks[i] = mask
            step.rows[i]["mask"] = mask.ctypes.data

    # ---- prompts ----------------------------------------------------------------------------------------------------
    def _prefill(self, s: Sequence, step: StepPlan, left: Left) -> None:
        """As many rows of a prompt as the limits leave. Its last row waits until every answer has a copy of the rows
        before it, and then runs once for each."""
        if s.request.to_fork and s.clock.pending == 1:
            if self.table.inflight[s.holding.slot if s.holding else 0]:
                return
            for other in self.residence.fork(s):
                self.add_running(other)
                self._send_prompt(other, step, left)
        self._send_prompt(s, step, left)

    def _send_prompt(self, s: Sequence, step: StepPlan, left: Left) -> None:
        clock, r = s.clock, s.request
        rows = self._rows(s, left)
        if rows <= 0 or not self._room_for(s, rows):
            return
        assert s.holding is not None
        slot, first = s.holding.slot, clock.row
        at = np.array([slot])
        wanted = r.rows_wanted(first, first + rows, clock.t)
        draws = first + rows == clock.t
        kept = clock.kept_in(rows)
        step.add_prompt(s.ids[first:first + rows], s.ids[max(0, first - self.plan.lookback):first],
                        self.table.template[slot], c=first, kept=kept, wanted=wanted, draws=int(draws),
                        num_blocks=s.holding.count, prompt_logprobs=r.prompt_logprobs_wanted(s),
                        want_draft=int(draws and bool(self.policy.wanted(at)[0])))
        if draws:
            self._mask(s, step, step.count - 1, [])
        self.table.clocks.sent(at, np.array([rows]))
        self.table.send(at, int(draws))
        self.metrics.prompt_tokens.add(max(0, min(first + rows, clock.prompt_end) - first))
        if draws:
            self.table.state[slot] = ANSWER
        left.step, left.kept, left.wanted = left.step - rows, left.kept - kept, left.wanted - wanted
        left.seq -= 1

    def _rows(self, s: Sequence, left: Left) -> int:
        """Rows that the limits leave for ``s``."""
        clock, r = s.clock, s.request
        if not left.seq:
            return 0
        rows = clock.rows_within(min(clock.pending - (r.to_fork > 0), left.step), left.kept)
        if rows > 0:
            rows = self.prefix.stop(s, clock.row, clock.row + rows) - clock.row
        wanted = r.rows_wanted(clock.row, clock.row + rows, clock.t)
        if wanted > left.wanted:
            if r.prompt_logprobs is None:
                return rows - 1  # the last row waits, the others need no logits
            rows -= wanted - left.wanted
        return rows

    def _room_for(self, s: Sequence, rows: int) -> bool:
        """Blocks for the next rows of a prompt."""
        clock = s.clock
        first, stop = max(clock.row, clock.h), clock.row + rows
        while s.holding is not None and not self.memory.prepare(s.holding, first, stop):
            if not self._room(self.memory.need(s.holding, first, stop), s):
                return False
        return s.holding is not None

    # ---- memory -----------------------------------------------------------------------------------------------------
    def _room(self, need: int, s: Sequence) -> bool:
        """Make ``need`` blocks free: from the prefix cache, else from the last sequences in order. False: a step in
        flight has to end first, or ``s`` itself had to give way."""
        while not self.residence.free(need):
            victim = self.running[-1]
            if victim.holding is None:
                raise InternalError("a running sequence without memory")
            if self.table.inflight[victim.holding.slot] or self.residence.leaving:
                self.blocked = True
                return False
            self._preempt(victim)
            if victim is s:
                return False
        return True

    def _preempt(self, s: Sequence) -> None:
        """Take the memory of ``s``; it waits in its old place."""
        self._stop(s)
        self.residence.preempt(s)
        self._preempted = True
        self.add(s)
        self.residence.promise()


def _rank(s: Sequence) -> tuple[float, int, int]:
    return s.rank
