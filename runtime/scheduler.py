"""Which rows run next: continuous batching, chunked prefill beside decoding, admission and preemption.

Order is first come, first served within a priority (smaller first). In a step the sequences that wait for one row
(decoding) come first, then unfinished prompts in order, as many of their rows as the limits of the engine leave, then
new requests. A request is admitted when its whole prompt has blocks, one more is free, and every answer has a slot.
When a decoding sequence needs a block and none is free, the last sequence in order gives up its memory: it is moved to
the host, or, when the host's share is used up, its rows run again later. Both are exact.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from deepinfer.runtime import events
from deepinfer.runtime.clock import Part
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sequence import Sequence, Status


@dataclass
class Budget:
    """What is left of a step's limits."""

    step: int
    kept: int
    wanted: int
    seq: int

    def take(self, part: Part, back: bool = False) -> None:
        sign = 1 if back else -1
        self.step += sign * part.rows
        self.kept += sign * part.kept
        self.wanted += sign * part.wanted
        self.seq += sign


class Scheduler:
    """Queues of one engine. ``spill_bytes``: host memory that preempted sequences may take."""

    def __init__(self, plan: EnginePlan, memory: SequenceMemory, metrics: Metrics, spill_bytes: int) -> None:
        self.plan, self.memory, self.metrics = plan, memory, metrics
        self.spill_left = spill_bytes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._chosen: dict[Sequence, Part] = {}
        self._budget = Budget(0, 0, 0, 0)
        self._preempted = False

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, s: Sequence) -> None:
        """Queue a sequence without memory."""
        insort(self.waiting, s, key=_rank)

    def add_running(self, s: Sequence) -> None:
        """A sequence that has memory already."""
        s.status = Status.RUNNING
        insort(self.running, s, key=_rank)
        self.promise()

    def drop(self, s: Sequence) -> None:
        """Forget a finished sequence and give its memory back."""
        if s.holding is not None:
            self.memory.close(s.holding)
            s.holding = None
        if s.spilled is not None:
            self.spill_left += s.spilled.bytes
            s.spilled = None
        for queue in (self.waiting, self.running):
            if s in queue:
                queue.remove(s)
        if s.request.to_fork:
            self.promise()

    def schedule(self) -> dict[Sequence, Part]:
        """Rows of the next step by sequence, in batch order. Every one of them has the memory it needs."""
        self._budget = Budget(**{k: self.plan.limits[k] for k in ("step", "kept", "wanted", "seq")})
        self._chosen, self._preempted = {}, False
        for decoding in (True, False):
            for s in list(self.running):
                if s.status is Status.RUNNING and (s.clock.pending == 1) == decoding and s not in self._chosen:
                    self._choose(s)
        while self.waiting and not self._preempted and self._budget.seq and self._admit(self.waiting[0]):
            pass
        return self._chosen

    # ---- rows ---------------------------------------------------------------------------------------------------
    def _choose(self, s: Sequence) -> bool:
        """Give ``s`` rows of this step; False when the limits leave none."""
        rows = self._rows(s)
        if rows == 0:
            return False
        clock = s.clock
        while s.holding is not None and not self.memory.prepare(
                s.holding, max(clock.row, clock.h), clock.row + rows):
            self._preempt(self.running[-1])
        if s.holding is None:
            return False
        part = clock.part(rows, s.request.rows_wanted(clock.row, clock.row + rows, clock.t))
        self._budget.take(part)
        self._chosen[s] = part
        return True

    def _rows(self, s: Sequence) -> int:
        """Rows that the limits leave for ``s``."""
        left, clock, r = self._budget, s.clock, s.request
        if not left.seq:
            return 0
        rows = clock.rows_within(min(clock.pending, left.step), left.kept)
        wanted = r.rows_wanted(clock.row, clock.row + rows, clock.t)
        if wanted > left.wanted:
            if r.prompt_logprobs is None:
                return rows - 1  # the last row waits, the others need no logits
            rows -= wanted - left.wanted
        return rows

    # ---- admission ----------------------------------------------------------------------------------------------
    def promise(self) -> None:
        """Keep free what the answers of running requests take when their prompt ends."""
        forks = [(s.request.to_fork, len(s.request.prompt_ids)) for s in self.running if s.request.to_fork]
        self.memory.promised_slots = sum(count for count, _ in forks)
        self.memory.promised_blocks = sum(count * self.memory.fork_need(rows) for count, rows in forks)

    def _admit(self, s: Sequence) -> bool:
        """Move the first waiting sequence into the running ones and give it rows; False when there is no room."""
        memory, clock, forks = self.memory, s.clock, s.request.to_fork
        need = max(self.plan.blocks_for(clock.t), len(s.spilled.blocks) if s.spilled else 0)
        extra = forks * memory.fork_need(len(s.request.prompt_ids)) + bool(self.running)
        if memory.free_slots < 1 + forks or memory.free_blocks < need + extra or not self._rows(s):
            return False
        if s.spilled is not None:
            s.holding = memory.resume(s.spilled)
            self.spill_left += s.spilled.bytes
            s.spilled = None
            events.info("sequence_resumed", request=s.request.request_id, answer=s.output.index, rows=clock.n)
        else:
            s.holding = memory.open()
            memory.prepare(s.holding, 0, clock.t)
        self.waiting.pop(0)
        self.add_running(s)
        return self._choose(s)

    # ---- preemption ---------------------------------------------------------------------------------------------
    def _preempt(self, s: Sequence) -> None:
        """Take the memory of ``s``; it waits in its old place."""
        assert s.holding is not None
        part = self._chosen.pop(s, None)
        if part is not None:
            self._budget.take(part, back=True)
        size = self.memory.spill_bytes(s.holding)
        if size <= self.spill_left:
            s.spilled = self.memory.spill(s.holding)
            s.status = Status.SPILLED
            self.spill_left -= s.spilled.bytes
            self.metrics.spilled.add()
        else:
            self.memory.close(s.holding)
            s.clock.restart()
            s.status = Status.WAITING
            self.metrics.restarted.add()
        s.holding = None
        s.request.metrics.num_preemptions += 1
        self.metrics.preemptions.add()
        self._preempted = True
        self.running.remove(s)
        self.add(s)
        self.promise()
        events.warn("sequence_preempted", request=s.request.request_id, answer=s.output.index, rows=s.clock.n,
                    how=s.status.value, bytes=size, free_blocks=self.memory.blocks.free)


def _rank(s: Sequence) -> tuple[int, float, int, int]:
    return s.rank
