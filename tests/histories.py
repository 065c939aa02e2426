"""Histories of sessions on a witness engine: random operations, the same ones on a reference, and the clock's books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from witness import Reference, WitnessEngine, need, witness_plan

from deepinfer.errors import PlanError, RequestError
from deepinfer.runtime.clock import KEPT, STEP
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.session import Session

# An operation is (name, x, y): x and y are reduced to what is possible when it runs.
Operation = tuple[str, int, int]
NAMES = ("feed", "feed", "feed", "verify", "verify", "draft", "adopt", "fork", "fork", "open", "close", "turn", "turn")

plans = st.builds(
    witness_plan, window=st.sampled_from((4, 8, 16)), block=st.sampled_from((4, 16, 32)),
    ratio=st.sampled_from((1, 2, 4)), drafts=st.sampled_from((0, 1, 5)), lag=st.sampled_from((0, 1)),
    lookback=st.sampled_from((0, 3)), seqs=st.just(3),
    step=st.sampled_from((7, 32)), wanted=st.sampled_from((6, 32)), max_len=st.just(90))
operations = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=14)


@dataclass
class Pair:
    """A session and the same history without rings, pages and chunks."""

    session: Session
    reference: Reference
    starts: dict[str, int]


class World:
    """Some sessions on one engine with few slots and blocks."""

    def __init__(self, plan: EnginePlan, blocks: int, shorter: dict[str, int] | None = None) -> None:
        self.plan = plan
        self.core = EngineCore(plan, WitnessEngine(plan, plan.max_num_seqs, blocks, shorter),
                               slots=plan.max_num_seqs, blocks=blocks)
        self.pairs: list[Pair] = []
        self.current = 0

    def run(self, operations: Sequence[Operation]) -> None:
        """Run all operations, comparing every result and checking the books after each."""
        try:
            for name, x, y in operations:
                if not self.pairs:
                    self.open(x, y)
                getattr(self, name)(x, y)
                self.check()
        finally:
            for pair in self.pairs:
                pair.session.close()
        self.core.memory.check()
        need(self.core.memory.blocks.free == self.core.memory.blocks.size, "I10: blocks are left over")

    @property
    def pair(self) -> Pair:
        return self.pairs[self.current]

    # ---- operations ---------------------------------------------------------------------------------------------
    def open(self, x: int, y: int) -> None:
        keep = (self.plan.window + x % 5) if y % 2 else None
        try:
            session = Session(self.core, "off" if keep is None else keep)
        except PlanError:
            return  # all slots are taken
        self.pairs.append(Pair(session, Reference(self.plan), {STEP: 0, KEPT: 0}))
        self.current = len(self.pairs) - 1

    def feed(self, x: int, y: int) -> None:
        room = self.plan.max_model_len - len(self.pair.session)
        if room:
            self._feed(1 + x % min(room, (1, 3, 40)[y % 3]), 1 + y % 9, y)

    def verify(self, x: int, y: int) -> None:
        """The anchor and drafts in one step, of which a part stays."""
        m, pair = self.plan.draft_tokens, self.pair
        if len(pair.session) + m + 1 > self.plan.max_model_len or not self._feed(m + 1, m + 1, y):
            return
        to = len(pair.session) - x % (m + 1)
        try:
            pair.session.rewind(to)
        except RequestError:
            return  # a cut window begins there
        pair.reference.rewind(to)

    def draft(self, x: int, y: int) -> None:
        if self.plan.draft_tokens and not self.pair.session._clock.adopted:
            got, expected = self.pair.session.draft(x % self.plan.vocab_size), self.pair.reference.draft(
                x % self.plan.vocab_size)
            need(np.array_equal(got.logits, expected["draft_logits"][0]), "I7: another draft")

    def adopt(self, x: int, y: int) -> None:
        clock, unit = self.pair.session._clock, self.plan.entry_positions
        tokens = x % (clock.n // unit + 1) * unit
        self.pair.session.adopt(tokens)
        self.pair.reference.adopt(tokens)
        self.pair.starts = {STEP: 0, KEPT: 0}

    def fork(self, x: int, y: int) -> None:
        try:
            session = self.pair.session.fork()
        except PlanError:
            return
        self.pairs.append(Pair(session, self.pair.reference.fork(), dict(self.pair.starts)))
        self.current = len(self.pairs) - 1

    def close(self, x: int, y: int) -> None:
        self.pairs.pop(x % len(self.pairs)).session.close()
        self.current = 0

    def turn(self, x: int, y: int) -> None:
        self.current = x % len(self.pairs)

    def _feed(self, count: int, chunk: int, seed: int) -> bool:
        session, reference = self.pair.session, self.pair.reference
        ids = np.random.default_rng(seed).integers(0, self.plan.vocab_size, count)
        try:
            got = session.feed(ids, chunk=[chunk, 1 + seed % 4])
        except PlanError:
            return False  # no blocks
        keep = None if session.replay == "off" else int(session.replay or 0)
        need(np.array_equal(got, reference.feed(ids, keep)), "I18: other logits")
        return True

    # ---- books --------------------------------------------------------------------------------------------------
    def check(self) -> None:
        for pair in self.pairs:
            self._check_clock(pair)
        self.core.memory.check()

    def _check_clock(self, pair: Pair) -> None:
        plan, c = self.plan, pair.session._clock
        need(0 <= c.h <= c.n <= c.w <= c.n + max(plan.rewind_rows, plan.draft_tokens + 1), f"I1: {c}")
        need(c.row == c.n, f"I1: {c}")
        need(c.t == c.n == len(pair.session), f"I2: {c}")
        if not c.adopted:  # after a hit they are set when it is known how far back rows run again
            need(all(c.starts[x] >= pair.starts[x] for x in (STEP, KEPT)), f"I9: {c}")
            pair.starts = dict(c.starts)
        holding = pair.session._holding
        need(holding is not None and holding.count == c.blocks, f"I10: {c}")
