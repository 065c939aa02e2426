"""A budget may not be made from the drafts that it admits: a scheduler that does so changes the distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from null_executor import NullEngine, null_plan

from deepinfer.runtime.batch import Batch
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.executor import StepPlan, StepResult, share_drafts
from deepinfer.runtime.host_executor import HostExecutor
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.speculation.cost import CostCurve
from deepinfer.runtime.speculation.interface import FixedDrafts, Observed
from deepinfer.runtime.speculation.scheduled import ScheduledDrafts

TARGET, DRAFT = np.array([0.7, 0.3]), np.array([0.5, 0.5])


class Acausal(ScheduledDrafts):
    """Makes the budget from the very drafts that it is for."""

    def _sample(self, slots: Any) -> Any:
        return self.blocks[slots][:, None] - 1


def chi_square(policy: ScheduledDrafts, steps: int) -> float:
    """Of the first token of each step, with one degree of freedom: one sequence, a vocabulary of two, drafts judged by
    rejection. The confidence of the second draft is high behind token 0 and low behind token 1."""
    rng = np.random.default_rng(4)
    counts = np.zeros(2)
    slots, drafts, confidence, drafted = np.zeros(1, np.int64), np.zeros(2, int), np.full((1, 2), np.nan, np.float32), 0
    for _ in range(steps):
        budget = policy.budget(policy.most(slots), 1)
        verified = int(share_drafts(confidence, np.array([drafted], np.int32), budget)[0])
        accepted = 0
        while accepted < verified and rng.random() < min(1.0, TARGET[drafts[accepted]] / DRAFT[drafts[accepted]]):
            accepted += 1
        law = TARGET
        if accepted < verified:  # rejected: from what the target has more of
            law = np.maximum(0.0, TARGET - DRAFT)
            law = law / law.sum()
        after = int(rng.choice(2, p=law))
        counts[int(drafts[0]) if accepted else after] += 1
        drafts = rng.choice(2, 2, p=DRAFT)
        confidence = np.array([[0.8, 0.9 if drafts[0] == 0 else 0.05]], np.float32)
        drafted = 2
        policy.observe(Observed(slots, np.array([verified], np.int32), np.array([accepted], np.int32), confidence,
                                np.array([2], np.int32), 1, 0, 0.0))
    expected = TARGET * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_budget_from_the_drafts_themselves_changes_the_distribution_and_ours_does_not() -> None:
    """Two rows are dear, three cost little more: both drafts or none."""
    curve = CostCurve((1, 2, 3), (1.0, 1.9, 1.95), (1, 2), (0.0, 0.0))
    bound = 10.83  # exceeded once in a thousand
    assert chi_square(ScheduledDrafts(curve, 1, 2), 4000) < bound
    assert chi_square(Acausal(curve, 1, 2), 4000) > 5 * bound


# ---- through the real loop -------------------------------------------------------------------------------------------
class TwoTokens(NullEngine):
    """A target and a draft head whose distributions are the same everywhere."""

    def run(self, entry: str, batch: Batch, pins: Any = None) -> dict[str, Any]:
        if entry == "step":
            wanted = int(batch.sequences["wanted"][: batch.count].sum())
            return {"logits": np.tile(np.log(TARGET).astype(np.float32), (wanted, 1))}
        return {"tokens": np.zeros((batch.count, 2), np.int64),
                "draft_logits": np.tile(np.log(DRAFT).astype(np.float32), (batch.count, 2, 1))}


class Telling(HostExecutor):
    """The confidence of the second draft is high behind token 0 and low behind token 1."""

    def _draft_some(self, asked: Sequence[int], step: StepPlan, out: StepResult) -> None:
        super()._draft_some(asked, step, out)
        for i in asked:
            held = self._held[int(step.rows[i]["slot"])]
            held.confidence = np.array([0.8, 0.9 if held.drafts[0] == 0 else 0.05], np.float32)
            out.confidence[i] = held.confidence


def streamed(policy: ScheduledDrafts | FixedDrafts, lag: int, tokens: int = 3000) -> tuple[float, EngineCore]:
    """Chi-square, with one degree of freedom, of the tokens of an answer without a seed."""
    plan, engine = null_plan(seqs=1, step=16, drafts=2, lag=lag, vocab=2, max_len=tokens + 8), TwoTokens()
    core = EngineCore(plan, engine, slots=1, blocks=plan.blocks_per_sequence, lag=lag, policy=policy,
                      executor=Telling(plan, engine, lag=lag))
    core._seed = 8  # as if the system had given it: one that a caller gives rules rejection out
    core.add(r := core.make("r", [1], SamplingParams(temperature=1, max_tokens=tokens)))
    while core.step():
        pass
    found, expected = np.bincount(r.outputs[0].token_ids, minlength=2), TARGET * tokens
    return float(((found - expected) ** 2 / expected).sum()), core


CURVE = CostCurve((1, 2, 3), (1.0, 1.9, 1.95), (1, 2), (0.0, 0.0))


@pytest.mark.parametrize("lag", [0, 1])
def test_the_loop_keeps_the_distribution_with_scheduled_and_with_fixed_drafts(lag: int) -> None:
    for policy in (ScheduledDrafts(CURVE, 1, 2), FixedDrafts(0), FixedDrafts(2)):
        chance, core = streamed(policy, lag)
        assert chance < 10.83  # exceeded once in a thousand
        assert (core.metrics.draft_tokens.value > 300) == (not isinstance(policy, FixedDrafts) or policy.count > 0)


def test_the_loop_with_an_acausal_scheduler_does_not() -> None:
    assert streamed(Acausal(CURVE, 1, 2), 0, tokens=4000)[0] > 5 * 10.83
