"""What drafts were worth is known from an engine's first step on, if it ran before. Times are virtual."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from null_executor import NullEngine
from scripted_drafts import BLOCK, PROFILES, ScriptedExecutor, curves, scripted_plan

from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.speculation.acceptance import Acceptance
from deepinfer.runtime.speculation.interface import DraftPolicy, FixedDrafts
from deepinfer.runtime.speculation.scheduled import ScheduledDrafts

CURVES = curves()
CHAT, CODE, HOPELESS = PROFILES


def short_answers(policy: DraftPolicy, curve: str, profile: Any, lag: int) -> float:
    """Tokens a second of two generations of 16 answers of 20 to 60 tokens, from an engine's first step."""
    plan = scripted_plan(16, lag)
    executor = ScriptedExecutor(plan, CURVES[curve], (profile,))
    core = EngineCore(plan, NullEngine(), slots=16, blocks=1024, ends=(1,), seed=1, lag=lag, executor=executor,
                      policy=policy, now=executor.clock)
    for i in range(32):
        core.add(core.make(f"r{i}", [2, 3, 4], SamplingParams(max_tokens=20 + i * 17 % 40, seed=i, detokenize=False)))
    while core.requests:
        assert core.step()
    return executor.decoded / executor.clock()


def started(curve: str, known: object = None) -> ScheduledDrafts:
    policy = ScheduledDrafts(CURVES[curve], 16, BLOCK)
    policy.worth.recall(known)
    return policy


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("curve", "profile", "fixed"), [
    ("staircase", CODE, 5), ("staircase", HOPELESS, 0), ("memory_bound", CHAT, 5), ("compute_bound", CODE, 0)])
def test_short_answers_of_a_second_start_lose_next_to_nothing(curve: str, profile: Any, fixed: int, lag: int) -> None:
    first = started(curve)
    short_answers(first, curve, profile, lag)
    again = short_answers(started(curve, json.loads(json.dumps(first.worth.record()))), curve, profile, lag)
    assert again >= 0.99 * short_answers(FixedDrafts(fixed), curve, profile, lag)


@pytest.mark.parametrize("lag", [0, 1])
def test_where_all_drafts_pay_the_first_start_loses_nothing(lag: int) -> None:
    """A block is drafted behind the prompts of the first step, too."""
    ours, five = (short_answers(policy, "memory_bound", CODE, lag) for policy in (
        started("memory_bound"), FixedDrafts(BLOCK)))
    assert ours >= 0.99 * five


def test_an_earlier_life_is_outweighed_within_a_few_blocks() -> None:
    worth, slots = Acceptance(2), 64
    good = np.tile([0.9, 0.8], (slots, 1))
    for _ in range(200):
        worth.observe(np.full(slots, 2, np.int32), np.full(slots, 2, np.int32), good, np.ones(slots, bool))
    later = Acceptance(2)
    later.recall(worth.record())
    assert later.usual(False) == pytest.approx(worth.usual(False))
    for _ in range(10):
        later.observe(np.full(slots, 2, np.int32), np.zeros(slots, np.int32), 0.1 * good, np.ones(slots, bool))
    assert later.stated[0] < 0.45 < worth.stated[0]


@pytest.mark.parametrize("wrong", [
    None, [], {}, {"told": 3}, {"told": 3, "judged": [1, 1], "kept": [1, 1], "hoped": [1, 1], "stated": [1]},
    {"told": "x", "judged": [1, 1], "kept": [1, 1], "hoped": [1, 1], "stated": [1, 1]},
    {"told": 3, "judged": [0, 1], "kept": [1, 1], "hoped": [1, 1], "stated": [1, 1]},
    {"told": 3, "judged": [1, 1], "kept": [1, -1], "hoped": [1, 1], "stated": [1, 1]},
    {"told": 3, "judged": [1, float("nan")], "kept": [1, 1], "hoped": [1, 1], "stated": [1, 1]},
    {"told": 3, "judged": [1], "kept": [1], "hoped": [1], "stated": [1]}])  # of another block
def test_a_record_that_is_none_says_nothing(wrong: object) -> None:
    worth = Acceptance(2)
    worth.recall(wrong)
    assert worth.record() == Acceptance(2).record()
