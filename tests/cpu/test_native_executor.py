"""The executor of compiled engines against the one on the host: tokens, drafts, log-probabilities, every clock."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cpu.stepping import Stepper, answers
from golden.cases import load_case
from golden.engines import fed, llm_of

from deepinfer import LLM
from deepinfer.codegen.plan.sequence_state import SequenceState
from deepinfer.runtime.executor import REJECTION, ROW, Executor, share_drafts
from deepinfer.runtime.host_executor import HostExecutor
from deepinfer.runtime.native_executor import NativeExecutor
from deepinfer.runtime.native_sampling import RECORD
from deepinfer.runtime.sampling import leading
from deepinfer.runtime.sampling_params import SamplingParams

NAME = "v41_a_f32"
GREEDY = SamplingParams(temperature=0)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.7}, {}, {"top_p": 0.9, "temperature": 1.3}, {"top_k": 12, "min_p": 0.01},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.2, "temperature": 0},
    {"repetition_penalty": 0.9, "frequency_penalty": 0.4, "logit_bias": {5: 9.0, 300: 8.0}, "min_tokens": 12},
    {"allowed_token_ids": [3, 9, 20, 21, 300], "frequency_penalty": 1.5, "temperature": 2}]
BAD = ((8,), (20, 9), (9, 3, 21))


def llm() -> LLM:
    return llm_of(NAME)


def executor(kind: str, lag: int = 0) -> Executor:
    made = NativeExecutor if kind == "native" else HostExecutor
    return made(llm().plan, llm().core.engine, lag=lag)  # type: ignore[arg-type]


def prompt(length: int = 40) -> list[int]:
    return load_case(NAME).ids[:length]


def begun(kind: str, lag: int = 0, **more: Any) -> Stepper:
    """One slot for each of KINDS, with prompts of different lengths."""
    stepper = Stepper(llm(), executor(kind, lag))
    for slot, options in enumerate(KINDS):
        stepper.begin(slot, prompt(20 + 7 * slot), SamplingParams(**options), key=1000 + slot, ends=(5, 300), bad=BAD,
                      **more)
    return stepper


@cache
def streams() -> list[list[int]]:
    """What the host chooses without drafts."""
    return answers(begun("host"), range(len(KINDS)), 24)


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 4, 5])
def test_streams_are_those_of_the_host_for_any_number_of_drafts(drafts: int) -> None:
    assert answers(begun("native"), range(len(KINDS)), 24, drafts) == streams()


@pytest.mark.parametrize("budget", [0, 1, 7, 23])
def test_streams_do_not_depend_on_the_budget(budget: int) -> None:
    assert answers(begun("native"), range(len(KINDS)), 24, 5, budget) == streams()


def test_the_host_verifies_the_same_streams_with_its_own_drafts() -> None:
    assert answers(begun("host"), range(len(KINDS)), 24, 5) == streams()


def test_steps_in_flight_give_the_same_streams() -> None:
    stepper = begun("native", lag=1)
    found: list[list[int]] = [[] for _ in KINDS]

    def take(ticket: int) -> None:
        out = stepper.executor.wait(ticket)
        for i, stream in enumerate(found):
            stream += out.tokens[i, : out.count[i]].tolist()

    slots = range(len(KINDS))
    take_next = stepper.submit([{"slot": s, "kind": 0, "c": 0, "rows": 20 + 7 * s, "kept": 20 + 7 * s, "draws": 1,
                                 "wanted": 1, "want_draft": 1} for s in slots])
    for _ in range(23):
        ahead = stepper.submit(stepper.decodes(slots, 5))
        take(take_next)
        take_next = ahead
    take(take_next)
    assert [stream[:24] for stream in found] == streams()


def test_a_sequence_resumed_from_its_ids_goes_on_as_if_undisturbed() -> None:
    """Counts, last ids and the end of the answer's minimum follow from the ids alone."""
    stepper = begun("native")
    slots = range(len(KINDS))
    out = stepper.prefill(slots)
    found = [out.tokens[i, : out.count[i]].tolist() for i in slots]
    for _ in range(5):
        out = stepper.decode(slots, 3)
        for i in slots:
            found[i] += out.tokens[i, : out.count[i]].tolist()
    for i in slots:
        stepper.begin(i, prompt(20 + 7 * i), SamplingParams(**KINDS[i]), key=1000 + i, ends=(5, 300), bad=BAD,
                      output=tuple(found[i]))
    while min(map(len, found)) < 24:
        out = stepper.decode(slots, 2)
        for i in slots:
            found[i] += out.tokens[i, : out.count[i]].tolist()
    assert [stream[:24] for stream in found] == streams()


def test_a_copy_of_all_state_goes_on_like_its_source() -> None:
    stepper = Stepper(llm(), executor("native"))
    params = SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.3)
    for slot in (0, 1):
        stepper.begin(slot, prompt(), params)
    stepper.prefill([0])
    stepper.decode([0], 3)
    stepper.copy(0, 1)
    for _ in range(4):
        out = stepper.decode([0, 1], 4)
        assert out.tokens[0].tolist() == out.tokens[1].tolist() and out.n[0] == out.n[1]


@pytest.mark.parametrize("top", [0, 3, 40])
def test_log_probabilities_are_those_of_the_host(top: int) -> None:
    both = [begun(kind) for kind in ("host", "native")]
    slots = range(len(KINDS))
    outs = [s.prefill(slots, logprobs=top) for s in both]
    for _ in range(3):
        for i in slots:
            host, native = (o.logprobs[i] for o in outs)
            assert host.ids[:, 0].tolist() == native.ids[:, 0].tolist()
            assert np.allclose(host.values[:, 0], native.values[:, 0], rtol=0, atol=1e-6)
            assert host.ranks[:, 0].tolist() == native.ranks[:, 0].tolist()
            for h, n in zip(host.ids, native.ids, strict=True):
                assert set(h.tolist()) >= set(n.tolist()) and len(n) == 1 + top
            assert (native.values[:, 1:] == -np.sort(-native.values[:, 1:], axis=1)).all()
        outs = [s.decode(slots, logprobs=top) for s in both]


@pytest.mark.parametrize(("chunk", "top"), [(64, 2), (11, 2), (16, 30)])
def test_prompt_log_probabilities_are_those_of_the_host(chunk: int, top: int) -> None:
    found = {}
    for kind in ("host", "native"):
        stepper = Stepper(llm(), executor(kind))
        stepper.begin(2, prompt(41), GREEDY)
        found[kind] = []
        for c in range(0, 41, chunk):
            q = min(chunk, 41 - c)
            out = stepper.run([{"slot": 2, "kind": 0, "c": c, "rows": q, "kept": q, "wanted": q,
                                "draws": int(c + q == 41), "prompt_logprobs": top}])
            found[kind] += list(zip(out.prompt_logprobs[0].ids[:, 0].tolist(), out.prompt_logprobs[0].values[:, 0],
                                    out.prompt_logprobs[0].ranks[:, 0].tolist(), strict=True))
    assert len(found["host"]) == 40 and [x[0] for x in found["native"]] == prompt(41)[1:]
    assert [(t, r) for t, _, r in found["host"]] == [(t, r) for t, _, r in found["native"]]
    assert np.allclose([v for _, v, _ in found["host"]], [v for _, v, _ in found["native"]], rtol=0, atol=1e-6)


def test_masks_give_the_streams_of_the_host() -> None:
    vocab = llm().plan.vocab_size
    found = {}
    for kind in ("host", "native"):
        stepper = Stepper(llm(), executor(kind))
        stepper.begin(0, prompt(), GREEDY)
        stepper.begin(1, prompt(), SamplingParams(temperature=1.1))
        bits = np.zeros((6, -(-vocab // 32)), np.uint32)
        bits[:, ::2] = 0x5A5A5A5A
        out = stepper.prefill([0, 1])
        seen = [out.tokens[:2, 0].tolist()]
        for _ in range(6):
            out = stepper.decode([0, 1], by_slot={1: {"mask": bits}})
            seen.append(out.tokens[:2, 0].tolist())
            assert 0x5A5A5A5A >> seen[-1][1] % 32 & 1 and not seen[-1][1] // 32 % 2
        found[kind] = seen
    assert found["host"] == found["native"]


def test_a_row_without_a_token_left_says_where() -> None:
    stepper = Stepper(llm(), executor("native"))
    stepper.begin(0, prompt(), SamplingParams(temperature=0, allowed_token_ids=[8]), bad=((8,),))
    out = stepper.prefill([0])
    assert out.count[0] == 0 and "no token is left to choose from" in out.errors[0] and "position 40" in out.errors[0]


def test_what_failed_in_a_step_is_forgotten_in_the_next_one_of_the_same_plan() -> None:
    stepper = Stepper(llm(), executor("native"))
    stepper.begin(0, prompt(), SamplingParams(temperature=0, allowed_token_ids=[8]), bad=((8,),))
    failed = stepper.prefill([0])
    assert failed.errors and not failed.count[0]
    stepper.begin(0, prompt(), GREEDY)
    stepper.turn = 0
    again = stepper.prefill([0])
    assert again is failed and again.count[0] == 1 and not again.errors and again.finite.all()


def test_log_probabilities_of_a_step_of_one_sequence_are_those_of_a_step_of_two() -> None:
    found = []
    for slots in ((0,), (0, 1)):
        stepper = Stepper(llm(), executor("native"))
        for slot in slots:
            stepper.begin(slot, prompt(20 + slot), GREEDY)
        stepper.prefill(slots)
        found.append(stepper.decode(slots, logprobs=3).logprobs)
    assert found[0][0].ids.tolist() == found[1][0].ids.tolist()
    assert found[0][0].values.tolist() == found[1][0].values.tolist()


# ---- clocks ----------------------------------------------------------------------------------------------------------
def put_drafts(stepper: Stepper, slot: int, drafts: list[int]) -> None:
    """Scripted drafts, as if the draft head had made them."""
    record = stepper.executor.state("sequence", slot)
    at = place("drafts")
    record[at : at + 8 * len(drafts)].view(np.int64)[:] = drafts
    record[24:28].view(np.int32)[0] = len(drafts)  # SlotHead.drafted


@cache
def place(part: str) -> int:
    """Where a part of a slot's record begins."""
    plan = llm().plan
    return SequenceState(plan.vocab_size, plan.draft_tokens, plan.draft_filler, plan.lookback).offsets()[part]


def test_every_accepted_length_at_every_place_of_two_blocks() -> None:
    """At each n of 2B places the first r of 5 scripted drafts are right, for every r; the step after it, with five
    right drafts, finds every ring, block, open group and last id as a run without drafts would."""
    plan = llm().plan
    m, first, places = plan.draft_tokens, 60, 2 * plan.block_tokens
    stepper = Stepper(llm(), executor("native"))
    stepper.begin(0, prompt(first), GREEDY)
    truth = [*prompt(first), *answers(stepper, [0], places + 3 * m)[0]]
    slots, spare = list(range(m + 1)), m + 1
    for s in [*slots, spare]:
        stepper.begin(s, prompt(first), GREEDY)
    stepper.prefill(slots, want_draft=0)
    for n in range(first, first + places):
        for r in slots:
            right = truth[n + 1 : n + 1 + r]
            put_drafts(stepper, r, [*right, *[(t + 1) % 300 for t in truth[n + 1 + r : n + 1 + m]]])
        out = stepper.decode(slots, m, want_draft=0)
        assert out.accepted[: m + 1].tolist() == slots and out.verified[: m + 1].tolist() == [m] * (m + 1)
        assert out.n[: m + 1].tolist() == [n + 1 + r for r in slots]
        for r in slots:
            assert out.tokens[r, : r + 1].tolist() == truth[n + 1 : n + 2 + r]
        stepper.copy(0, spare, n)
        for r in slots:
            put_drafts(stepper, r, truth[n + 2 + r : n + 2 + r + m])
        out = stepper.decode(slots, m, want_draft=0)
        assert out.accepted[: m + 1].tolist() == [m] * (m + 1), n
        for r in slots:
            stepper.copy(spare, r, n)


def test_drafts_that_are_right_all_stay_whatever_the_options() -> None:
    """Penalties, bad words and the least answer of a row see the drafts before it: a draft is right only if they do."""
    stepper, m, slots = begun("native"), llm().plan.draft_tokens, range(len(KINDS))
    stepper.prefill(slots, want_draft=0)
    for done in (1, 7, 13):
        for s in slots:
            put_drafts(stepper, s, streams()[s][done : done + m])
        out = stepper.decode(slots, m, want_draft=0)
        assert out.tokens[: len(slots)].tolist() == [stream[done : done + m + 1] for stream in streams()]
        assert out.accepted[: len(slots)].tolist() == [m] * len(slots)


# ---- rejection -------------------------------------------------------------------------------------------------------
def test_rejection_draws_from_the_target() -> None:
    """Answers of three tokens under top_k 2 against their probabilities, with five drafts a step."""
    params, ids = SamplingParams(top_k=2, temperature=3.0), prompt(6)
    expected: dict[tuple[int, ...], float] = {}

    def walk(taken: tuple[int, ...], chance: float) -> None:
        if len(taken) == 3:
            expected[taken] = chance
            return
        z = fed(llm(), [*ids, *taken])[-1].astype(np.float64) / params.temperature
        kept = leading(z, 2, 1.0, 0.0)
        assert kept is not None
        p = np.exp(z[kept] - z[kept].max())
        for token, share in zip(kept.tolist(), p / p.sum(), strict=True):
            walk((*taken, token), chance * share)

    walk((), 1.0)
    stepper, found, n = Stepper(llm(), executor("native")), Counter[tuple[int, ...]](), 1600
    for first in range(0, n, 8):
        for slot in range(8):
            stepper.begin(slot, ids, params, REJECTION, key=first + slot)
        found.update(map(tuple, answers(stepper, range(8), 3, 5)))
    assert set(found) <= set(expected)
    distance = sum((found[k] - n * p) ** 2 / (n * p) for k, p in expected.items())
    chance = torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(distance / 2))
    assert chance > 1e-3


@pytest.mark.parametrize("kind", ["host", "native"])
def test_a_draft_is_verified_whatever_the_confidences_behind_it_say(kind: str) -> None:
    """Whether draft j is looked at may depend on tokens before it, never on its own: confidence j + 1 knows of it."""
    rng, m = np.random.default_rng(4), llm().plan.draft_tokens
    stepper = begun("native")
    stepper.prefill(range(len(KINDS)))
    confidence = rng.random((len(KINDS), m)).astype(np.float32)
    at = place("confidence")

    def verified(values: Any, budget: int) -> list[int]:
        most = np.full(len(KINDS), m, np.int32)
        if kind == "host":
            return share_drafts(values, most, budget).tolist()
        for slot in range(len(KINDS)):
            put_drafts(stepper, slot, [1] * m)
            stepper.executor.state("sequence", slot)[at : at + 4 * m].view(np.float32)[:] = values[slot]
        return stepper.decode(range(len(KINDS)), m, budget, want_draft=0).verified[: len(KINDS)].tolist()

    for budget in (1, 5, 17, 30):
        before = verified(confidence, budget)
        assert sum(before) == budget
        for j in range(m):
            other = confidence.copy()
            other[2, j + 1 :] = rng.random(m - j - 1)
            after = verified(other, budget)
            assert (before[2] > j) == (after[2] > j)


def test_records_have_the_size_that_the_runner_expects() -> None:
    """The runner asserts the same numbers of its own records while it is compiled."""
    assert (ROW.itemsize, RECORD.itemsize) == (96, 152)
