"""More than one answer to a request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai
import pytest
from server.running import MODEL, Running
from server.scripted_engine import HELLO, REASONING, SLOTS
from server.test_chat import TOOL

ASKED: Any = [{"role": "user", "content": "say:hello"}]


def test_n_answers_are_n_choices_and_the_prompt_counts_once(openai_client: openai.OpenAI) -> None:
    one: Any = openai_client.chat.completions.create(model=MODEL, messages=ASKED).usage
    done: Any = openai_client.chat.completions.create(model=MODEL, messages=ASKED, n=3)
    assert [c.index for c in done.choices] == [0, 1, 2]
    for choice in done.choices:
        assert choice.message.content == HELLO and choice.message.reasoning_content == REASONING
        assert choice.finish_reason == "stop"
    assert done.usage.prompt_tokens == one.prompt_tokens
    assert done.usage.completion_tokens == 3 * one.completion_tokens
    assert done.usage.total_tokens == one.prompt_tokens + 3 * one.completion_tokens
    reasoned = one.completion_tokens_details.reasoning_tokens
    assert done.usage.completion_tokens_details.reasoning_tokens == 3 * reasoned > 0


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_of_n_answers_holds_each_whole_and_usage_once(openai_client: openai.OpenAI,
                                                               include_usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks: list[Any] = list(openai_client.chat.completions.create(model=MODEL, messages=ASKED, n=2, stream=True,
                                                                   **options))
    text, finishes = Counter[int](), []
    said = {0: "", 1: ""}
    for chunk in chunks:
        choice = chunk.choices[0]
        said[choice.index] += choice.delta.content or ""
        text[choice.index] += 1
        if choice.finish_reason:
            finishes.append((choice.index, choice.finish_reason))
    assert said == {0: HELLO, 1: HELLO} and sorted(finishes) == [(0, "stop"), (1, "stop")]
    assert len({c.id for c in chunks}) == 1
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens % 2 == 0


def test_every_choice_has_its_own_calls_and_its_own_end(server: Running) -> None:
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": "say:weather"}], "tools": [TOOL], "n": 2}
    choices = server.post("/v1/chat/completions", body).json()["choices"]
    assert [c["finish_reason"] for c in choices] == ["tool_calls", "tool_calls"]
    calls = [call for c in choices for call in c["message"]["tool_calls"]]
    assert len(calls) == 4 and len({c["id"] for c in calls}) == 4
    cut = server.post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "say:long"}],
                                               "stop": ["word word"], "thinking": {"type": "disabled"}}).json()
    assert [c["message"]["content"] for c in cut["choices"]] == [" ", " "]
    server.wait_idle()


def test_plain_completions_have_choices_too(openai_client: openai.OpenAI) -> None:
    done = openai_client.completions.create(model=MODEL, prompt="say:stops", max_tokens=4, n=SLOTS)
    assert [(c.index, c.text) for c in done.choices] == [(i, done.choices[0].text) for i in range(SLOTS)]
    assert done.usage is not None and done.usage.completion_tokens == 4 * SLOTS
    chunks = list(openai_client.completions.create(model=MODEL, prompt="say:stops", max_tokens=4, n=2, stream=True,
                                                   stream_options={"include_usage": True}))
    said = {i: "".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == i) for i in (0, 1)}
    assert said[0] == said[1] == done.choices[0].text
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [8]


PROMPTS = ["say:stops", "And now say:hello", "x" * 300 + " say:stops"]


@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts_have_the_choices_that_each_has_alone(openai_client: openai.OpenAI, n: int) -> None:
    def ask(prompt: Any, **more: Any) -> Any:
        return openai_client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, n=n, **more)

    alone = [ask(p) for p in PROMPTS]
    done = ask(PROMPTS)
    assert [c.index for c in done.choices] == list(range(n * len(PROMPTS)))
    assert [(c.text, c.finish_reason) for c in done.choices] == [
        (c.text, c.finish_reason) for one in alone for c in one.choices]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(done.usage, name) == sum(getattr(one.usage, name) for one in alone), name
    chunks = list(ask(PROMPTS, stream=True, stream_options={"include_usage": True}))
    said = Counter[int]()
    for chunk in chunks:
        for choice in chunk.choices:
            assert done.choices[choice.index].text[said[choice.index]:].startswith(choice.text)
            said[choice.index] += len(choice.text)
    assert said == {c.index: len(c.text) for c in done.choices}
    assert [c.usage.total_tokens for c in chunks if c.usage] == [done.usage.total_tokens]


def test_echo_and_scores_of_several_prompts_are_each_its_own(openai_client: openai.OpenAI) -> None:
    alone = [openai_client.completions.create(model=MODEL, prompt=p, max_tokens=0, echo=True, logprobs=0)
             for p in PROMPTS]
    done = openai_client.completions.create(model=MODEL, prompt=PROMPTS, max_tokens=0, echo=True, logprobs=0)
    assert [c.text for c in done.choices] == PROMPTS
    assert [c.logprobs for c in done.choices] == [one.choices[0].logprobs for one in alone]


def test_one_prompt_that_fails_frees_the_others(server: Running) -> None:
    failed = server.post("/v1/completions", {"model": MODEL, "prompt": ["say:long", "say:nan"], "max_tokens": 900})
    assert failed.status_code == 500 and "finite" in failed.json()["error"]["message"]
    server.wait_idle()


def test_more_prompts_than_may_be_open_now_are_told_to_wait(server: Running) -> None:
    body: Any = {"model": MODEL, "prompt": "say:long", "max_tokens": 900, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = server.post("/v1/completions", {**body, "prompt": ["a"] * 8})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert server.load()["open"] == 1
    server.wait_idle()


def test_an_answer_that_fails_fails_the_request(server: Running) -> None:
    failed = server.chat("nan", n=2, thinking={"type": "disabled"})
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "server_error"
    server.wait_idle()
