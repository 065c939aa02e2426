"""Who runs first, and who is not held up: priorities take memory from later turns, loads hold up nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from dict_tier import DictTier
from drafting import DraftingEngine
from loops import LOOPS, PLANS, alone, check_flights, prompt
from prefix_core import answered, check, core, ids, params, plan_for

from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.prefix.cache import MemoryCache
from deepinfer.runtime.prefix.roots import Roots
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sequence import Request

ROOTS = Roots((b"weights", b"numerics", b"plan"))
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def _until_all_run(c: EngineCore, requests: list[Request], steps: int = 6) -> None:
    for r in requests:
        c.add(r)
    for _ in range(steps):
        c.step()
    assert len(c.scheduler.running) == len(requests) and not c.metrics.preemptions.value


def _finish(c: EngineCore, requests: list[Request]) -> None:
    while c.step():
        check_flights(c)
        c.memory.check()
    for r in requests:
        assert r.outputs[0].token_ids == alone(r.prompt_ids, r.params, ends=())
    assert c.residence.spill_left == 1 << 30 and not c.memory.spilled


@pytest.mark.parametrize("m", [0, 5])
@pytest.mark.parametrize("lag", LOOPS)
@pytest.mark.parametrize("cached", [False, True])
def test_a_request_of_higher_priority_takes_the_place_of_the_last_in_turn(lag: int, m: int, cached: bool) -> None:
    plan = PLANS[lag, m]
    how: dict[str, Any] = {"prefix": MemoryCache(plan, snapshots=4)} if cached else {}
    c = EngineCore(plan, DraftingEngine(plan, 4, 40), slots=4, blocks=40, lag=lag, **how)
    low = [c.make(f"low{i}", prompt(i, 12), LONG, priority=1) for i in range(4)]  # every slot
    _until_all_run(c, low)
    high = c.make("high", prompt(9, 12), SHORT)
    c.add(high)
    steps = 0
    while high.metrics.first_scheduled_time is None:
        c.step()
        steps += 1
    assert steps <= 2 + lag
    _finish(c, [*low, high])
    assert [r.metrics.num_preemptions for r in low] == [0, 0, 0, 1]
    assert c.metrics.spilled.value == 1 and high.metrics.finished_time is not None
    assert all(r.metrics.finished_time is not None for r in low)


@pytest.mark.parametrize("lag", LOOPS)
def test_as_many_give_way_as_a_long_prompt_of_higher_priority_needs(lag: int) -> None:
    plan = PLANS[lag, 0]
    c = EngineCore(plan, DraftingEngine(plan, 4, 14), slots=4, blocks=14, lag=lag,
                   prefix=MemoryCache(plan, snapshots=4))
    low = [c.make(f"low{i}", prompt(i, 20), SHORT if i == 0 else LONG, priority=1) for i in range(3)]
    _until_all_run(c, low, 3)
    high = c.make("high", prompt(9, 58), SHORT)
    c.add(high)
    _finish(c, [*low, high])
    assert low[0].metrics.num_preemptions == 0 and low[1].metrics.num_preemptions + low[2].metrics.num_preemptions >= 1
    assert all(high.metrics.finished_time <= (r.metrics.finished_time or 0) for r in low[1:])  # type: ignore[operator]


@pytest.mark.parametrize("lag", LOOPS)
def test_nobody_gives_way_to_the_same_priority_or_in_vain(lag: int) -> None:
    c = EngineCore(PLANS[lag, 0], DraftingEngine(PLANS[lag, 0], 4, 12), slots=4, blocks=12, lag=lag)
    first = c.make("first", prompt(0, 45), SHORT)  # 6 blocks, and before all others in turn
    low = c.make("low", prompt(1, 12), SHORT, priority=1)
    _until_all_run(c, [first, low], 2)
    same, high = c.make("same", prompt(2, 58), SHORT, priority=1), c.make("high", prompt(3, 58), SHORT)
    c.add(same)
    c.add(high)  # needs 9 blocks; 6 are left for it when all later ones are gone
    while not first.finished and not low.finished:
        c.step()
        assert not c.metrics.preemptions.value
    _finish(c, [first, low, same, high])


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("lag", LOOPS)
def test_a_request_whose_blocks_are_on_their_way_does_not_hold_up_the_queue(lag: int, running: bool) -> None:
    plan = plan_for(lag=lag)
    tier, whole = DictTier(plan, delay=30), [ids(4, 190), ids(14, 190)]
    answered(core(plan, tier=tier, lag=lag, roots=ROOTS), [(x[:150], params("exact", 1)) for x in whole])
    tier.land()
    c = core(plan, tier=tier, lag=lag, roots=ROOTS)
    if running:
        c.add(c.make("before", ids(6, 20), params("off", 60)))
        c.step()
    loading = [c.make(f"loading{i}", x, params(8, 2)) for i, x in enumerate(whole)]
    behind = c.make("behind", ids(5, 20), params("off", 5))
    for r in (*loading, behind):
        c.add(r)
    while not behind.finished:
        c.step()
        assert not any(r.metrics.first_scheduled_time for r in loading)
    while c.step():
        c.memory.check()
    for r in loading:
        check(plan, r.updates[-1], 8)
        assert r.updates[-1].num_cached_tokens == 144


def test_a_preempted_request_is_overtaken_for_its_minute_and_then_ends() -> None:
    plan, time = PLANS[0, 0], [0.0]
    c = EngineCore(plan, DraftingEngine(plan, 4, 40), slots=1, blocks=40, now=lambda: time[0])
    low = c.make("low", prompt(0, 12), LONG, priority=1)
    c.add(low)
    high: list[Request] = []
    while not low.finished:
        high.append(c.make(str(len(high)), prompt(1 + len(high) % 7, 12), SHORT))
        c.add(high[-1])
        for _ in range(5):  # one request of higher priority takes as many steps
            c.step()
        time[0] += 2
    before = [r for r in high if r.finished]
    assert low.outputs[0].token_ids == alone(low.prompt_ids, LONG, ends=())
    assert 28 <= len(before) <= 31 and low.metrics.num_preemptions <= 31
    assert all(r.metrics.arrival_time <= 60 for r in before)


def test_blocks_that_are_loaded_for_another_request_keep_nobody_out_when_nothing_runs() -> None:
    plan = plan_for()
    tier, whole = DictTier(plan, delay=1000), ids(4, 190)
    answered(core(plan, tier=tier, roots=ROOTS), [(whole[:150], params("exact", 1))])
    tier.land()
    c = core(plan, tier=tier, roots=ROOTS, blocks=16)
    before = c.make("before", ids(6, 20), params("off", 4))
    loading, first = c.make("loading", whole, params(8, 2)), c.make("first", ids(7, 170), params("off", 2), priority=-1)
    c.add(before)
    c.step()
    c.add(loading)
    c.step()
    c.add(first)
    while c.step():
        c.memory.check()
    for r, option in ((before, "off"), (loading, 8), (first, "off")):
        check(plan, r.updates[-1], option)
    assert (first.metrics.first_scheduled_time or 0) < (loading.metrics.first_scheduled_time or 0)
