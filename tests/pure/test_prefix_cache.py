"""The prefix cache on a witness engine: what a request adopts never changes its answer but as its replay log says.

``test_a_mutant_is_caught`` breaks one rule at a time:

| rule | mutant |
|---|---|
| I4 nothing below the hit is written again | the write floor is one group too low; too high |
| I6, I9 windows begin where each axis says | one window start for all axes; a hit leaves the start at 0 |
| I10 blocks are recycled when nobody holds them | a block is evicted under its reader |
| I11 only committed rows are published | blocks are published up to the written rows |
| I11 ids are compared | a key alone decides |
| I12 lineage | exact requests adopt replayed blocks; a replayed block is published as exact; windows of a replayed
  run are kept at the hit |
| windows | a snapshot holds rows one position off; a short suffix takes the snapshot at the hit |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_loop import NoRoom, PrefixLoop, Turn, check_answer, expected
from witness import WitnessFailure, need, witness_plan

from deepinfer.errors import InternalError
from deepinfer.runtime.clock import KEPT, STEP, Clock, Replayed
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix import cache as cache_module
from deepinfer.runtime.prefix import tree as tree_module
from deepinfer.runtime.prefix.cache import MemoryCache, Progress
from deepinfer.runtime.prefix.tree import NO_WINDOWS, BlockTree
from deepinfer.runtime.prefix.windows import WindowPool


def ids(seed: int, count: int, vocab: int = 61) -> list[int]:
    out: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
    return out


def small_plan(window: int = 8, block: int = 16, **changes: Any) -> EnginePlan:
    return witness_plan(**{"window": window, "block": block, "max_len": 200, "step": 48, "seqs": 3, **changes})


# ---- random histories -----------------------------------------------------------------------------------------------
class Traffic:
    """Conversations that share beginnings, three at a time, in a pool of few blocks; aborts at any point."""

    def __init__(self, plan: EnginePlan, seed: int, blocks: int, snapshots: int,
                 cache: type[MemoryCache] = MemoryCache) -> None:
        self.rng = random.Random(seed)
        self.loop = PrefixLoop(plan, blocks, snapshots, cache=cache)
        self.texts = [ids(seed, 40), ids(seed, 40)[:21] + ids(seed + 1, 30)]

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.step()
            self.loop.check()
        for turn in list(self.loop.open):
            self.finish(turn)
        self.loop.cache.clear()
        self.loop.check()
        need(self.loop.memory.blocks.free == self.loop.memory.blocks.size, "I10: blocks are left over")

    def step(self) -> None:
        rng, loop, plan = self.rng, self.loop, self.loop.plan
        turn = rng.choice(loop.open) if loop.open else None
        what = rng.random()
        if len(loop.open) < plan.max_num_seqs and (turn is None or what < 0.5):
            turn = self.begin()
            while turn is not None and what < 0.3 and turn in loop.open and not turn.tokens:
                self.advance(turn)  # a whole prompt at once
            if turn in loop.open and what < 0.2:
                self.finish(turn)
        elif turn is not None and (what < 0.6 or self.full(turn)):
            self.finish(turn)
        elif turn is not None:
            self.advance(turn)

    def begin(self) -> Turn | None:
        rng, plan = self.rng, self.loop.plan
        text = rng.choice(self.texts)
        prompt = [*text[: rng.choice((len(text), len(text), rng.randrange(1, len(text) + 1)))],
                  *ids(rng.randrange(4), rng.choice((0, 1, 3, plan.window - 1, plan.window + 1, 20, 40)))]
        prompt = (prompt or [1])[: plan.max_model_len - 20]
        replay = rng.choice(("off", "exact", plan.window, plan.window, plan.window + 3))
        try:
            turn = self.loop.begin(prompt, replay, rng.choice((None, None, None, "other")), rng.random() < 0.1)
        except NoRoom:
            for other in self.loop.open[:1]:
                self.finish(other)
            return None
        return turn

    def advance(self, turn: Turn) -> None:
        rng, m = self.rng, self.loop.plan.draft_tokens
        try:
            if not turn.tokens:
                self.loop.chunk(turn, rng.choice((1, 3, 11, 40)))
                return
            for _ in range(rng.choice((1, 4, 12))):
                if self.full(turn):
                    return
                best = expected(self.loop.plan, [*turn.prompt, *turn.tokens], 1) if m and rng.random() < 0.3 else []
                self.loop.decode(turn, [*best, *ids(rng.randrange(99), rng.randrange(m + 1))][:m])
        except NoRoom:
            self.finish(turn)

    def full(self, turn: Turn) -> bool:
        plan = self.loop.plan
        return len(turn.prompt) + len(turn.tokens) + plan.draft_tokens + 2 > plan.max_model_len

    def finish(self, turn: Turn) -> None:
        self.loop.end(turn)
        check_answer(self.loop.plan, turn)
        if turn.tokens and len(self.texts) < 6:
            self.texts.append(turn.prompt + turn.tokens)
        elif turn.tokens:
            self.texts[self.rng.randrange(6)] = (turn.prompt + turn.tokens)[:120]


plans = st.builds(small_plan, window=st.sampled_from((8, 32)), block=st.sampled_from((8, 16, 64)),
                  ratio=st.sampled_from((1, 2, 4)), drafts=st.sampled_from((0, 1, 5)), lag=st.sampled_from((0, 1)))


class BlockByBlock(MemoryCache):
    """Compares how far a sequence is published with what is found for one that was forked or resumed."""

    compared = 0

    def _begin(self, s: Any) -> Progress:
        nodes = self._adopted.get(s)
        progress = super()._begin(s)
        if nodes:
            other = super()._begin(s)
            found = [(p.settled, p.last, p.closed, p.pins, p.edges) for p in (progress, other)]
            assert found[0] == found[1], "adopted blocks are not where the chain says"
            BlockByBlock.compared += 1
        return progress


def test_adopted_blocks_count_as_published_as_a_walk_over_them_finds() -> None:
    for seed in range(4):
        Traffic(small_plan(), seed, blocks=48, snapshots=6, cache=BlockByBlock).run(60)
    assert BlockByBlock.compared > 20


@settings(max_examples=10)
@given(plans, st.integers(0, 10**6), st.integers(0, 12), st.sampled_from((0, 1, 3, 20)))
def test_answers_are_those_of_their_replay_logs(plan: EnginePlan, seed: int, more: int, snapshots: int) -> None:
    Traffic(plan, seed, plan.blocks_per_sequence + more, snapshots).run(40)


def test_the_traffic_of_these_tests_has_hits_of_every_kind() -> None:
    kinds: dict[str, float] = {}
    for seed in range(6):
        traffic = Traffic(small_plan(drafts=seed % 2 * 5), seed, 40, (0, 20)[seed % 2])
        traffic.run(60)
        for kind, count in traffic.loop.cache.counters.how.values.items():
            kinds[kind] = kinds.get(kind, 0) + count
    assert set(kinds) == {"snapshot", "exact", "replay"} and all(count > 3 for count in kinds.values())


# ---- edges ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("window", [8, 32])
@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("replay", ["exact", "window"])
def test_hits_at_every_edge_answer_as_their_logs_say(window: int, block: int, replay: str) -> None:
    plan = small_plan(window, block, max_len=330)
    option: Any = window if replay == "window" else replay
    whole = ids(window + block, 310)
    for hit in sorted({block, 2 * block, max(block, window // block * block), (window + block) // block * block}):
        for suffix in (1, window - 1, window, window + 1, block + 1, 129):
            for snapshots in (0, 8):
                loop = PrefixLoop(plan, 60, snapshots)
                loop.answer(whole[:hit], 1, "exact", chunk=23)
                turn = loop.answer(whole[: hit + suffix], 3, option, chunk=suffix % 7 + 3)
                check_answer(plan, turn)
                loop.check()
                assert turn.cached in (0, hit), (hit, suffix)


def test_without_windows_a_hit_no_longer_than_the_window_is_not_adopted() -> None:
    plan = small_plan(window=32, block=16)
    whole = ids(1, 150)
    for hit, adopted in ((16, 0), (32, 0), (48, 48)):
        loop = PrefixLoop(plan, 60, snapshots=0)
        loop.answer(whole[:hit], 1)
        turn = loop.answer(whole[: hit + 40], 2, 32)
        assert turn.cached == adopted
        assert [r for r in turn.clock.log if r.axis == STEP] == ([Replayed(STEP, 16, 48)] if adopted else [])


def test_a_short_suffix_takes_the_windows_one_block_before_the_hit() -> None:
    plan = small_plan(window=8, block=16)
    whole = ids(2, 100)
    loop = PrefixLoop(plan, 60)
    loop.answer(whole[:64], 1, 8)
    runs, turn = loop.engine.runs, loop.answer(whole[:67], 1, 8)
    assert turn.cached == 64 and turn.clock.log == [Replayed(KEPT, 59)]  # rows 48 .. 63 ran again, exactly
    assert loop.engine.runs > runs and loop.rerun == 16
    check_answer(plan, turn)


def test_an_answer_is_found_by_the_next_turn() -> None:
    plan = small_plan()
    loop = PrefixLoop(plan, 60)
    first = loop.answer(ids(3, 20), 50, 8)
    second = loop.answer([*first.prompt, *first.tokens, *ids(4, 9)], 5, 8)
    assert second.cached == 64 and [r.axis for r in second.clock.log] == [KEPT]  # 69 rows were computed
    check_answer(plan, second)


def test_a_model_that_is_not_trained_for_replay_is_never_replayed() -> None:
    plan = small_plan()
    plan = replace(plan, least_keep=plan.exact_keep, rerun=plan.exact_rerun)
    for snapshots, how in ((0, "exact"), (8, "snapshot")):
        loop = PrefixLoop(plan, 60, snapshots)
        first = loop.answer(ids(5, 100), 30)
        second = loop.answer([*first.prompt, *first.tokens, *ids(6, 40)], 4)
        assert second.cached == 128 and loop.cache.counters.how.values == {how: 1}
        assert second.tokens == expected(plan, second.prompt, 4)
        assert all(node.exact for node in loop.cache.tree)


def test_windows_at_an_exactly_rerun_hit_are_kept_for_the_next_one() -> None:
    loop = PrefixLoop(small_plan(), 60, snapshots=3)
    whole = ids(7, 150)
    loop.answer(whole[:130], 1)
    for seed in (1, 2):
        turn = loop.answer([*whole[:100], *ids(seed, 40)], 2, "exact")
        assert turn.cached == 96
        check_answer(loop.plan, turn)
    assert loop.cache.counters.how.values == {"exact": 1, "snapshot": 1}


def test_prompt_logprobs_adopt_nothing_and_publish_exact_blocks() -> None:
    loop = PrefixLoop(small_plan(), 60)
    whole = ids(8, 70)
    loop.answer(whole, 1, 8)
    turn = loop.begin(whole, 8, logprobs=True)
    assert turn.cached == 0 and turn.clock.log == []
    while not loop.chunk(turn, 20):
        pass
    loop.end(turn)
    assert all(node.exact for node in loop.cache.tree)


# ---- lineage --------------------------------------------------------------------------------------------------------
def replayed_chain(loop: PrefixLoop, whole: list[int]) -> Turn:
    """48 exact positions, and behind them entries that hang on a replay."""
    loop.answer(whole[:48], 1, "exact")
    return loop.answer(whole[:112], 1, 8)


def test_lineage_sticks_down_the_chain_and_exact_requests_stop_before_it() -> None:
    loop, whole = PrefixLoop(small_plan(), 60, snapshots=0), ids(9, 200)
    replayed_chain(loop, whole)
    assert [(n.number, n.exact) for n in sorted(loop.cache.tree, key=lambda n: n.number)] == [
        (b, b < 3) for b in range(7)]
    later = loop.answer(whole[:150], 1, 8)
    assert later.cached == 112 and later.clock.log[:2] == [Replayed(STEP, 40, 48), Replayed(STEP, 104, 112)]
    exact = loop.answer(whole[:150], 2, "exact")
    assert exact.cached <= 48
    for turn in (later, exact):
        check_answer(loop.plan, turn)


def test_an_exact_block_replaces_a_replayed_one_and_what_hangs_on_it() -> None:
    loop, whole = PrefixLoop(small_plan(), 60, snapshots=0), ids(10, 200)
    replayed_chain(loop, whole)
    loop.answer(whole[:80], 1, "exact")
    assert {(n.number, n.exact) for n in loop.cache.tree} == {(b, True) for b in range(5)}
    assert loop.cache.counters.replaced.value == 1
    loop.check()


def test_a_replayed_block_never_hangs_on_another_history() -> None:
    """Of two runs that replayed at different places the one that comes later publishes nothing behind the other."""
    loop, whole = PrefixLoop(small_plan(), 80, snapshots=0), ids(11, 200)
    loop.answer(whole[:48], 1, "exact")
    late = loop.begin(whole[:190], 8)
    first = loop.answer(whole[:112], 1, 8)
    second = loop.answer(whole[:150], 1, 8)
    while not loop.chunk(late, 40):
        pass
    loop.check()
    loop.end(late)
    assert max(node.number for node in loop.cache.tree) == 8
    third = loop.answer(whole[:195], 2, 8)
    assert [r.floor for r in third.clock.log if r.axis == STEP] == [48, 112, 144]
    for turn in (first, second, late, third):
        check_answer(loop.plan, turn)


# ---- tenants, ids, memory -------------------------------------------------------------------------------------------
def test_tenants_share_nothing() -> None:
    loop, whole = PrefixLoop(small_plan(), 60), ids(12, 80)
    assert loop.answer(whole, 1, salt="one").cached == 0
    assert loop.answer(whole, 1, salt="two").cached == 0
    assert loop.answer(whole, 1).cached == 0
    assert loop.answer(whole, 1, salt="one").cached == 64


def test_equal_keys_of_other_ids_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = PrefixLoop(small_plan(), 60)
    collide(monkeypatch)
    a, b = (loop.answer(ids(seed, 70), 3) for seed in (13, 14))
    assert b.cached == 0
    check_answer(loop.plan, a)
    check_answer(loop.plan, b)
    loop.check()


def test_blocks_that_only_the_cache_holds_make_room_oldest_ends_first() -> None:
    plan = small_plan(max_len=140)
    loop = PrefixLoop(plan, 12, snapshots=4)
    first, second = ids(15, 70), ids(16, 70)
    loop.answer(first, 1)
    loop.answer(second, 1)
    assert len(loop.cache.tree) == 8 and loop.cache.evictable == 8
    loop.answer([*second, *ids(17, 50)], 1)  # 4 blocks adopted, 4 taken: 4 free ones are there
    loop.answer(ids(18, 60), 1)  # 4 more: the ends of the first go
    assert loop.answer(second, 1).cached == 64
    assert loop.answer(first, 1).cached < 64
    loop.check()


def test_a_block_that_somebody_reads_is_never_given_up() -> None:
    loop = PrefixLoop(small_plan(max_len=140), 12)
    reader = loop.begin(ids(19, 70))
    while not loop.chunk(reader, 30):
        pass
    assert loop.cache.evictable == 0 and loop.cache.evict(5) == 0
    with pytest.raises(NoRoom):
        loop.begin(ids(20, 130))
    loop.end(reader)
    assert loop.cache.evictable == 4


def test_a_pool_of_one_snapshot_serves_the_latest_end() -> None:
    loop, whole = PrefixLoop(small_plan(), 60, snapshots=1), ids(21, 190)
    for length in (40, 80, 120):
        loop.answer(whole[:length], 1, 8)
        assert loop.cache.windows.held == 1
    last = next(n for n in loop.cache.tree if n.windows != NO_WINDOWS)
    assert last.number == 120 // 16 - 1


# ---- mutants --------------------------------------------------------------------------------------------------------
Patch = Callable[[pytest.MonkeyPatch], None]


def collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that say nothing but the number of the block."""
    def settled(self: MemoryCache, s: Any, text: Any) -> Any:
        chain = original(self, s, text)
        chain._keys = [bytes([i]) * 16 for i in range(len(chain))]
        return chain
    original = MemoryCache._chain
    monkeypatch.setattr(MemoryCache, "_chain", settled)


def ids_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    collide(monkeypatch)
    for module in (cache_module, tree_module):
        monkeypatch.setattr(module, "ids_of", lambda *_: b"")


def changed_floor(by: int) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Clock.part

        def part(self: Clock, *a: Any) -> Any:
            found = original(self, *a)
            return replace(found, floor=max(0, found.floor + by * self.plan.entry_positions) if found.floor else 0)
        monkeypatch.setattr(Clock, "part", part)
    return patch


def starts(change: Callable[[Clock], dict[str, int]]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Clock.prompt

        def prompt(self: Clock, *a: Any) -> None:
            hit = self.adopted
            original(self, *a)
            if hit:
                self.starts = change(self)
        monkeypatch.setattr(Clock, "prompt", prompt)
    return patch


def published_to_w(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemoryCache.committed

    def committed(self: MemoryCache, s: Any) -> None:
        n, s.clock.n = s.clock.n, s.clock.w
        s.tokens += [5] * (s.clock.w - n)
        original(self, s)
        s.tokens = s.tokens[: len(s.tokens) - (s.clock.w - n)]
        s.clock.n = n
    monkeypatch.setattr(MemoryCache, "committed", committed)


def evicted_under_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(self: BlockTree, need: int) -> int:
        for node in list(self._order)[:need]:
            if node.alive:
                while self.pool.shared(node.block):
                    self.pool.give_back(node.block)
                self.remove(node)
        return need
    monkeypatch.setattr(BlockTree, "evict", evict)


def published_as_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "history_of", lambda self, block, size: ())


def every_block_serves_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "must_be_exact", lambda plan, option: False)


def windows_of_the_replay_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemoryCache._begin

    def begin(self: MemoryCache, s: Any) -> Progress:
        progress = original(self, s)
        progress.first_edge = 0
        progress.edges = (*progress.edges, s.clock.h)
        return progress
    monkeypatch.setattr(MemoryCache, "_begin", begin)


def windows_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WindowPool.restore
    monkeypatch.setattr(WindowPool, "restore", lambda self, number, slot, at: original(self, number, slot, at + 1))


def a_short_suffix_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.runtime.prefix.road.kept_rows", lambda *_: 1)


MUTANTS: dict[str, Patch] = {
    "I4 the write floor is one group too low": changed_floor(-1),
    "I4 the write floor is one group too high": changed_floor(1),
    "I6 one window start for all axes": starts(lambda c: {STEP: c.starts[KEPT], KEPT: c.starts[KEPT]}),
    "I9 a hit without windows leaves the start": starts(lambda c: {STEP: 0, KEPT: c.starts[KEPT]}),
    "I10 a block is evicted under its reader": evicted_under_readers,
    "I11 published to the written rows": published_to_w,
    "I11 a key alone decides": ids_are_not_compared,
    "I12 exact requests adopt replayed blocks": every_block_serves_everybody,
    "I12 a replayed block is published as exact": published_as_exact,
    "I12 windows of a replayed run at the hit": windows_of_the_replay_are_kept,
    "windows one position off": windows_one_off,
    "a short suffix takes the snapshot at the hit": a_short_suffix_is_forgotten,
}


def traffic_for_mutants(seeds: int = 16) -> None:
    for seed in range(seeds):
        plan = small_plan(window=8, block=(8, 16)[seed % 2], ratio=2, drafts=(0, 5)[seed // 2 % 2], max_len=140)
        Traffic(plan, seed, plan.blocks_per_sequence + (4, 50)[seed % 2], (0, 4, 0, 20)[seed // 2 % 4]).run(40)


def test_traffic_that_mutants_are_tried_on_holds_without_one() -> None:
    traffic_for_mutants()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    with pytest.raises((WitnessFailure, InternalError, IndexError, KeyError)):
        traffic_for_mutants()
