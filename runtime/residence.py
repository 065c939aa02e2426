"""Who has memory: the way of a sequence into the engine's slots and blocks, and out of them.

Memory that a step in flight may touch is neither copied nor given away: a sequence that ends meanwhile is kept in
``leaving`` until the last such step has retired.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from deepinfer.errors import InternalError
from deepinfer.runtime import events
from deepinfer.runtime.executor import COUPLED, GREEDY, REJECTION, Executor
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.plan import OFF, EnginePlan
from deepinfer.runtime.prefix.interface import MISS, PrefixCache
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sequence import Request, Sequence, Status, TokenIds
from deepinfer.runtime.speculation.interface import DraftPolicy
from deepinfer.runtime.table import PROMPT, SequenceTable


class Entry(Enum):
    """What came of the wish to enter."""

    ENTERED = "entered"
    LOADING = "loading"  # blocks of it are on their way from a tier
    FULL = "full"


class Residence:
    """Args:
        spill_bytes: host memory that preempted sequences may take.
        repeatable: answers of requests without a seed follow from one that was given for all of them.
        now: seconds of one clock. ``answer``: makes the sequence of a request's next answer.
    """

    def __init__(self, plan: EnginePlan, memory: SequenceMemory, table: SequenceTable, executor: Executor,
                 prefix: PrefixCache, policy: DraftPolicy, metrics: Metrics, *, spill_bytes: int,
                 repeatable: bool, now: Callable[[], float], answer: Callable[[Request], Sequence]) -> None:
        self.plan, self.memory, self.table, self.executor = plan, memory, table, executor
        self.prefix, self.policy, self.metrics = prefix, policy, metrics
        self.spill_left, self.now, self.answer, self.repeatable = spill_bytes, now, answer, repeatable
        self.leaving: list[Sequence] = []
        self._spilled: list[Sequence] = []
        self._forking: list[Sequence] = []  # may have answers without a sequence

    def free(self, blocks: int, but: Sequence | None = None) -> bool:
        """Whether so many blocks are free, if need be because the prefix cache gave some up, or because blocks that
        preempted sequences (all ``but`` one) share went to the host."""
        self._evict(blocks)
        for s in self._pinning(but) if self.memory.free_blocks < blocks else ():
            self._unpin(s)
            self._evict(blocks)
            if self.memory.free_blocks >= blocks:
                break
        return self.memory.free_blocks >= blocks

    def _unpin(self, s: Sequence) -> None:
        """Move what a preempted sequence shares to the host too, if there is room."""
        size = len(s.spilled.kept) * self.memory.block_bytes if s.spilled else 0
        if s.spilled is not None and size <= self.spill_left:
            self.spill_left -= size
            self.memory.unpin(s.spilled)

    def _evict(self, blocks: int) -> None:
        short = blocks - self.memory.free_blocks
        if short > 0 and self.prefix.evictable:
            self.prefix.evict(short)

    def _pinning(self, but: Sequence | None) -> list[Sequence]:
        """Preempted sequences whose shared blocks are still in place, the last turn first."""
        self._spilled = [s for s in self._spilled if s.spilled is not None]
        found = [s for s in self._spilled if s is not but and s.spilled is not None and s.spilled.kept]
        return sorted(found, key=lambda s: s.rank, reverse=True)

    def promise(self) -> None:
        """Keep free what the answers of running requests take when their prompt ends: a slot and a block each."""
        self._forking = [s for s in self._forking if s.holding is not None and s.status is Status.RUNNING]
        answers = sum(s.request.to_fork for s in self._forking)
        self.memory.promised_slots = self.memory.promised_blocks = answers

    # ---- in ---------------------------------------------------------------------------------------------------------
    def enter(self, s: Sequence, spare: bool, patient: bool = False) -> Entry:
        """Memory for all rows of ``s`` that are known. ``spare``: one more block has to be free. ``patient``: nobody
        else has anything to do while its blocks are loaded."""
        memory, r = self.memory, s.request
        if memory.free_slots < 1 + r.to_fork:
            return Entry.FULL
        fresh = s.spilled is None and not s.clock.t
        hit = self.prefix.lookup(s, patient) if fresh and r.prompt_logprobs is None else MISS
        if hit.pending:
            return Entry.LOADING
        whole = self.plan.blocks_for(s.known) + r.to_fork + spare
        kept = 0
        if s.spilled is not None:
            whole, kept = max(whole, len(s.spilled.blocks) + spare), len(s.spilled.kept)
        need = whole - len(hit.blocks) - kept
        if memory.free_blocks < need and (  # blocks of the hit that only the cache holds do not become free
                memory.free_blocks + self.prefix.evictable - memory.blocks.alone(list(hit.blocks)) < need):
            return self.enter(s, spare) if not spare and self._make_room(whole - kept, s) else Entry.FULL
        if s.spilled is not None:
            self._resume(s, need)
        else:
            s.holding = memory.open()
            if hit.floor:
                self.prefix.adopt(hit, s)
            if fresh:
                self._prompt(s)
            if not self.free(need) or not memory.prepare(s.holding, max(s.clock.row, s.clock.h), s.clock.t):
                raise InternalError("blocks that were counted as free are not")
        s.status = Status.RUNNING
        if r.to_fork:
            self._forking.append(s)
        if r.metrics.first_scheduled_time is None:
            r.metrics.first_scheduled_time = self.now()
            self.metrics.queued.observe(r.metrics.first_scheduled_time - r.metrics.arrival_time)
        self._settle(s)
        return Entry.ENTERED

    def fits_without(self, s: Sequence, others: list[Sequence]) -> bool:
        """Whether there were room for ``s``, and a block to spare, if the running ``others`` gave up their memory. Hits
        are left out: it may need less."""
        gone = [h for h in (other.holding for other in others) if h is not None]
        short = self._most_needed(s) - self.memory.free_blocks - self.prefix.evictable
        if self.memory.free_slots + len(gone) < 1 + s.request.to_fork or sum(h.count for h in gone) < short:
            return False
        return short <= 0 or len({block for h in gone for block in h.blocks.tolist()}) >= short

    def _most_needed(self, s: Sequence) -> int:
        need = self.plan.blocks_for(s.known) if s.spilled is None else len(s.spilled.blocks) - len(s.spilled.kept)
        return need + s.request.to_fork + 1

    def preempt_for(self, s: Sequence, victim: Sequence) -> None:
        """Preempt ``victim``, and move what it shares to the host too as far as ``s`` needs the room."""
        self.preempt(victim)
        for other in self._pinning(s):
            if self.memory.free_blocks + self.prefix.evictable >= self._most_needed(s):
                break
            self._unpin(other)

    def _make_room(self, need: int, s: Sequence) -> bool:
        """Nothing runs and the first in turn does not fit: preempted sequences behind it give up what they still hold,
        for good if the host has no room for it."""
        for other in [None, *self._pinning(s)]:
            if other is not None and other.spilled is not None:
                self.memory.forget(other.spilled)
                self.spill_left += other.spilled.bytes
                other.spilled = None
                self._run_again(other)
            if self.free(need, but=s):
                return True
        return False

    def _prompt(self, s: Sequence) -> None:
        """All known ids become a prompt behind what was adopted."""
        r, clock = s.request, s.clock
        logged = len(clock.log)
        option = OFF if r.prompt_logprobs is not None else r.params.replay
        replay = self.plan.replay_rows(option)
        s.hit, first = clock.t, clock.t
        clock.prompt(s.known - clock.t, replay)
        s.replayed += first - clock.row
        self.metrics.prefix_queries.add(s.known)
        self.metrics.prefix_hits.add(s.hit)
        self.metrics.replayed_rows.add(first - clock.row)
        self.metrics.recomputed.add(max(0, s.lost - s.hit))
        s.lost = 0
        bounded = replay.keep is not None and not replay.depth  # other options cut nothing that counts
        if s.preemptions and bounded and len(clock.log) > logged:
            s.inexact = True
            self.metrics.inexact.add()

    def _resume(self, s: Sequence, need: int) -> None:
        assert s.spilled is not None
        self._evict(need)
        s.holding = self.memory.resume(s.spilled)
        self.spill_left += s.spilled.bytes
        s.spilled = None
        events.info("sequence_resumed", request=s.request.request_id, answer=s.output.index, rows=s.clock.n)

    def _settle(self, s: Sequence) -> None:
        """The sequence takes its slot in the table and the executor."""
        slot = self.table.open(s)
        if self.table.state[slot] == PROMPT:
            s.ids = TokenIds(s.known_ids(), 0)
        s.drafts = []
        self.executor.begin(slot, s.start(self._mode(s.request.params)))
        self.policy.opened(slot)

    def _mode(self, params: SamplingParams) -> int:
        """How drafts are judged. A seed promises the same answer whatever is drafted; without one more drafts stay
        when they are judged by rejection, where the executor can."""
        if params.greedy:
            return GREEDY
        promised = self.repeatable or params.seed is not None
        return COUPLED if promised or not getattr(self.executor, "rejection", False) else REJECTION

    def fork(self, s: Sequence) -> list[Sequence]:
        """One sequence for each further answer, with copies of the rows so far."""
        out: list[Sequence] = []
        assert s.holding is not None
        while s.request.to_fork:
            other = self.answer(s.request)
            other.clock, other.status, other.hit, other.replayed = s.clock.fork(), Status.RUNNING, s.hit, s.replayed
            other.holding = self.memory.fork(s.holding, s.clock.n)
            self.memory.grow(other.holding, self.plan.blocks_for(s.clock.t) - other.holding.count)
            self._settle(other)
            out.append(other)
        return out

    # ---- out --------------------------------------------------------------------------------------------------------
    def leave(self, s: Sequence) -> None:
        """Give everything back, or see to it that this happens when no step in flight touches it."""
        if s.spilled is not None:
            self.spill_left += s.spilled.bytes
            self.memory.forget(s.spilled)
            s.spilled = None
        if s.holding is None or s in self.leaving:
            return
        if self.table.inflight[s.holding.slot]:
            self.table.end(s.holding.slot)
            self.leaving.append(s)
        else:
            self._give_back(s)

    def sweep(self) -> None:
        """A step has retired: what no other one touches is free."""
        for s in [s for s in self.leaving if s.holding is not None and not self.table.inflight[s.holding.slot]]:
            self.leaving.remove(s)
            self._give_back(s)

    def _give_back(self, s: Sequence) -> None:
        assert s.holding is not None
        self.prefix.released(s)
        self.table.close(s)
        self.memory.close(s.holding)
        s.holding = None

    def preempt(self, s: Sequence) -> None:
        """Take the memory of a sequence that no step in flight touches: to the host, or for good."""
        assert s.holding is not None
        size, rows = self.memory.spill_bytes(s.holding), s.clock.n
        self.prefix.released(s)
        self.table.close(s)
        if size <= self.spill_left:
            s.spilled = self.memory.spill(s.holding)
            s.status = Status.SPILLED
            self.spill_left -= s.spilled.bytes
            self._spilled.append(s)
            self.metrics.spilled.add()
        else:
            self.memory.close(s.holding)
            self._run_again(s)
        s.holding = None
        s.preemptions += 1
        s.request.metrics.num_preemptions += 1
        self.metrics.preemptions.add()
        events.warn("sequence_preempted", request=s.request.request_id, answer=s.output.index, rows=rows,
                    how=s.status.value, bytes=size, free_blocks=self.memory.blocks.free)

    def _run_again(self, s: Sequence) -> None:
        """The memory of a sequence is gone: its rows run in the role they had, or behind another hit."""
        if s.clock.h:
            s.lost = max(s.lost, s.clock.n)
            s.clock.reset()
        else:
            self.metrics.recomputed.add(s.clock.n)
            s.clock.restart()
        s.status = Status.WAITING
        self.metrics.restarted.add()
