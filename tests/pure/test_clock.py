"""The clock of a sequence, on a witness engine: the invariants of its numbers and of everything that rows read.

Each invariant has a mutant below that breaks it; `test_a_mutant_is_caught` shows that the properties notice:

| invariant | mutant |
|---|---|
| I1 order of floor, rows and written rows | written rows are not raised by a step |
| I2 ids against rows | a rewind leaves the ids |
| I3 entries seen were written | the write floor is one group too high |
| I4 nothing below the floor, nothing shared is written | the floor is one group too low; a shared block is not copied |
| I5 raw rows of open groups | a group tail is two rows short |
| I6 windows from ring and chunk | a ring is one row short; one window start for all axes |
| I7 draft context | a draft begins one position late |
| I8 look-back reaches below floor and window starts | look-back ends at the first row that runs |
| I9 window starts rise by a hit | a hit leaves the window starts |
| I10 blocks and slots | a hit leaves the blocks; every sequence gets the first slot; freed blocks stay counted |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from histories import NAMES, World, operations, plans
from hypothesis import given, settings
from hypothesis import strategies as st
from witness import Reference, WitnessEngine, WitnessFailure, witness_plan

from deepinfer.errors import InternalError, RequestError
from deepinfer.runtime import engine_core, session
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.clock import KEPT, STEP, Clock
from deepinfer.runtime.engine_core import EngineCore, fill
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.plan import Replay
from deepinfer.runtime.pool import Pool
from deepinfer.runtime.sequence import TokenIds
from deepinfer.runtime.session import Session


@settings(max_examples=60)
@given(plans, operations, st.integers(0, 20))
def test_histories_equal_those_without_rings_pages_and_chunks(plan: Any, ops: Any, more: int) -> None:
    World(plan, plan.blocks_per_sequence + more).run(ops)


LENGTHS = (*range(1, 21), 31, 32, 33, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("replay", ["off", 8, 13])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 128])
def test_chunking_never_changes_a_result(chunk: int, replay: Any) -> None:
    plan = witness_plan(drafts=5, step=128, wanted=128, max_len=140)
    core = EngineCore(plan, WitnessEngine(plan, 1, 20), slots=1, blocks=20)
    ids = np.random.default_rng(5).integers(0, plan.vocab_size, max(LENGTHS))
    for length in LENGTHS if chunk > 1 else LENGTHS[-3:]:
        with Session(core, replay) as s:
            expected = Reference(plan).feed(ids[:length], None if replay == "off" else replay)
            assert np.array_equal(s.feed(ids[:length], chunk=chunk), expected)


def test_exact_replay_gives_the_row_of_a_run_that_keeps_all() -> None:
    plan = witness_plan(max_len=100, step=16)
    core = EngineCore(plan, WitnessEngine(plan, 3, 30), slots=3, blocks=30)
    ids = np.random.default_rng(6).integers(0, plan.vocab_size, 70)
    with Session(core, "exact") as exact, Session(core, "off") as full, Session(core, plan.window) as short:
        everything = full.feed(ids)
        assert np.array_equal(exact.feed(ids), everything[-1:])
        assert not np.array_equal(short.feed(ids)[-1:], everything[-1:])
        assert full.replay_log == () and [r.start for r in exact.replay_log] == [70 - plan.exact_keep]


def test_a_row_decoded_equals_the_row_prefilled() -> None:
    plan = witness_plan(max_len=100)
    core = EngineCore(plan, WitnessEngine(plan, 2, 20), slots=2, blocks=20)
    ids = np.random.default_rng(7).integers(0, plan.vocab_size, 90)
    with Session(core) as whole, Session(core) as single:
        rows = whole.feed(ids)
        assert np.array_equal(np.concatenate([single.feed([i]) for i in ids]), rows)


# ---- verify and accept --------------------------------------------------------------------------------------------
def speculative(plan: Any, prompt: list[int], count: int, accepted: random.Random) -> list[int]:
    """Greedy tokens with scripted drafts, some right and some wrong, verified on one clock."""
    engine, clock, batch = WitnessEngine(plan, 1, 20), Clock(plan), Batch(plan)
    memory = SequenceMemory(plan, engine, 1, 20)
    holding, ids = memory.open(), TokenIds(prompt, 200)

    def logits(part: Any) -> Any:
        batch.clear()
        fill(batch, part, ids, 0, holding.blocks, plan.lookback)
        return engine.run("step", batch)["logits"]

    truth = plain(plan, prompt, count + plan.draft_tokens + 1)
    clock.prompt(len(prompt), Replay(None, 0))
    memory.prepare(holding, 0, len(prompt))
    part = clock.part(len(prompt), 1)
    token = int(logits(part)[0].argmax())
    clock.ran(part)
    clock.sampled()
    out = [token]
    while len(out) < count:
        ids.extend([out[-1]])
        m = accepted.randrange(plan.draft_tokens + 1)
        drafts = [t if accepted.random() < 0.7 else (t + 1) % plan.vocab_size for t in truth[len(out): len(out) + m]]
        ids.extend(drafts)
        memory.prepare(holding, clock.n, clock.n + m + 1)
        best = logits(clock.verify(m)).argmax(axis=1).tolist()
        right = next((i for i, d in enumerate(drafts) if d != best[i]), m)
        clock.accept(right)
        ids.cut(clock.n)
        out += best[: right + 1]
        assert clock.t == clock.n + 1 <= clock.w + 1 <= clock.n + plan.draft_tokens + 2
    return out[:count]


def plain(plan: Any, prompt: list[int], count: int) -> list[int]:
    reference, out = Reference(plan), []
    row = reference.feed(prompt, None)[-1]
    for _ in range(count):
        out.append(int(row.argmax()))
        row = reference.feed(out[-1:], None)[-1]
    return out


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("drafts", [1, 5])
def test_verified_drafts_never_change_greedy_tokens(drafts: int, ratio: int) -> None:
    plan = witness_plan(drafts=drafts, ratio=ratio, max_len=160)
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(0, plan.vocab_size, 3 + 5 * seed).tolist()
        assert speculative(plan, prompt, 40, random.Random(seed)) == plain(plan, prompt, 40)


def test_a_stop_inside_an_accepted_run_cuts_it() -> None:
    clock = Clock(witness_plan(drafts=5))
    clock.prompt(10, Replay(None, 0))
    clock.ran(clock.part(10, 1))
    clock.sampled()
    clock.verify(5)
    clock.accept(4)
    clock.cut(13)
    assert (clock.t, clock.n, clock.w, clock.finished) == (13, 13, 16, True)


def test_restarted_rows_run_in_the_role_they_had() -> None:
    plan = witness_plan()
    clock = Clock(plan)
    clock.prompt(50, Replay(9, 0))
    clock.ran(clock.part(30, 0))
    before = clock.part(20, 1)
    clock.restart()
    assert clock.part(30, 0).kept == 0
    clock.ran(clock.part(30, 0))
    assert clock.part(20, 1) == before and before.kept == 9 and before.start_kept == 41


@pytest.mark.parametrize("wrong", [
    lambda c: c.part(0, 0), lambda c: c.part(11, 0), lambda c: c.part(5, 6), lambda c: c.sampled(),
    lambda c: c.verify(0), lambda c: c.accept(0), lambda c: c.prompt(0, Replay(None, 0))])
def test_a_transition_out_of_turn_is_a_bug_of_ours(wrong: Callable[[Clock], Any]) -> None:
    clock = Clock(witness_plan())
    clock.prompt(10, Replay(8, 0))
    with pytest.raises(InternalError, match="the clock cannot"):
        wrong(clock)


def test_going_back_too_far_is_refused_in_one_sentence() -> None:
    plan = witness_plan(drafts=5)
    core = EngineCore(plan, WitnessEngine(plan, 1, 20), slots=1, blocks=20)
    with Session(core) as s:
        s.feed(list(range(40)))
        with pytest.raises(RequestError, match=r"rewind: rows that far back are gone; found 34; allowed 35..40"):
            s.rewind(34)
        with pytest.raises(RequestError, match=r"adopt: the cache cannot be cut there; found 7; allowed 0..40"):
            s.adopt(7)
        assert len(s) == 40


# ---- mutants ------------------------------------------------------------------------------------------------------
Patch = Callable[[pytest.MonkeyPatch], dict[str, int] | None]


def changed_part(change: Callable[[Any, Any], Any], name: str = "part") -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(Clock, name)
        monkeypatch.setattr(Clock, name, lambda self, *a: change(self, original(self, *a)))
    return patch


def written_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Clock.ran

    def ran(self: Clock, part: Any) -> None:
        before = self.w
        original(self, part)
        self.w = before
    monkeypatch.setattr(Clock, "ran", ran)


def rewind_leaves_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Clock.rewind

    def rewind(self: Clock, to: int) -> None:
        t = self.t
        original(self, to)
        self.t = t
    monkeypatch.setattr(Clock, "rewind", rewind)


def shared_blocks_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(self: SequenceMemory, holding: Any, rows: int) -> Any:
        other = self.open()
        for block in holding.blocks.tolist():
            self.blocks.share(block)
            other.append(block)
        for s in self.plan.rings:
            self.engine.state(s.name, other.slot)[:] = self.engine.state(s.name, holding.slot)
        return other
    monkeypatch.setattr(SequenceMemory, "fork", fork)
    monkeypatch.setattr(SequenceMemory, "_written", lambda self, holding, first, stop: holding.blocks[:0])
    monkeypatch.setattr(Pool, "shared", lambda self, unit: False)


def hit_leaves_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Clock.prompt

    def prompt(self: Clock, *a: Any) -> None:
        starts, hit = dict(self.starts), self.adopted
        original(self, *a)
        self.starts = starts if hit else self.starts
    monkeypatch.setattr(Clock, "prompt", prompt)


def lookback_ends_at_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(batch: Batch, part: Any, ids: Any, slot: int, blocks: Any, lookback: int) -> None:
        batch.add(ids[part.c:part.stop], slot=slot, c=part.c, blocks=blocks, kept=part.kept, wanted=part.wanted,
                  floor=part.floor, start_step=part.start_step, start_kept=part.start_kept)
    monkeypatch.setattr(session, "fill", short)
    monkeypatch.setattr(engine_core, "fill", short)


def one_slot_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceMemory.open

    def open_(self: SequenceMemory) -> Any:
        holding = original(self)
        holding.slot = 0
        return holding
    monkeypatch.setattr(SequenceMemory, "open", open_)


def freed_blocks_stay_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Pool.give_back

    def give_back(self: Pool, unit: int) -> None:
        if self.what != "block":
            original(self, unit)
    monkeypatch.setattr(Pool, "give_back", give_back)


def only_shorter(**rows: int) -> Patch:
    return lambda monkeypatch: dict(rows)


MUTANTS: dict[str, Patch] = {
    "I1 written rows are not raised": written_rows_stay,
    "I2 a rewind leaves the ids": rewind_leaves_ids,
    "I3 the floor is one group too high": changed_part(
        lambda clock, part: replace(part, floor=part.floor + clock.plan.entry_positions if part.floor else 0)),
    "I4 the floor is one group too low": changed_part(
        lambda clock, part: replace(part, floor=max(0, part.floor - clock.plan.entry_positions))),
    "I4 a shared block is written": shared_blocks_are_written,
    "I5 a group tail is two rows short": only_shorter(tail=2),
    "I6 a ring is one row short": only_shorter(dr=1),
    "I6 one window start for all": changed_part(
        lambda clock, part: replace(part, start_kept=part.start_step)),
    "I7 a draft begins late": changed_part(lambda clock, part: replace(part, c=part.c + 1), "draft"),
    "I8 look-back ends at the step": lookback_ends_at_the_step,
    "I9 a hit leaves the window starts": hit_leaves_starts,
    "I10 a hit leaves the blocks": lambda monkeypatch: monkeypatch.setattr(
        SequenceMemory, "shorten", lambda self, holding, rows: None),
    "I10 one slot for all": one_slot_for_all,
    "I10 freed blocks stay counted": freed_blocks_stay_counted,
}


def random_history(seed: int) -> None:
    """One history of the generator's kind, from a seed, with the smallest sizes that show every rule."""
    rng = random.Random(seed)
    plan = witness_plan(window=4, block=rng.choice((4, 16)), ratio=rng.choice((2, 4)), drafts=rng.choice((1, 5)),
                        seqs=3, max_len=90)
    ops = [(rng.choice(NAMES), rng.randrange(10**6), rng.randrange(10**6)) for _ in range(20)]
    World(plan, plan.blocks_per_sequence + rng.randrange(20), SHORTER).run(ops)


SHORTER: dict[str, int] = {}


def test_histories_that_mutants_are_tried_on_hold_without_one() -> None:
    for seed in range(60):
        random_history(seed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sessions of a broken pool
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SHORTER", MUTANTS[mutant](monkeypatch) or {})
    with pytest.raises((WitnessFailure, InternalError, RequestError)):
        for seed in range(60):
            random_history(seed)


def test_starts_are_kept_apart_by_axis() -> None:
    clock = Clock(witness_plan())
    clock.prompt(64, Replay(None, 0))
    clock.ran(clock.part(64, 0))
    clock.adopt(32)
    clock.prompt(60, Replay(10, rerun=8))
    assert clock.starts == {STEP: 24, KEPT: 82}
    part = clock.part(68, 1)
    assert (part.c, part.floor, part.kept) == (24, 32, 10)


def test_rows_run_again_as_far_back_as_the_replay_option_needs() -> None:
    """Trained: one window in front of the hit, or the kept rows; exact: all that the wanted rows hang on."""
    plan = witness_plan(window=8)  # exact: 15 kept rows, 14 in front of a hit

    def first(option: Any, ids: int, wanted: int = 1, **changes: Any) -> int:
        clock = Clock(replace(plan, **changes))
        clock.prompt(100, clock.plan.replay_rows("off"))
        clock.ran(clock.part(100, 0))
        clock.adopt(64)
        replay = clock.plan.replay_rows(option, wanted)
        row = clock.first_row(ids, replay, wanted)
        clock.prompt(ids, replay, wanted)
        assert clock.starts[STEP] == clock.row == row
        return row
    assert first("off", 40) == first("off", 1) == first(8, 1) == 56
    assert (first(12, 1), first(12, 4), first(12, 5)) == (53, 56, 56)
    assert (first("exact", 40), first("exact", 1), first("exact", 40, 40)) == (50, 36, 36)
    only_exact = {"least_keep": plan.exact_keep, "rerun": plan.exact_rerun}
    assert (first("off", 40, 40, **only_exact), first("off", 40, 1, **only_exact)) == (36, 50)


def test_an_exact_session_is_exact_after_a_hit() -> None:
    plan = witness_plan(max_len=150, step=16)
    core = EngineCore(plan, WitnessEngine(plan, 2, 40), slots=2, blocks=40)
    ids = np.random.default_rng(8).integers(0, plan.vocab_size, 150)
    with Session(core, "exact") as s, Session(core) as full:
        rows = full.feed(ids)
        for hit, more in ((64, 1), (64, 3), (100, 40), (16, 30), (2, 5)):
            s.feed(ids[len(s):hit]) if len(s) < hit else s.adopt(hit)
            s.adopt(hit)
            assert np.array_equal(s.feed(ids[hit:hit + more]), rows[hit + more - 1:hit + more]), (hit, more)
            s.adopt(0)
