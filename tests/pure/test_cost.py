"""The chunk budget: what a long prompt does to those who decode, on an engine whose steps take a made-up time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from null_executor import NullEngine, VirtualClock, VirtualExecutor, null_plan

from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.sampling_params import SamplingParams

Cost = Callable[[int, int], float]


def gaps(cost: Cost, lag: int, stretch: float | None, prompt: int = 200_000) -> tuple[list[float], int]:
    """Seconds of each step with prompt rows of a long prompt beside 32 that decode, and how many there were."""
    clock, plan = VirtualClock(), null_plan(seqs=33, lag=lag)
    core = EngineCore(plan, NullEngine(), slots=33, blocks=10_000, lag=lag, now=clock, stretch=stretch,
                      executor=VirtualExecutor(plan, cost, now=clock))
    p = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True)
    for i in range(32):
        core.add(core.make(str(i), [3 + i] * 20, p))
    for _ in range(20):
        core.step()
    long = core.make("long", np.full(prompt, 7).tolist(), SamplingParams(temperature=0, max_tokens=1))
    core.add(long)
    seen = [clock.time]
    while not long.finished:
        core.step()
        seen.append(clock.time)
    found = np.diff(seen)
    return found[found > 0].tolist(), len(seen)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("cost", [
    lambda decoding, prompt: 4e-3 + 1e-6 * prompt,
    lambda decoding, prompt: 4e-3 + (2e-3 if prompt else 0) + 1e-6 * prompt,  # a step with prompt rows has a price
    lambda decoding, prompt: 4e-3 + 2e-3 * -(-prompt // 1024),  # in stairs
    lambda decoding, prompt: 20e-3 + 1e-5 * prompt])
def test_a_long_prompt_stretches_the_steps_of_others_to_twice_their_time_at_most(cost: Cost, lag: int) -> None:
    found, _ = gaps(cost, lag, 2.0)
    alone = cost(32, 0)
    assert np.percentile(found, 99) <= 2 * alone * (1 + 1e-9)  # times are sums of many floats
    assert np.median(found) >= 1.45 * alone  # and the prompt gets its part of the engine


def test_without_a_bound_chunks_are_as_long_as_the_engine_allows() -> None:
    found, steps = gaps(lambda decoding, prompt: 4e-3 + 1e-6 * prompt, 0, None)
    assert max(found) > 2.9 * 4e-3 and steps < 30


def test_chunks_follow_a_cost_that_grows_with_the_context() -> None:
    read = [0]

    def cost(decoding: int, prompt: int) -> float:
        read[0] += prompt
        return 4e-3 + prompt * (1e-6 + 4e-11 * read[0])
    found, _ = gaps(cost, 1, 2.0)
    assert np.percentile(found, 99) <= 8e-3
