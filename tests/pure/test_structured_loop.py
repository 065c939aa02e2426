"""Forms of answers in the loop, with a model that would rather write anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.scripted_engine import VOCABULARY, ScriptedEngine, ScriptedPackage
from server.soak import write_checkpoint

from deepinfer.errors import RequestError
from deepinfer.recipe import RecipeTokenizer
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.sampling_params import SamplingParams

END = 1
ORDER: dict[str, Any] = {
    "type": "object", "required": ["id", "items"], "additionalProperties": False,
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999},
                   "items": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["a", "b", 3]}}}}


class WildEngine(ScriptedEngine):
    """Its logits are noise of position and last id; the end token and a quotation mark are likelier than others."""

    def run(self, entry: str, batch: Batch, pins: Any = None) -> dict[str, Any]:
        out, stop = [], 0
        for s in batch.sequences[: batch.count]:
            stop += int(s["rows"])
            for row in range(int(s["wanted"])):
                seed = [int(s["c"]) + int(s["rows"]) - row, int(batch.token_ids[stop - row - 1])]
                out.append(np.random.default_rng(seed).standard_normal(VOCABULARY, np.float32))
                out[-1][[END, 4]] += 5
        return {"logits": np.stack(out) if out else np.zeros((0, VOCABULARY), np.float32)}


class WildPackage(ScriptedPackage):
    def start(self, checkpoint: Any, *, slots: int, blocks: int, **_: Any) -> WildEngine:
        return WildEngine(self.plan, slots, blocks, Path(checkpoint))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(WildPackage(), write_checkpoint(tmp_path_factory.mktemp("checkpoint")), progress=False) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> RecipeTokenizer:
    return RecipeTokenizer.from_file(write_checkpoint(tmp_path_factory.mktemp("tokenizer")))


def ask(llm: LLM, *params: SamplingParams) -> list[RequestOutput]:
    prompts = [[10 + i, 20, 30] for i in range(len(params))]
    return llm.generate(prompts, list(params), progress=False)


def fits(text: str) -> bool:
    found = json.loads(text)
    return (list(found) == ["id", "items"] and 0 <= found["id"] <= 999 and 1 <= len(found["items"]) <= 3
            and all(x in ("a", "b", 3) for x in found["items"]))


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
def test_answers_have_their_form_whatever_the_model_prefers(llm: LLM, temperature: float) -> None:
    answers = 1 if temperature == 0 else 3
    shared: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_tokens": 80, "n": answers}
    found = ask(llm, SamplingParams(structured_outputs={"json": ORDER}, **shared),
                SamplingParams(structured_outputs={"regex": "[0-9]{4}"}, **shared))
    for out in found[0].outputs:
        assert out.finish_reason == "stop" and fits(out.text), out.text
    assert all(out.text.isdigit() and len(out.text) == 4 for out in found[1].outputs)
    if temperature:
        assert len({out.text for out in found[0].outputs}) > 1


def test_a_form_changes_no_answer_beside_it(llm: LLM) -> None:
    free = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)
    alone = ask(llm, free)[0]
    beside = ask(llm, free, SamplingParams(structured_outputs={"json": ORDER}, seed=1, max_tokens=80))[0]
    assert beside.token_ids == alone.token_ids


def test_the_form_begins_behind_its_marker(llm: LLM, tokenizer: RecipeTokenizer) -> None:
    marker = tokenizer.special_id("</think>")
    form = {"choice": ["left", "right"], "start_after": [marker]}
    found = ask(llm, SamplingParams(structured_outputs=form, seed=2, max_tokens=8, ignore_eos=True, temperature=1),
                SamplingParams(structured_outputs=form, seed=2, max_tokens=8, logit_bias={marker: 100}))
    assert marker not in found[0].token_ids and found[0].outputs[0].finish_reason == "length"
    assert found[1].token_ids[0] == marker
    assert tokenizer.decode(found[1].token_ids[1:]) in ("left", "right")
    assert found[1].outputs[0].finish_reason == "stop"


def test_an_answer_ends_when_nothing_can_follow(llm: LLM) -> None:
    form = {"choice": ["yes"]}
    for params in (SamplingParams(structured_outputs=form, max_tokens=50, min_tokens=9),
                   SamplingParams(structured_outputs=form, max_tokens=50, ignore_eos=True)):
        found = ask(llm, params)[0].outputs[0]
        assert (found.text, found.finish_reason, END in found.token_ids) == ("yes", "stop", False)


def test_min_tokens_holds_the_end_back_where_more_can_follow(llm: LLM) -> None:
    found = ask(llm, SamplingParams(structured_outputs={"regex": "[ab]+"}, min_tokens=9, max_tokens=60, seed=5,
                                    logit_bias={END: 100}))[0]
    assert len(found.token_ids) == 10 and found.token_ids[-1] == END and set(found.text) <= set("ab")


def test_options_that_leave_no_token_end_only_their_request(llm: LLM) -> None:
    found = ask(llm, SamplingParams(structured_outputs={"choice": ["yes"]}, allowed_token_ids=[5]),
                SamplingParams(structured_outputs={"choice": ["yes"]}))
    assert found[0].outputs[0].finish_reason == "error" and "no token is left" in str(found[0].outputs[0].error)
    assert found[1].text == "yes"


def test_a_form_that_cannot_be_compiled_is_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.metrics.steps.values.copy()
    with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
        ask(llm, SamplingParams(), SamplingParams(structured_outputs={"regex": "(a"}))
    assert llm.metrics.steps.values == steps and not llm.core.requests


def test_the_matcher_has_seen_the_emitted_tokens_after_every_step(llm: LLM) -> None:
    core = llm.core
    request = core.make("watched", [1, 2, 3], SamplingParams(structured_outputs={"json": ORDER}, max_tokens=80, n=2,
                                                             seed=4))
    core.add(request)
    while core.requests:
        core.step()
        for s in request.sequences:
            assert s.constraint is not None and s.constraint.tokens == s.output.token_ids
    assert all(fits(out.text) for out in request.outputs)
