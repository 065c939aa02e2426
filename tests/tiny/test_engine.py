"""Speculation of the shipped model through the compiled engine: what the model card states is what an engine does."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from deepinfer import LLM, SamplingParams
from deepinfer.backends.base import HOST
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl.model import EngineOptions
from tools.train_tiny import measure
from tools.train_tiny.evaluate import load, sample_prompts
from tools.train_tiny.layers import Mode
from tools.train_tiny.vocabulary import Encoder

FOLDER = Path(__file__).parents[2] / "assets" / "tiny"
EVERY = 8  # of the prompts of the card one in so many is continued here


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("engine") / "tiny"
    options = EngineOptions(profile="wide", max_model_len=512, max_num_batched_tokens=256)
    compile_engine(model=str(FOLDER), out=folder, target="cpu", isa=HOST, options=options,
                   console=Console(file=io.StringIO()))
    return LLM(folder, FOLDER, threads=1, progress=False)


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "speculation.json").read_text(encoding="utf-8"))
    return found


def speculate(llm: LLM, prompt: list[int], answer: int) -> tuple[list[int], int, int]:
    """(greedy text of ``answer`` tokens, verification steps, tokens they gave), by drafts and their verification.

    As the trainer's count does, it leaves out steps that begin so late that a whole block would pass the end.
    """
    most = llm.plan.draft_tokens
    steps = gained = 0
    with llm.session() as s:
        made = [int(s.feed(prompt, wanted=1)[-1].argmax())]
        while len(made) - 1 < answer - most:
            drafts = [int(token) for token in s.draft(made[-1]).tokens]
            wanted = [int(token) for token in s.feed([made[-1], *drafts]).argmax(-1)]
            good = next((i for i in range(most) if drafts[i] != wanted[i]), most)
            s.rewind(len(s) - (most - good))
            made += wanted[: good + 1]
            steps, gained = steps + 1, gained + good + 1
        while len(made) < answer:
            made.append(int(s.feed([made[-1]])[-1].argmax()))
    return made[:answer], steps, gained


def test_acceptance_through_the_engine_is_the_trainers(llm: LLM, card: dict[str, Any]) -> None:
    """On the same text: roundings send greedy texts of two programs apart, and acceptance varies with the text."""
    prompts = card["prompt_ids"][::EVERY]
    done = [speculate(llm, prompt, card["answer_tokens"]) for prompt in prompts]
    found = sum(gained for _, _, gained in done) / sum(steps for _, steps, _ in done)
    backbone, draft = load(FOLDER, torch.device("cpu"))
    texts = torch.tensor([prompt + made for prompt, (made, _, _) in zip(prompts, done, strict=True)])
    mode = Mode(quantised=True, frozen=True, exact_ties=True)
    expected = measure.speculate(backbone, draft, texts, len(prompts[0]), mode).mean_length
    assert found == pytest.approx(expected, abs=0.05)
    stated = sum(card["tokens_by_prompt"][::EVERY]) / sum(card["steps_by_prompt"][::EVERY])
    # The trainer's own text for the same prompts is another one.
    assert found == pytest.approx(stated, rel=0.1)
    assert card["mean_accepted_length"] >= 2.5


def test_drafts_change_no_greedy_answer(llm: LLM, card: dict[str, Any]) -> None:
    prompt, params = card["prompt_ids"][-1], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answer = llm.generate([prompt], params)[0]
    made, _, _ = speculate(llm, prompt, 24)
    assert list(answer.token_ids) == made


def test_a_greeting_is_answered_and_a_tool_is_called(llm: LLM) -> None:
    encoder = Encoder(FOLDER / "tokenizer.json")
    asked = {shown: encoder.encode(pieces) for shown, pieces in sample_prompts()}
    questions = ("Hello", "What is the weather in Paris?")
    params = SamplingParams(temperature=0, max_tokens=80)
    hello, weather = llm.generate([asked[question] for question in questions], params)
    assert hello.text == "Hello! How can I help you?"
    assert '<｜DSML｜ invoke name="get_weather">' in weather.text and ">Paris<" in weather.text
    assert [answer.outputs[0].finish_reason for answer in (hello, weather)] == ["stop", "stop"]
