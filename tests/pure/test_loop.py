"""The plain and the overlapped loop, with and without drafts: the same tokens, and memory that is never taken from a
step in flight."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drafting import DraftingEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LOOPS, PLANS, alone, check_flights, prompt
from witness import Reference, witness_plan

from deepinfer.errors import InternalError
from deepinfer.runtime.engine_core import EngineCore, TextSide
from deepinfer.runtime.memory import SequenceMemory
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.prefix.cache import MemoryCache
from deepinfer.runtime.residence import Residence
from deepinfer.runtime.sampling import TokenChooser, sequence_key
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.sequence import Request
from deepinfer.runtime.speculation.interface import FixedDrafts


def core(lag: int, m: int, truths: Sequence[Sequence[int]] = (), *, blocks: int = 40, right: float = 0.7,
         **how: Any) -> EngineCore:
    plan = PLANS[lag, m]
    return EngineCore(plan, DraftingEngine(plan, plan.max_num_seqs, blocks, truths, right), slots=plan.max_num_seqs,
                      blocks=blocks, ends=(0,), seed=11, lag=lag, **how)


def run(c: EngineCore, requests: Sequence[Request], meanwhile: Callable[[int], None] = lambda step: None) -> None:
    for r in requests:
        c.add(r)
    steps = 0
    while c.step():
        check_flights(c)
        meanwhile(steps)
        check_flights(c)
        steps += 1
    c.memory.check()
    assert c.memory.blocks.free == c.memory.blocks.size and c.memory.slots.free == c.memory.slots.size


def asked(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    found = []
    for i in range(count):
        temperature = rng.choice((0, 0.7, 1))
        p = SamplingParams(
            n=1 if temperature == 0 else rng.choice((1, 1, 2)), temperature=temperature, seed=i,
            ignore_eos=rng.random() < 0.7, max_tokens=rng.choice((1, 2, 7, 30)), replay=rng.choice(("off", 6, None)),
            repetition_penalty=rng.choice((1.0, 1.3)), frequency_penalty=rng.choice((0, 0.4)),
            top_k=rng.choice((0, 20)), min_tokens=0, stop_token_ids=rng.sample(range(61), 2))
        found.append((prompt(rng.randrange(10**6), rng.choice((1, 2, 8, 9, 17, 30))), p))
    return found


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(LOOPS), st.sampled_from((0, 1, 5)), st.integers(9, 30),
       st.sampled_from((0, 4_000, 1 << 30)))
def test_loops_and_drafts_change_no_token(seed: int, lag: int, m: int, blocks: int, spill: int) -> None:
    wanted = asked(random.Random(seed), 8)
    answers = [[alone(ids, p, i) for i in range(p.n)] for ids, p in wanted]
    truths = [[*ids, *answer] for (ids, _), several in zip(wanted, answers, strict=True) for answer in several]
    c = core(lag, m, truths, blocks=blocks, spill_bytes=spill)
    requests = [c.make(str(i), ids, p) for i, (ids, p) in enumerate(wanted)]
    run(c, requests)
    assert [[out.token_ids for out in r.outputs] for r in requests] == answers
    assert all(out.finish_reason in ("stop", "length") for r in requests for out in r.outputs)
    assert c.residence.spill_left == spill


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
@pytest.mark.parametrize("lag", LOOPS)
def test_a_stream_is_the_same_for_every_number_of_drafts(lag: int, temperature: float) -> None:
    p = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    ids = prompt(3, 12)
    expected = alone(ids, p)
    steps = []
    for drafts in range(6):
        c = core(lag, 5, [[*ids, *expected]], right=0.9, policy=FixedDrafts(drafts))
        r = c.make("r", ids, p)
        run(c, [r])
        assert r.outputs[0].token_ids == expected
        steps.append(c.metrics.steps.value)
        debug = r.updates[-1].debug[0]
        assert sum(debug.drafts_proposed) == c.metrics.draft_tokens.value
        assert sum(debug.drafts_accepted) == c.metrics.accepted_tokens.value
        assert list(debug.drafts_accepted) == [c.metrics.accepted_at.values.get(str(i), 0) for i in range(5)]
    assert steps[0] >= 40 and steps[5] < steps[2] < steps[0]  # drafts that are right save steps


def test_every_draft_of_a_perfect_drafter_is_accepted() -> None:
    p = SamplingParams(temperature=1, seed=5, max_tokens=37, ignore_eos=True)
    ids = prompt(3, 12)
    c = core(0, 5, [[*ids, *alone(ids, p), *prompt(4, 9)]], right=1 - 1e-9)
    run(c, [c.make("r", ids, p)])
    assert c.metrics.accepted_tokens.value == c.metrics.draft_tokens.value == 30  # 1 + 6 * 6 = 37 tokens
    assert c.metrics.accepted_at.values == {str(i): 6.0 for i in range(5)}


# ---- stops inside an accepted run ---------------------------------------------------------------------------------
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678"


def letters() -> TextSide:
    return TextSide(lambda text: [LETTERS.index(x) for x in text], lambda ids, _: "".join(LETTERS[i] for i in ids))


@pytest.mark.parametrize("lag", LOOPS)
def test_a_stop_inside_an_accepted_run_cuts_it_wherever_it_is(lag: int) -> None:
    base: dict[str, Any] = {"temperature": 1, "seed": 8, "ignore_eos": True}
    ids = prompt(7, 10)
    full = alone(ids, SamplingParams(max_tokens=40, **base))
    text = "".join(LETTERS[i] for i in full)
    for at in range(1, 22):
        first = full.index(full[at]) + 1
        cases = [(SamplingParams(max_tokens=at, **base), at, "length", None, text[:at]),
                 (SamplingParams(stop_token_ids=[full[at]], max_tokens=40, **base), first, "stop", full[at],
                  text[: first - 1])]
        word = text[at: at + 2]
        end = text.index(word) + 2
        cases.append((SamplingParams(stop=[word], max_tokens=40, **base), end, "stop", word, text[: end - 2]))
        for p, count, reason, stop, shown in cases:
            c = core(lag, 5, [[*ids, *full]], right=0.95, text=letters())
            r = c.make("r", ids, p)
            run(c, [r])
            out = r.updates[-1].outputs[0]
            assert (out.token_ids, out.finish_reason, out.stop_reason) == (full[:count], reason, stop)
            assert out.text == shown
            assert c.metrics.generation_tokens.value == count


@pytest.mark.parametrize("lag", LOOPS)
def test_no_end_comes_before_min_tokens(lag: int) -> None:
    ids = prompt(9, 10)
    p = SamplingParams(temperature=1, seed=2, max_tokens=40, min_tokens=11, stop_token_ids=list(range(30)))
    reference, row, out = Reference(PLANS[0, 0]), None, list[int]()
    chooser = TokenChooser(p, sequence_key(2, 0), np.array(ids), tuple(range(30)))
    row = reference.feed(ids, None)[-1]
    while not out or out[-1] >= 30:
        out.append(chooser.choose(row, len(ids) + len(out)))
        chooser.took(out[-1])
        row = reference.feed(out[-1:], None)[-1]
    c = core(lag, 5, [[*ids, *out]], right=0.9)
    r = c.make("r", ids, p)
    run(c, [r])
    assert r.outputs[0].token_ids == out and len(out) >= 12 and out[-1] < 30


# ---- aborts and deadlines -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["abort", "deadline"])
@pytest.mark.parametrize("lag", LOOPS)
@pytest.mark.parametrize("m", [0, 5])
def test_a_request_that_ends_early_gives_its_blocks_back_within_two_steps(lag: int, m: int, how: str) -> None:
    time = [0.0]
    c = core(lag, m, now=lambda: time[0])
    p = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    stay, held = c.make("stay", prompt(1, 12), p), [0]
    go = c.make("go", prompt(2, 30), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, deadline=7.0))

    def meanwhile(step: int) -> None:
        time[0] += 1
        if step == 3:
            held[0] = sum(s.holding is not None for s in (*stay.sequences, *go.sequences))
            if how == "abort":
                assert c.abort("go") and not c.abort("go")
            else:
                time[0] = 8.0
        if step == 5:
            assert go.finished and go.sequences[0].holding is None
            assert c.memory.slots.free == c.memory.slots.size - 1
    run(c, [stay, go], meanwhile)
    assert held == [2]
    assert go.outputs[0].finish_reason == how and go.updates[-1].finished
    assert stay.outputs[0].token_ids == alone(stay.prompt_ids, p)
    assert go.outputs[0].token_ids == alone(go.prompt_ids, p)[: len(go.outputs[0].token_ids)]
    assert c.metrics.success.values == {how: 1.0, "length": 1.0}


def test_a_deadline_also_ends_a_request_that_waits() -> None:
    time = [0.0]
    c = core(0, 0, now=lambda: time[0])
    p = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    others = [c.make(str(i), prompt(i, 9), p) for i in range(4)]
    late = c.make("late", prompt(8, 9), SamplingParams(temperature=0, deadline=3))

    def meanwhile(step: int) -> None:
        time[0] += 1
    run(c, [*others, late], meanwhile)
    assert late.outputs[0].finish_reason == "deadline" and late.outputs[0].token_ids == []
    assert all(r.outputs[0].token_ids == alone(r.prompt_ids, p) for r in others)


@pytest.mark.parametrize("lag", LOOPS)
@pytest.mark.parametrize("m", [0, 5])
@pytest.mark.parametrize("when", [0, 4])
def test_a_row_from_which_nothing_can_be_chosen_ends_its_answer_only(lag: int, m: int, when: int) -> None:
    ids, base = prompt(5, 12), SamplingParams(temperature=1, seed=4, max_tokens=20, ignore_eos=True)
    full = alone(ids, base)
    nothing = replace(base, ignore_eos=False, stop_token_ids=[full[when]], allowed_token_ids=[full[when]],
                      min_tokens=when + 1)
    others = [i for i in prompt(6, 9) if i != 60]
    c = core(lag, m, [[*ids, *full]])
    assert isinstance(c.engine, DraftingEngine)
    c.engine.broken_ids = {60}
    broken = [*ids, 60] if not when else ids
    requests = [c.make("none", ids, nothing), c.make("nan", broken, base), c.make("good", others, base)]
    run(c, requests)
    assert requests[0].outputs[0].finish_reason == "error"
    assert "no token is left" in (requests[0].outputs[0].error or "")
    if not when or 60 in full[:-1]:
        assert "not finite" in (requests[1].outputs[0].error or "")
    expected = alone(others, base)
    assert requests[2].outputs[0].token_ids == expected[: expected.index(60) + 1 if 60 in expected else None]


def test_memory_given_back_under_a_step_in_flight_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residence, "leave", lambda self, s: self._give_back(s) if s.holding else None)
    with pytest.raises(AssertionError, match="of a step in flight is free"):
        test_a_request_that_ends_early_gives_its_blocks_back_within_two_steps(1, 5, "abort")


# ---- turns --------------------------------------------------------------------------------------------------------
def test_a_priority_is_worth_a_minute_of_waiting_and_nobody_starves() -> None:
    time = [0.0]
    plan: EnginePlan = witness_plan(window=4, block=8, seqs=1, step=12, wanted=6, max_len=64)
    c = EngineCore(plan, DraftingEngine(plan, 1, 20), slots=1, blocks=20, now=lambda: time[0])
    p = SamplingParams(temperature=0, max_tokens=1)
    low = c.make("low", [1, 2], p, priority=2)
    c.add(low)
    ended_before = 0
    for i in range(100):  # a request of priority 0 arrives every two seconds, and one is served in that time
        c.add(c.make(str(i), [3, i % 60], p))
        time[0] += 2
        c.step()
        if not low.finished:
            ended_before += 1
    assert 58 <= ended_before <= 62


@pytest.mark.parametrize("lag", LOOPS)
def test_sequences_take_turns_when_a_step_has_no_row_for_each(lag: int) -> None:
    plan = witness_plan(window=4, block=8, seqs=4, step=24, wanted=2, max_len=64, lag=lag)
    c = EngineCore(plan, DraftingEngine(plan, 4, 40), slots=4, blocks=40, lag=lag)
    p = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [c.make(str(i), prompt(i, 5), p) for i in range(4)]
    spread: list[int] = []

    def meanwhile(step: int) -> None:
        counts = [len(r.outputs[0].token_ids) for r in requests]
        if min(counts) > 0:
            spread.append(max(counts) - min(counts))
    run(c, requests, meanwhile)
    assert [r.outputs[0].token_ids for r in requests] == [alone(r.prompt_ids, p) for r in requests]
    assert len(spread) > 30 and max(spread) <= 4


# ---- preemption behind a prefix hit -------------------------------------------------------------------------------
@pytest.mark.parametrize("lag", LOOPS)
@pytest.mark.parametrize(("spill", "inexact"), [(1 << 30, False), (0, True)])
def test_rows_that_run_again_behind_another_replay_log_are_counted_as_inexact(
        lag: int, spill: int, inexact: bool) -> None:
    plan = PLANS[lag, 0]
    c = EngineCore(plan, DraftingEngine(plan, 4, 11), slots=4, blocks=11, lag=lag, spill_bytes=spill,
                   prefix=MemoryCache(plan, snapshots=0))
    p = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, replay=6)
    shared = prompt(5, 24)
    for r in (c.make("first", [*shared, 1], SamplingParams(temperature=0, max_tokens=1)),):
        c.add(r)
        while c.step():
            pass
    requests = [c.make(str(i), [*shared, 7 + i], p) for i in range(3)]
    for r in requests:
        c.add(r)
    while c.step():
        check_flights(c)
    debug = [r.updates[-1].debug[0] for r in requests]
    assert c.metrics.preemptions.value > 0 and all(d.cached_tokens >= 24 for d in debug)
    assert any(d.inexact for d in debug) == inexact == bool(c.metrics.inexact.value)
    assert any(len(d.replay_log) > 2 for d in debug) == inexact
    assert all(d.preemptions for d in debug if d.inexact)


# ---- grammars -----------------------------------------------------------------------------------------------------
class Even:
    """A form whose tokens are even numbers."""

    over = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def mask(self, drafts: Sequence[int] = ()) -> Any:
        return np.full((len(drafts) + 1, 2), 0x55555555, np.uint32)

    def accept(self, ids: Sequence[int]) -> None:
        assert all(i % 2 == 0 for i in ids)
        self.tokens += ids

    def require_equal(self, count: int, newest: Sequence[int]) -> None:
        assert len(self.tokens) == count and self.tokens[count - len(newest):] == list(newest)


@pytest.mark.parametrize("lag", LOOPS)
@pytest.mark.parametrize("m", [0, 5])
def test_only_constrained_rows_wait_for_their_tokens(lag: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)
    only = replace(p, allowed_token_ids=list(range(0, 61, 2)))
    ids = prompt(1, 9)
    expected, free = alone(ids, only), alone(ids, p)
    c = core(lag, m, [[*ids, *expected]])
    original = c._sequence
    bound = c.make("bound", ids, p)

    def sequence(r: Request) -> Any:
        s = original(r)
        s.constraint = Even() if r is bound else None  # type: ignore[assignment]
        return s
    monkeypatch.setattr(c, "_sequence", sequence)
    other = c.make("free", ids, p)
    run(c, [bound, other])
    assert bound.outputs[0].token_ids == expected and other.outputs[0].token_ids == free
    assert (c.metrics.held_up.value > 0) == bool(lag)
    if m:
        assert c.metrics.accepted_tokens.value > 3
    free_only = core(lag, m)
    run(free_only, [free_only.make("free", ids, p)])
    assert free_only.metrics.held_up.value == 0


@pytest.mark.parametrize("lag", LOOPS)
def test_spilling_moves_what_is_private_and_shared_blocks_stay_until_they_are_needed(
        lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spill, moved = PLANS[lag, 0], SequenceMemory.spill, list[int]()
    c = EngineCore(plan, DraftingEngine(plan, 4, 14), slots=4, blocks=14, lag=lag,
                   prefix=MemoryCache(plan, snapshots=4))

    def counted(self: SequenceMemory, holding: Any) -> Any:
        out = spill(self, holding)
        moved.append(out.bytes)
        return out
    monkeypatch.setattr(SequenceMemory, "spill", counted)
    p = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    shared = prompt(5, 24)
    requests = [c.make(str(i), [*shared, 7 + i], p) for i in range(4)]
    for r in requests:
        c.add(r)
    while c.step():
        check_flights(c)
        c.memory.check()
    assert [r.outputs[0].token_ids for r in requests] == [alone(r.prompt_ids, p, ends=()) for r in requests]
    rings = sum(s.unit_bytes for s in plan.rings)
    assert rings <= moved[0] <= rings + c.memory.block_bytes  # rings and tail; later ones may bring back more
    assert not any(r.updates[-1].debug[0].inexact for r in requests)
    assert c.residence.spill_left == 1 << 30 and not c.memory.spilled


@pytest.mark.parametrize("spill", [1 << 30, 1_500])
def test_blocks_that_preempted_sequences_pin_never_keep_the_first_in_turn_out(spill: int) -> None:
    plan = PLANS[0, 0]
    c = EngineCore(plan, DraftingEngine(plan, 4, 9), slots=4, blocks=9, spill_bytes=spill,
                   prefix=MemoryCache(plan, snapshots=4))
    p = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    low = [c.make(f"low{i}", prompt(i, 24), p, priority=1) for i in range(2)]
    high = c.make("high", prompt(9, 60), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    for r in low:
        c.add(r)
    while not c.metrics.preemptions.value:
        c.step()
    c.add(high)
    while c.step():
        c.memory.check()
    for r in (*low, high):
        assert r.outputs[0].token_ids == alone(r.prompt_ids, r.params, ends=())
    assert c.residence.spill_left == spill and not c.memory.spilled


@pytest.mark.parametrize("lag", LOOPS)
def test_an_idle_engine_checks_its_books(lag: int) -> None:
    c = core(lag, 0)
    c.add(c.make("r", prompt(1, 20), SamplingParams(temperature=0, max_tokens=4)))
    while c.requests:
        c.step()
    c.settle()
    assert not c.loop.flights and c.memory.blocks.free == c.memory.blocks.size
    c.memory.blocks.take()
    with pytest.raises(InternalError, match="the books of the blocks are wrong"):
        c.settle()
