"""Both loops and every number of drafts on a compiled engine with a draft head: the same tokens, bit by bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from compiled import checkpoint_of, engine_of

from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.speculation.scheduled import ScheduledDrafts

CASE = "v41_a_f32"
VOCABULARY = 336


@contextmanager
def start(**options: Any) -> Iterator[LLM]:
    engine = engine_of(CASE, profile="wide", max_num_seqs=6, max_num_batched_tokens=64, max_model_len=640, host_lag=1)
    with LLM(engine, checkpoint_of(CASE), threads=1, progress=False, decode_stretch=None,
             **{"schedule_drafts": False, **options}) as llm:
        yield llm


def prompts() -> list[list[int]]:
    return [np.random.default_rng(i).integers(3, VOCABULARY - 2, length).tolist()
            for i, length in enumerate((1, 2, 33, 150, 7, 64, 129, 257))]


def params(i: int) -> SamplingParams:
    return SamplingParams(temperature=(0, 0.7, 1)[i % 3], seed=i, n=1 + (i % 3 > 0), max_tokens=14, ignore_eos=True,
                          logprobs=0, replay=("off", 32, "exact")[i % 3], repetition_penalty=(1.0, 1.2)[i % 2])


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with start(loop="plain", num_speculative_tokens=0, prefix_cache=False) as llm:
        return [told(llm, [p], [params(i)])[0] for i, p in enumerate(prompts())]


def told(llm: LLM, some: list[list[int]], each: list[SamplingParams]) -> list[Any]:
    """Ids and log-probabilities, every bit of them."""
    return [[(o.token_ids, [x[t].logprob for x, t in zip(o.logprobs or (), o.token_ids, strict=True)])
             for o in out.outputs] for out in llm.generate(some, each, progress=False)]


@pytest.mark.parametrize("drafts", [0, 1, 3, None])
@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_loops_and_drafts_change_no_bit(expected: list[Any], loop: str, drafts: int | None) -> None:
    with start(loop=loop, num_speculative_tokens=drafts, prefix_cache=False) as llm:
        assert told(llm, prompts(), [params(i) for i in range(8)]) == expected
        assert bool(llm.metrics.draft_tokens.value) == (drafts != 0)


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_scheduled_drafts_change_no_bit(expected: list[Any], loop: str) -> None:
    with start(loop=loop, schedule_drafts=True, prefix_cache=False) as llm:
        assert isinstance(llm.core.policy, ScheduledDrafts)
        assert told(llm, prompts(), [params(i) for i in range(8)]) == expected


def test_forms_hold_on_the_compiled_engine_with_any_drafts_in_either_loop() -> None:
    """The model's tokenizer has 336 tokens; its weights are random, so that nothing of the form comes by itself."""
    forms: list[dict[str, Any]] = [{"regex": "[a-z]{4}-[0-9]{2}"}, {"choice": ["left", "right"]},
                                   {"json": {"type": "object", "required": ["a"], "additionalProperties": False,
                                             "properties": {"a": {"enum": [1, 22, 333]}}}}]
    each = [SamplingParams(temperature=(0, 1)[i % 2], seed=i, max_tokens=40, structured_outputs=forms[i % 3])
            for i in range(6)]
    found = []
    for options in ({"loop": "plain", "num_speculative_tokens": 0}, {"loop": "plain"}, {"loop": "overlapped"}):
        with start(**options) as llm:
            outputs = llm.generate(prompts()[:6], each, progress=False)
            assert all(o.outputs[0].finish_reason == "stop" for o in outputs)
            found.append([(o.text, o.token_ids) for o in outputs])
    assert found[0] == found[1] == found[2]
    texts = [text for text, _ in found[0]]
    assert all(re.fullmatch("[a-z]{4}-[0-9]{2}", text) for text in texts[::3])
    assert set(texts[1::3]) <= {"left", "right"} and all(json.loads(t)["a"] in (1, 22, 333) for t in texts[2::3])


@pytest.mark.parametrize("spill", [0, 1 << 30])
def test_preemption_in_the_overlapped_loop_changes_no_bit(spill: int) -> None:
    some = [np.random.default_rng(9).integers(3, VOCABULARY - 2, 121 + i).tolist() for i in range(6)]
    each = [params(3 * i + 1) for i in range(6)]
    found = []
    for options in ({"loop": "plain", "num_speculative_tokens": 0}, {"loop": "overlapped", "num_blocks": 7}):
        with start(prefix_cache=False, spill_bytes=spill, **options) as llm:
            found.append(told(llm, some, each))
            preempted = llm.metrics.preemptions.value
    assert found[0] == found[1] and preempted > 0


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_a_form_that_breaks_its_budgets_at_a_token_ends_its_answer_and_no_other(expected: list[Any], loop: str) -> None:
    broken = SamplingParams(temperature=1, seed=3, max_tokens=40, structured_outputs={"regex": "(a{1000}){1000}"})
    with start(loop=loop, prefix_cache=False) as llm:
        *others, last = llm.generate([*prompts()[:3], [5, 6]], [*map(params, range(3)), broken], progress=False)
        assert last.outputs[0].finish_reason == "error" and "needs more states" in str(last.outputs[0].error)
        assert [[o.token_ids for o in out.outputs] for out in others] == [[ids for ids, _ in one]
                                                                          for one in expected[:3]]
