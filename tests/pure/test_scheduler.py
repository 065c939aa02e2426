"""The scheduler and the loop around it, on a witness engine: what runs beside a request never changes its answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from witness import Reference, WitnessEngine, witness_plan

from deepinfer.errors import ArtifactError, PlanError, RequestError
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.plan import EnginePlan
from deepinfer.runtime.sampling import NOT_FINITE, TokenChooser, log_softmax, sequence_key
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler import Scheduler
from deepinfer.runtime.sequence import Request
from deepinfer.runtime.session import Session

PLAN = witness_plan(window=4, block=8, seqs=4, step=12, wanted=6, max_len=64)


def core(plan: EnginePlan = PLAN, blocks: int = 40, spill: int = 1 << 30) -> EngineCore:
    return EngineCore(plan, WitnessEngine(plan, plan.max_num_seqs, blocks), slots=plan.max_num_seqs, blocks=blocks,
                      ends=(0,), seed=11, spill_bytes=spill)


def prompt(seed: int, length: int, plan: EnginePlan = PLAN) -> list[int]:
    out: list[int] = np.random.default_rng(seed).integers(0, plan.vocab_size, length).tolist()
    return out


def alone(ids: Sequence[int], params: SamplingParams, answer: int = 0, plan: EnginePlan = PLAN,
          keep: int | None = None) -> list[int]:
    """The answer of a request that has an engine without rings, pages and batches for itself."""
    reference, out = Reference(plan), list[int]()
    chooser = TokenChooser(params, sequence_key(params.seed or 0, answer), np.array(ids), (0,))
    row = reference.feed(ids, keep)[-1]
    most = min(params.max_tokens or 10**9, plan.max_model_len - len(ids))
    while len(out) < most:
        out.append(chooser.choose(row, len(ids) + len(out)))
        chooser.took(out[-1])
        if out[-1] == 0 and not params.ignore_eos:
            break
        row = reference.feed(out[-1:], None)[-1]
    return out


def run(c: EngineCore, requests: Sequence[Request]) -> list[list[list[int]]]:
    for r in requests:
        c.add(r)
    while c.step():
        pass
    return [[out.token_ids for out in r.outputs] for r in requests]


def mixed(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams, int]]:
    found = []
    for i in range(count):
        greedy = rng.random() < 0.5
        n = 1 if greedy else rng.choice((1, 1, 2, 3))
        p = SamplingParams(n=n, temperature=0 if greedy else 1.0, seed=None if greedy else i,
                           ignore_eos=rng.random() < 0.5, max_tokens=rng.choice((1, 5, 20)),
                           replay=rng.choice(("off", "exact", 6, None)), repetition_penalty=rng.choice((1.0, 1.3)))
        found.append((prompt(rng.randrange(10**6), rng.choice((1, 3, 8, 16, 17, 33, 40))), p, rng.choice((0, 0, 1))))
    return found


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(8, 30), st.sampled_from((0, 4_000, 1 << 30)))
def test_an_answer_does_not_depend_on_what_runs_beside_it(seed: int, blocks: int, spill: int) -> None:
    c = core(blocks=blocks, spill=spill)
    asked = mixed(random.Random(seed), 8)
    made = [c.make(str(i), ids, p, priority=priority) for i, (ids, p, priority) in enumerate(asked)
            if PLAN.blocks_for(len(ids)) + p.n - 1 <= blocks]
    for r, answers in zip(made, run(c, made), strict=True):
        keep = PLAN.replay_rows(r.params.replay).keep
        assert answers == [alone(r.prompt_ids, r.params, i, keep=keep) for i in range(r.params.n)]
        assert all(out.finish_reason in ("stop", "length") for out in r.outputs)
    assert c.memory.blocks.free == blocks and c.memory.slots.free == PLAN.max_num_seqs
    assert c.residence.spill_left == spill


@pytest.mark.parametrize(("spill", "how"), [(1 << 30, "spilled"), (0, "restarted")])
def test_preemption_is_exact(spill: int, how: str) -> None:
    p = SamplingParams(max_tokens=30, temperature=1, seed=3, ignore_eos=True)
    c = core(blocks=10, spill=spill)
    requests = [c.make(str(i), prompt(i, 15), p) for i in range(3)]
    assert run(c, requests) == [[alone(r.prompt_ids, p)] for r in requests]
    assert getattr(c.metrics, how).value > 0
    assert c.metrics.preemptions.value == sum(r.metrics.num_preemptions for r in requests)
    assert requests[0].metrics.num_preemptions == 0  # the first to come is the last to give way
    needed = sum(len(r.prompt_ids) + len(r.outputs[0].token_ids) - 1 for r in requests)
    assert c.metrics.iteration_tokens.total == needed + c.metrics.recomputed.value
    assert (c.metrics.recomputed.value > 0) == (how == "restarted")


def test_a_spill_that_loses_a_ring_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.runtime.memory import SequenceMemory
    original = SequenceMemory.spill

    def spill(self: SequenceMemory, holding: Any) -> Any:
        out = original(self, holding)
        out.rings["d1"][:] = 0xFF
        return out
    monkeypatch.setattr(SequenceMemory, "spill", spill)
    with pytest.raises(AssertionError, match="I6"):
        test_preemption_is_exact(1 << 30, "spilled")


def test_decoding_sequences_are_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    c, seen = core(), list[dict[str, int]]()
    original = Scheduler.schedule

    def schedule(self: Scheduler, step: Any) -> bool:
        found = original(self, step)
        asked = [self.table.sequences[int(slot)] for slot in step.sequences["slot"]]
        seen.append({s.request.request_id: int(rows) for s, rows in zip(asked, step.sequences["rows"], strict=True)
                     if s is not None})
        return found
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    p = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    first = c.make("first", prompt(0, 5), p)
    c.add(first)
    c.step()
    run(c, [c.make("long", prompt(1, 40), p), c.make("next", prompt(2, 20), p)])
    decoding = seen[1:20]
    assert all(step["first"] == 1 and sum(step.values()) <= PLAN.limits["step"] for step in decoding)
    assert [step.get("long", 0) for step in decoding[:4]] == [11, 11, 11, 7]  # the rest of 12 rows each, then the end
    assert [step.get("next", 0) for step in decoding[:4]] == [0, 0, 0, 4]


@pytest.mark.parametrize("limits", [{"kept": 3}, {"wanted": 1}, {"wanted": 2, "step": 5}])
def test_small_limits_of_an_axis_only_cost_steps(limits: dict[str, int]) -> None:
    plan = witness_plan(window=4, block=8, seqs=4, **{"step": 12, "wanted": 6, **limits}, max_len=64)
    c = core(plan)
    asked = [(prompt(i, 20 + i), SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0 if i == 2 else None))
             for i in range(4)]
    requests = [c.make(str(i), ids, p) for i, (ids, p) in enumerate(asked)]
    assert run(c, requests) == [[alone(ids, p)] for ids, p in asked]


def test_requests_are_admitted_in_order_and_by_priority() -> None:
    plan = witness_plan(window=4, block=8, seqs=1, step=12, wanted=6, max_len=64)
    c = core(plan)
    p = SamplingParams(max_tokens=2, temperature=0)
    requests = [c.make(name, prompt(i, 9), p, priority=priority)
                for i, (name, priority) in enumerate((("a", 1), ("b", 0), ("c", 1), ("d", 0)))]
    run(c, requests)
    ended = sorted(requests, key=lambda r: r.metrics.finished_time or 0)
    assert [r.request_id for r in ended] == ["b", "d", "a", "c"]


def test_a_request_waits_until_its_whole_prompt_and_one_more_block_fit() -> None:
    c = core(blocks=9)
    p = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    c.add(c.make("big", prompt(0, 40), p))  # 5 blocks
    c.add(c.make("next", prompt(1, 30), p))  # 4 blocks, and one has to stay free
    c.step()
    assert [s.request.request_id for s in c.scheduler.running] == ["big"]
    while c.step():
        pass


def test_an_abort_frees_memory_at_once_and_nothing_else_changes() -> None:
    c = core()
    p = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    stay, go = c.make("stay", prompt(1, 12), p), c.make("go", prompt(2, 30), p)
    c.add(go)
    c.add(stay)
    for _ in range(5):
        c.step()
    held = c.memory.blocks.free
    assert c.abort("go") and not c.abort("go") and not c.abort("never seen")
    assert c.memory.blocks.free > held and c.memory.slots.free == PLAN.max_num_seqs - 1
    while c.step():
        pass
    assert stay.outputs[0].token_ids == alone(stay.prompt_ids, p)
    assert go.outputs[0].finish_reason == "abort" and go.updates[-1].finished
    assert go.outputs[0].token_ids == alone(go.prompt_ids, p)[: len(go.outputs[0].token_ids)]


def test_an_abort_of_a_request_whose_memory_is_on_the_host_gives_that_back() -> None:
    c = core(blocks=10)
    p = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    for i in range(3):
        c.add(c.make(str(i), prompt(i, 15), p))
    while c.residence.spill_left == 1 << 30:
        c.step()
    spilled = [s.request.request_id for s in c.scheduler.waiting if s.spilled is not None]
    assert spilled and all(c.abort(i) for i in spilled)
    assert c.residence.spill_left == 1 << 30
    while c.step():
        pass


def test_an_error_of_one_request_never_ends_another() -> None:
    c = core()
    assert isinstance(c.engine, WitnessEngine)
    c.engine.broken_ids = {60}
    p = SamplingParams(max_tokens=6, temperature=1, seed=4, ignore_eos=True, n=2)
    good = [i % 60 for i in prompt(5, 12)]
    requests = [c.make("bad", [*good, 60], p), c.make("good", good, SamplingParams(max_tokens=6, temperature=0))]
    answers = run(c, requests)
    bad = requests[0].outputs
    assert [out.finish_reason for out in bad] == ["error", "error"]
    assert bad[0].error == NOT_FINITE
    expected = alone(good, requests[1].params)
    assert answers[1] == [expected[: expected.index(60) + 1] if 60 in expected else expected]


def test_a_session_never_returns_logits_that_are_not_finite_and_ends_no_other_one() -> None:
    c, good = core(), [i % 60 for i in prompt(5, 12)]
    assert isinstance(c.engine, WitnessEngine)
    c.engine.broken_ids = {60}
    with Session(c) as other, Session(c) as broken:
        other.feed(good[:5])
        with pytest.raises(ArtifactError) as found:
            broken.feed([*good, 60, 3])
        assert str(found.value).startswith(f"position 12: {NOT_FINITE}; fetch")
        assert np.array_equal(other.feed(good[5:]), Reference(PLAN).feed(good, None)[5:])
        assert broken.token_ids == [*good, 60, 3]
        broken.feed([4])


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda s: s.feed([5, True]), "feed: token ids are whole numbers; found bool"),
    (lambda s: s.feed([5, [6]]), "feed: a list of at least one token id is needed; found lists inside the list"),
    (lambda s: s.feed([5], wanted="1"), "wanted: a whole number is needed; found '1'"),
    (lambda s: s.feed([5], pins=5), "pins: a mapping from names to arrays is needed; found int"),
    (lambda s: s.feed([5], chunk=1.5), "chunk: chunks have at least one row; found 1.5"),
    (lambda s: s.feed([5], chunk=True), "chunk: chunks have at least one row; found True"),
    (lambda s: s.adopt(None), "adopt: a whole number is needed; found None"),
    (lambda s: s.rewind("1"), "rewind: a whole number is needed; found '1'"),
])
def test_a_session_refuses_arguments_of_the_wrong_kind_and_goes_on(call: Any, sentence: str) -> None:
    with Session(core()) as s:
        s.feed([1, 2])
        with pytest.raises(RequestError) as found:
            call(s)
        assert str(found.value).startswith(sentence)
        assert np.array_equal(s.feed([3]), Reference(PLAN).feed([1, 2, 3], None)[2:])


def test_after_close_requests_and_sessions_are_refused_in_a_sentence() -> None:
    c = core()
    kept, request = Session(c), c.make("r", [1, 2], SamplingParams(max_tokens=9))
    kept.feed([1, 2, 3])
    c.close()
    c.close()
    for call in (lambda: c.make("s", [1], SamplingParams()), lambda: c.add(request), c.step, lambda: kept.feed([4]),
                 kept.fork, lambda: kept.rewind(2), lambda: Session(c)):
        with pytest.raises(RequestError, match="the engine is closed; make another LLM"):
            call()
    kept.close()


def test_a_request_with_nothing_left_to_choose_ends_with_a_sentence() -> None:
    c = core()
    p = SamplingParams(max_tokens=6, allowed_token_ids=[0], min_tokens=3)
    other = c.make("other", prompt(1, 4), SamplingParams(max_tokens=6, temperature=0))
    request = c.make("none", prompt(0, 4), p)
    answers = run(c, [request, other])
    assert request.outputs[0].finish_reason == "error"
    assert "no token is left to choose from" in (request.outputs[0].error or "")
    assert answers[1] == [alone(other.prompt_ids, other.params)]


@pytest.mark.parametrize("blocks", [30, 9])
def test_prompt_logprobs_are_those_of_every_row(blocks: int) -> None:
    c = core(blocks=blocks, spill=0)
    p = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=2, logprobs=1, ignore_eos=True)
    requests = [c.make(str(i), prompt(i, 30), p) for i in range(2)]
    run(c, requests)
    for r in requests:
        rows = [log_softmax(x) for x in Reference(PLAN).feed([*r.prompt_ids, *r.outputs[0].token_ids], None)]
        assert r.prompt_logprobs is not None and r.prompt_logprobs[0] is None
        assert len(r.prompt_logprobs) == 30
        for at, found in enumerate(r.prompt_logprobs[1:]):
            assert found is not None
            assert found[r.prompt_ids[at + 1]].logprob == pytest.approx(rows[at][r.prompt_ids[at + 1]], abs=1e-12)
            assert max(x.logprob for x in found.values()) == pytest.approx(rows[at].max(), abs=1e-12)
        for at, chosen in enumerate(r.outputs[0].logprobs or ()):
            token = r.outputs[0].token_ids[at]
            assert chosen[token].logprob == pytest.approx(rows[29 + at].max(), abs=1e-12) and chosen[token].rank == 1


def test_sessions_and_requests_share_an_engine() -> None:
    c = core(blocks=24)
    ids = prompt(9, 40)
    with Session(c) as s:
        s.feed(ids[:20])
        p = SamplingParams(max_tokens=12, temperature=0)
        requests = [c.make(str(i), prompt(i, 17), p) for i in range(4)]
        assert run(c, requests) == [[alone(r.prompt_ids, p)] for r in requests]
        assert np.array_equal(s.feed(ids[20:])[-1], Reference(PLAN).feed(ids, None)[-1])


def test_a_failing_engine_ends_what_runs_and_leaves_the_books_right(monkeypatch: pytest.MonkeyPatch) -> None:
    c = core()
    request = c.make("x", prompt(0, 9), SamplingParams())
    c.add(request)
    with monkeypatch.context() as m:
        m.setattr(c.engine, "run", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            c.step()
    assert request.outputs[0].finish_reason == "error" and not c.requests
    c.memory.check()
    p = SamplingParams(max_tokens=3, temperature=0)
    assert run(c, [c.make("y", prompt(1, 9), p)]) == [[alone(prompt(1, 9), p)]]


def test_requests_that_sessions_leave_no_room_for_say_so() -> None:
    c = core(blocks=8)
    with Session(c) as s:
        s.feed(prompt(0, 60))
        c.add(c.make("waits", prompt(1, 30), SamplingParams()))
        with pytest.raises(PlanError, match=r"cache blocks: requests wait .* close sessions"):
            c.step()
    while c.step():
        pass
    assert not c.requests


@pytest.mark.parametrize(("ids", "params", "sentence"), [
    ([], {}, "prompt: the prompt is empty; send at least one token"),
    ([1, 61], {}, "prompt, position 1: token id out of range; found 61; allowed 0..60"),
    ([-1], {}, "prompt, position 0: token id out of range; found -1; allowed 0..60"),
    ([1] * 64, {}, "prompt: the prompt leaves no room for an answer; found 64 tokens; allowed at most 63; shorten"),
    ([1], {"n": 5, "temperature": 1}, "n: more answers than sequences run at the same time; found 5; allowed 1..4"),
    ([1], {"stop_token_ids": [61]}, "stop_token_ids: token id out of range; found 61; allowed 0..60"),
    ([1], {"logit_bias": {99: 1.0}}, "logit_bias: token id out of range; found 99; allowed 0..60"),
    ([1], {"replay": 3}, "replay: replay keeps too few rows: the model was trained for no fewer rows than that; found"),
    ([1], {"replay": "some"}, "replay: unknown replay option; found some; allowed off, exact or a number of rows"),
    ([1], {"stop": "x"}, "stop: texts need a tokenizer"),
])
def test_a_bad_request_is_refused_in_one_sentence(ids: list[int], params: dict[str, Any], sentence: str) -> None:
    c = core()
    with pytest.raises(RequestError) as found:
        c.make("x", ids, SamplingParams(**params))
    assert str(found.value).startswith(sentence) and not c.requests
