"""The tier below the prefix cache: what it gives is adopted like a block of memory, what it spoils is never seen."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dict_tier import DictTier
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_core import answered, check, ids, params, plan_for
from prefix_core import core as plain_core
from prefix_loop import expected

from deepinfer.runtime.clock import STEP
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.roots import Roots
from deepinfer.runtime.store.layout import layout_of
from deepinfer.runtime.store.settings import StoreSettings
from deepinfer.runtime.store.store import Store
from deepinfer.runtime.store.tier import Status

ROOTS = Roots((b"weights", b"numerics", b"plan"))


def core(plan: EnginePlan, tier: Any, blocks: int = 60, snapshots: int = 16, lag: int = 0,
         **more: Any) -> EngineCore:
    return plain_core(plan, blocks, snapshots, lag, roots=ROOTS, tier=tier, **more)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("replay", ["exact", 8])
def test_an_engine_finds_what_another_one_stored(lag: int, replay: Any) -> None:
    plan = plan_for(lag)
    tier, whole = DictTier(plan), ids(1, 190)
    first = core(plan, tier, lag=lag)
    answered(first, [(whole[:150], params(replay, 3, cache_class="agent"))])
    first.close()
    assert len(tier.records) == 9 and {r[3] for r in tier.records.values()} == {"agent"}
    second = core(plan, tier, lag=lag)
    out = answered(second, [(whole, params(replay, 5))])[0]
    assert out.num_cached_tokens == 144 and tier.fetched == 9
    check(plan, out, replay)
    assert 'deepinfer:prefix_hit_tokens_total{tier="store"} 144' in second.metrics.text().splitlines()
    again = answered(second, [(whole, params(replay, 5))])[0]
    assert tier.fetched == 9 and again.num_cached_tokens == 176
    check(plan, again, replay)


@pytest.mark.parametrize("bad", range(9))
@pytest.mark.parametrize("status", [Status.DAMAGED, Status.MISS, Status.IO_ERROR, Status.CANCELLED])
def test_a_bad_block_cuts_the_hit_before_any_row_runs(bad: int, status: Status) -> None:
    plan = plan_for()
    tier, whole = DictTier(plan), ids(2, 190)
    answered(core(plan, tier), [(whole[:150], params("exact", 1))])
    tier.land()
    order = iter(status if i == bad else Status.OK for i in range(9))
    tier.spoil = lambda: next(order)
    out = answered(core(plan, tier), [(whole, params(8, 4))])[0]
    floor = bad * 16
    assert out.num_cached_tokens == (floor if floor > 8 else 0)
    check(plan, out, 8)


def test_replayed_blocks_are_found_under_their_history_only() -> None:
    plan = plan_for()
    tier, whole = DictTier(plan), ids(3, 200)
    answered(core(plan, tier), [(whole[:100], params("exact", 1))])
    tier.land()
    for length in (150, 199):  # each engine begins with an empty memory, so each turn replays
        out = answered(core(plan, tier), [(whole[:length], params(8, 2))])[0]
        tier.land()
        check(plan, out, 8)
    assert [r.floor for r in out.replay_log if r.axis == STEP] == [96, 144]
    exact = answered(core(plan, tier), [(whole, params("exact", 3))])[0]
    assert exact.num_cached_tokens == 96
    check(plan, exact, "exact")
    assert {bool(r[2]) for r in tier.records.values()} == {True, False}


def test_others_go_on_while_blocks_are_on_their_way() -> None:
    plan = plan_for()
    tier, whole = DictTier(plan, delay=6), ids(4, 190)
    answered(core(plan, tier), [(whole[:150], params("exact", 1))])
    tier.land()
    c = core(plan, tier)
    running, waiting = c.make("a", ids(5, 20), params("off", 30)), c.make("b", whole, params(8, 2))
    c.add(running)
    c.step()
    c.add(waiting)
    steps = 0
    while waiting.metrics.first_scheduled_time is None:
        c.step()
        steps += 1
        c.memory.check()
    assert steps >= 6 and running.sequences[0].known >= 26
    while c.step():
        pass
    check(plan, waiting.updates[-1], 8)
    assert waiting.updates[-1].num_cached_tokens == 144


def test_a_request_that_is_aborted_while_its_blocks_load_leaves_none_behind() -> None:
    plan = plan_for()
    tier, whole = DictTier(plan, delay=5), ids(6, 190)
    answered(core(plan, tier), [(whole[:150], params("exact", 1))])
    tier.land()
    c = core(plan, tier)
    c.add(c.make("a", ids(5, 20), params("off", 30)))
    c.step()
    c.add(c.make("b", whole, params(8, 2)))
    c.step()
    c.abort("b")
    while c.step():
        c.memory.check()
    c.close()
    c.memory.check()


@pytest.mark.parametrize("delay", [0, 4])
def test_windows_of_a_model_without_the_licence_are_stored_and_found(delay: int) -> None:
    plan = plan_for()
    plan = replace(plan, least_keep=plan.exact_keep, rerun=plan.exact_rerun)
    tier, windows, whole = DictTier(plan, delay), DictTier(plan, delay), ids(8, 200)
    windows.sections = (("windows", plan.resume_bytes),)
    texts = [whole[:100]]
    for turn, found in enumerate(({}, {"snapshot": 1}, {"exact": 1})):
        if turn == 2:
            windows.records.clear()
        c = core(plan, tier, window_tier=windows)
        out = answered(c, [(texts[-1], params("off", 30))])[0]
        assert out.token_ids == expected(plan, texts[-1], 30)
        assert c.metrics.prefix_how.values == found  # type: ignore[attr-defined]
        assert out.num_cached_tokens == (len(texts[-1]) - 12) // 16 * 16 * (turn > 0)  # all rows of the turn before
        texts.append(out.prompt_token_ids + out.token_ids + ids(turn, 11))
        c.close()
        windows.land()


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from((0, 1)), st.sampled_from((0, 3)), st.sampled_from((18, 40)))
def test_answers_are_those_of_their_logs_whatever_the_tier_does(seed: int, lag: int, delay: int, blocks: int) -> None:
    rng, plan = random.Random(seed), plan_for(lag)
    ends = (Status.OK,) * 9 + (Status.DAMAGED, Status.MISS, Status.IO_ERROR)
    tier = DictTier(plan, delay, lambda: rng.choice(ends))
    texts = [ids(seed, 60), ids(seed, 30) + ids(seed + 1, 40)]
    for _ in range(3):
        c = core(plan, tier, blocks, rng.choice((0, 8)), lag)
        for _ in range(3):
            asked = [(rng.choice(texts)[: rng.choice((30, 70, 150))] + ids(rng.randrange(3), 20),
                      rng.choice(("exact", 8, 8))) for _ in range(2)]
            for out, (_, replay) in zip(answered(c, [(p, params(replay, 9)) for p, replay in asked]), asked,
                                        strict=True):
                check(plan, out, replay)
                texts.append((out.prompt_token_ids + out.token_ids)[:150])
        c.close()
        c.memory.check()


def test_the_store_on_disk_serves_the_next_process(tmp_path: Path) -> None:
    plan, whole = plan_for(), ids(7, 190)
    layout = layout_of(plan, b"i" * 16)
    for turn, length in enumerate((150, 190)):
        store = Store(StoreSettings(tmp_path / "store", quota=1 << 30, segment_bytes=1 << 20,
                                    index=tmp_path / "index"), layout)
        assert store.ready(120)
        c = core(plan, store)
        out = answered(c, [(whole[:length], params("exact", 4))])[0]
        assert out.token_ids == expected(plan, whole[:length], 4)
        assert out.num_cached_tokens == (144 if turn else 0)
        until = time.monotonic() + 120
        while any(True for _ in c.prefix.link.held()) and time.monotonic() < until:  # type: ignore[attr-defined]
            c.prefix.link.poll()  # type: ignore[attr-defined]
            time.sleep(0.01)
        c.close()
        c.memory.check()
