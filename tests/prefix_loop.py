"""A plain loop around the prefix cache, one sequence a step on a witness engine, and the oracle of its answers.

``Turn`` is what the cache sees of a sequence. ``expected`` says what a request's tokens have to be under its replay log
on an engine that keeps everything by absolute position and knows neither blocks nor snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from witness import Reference, WitnessEngine, need

from deepinfer.runtime.batch import Batch
from deepinfer.runtime.clock import KEPT, STEP, Clock, Part, Replayed
from deepinfer.runtime.memory import Holding, SequenceMemory
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.cache import MemoryCache
from deepinfer.runtime.prefix.road import must_be_exact
from deepinfer.runtime.prefix.roots import Roots


class NoRoom(Exception):
    """No blocks are free for a row, whatever the cache gives up."""


class Oracle(Reference):
    """A reference that replays at the places of a log."""

    def run(self, ids: Sequence[int], log: Iterable[Replayed]) -> NDArray[np.float32]:
        """Logits of the kept rows at the end of a prompt."""
        kept = 0
        for r in log:
            if r.axis == STEP:
                self.feed(ids[len(self.ids):r.floor], None)
                self.adopt(r.floor)
                self.row = self.enc = self.dec = r.start
                self.hit = False
            else:
                kept = r.start
        return self.feed(ids[len(self.ids):], len(ids) - kept if kept else None)


def expected(plan: EnginePlan, prompt: Sequence[int], count: int, log: Iterable[Replayed] = ()) -> list[int]:
    """Greedy tokens."""
    oracle, out = Oracle(plan), list[int]()
    row = oracle.run(list(prompt), log)[-1]
    for _ in range(count):
        out.append(int(row.argmax()))
        row = oracle.feed(out[-1:], None)[-1]
    return out


@dataclass(eq=False)
class Turn:
    """A request and its one answer."""

    request: Any
    clock: Clock
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    holding: Holding | None = None
    prompt_row: NDArray[np.float32] | None = None
    cached: int = 0
    output: Any = field(default_factory=lambda: SimpleNamespace(index=0))

    def ids_in(self, first: int, stop: int) -> NDArray[np.int64]:
        return self.known_ids()[first:stop]

    def known_ids(self) -> NDArray[np.int64]:
        return np.array([*self.prompt, *self.tokens], dtype=np.int64)


class PrefixLoop:
    """Requests on one engine with a prefix cache. ``sequences`` may be open at the same time."""

    def __init__(self, plan: EnginePlan, blocks: int, snapshots: int = 8, roots: Roots | None = None,
                 cache: type[MemoryCache] = MemoryCache) -> None:
        self.plan = plan
        self.engine = WitnessEngine(plan, plan.max_num_seqs, blocks)
        self.memory = SequenceMemory(plan, self.engine, plan.max_num_seqs, blocks)
        self.cache, self.metrics = cache(plan, snapshots=snapshots, roots=roots), Metrics()
        self.cache.attach(self.memory, lambda slot: False, self.metrics)
        self.rerun = 0  # rows in front of hits
        self.batch = Batch(plan)
        self.open: list[Turn] = []

    # ---- life of a request ------------------------------------------------------------------------------------------
    def begin(self, prompt: Sequence[int], replay: Any = "off", salt: str | None = None,
              logprobs: bool = False) -> Turn:
        """Admit a request; NoRoom when there are too few blocks."""
        params = SimpleNamespace(replay=replay, cache_salt=salt)
        request = SimpleNamespace(params=params, prompt_logprobs=[None] if logprobs else None, sequences=[], images=(),
                                  prompt_ids=list(prompt), order=0, to_fork=0)
        turn = Turn(request, Clock(self.plan), list(prompt))
        request.sequences.append(turn)
        hit = self.cache.lookup(turn)
        if self.memory.free_slots < 1:
            raise NoRoom
        turn.holding = self.memory.open()
        self.open.append(turn)
        if hit.floor:
            self.cache.adopt(hit, turn)
        turn.cached = hit.floor
        turn.clock.prompt(len(prompt) - hit.floor, self.plan.replay_rows("off" if logprobs else replay))
        self.rerun += turn.clock.h - min(turn.clock.row, turn.clock.h)
        try:
            self._room(turn, turn.clock.h, len(prompt))
        except NoRoom:
            self.end(turn)
            raise
        return turn

    def chunk(self, turn: Turn, most: int) -> bool:
        """Run the next rows of the prompt; True when its end gave the first token."""
        clock, limits = turn.clock, self.plan.limits
        rows = clock.rows_within(min(clock.pending, most, limits["step"]), limits["kept"])
        rows = self.cache.stop(turn, clock.row, clock.row + rows) - clock.row
        ends = rows == clock.pending
        part = clock.part(rows, int(ends))
        self._room(turn, max(clock.row, clock.h), part.stop)
        logits = self._run(turn, part)
        clock.ran(part)
        if ends:
            turn.prompt_row = logits[-1]
            clock.sampled()
            turn.tokens.append(int(logits[-1].argmax()))
        self.cache.committed(turn)
        return ends

    def decode(self, turn: Turn, drafts: Sequence[int] = ()) -> int:
        """Verify drafts behind the last token; how many of them stay."""
        clock = turn.clock
        self._room(turn, clock.n, clock.n + len(drafts) + 1)
        known = len(turn.prompt) + len(turn.tokens)
        best = self._run(turn, clock.verify(len(drafts)), drafts).argmax(axis=1).tolist()
        right = next((i for i, d in enumerate(drafts) if d != best[i]), len(drafts))
        clock.accept(right)
        turn.tokens += best[: right + 1]
        need(clock.t == known + right + 1, "I2: ids and clock")
        self.cache.committed(turn)
        return right

    def end(self, turn: Turn) -> None:
        """The answer is complete, or nobody wants it any more."""
        self.cache.released(turn)
        assert turn.holding is not None
        self.memory.close(turn.holding)
        turn.holding = None
        self.open.remove(turn)

    def answer(self, prompt: Sequence[int], count: int, replay: Any = "off", chunk: int = 1000,
               salt: str | None = None) -> Turn:
        """A whole request by itself."""
        turn = self.begin(prompt, replay, salt)
        while not self.chunk(turn, chunk):
            pass
        while len(turn.tokens) < count:
            self.decode(turn)
        self.end(turn)
        return turn

    def check(self) -> None:
        """The books of blocks and snapshots."""
        held = [b for h in self.memory.live for b in h.blocks.tolist()]
        self.memory.blocks.check([*held, *self.cache.held()])
        self.cache.check()
        for node in self.cache.tree:
            need(node.parent is None or node.parent.alive, "a block without the one before it")
            need(node.parent is None or node.history[: len(node.parent.history)] == node.parent.history, "I12: history")
        for turn in self.open:
            c = turn.clock
            need(0 <= c.h <= self.plan.block_tokens * c.pub <= c.n <= c.w and c.h % self.plan.block_tokens == 0,
                 f"I1: {c}")

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _room(self, turn: Turn, first: int, stop: int) -> None:
        assert turn.holding is not None
        lacking = self.memory.need(turn.holding, first, stop) - self.memory.free_blocks
        if lacking > 0:
            self.cache.evict(lacking)
        if not self.memory.prepare(turn.holding, first, stop):
            raise NoRoom

    def _run(self, turn: Turn, part: Part, drafts: Sequence[int] = ()) -> NDArray[np.float32]:
        assert turn.holding is not None
        ids = np.array([*turn.prompt, *turn.tokens, *drafts], dtype=np.int64)
        self.batch.clear()
        self.batch.add(ids[part.c:part.stop], slot=turn.holding.slot, c=part.c, blocks=turn.holding.blocks,
                       kept=part.kept, wanted=part.wanted, floor=part.floor, start_step=part.start_step,
                       start_kept=part.start_kept, before=ids[max(0, part.c - self.plan.lookback):part.c])
        out: NDArray[np.float32] = np.array(self.engine.run("step", self.batch)["logits"])
        return out


def check_answer(plan: EnginePlan, turn: Turn) -> None:
    """The tokens are those of the replay log; of a request that has to be exact, those of a cold run."""
    count = len(turn.tokens)
    if count:
        need(turn.tokens == expected(plan, turn.prompt, count, turn.clock.log), f"I18: {turn.clock.log}")
        if must_be_exact(plan, turn.request.params.replay):
            need(turn.tokens == expected(plan, turn.prompt, count), f"an exact request: {turn.clock.log}")
    need(all(r.axis in (STEP, KEPT) for r in turn.clock.log), "the log")
