"""How many drafts are verified: the best number, never at the price of the distribution; costs measured and kept."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from null_executor import NullEngine, null_plan
from scripted_drafts import BLOCK, PROFILES, ScriptedExecutor, curves, scripted_plan, simulate

from deepinfer.runtime.batch import Batch
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.executor import DECODE, share_drafts
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.speculation.choose import draft_policy
from deepinfer.runtime.speculation.cost import CostCurve, CostRecord, curve_of, kept_curve
from deepinfer.runtime.speculation.interface import DraftPolicy, FixedDrafts, Observed
from deepinfer.runtime.speculation.measure import ladder, measure_costs
from deepinfer.runtime.speculation.scheduled import ScheduledDrafts

CURVES = curves()
CHAT, CODE, HOPELESS = PROFILES
FLAT = CostCurve((1, 1000), (1.0, 1.0), (1, 100), (0.0, 0.0))


def observed(policy: DraftPolicy, slots: Sequence[int], confidence: Any, verified: int = 0, accepted: int = 0) -> None:
    """A step of ``slots`` that verified and accepted so many each and made blocks with these confidences."""
    k = len(slots)
    block = np.broadcast_to(np.asarray(confidence, np.float32), (k, np.shape(confidence)[-1]))
    policy.observe(Observed(np.asarray(slots), np.full(k, verified, np.int32), np.full(k, accepted, np.int32), block,
                            np.full(k, block.shape[1], np.int32), k, 0, 0.0))


def planned(policy: ScheduledDrafts, slots: Sequence[int]) -> int:
    """The budget of a step of ``slots``."""
    at = np.asarray(slots)
    return policy.budget(policy.most(at), len(at))


# ---- the budget ------------------------------------------------------------------------------------------------------
def test_the_budget_is_the_best_of_all_on_a_staircase_too() -> None:
    curve = CURVES["staircase"]
    rng = np.random.default_rng(2)
    for k in (300, 256, 40):
        policy, slots = ScheduledDrafts(curve, k, BLOCK), list(range(k))
        confidence = rng.uniform(0.2, 1, (k, BLOCK)).astype(np.float32)
        for _ in range(30):  # one block for all, so that the older ones say what the newest says
            observed(policy, slots, confidence)
        worth = np.sort(np.cumprod(confidence.astype(float), axis=1).ravel())[::-1]
        speeds = [(k + worth[:n].sum()) / (float(curve.step(k + n)) + curve.draft(k)) for n in range(len(worth) + 1)]
        found = planned(policy, slots)
        assert math.isclose(speeds[found], max(speeds), rel_tol=1e-3)


def test_the_budget_does_not_depend_on_the_block_that_it_is_for() -> None:
    curve = CURVES["staircase"]
    found = set()
    for newest in (0.01, 0.5, 0.99):
        policy, slots = ScheduledDrafts(curve, 64, BLOCK), list(range(64))
        for _ in range(5):
            observed(policy, slots, [0.8] * BLOCK)
        observed(policy, slots, [newest] * BLOCK)
        found.add(planned(policy, slots))
    assert len(found) == 1 and found != {0}


# ---- switching off ---------------------------------------------------------------------------------------------------
def test_drafting_stops_where_it_does_not_pay_and_is_tried_again() -> None:
    curve = CostCurve((1, 1000), (1.0, 1.5), (1, 100), (0.1, 1.0))
    policy, slots = ScheduledDrafts(curve, 4, BLOCK), [0, 1, 2, 3]
    at = np.asarray(slots)

    def run(steps: int, good: set[int]) -> list[np.ndarray[Any, Any]]:
        """Which sequences drafted in each step; those in ``good`` have drafts that are always right."""
        found = []
        rate = np.array([[0.98 if i in good else 0.02] * BLOCK for i in slots], np.float32)
        drafted = np.zeros(4, np.int32)
        for _ in range(steps):
            most = policy.most(at)
            wanted = policy.wanted(at)
            verified = share_drafts(rate, np.minimum(most, drafted), policy.budget(most, 4))
            accepted = np.where([i in good for i in slots], verified, 0).astype(np.int32)
            drafted = np.where(wanted, BLOCK, 0).astype(np.int32)
            block = np.where(wanted[:, None], rate, np.nan)
            policy.observe(Observed(at, verified, accepted, block, drafted, 4, 0, 0.0))
            found.append(wanted)
        return found

    found = np.array(run(600, {0, 1, 2}))
    assert found[-400:, :3].all() and found[-400:, 3].mean() < 0.2 and found[-400:, 3].any()
    found = np.array(run(1500, {0, 1, 2, 3}))
    assert found[-10:].all()
    found = np.array(run(2500, set()))
    assert found[-1500:].mean() < 0.02 and found[-1500:].any()
    found = np.array(run(5000, {0, 1, 2, 3}))
    assert found[-10:].all()


def test_confidences_that_promise_too_much_are_not_believed() -> None:
    curve = CURVES["staircase"]
    budgets = []
    for accepted in (1, 4):
        policy, slots = ScheduledDrafts(curve, 128, BLOCK), list(range(128))
        for _ in range(300):
            planned(policy, slots)
            observed(policy, slots, [0.9] * BLOCK, verified=5, accepted=accepted)
        budgets.append(planned(policy, slots))
        hoped = policy._hoped(np.asarray(slots), np.full(128, BLOCK, np.int32)).sum() / 128
        assert 0.8 * accepted < hoped < 1.3 * accepted  # 0.9 + 0.81 + ... = 3.7 by the confidences
    assert budgets[0] < budgets[1]


def test_a_draft_head_without_confidences_is_judged_by_its_record() -> None:
    curve = CostCurve((1, 2000), (1.0, 3.0), (1, 100), (0.0, 0.0))
    for accepted, few in ((0, True), (5, False)):
        policy, slots = ScheduledDrafts(curve, 64, BLOCK), list(range(64))
        for _ in range(200):
            planned(policy, slots)
            observed(policy, slots, [np.nan] * BLOCK, verified=5, accepted=accepted)
        assert (planned(policy, slots) < 64) == few


# ---- what it brings --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("curve", "profile", "sequences", "fixed", "least"), [
    ("staircase", CHAT, 256, 5, 1.06), ("staircase", CODE, 256, 5, 0.99), ("memory_bound", CHAT, 64, 5, 0.99),
    ("memory_bound", CODE, 256, 5, 0.99), ("staircase", HOPELESS, 256, 0, 0.99),
    ("memory_bound", HOPELESS, 16, 0, 0.99),
    ("compute_bound", CHAT, 16, 0, 0.99), ("compute_bound", CODE, 4, 0, 0.99), ("staircase", CHAT, 4, 0, 0.99),
])
def test_scheduling_beats_fixed_numbers_or_costs_next_to_nothing(curve: str, profile: Any, sequences: int, fixed: int,
                                                                 least: float) -> None:
    """Tokens a second of simulated time; the whole table is tests/bench/bench_speculation.py."""
    steps = 60_000 // max(64, sequences)
    scheduled = simulate(ScheduledDrafts(CURVES[curve], sequences, BLOCK), CURVES[curve], (profile,), sequences,
                         steps=steps)
    plain = simulate(FixedDrafts(fixed), CURVES[curve], (profile,), sequences, steps=steps)
    assert scheduled.speed >= least * plain.speed


class Foresight(FixedDrafts):
    """The best budget from the very blocks that it is for: more than a scheduler may know."""

    def __init__(self, curve: CostCurve) -> None:
        super().__init__(BLOCK)
        self.curve, self.newest = curve, np.zeros((1, BLOCK))

    def budget(self, most: Any, other_rows: int) -> int:
        worth = np.sort(np.cumprod(self.newest, axis=1).ravel())[::-1]
        tokens = len(most) + np.concatenate(((0.0,), np.cumsum(worth)))
        rows = other_rows + np.arange(len(tokens))
        return int(np.argmax(tokens / (self.curve.step(rows) + self.curve.draft(len(most)))))

    def observe(self, seen: Observed) -> None:
        self.newest = np.nan_to_num(seen.confidence.astype(np.float64))


@pytest.mark.parametrize(("profile", "gain"), [(CHAT, 1.15), (CODE, 1.03)])
def test_older_confidences_say_nearly_as_much_as_those_of_the_drafts_themselves(profile: Any, gain: float) -> None:
    """What can be gained over five drafts in every step at 256 sequences on the staircase, and how much of it is."""
    curve = CURVES["staircase"]
    best, ours, five = (simulate(policy, curve, (profile,), 256, steps=200).speed for policy in (
        Foresight(curve), ScheduledDrafts(curve, 256, BLOCK), FixedDrafts(BLOCK)))
    assert best >= gain * five and ours >= 0.995 * best


# ---- in the loop -----------------------------------------------------------------------------------------------------
def served(policy: DraftPolicy, lag: int, sequences: int = 32, tokens: int = 120) -> tuple[list[list[int]], EngineCore]:
    plan = scripted_plan(sequences, lag)
    executor = ScriptedExecutor(plan, CURVES["staircase"], (CHAT, CODE, HOPELESS))
    core = EngineCore(plan, NullEngine(), slots=sequences, blocks=64 * sequences, ends=(1,), seed=1, lag=lag,
                      executor=executor, policy=policy, now=executor.clock)
    requests = [core.make(f"r{i}", [2, 3, 4], SamplingParams(max_tokens=tokens, seed=i, detokenize=False))
                for i in range(sequences)]
    for request in requests:
        core.add(request)
    while core.requests:
        assert core.step()
    return [r.outputs[0].token_ids for r in requests], core


def test_no_policy_changes_a_token_in_either_loop() -> None:
    expected, _ = served(FixedDrafts(0), 0)
    for lag in (0, 1):
        for policy in (FixedDrafts(3), FixedDrafts(5), ScheduledDrafts(CURVES["staircase"], 32, BLOCK)):
            found, _ = served(policy, lag)
            assert found == expected


class Told(ScheduledDrafts):
    """Keeps what it is told of each step: (sequences that decode, rows beside drafts)."""

    def budget(self, most: Any, other_rows: int) -> int:
        self.steps = [*getattr(self, "steps", []), (len(most), other_rows)]
        return super().budget(most, other_rows)


@pytest.mark.parametrize("lag", [0, 1])
def test_drafts_are_counted_beside_the_prompt_rows_of_their_step(lag: int) -> None:
    """Requests come and go; a step that was to end on a stair of the curve would else end behind it."""
    plan, curve, prompt = scripted_plan(16, lag), CURVES["staircase"], [2, 3, 4]
    executor, policy = ScriptedExecutor(plan, curve, (CODE,)), Told(curve, 16, BLOCK)
    core = EngineCore(plan, NullEngine(), slots=16, blocks=1024, ends=(1,), seed=1, lag=lag, executor=executor,
                      policy=policy, now=executor.clock)
    ran, run = [], executor._run

    def noted(step: Any, out: Any) -> float:
        decoding = step.sequences["kind"] == DECODE
        if decoding.any():
            ran.append((int(decoding.sum()), int(decoding.sum()) + step.ids))
        return run(step, out)

    executor._run = noted  # type: ignore[method-assign]
    for i in range(48):
        core.add(core.make(f"r{i}", prompt, SamplingParams(max_tokens=20 + 7 * i, seed=i, detokenize=False)))
    while core.requests:
        assert core.step()
    assert ran == policy.steps and any(rows > decoding for decoding, rows in ran)


@pytest.mark.parametrize("lag", [0, 1])
def test_metrics_by_position_sum_to_the_totals(lag: int) -> None:
    _, core = served(ScheduledDrafts(CURVES["staircase"], 32, BLOCK), lag)
    m = core.metrics
    verified, accepted = (dict(c.values) for c in (m.proposed_at, m.accepted_at))
    executor = core.executor
    assert isinstance(executor, ScriptedExecutor) and executor.verified > executor.accepted > 0
    assert sum(verified.values()) == sum(m.draft_tokens.values.values())
    assert sum(accepted.values()) == sum(m.accepted_tokens.values.values())
    assert all(verified[str(j)] >= accepted[str(j)] for j in range(BLOCK))
    assert [verified[str(j)] for j in range(BLOCK)] == sorted(verified.values(), reverse=True)


# ---- costs -----------------------------------------------------------------------------------------------------------
def test_a_curve_is_the_line_between_its_points_and_goes_on_behind_them() -> None:
    curve = CostCurve((1, 64, 65, 128), (1.0, 1.0, 2.0, 3.0), (1, 10), (0.5, 1.4))
    assert curve.step([1, 40, 64, 65, 128, 191]).tolist() == pytest.approx([1, 1, 1, 2, 3, 4])
    assert curve.draft(0) == 0 and curve.draft(4) == pytest.approx(0.8) and curve.draft(20) == pytest.approx(2.4)
    assert curve_of(json.loads(json.dumps(curve.record()))) == curve
    for wrong in ({}, [], {**curve.record(), "form": 2}, {**curve.record(), "rows": [2, 1, 3, 4]},
                  {**curve.record(), "step_seconds": [1.0, math.nan, 1.0, 1.0]}, {**curve.record(), "rows": "abcd"}):
        assert curve_of(wrong) is None
    assert curve_of({**FLAT.record(), "rows": [1, float("inf")]}) is None  # legal for json.loads, no integer


def test_a_curve_is_measured_once_for_engine_and_machine(tmp_path: Path) -> None:
    measured = []

    def measure() -> CostCurve:
        measured.append(1)
        return FLAT

    def kept(engine: str, folder: str = "costs") -> CostCurve:
        return kept_curve(CostRecord(tmp_path / folder, {"engine": engine, "machine": "m"}), measure)

    for engine in "aabb":
        assert kept(engine) == FLAT
    assert len(measured) == 2
    for file in (tmp_path / "costs").iterdir():
        file.write_text("[" * 100_000 if len(measured) == 2 else json.dumps({"curve": {"form": 1}}))
        measured.append(0)
    assert kept("a") == kept("b") == FLAT
    assert sum(measured) == 4 and kept("a") == FLAT and sum(measured) == 4
    (tmp_path / "file").touch()
    assert kept("a", "file") == FLAT  # nowhere to write: measured, and said


class TimedEngine(NullEngine):
    """Steps and drafts pass a virtual time that depends on their sizes."""

    def __init__(self) -> None:
        self.time, self.shapes = 0.0, list[tuple[str, int, int]]()

    def run(self, entry: str, batch: Batch, pins: Any = None) -> dict[str, Any]:
        self.shapes.append((entry, batch.count, batch.rows))
        self.time += 1e-3 * (1 + (batch.rows > 16)) if entry == "step" else 1e-4 * batch.count
        return {}


def test_measuring_finds_the_steps_of_the_curve_and_leaves_the_memory_free() -> None:
    plan, engine = null_plan(seqs=8, drafts=BLOCK, step=64), TimedEngine()
    memory = SequenceMemory(plan, engine, 8, 64)
    curve = measure_costs(plan, engine, memory, now=lambda: engine.time)
    assert curve.rows == tuple(ladder(48)) and curve.sequences == tuple(ladder(8))
    assert curve.step([1, 16]).tolist() == pytest.approx([1e-3, 1e-3])
    assert curve.step([17, 48]).tolist() == pytest.approx([2e-3, 2e-3])
    assert curve.draft(8) == pytest.approx(8e-4) and curve.draft(1) == pytest.approx(1e-4)
    assert all(rows <= count * (BLOCK + 1) for _, count, rows in engine.shapes)
    assert memory.free_slots == 8 and memory.free_blocks == 64 and not memory.live


def test_measuring_ends_soon_on_a_slow_engine() -> None:
    """Without any time left only the ends of the curve are timed, once each."""
    plan, engine = null_plan(seqs=8, drafts=BLOCK, step=64), TimedEngine()
    curve = measure_costs(plan, engine, SequenceMemory(plan, engine, 8, 64), seconds=0.0, now=lambda: engine.time)
    assert (curve.rows, curve.sequences) == ((1, 48), (1, 8)) and len(engine.shapes) == 2 + 2


class DisturbedEngine(TimedEngine):
    """Others take the processor: through the first runs of all, and whenever a step has three rows."""

    def run(self, entry: str, batch: Batch, pins: Any = None) -> dict[str, Any]:
        found = super().run(entry, batch, pins)
        self.time += 0.02 * (len(self.shapes) <= 40 or batch.rows == 3)
        return found


def test_what_others_do_meanwhile_is_not_measured() -> None:
    """A curve that looks flat because the start of it was disturbed would make drafts look free."""
    plan = null_plan(seqs=8, drafts=BLOCK, step=64)
    quiet, disturbed = (measure_costs(plan, e, SequenceMemory(plan, e, 8, 64), now=lambda e=e: e.time)
                        for e in (TimedEngine(), DisturbedEngine()))
    assert disturbed.rows == quiet.rows and disturbed.sequences == quiet.sequences
    assert disturbed.step_seconds == pytest.approx(quiet.step_seconds)
    assert disturbed.draft_seconds == pytest.approx(quiet.draft_seconds)


def test_the_policy_of_an_engine_is_scheduled_unless_asked_otherwise(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    plan, engine = null_plan(seqs=8, drafts=BLOCK, step=64), TimedEngine()
    sizes: dict[str, Any] = {"slots": 8, "blocks": 64, "threads": None}
    for limit, scheduled in ((0, True), (3, False)):
        policy = draft_policy(plan, engine, {"digest": "d"}, limit=limit, scheduled=scheduled, **sizes)
        assert isinstance(policy, FixedDrafts) and policy.count == limit and not engine.shapes
    policy = draft_policy(plan, engine, {"digest": "d"}, limit=3, scheduled=True, **sizes)
    assert isinstance(policy, ScheduledDrafts) and policy.most(np.arange(8)).tolist() == [3] * 8
    measured = len(engine.shapes)
    assert measured and len(list((tmp_path / "costs").iterdir())) == 1
    draft_policy(plan, engine, {"digest": "d"}, limit=5, scheduled=True, **sizes)
    assert len(engine.shapes) == measured
    draft_policy(plan, engine, {"digest": "another"}, limit=5, scheduled=True, **sizes)
    draft_policy(plan, engine, {}, limit=5, scheduled=True, **sizes)
    assert len(engine.shapes) > 2 * measured and len(list((tmp_path / "costs").iterdir())) == 2
