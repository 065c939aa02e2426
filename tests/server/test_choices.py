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


def test_an_answer_that_fails_fails_the_request(server: Running) -> None:
    failed = server.chat("nan", n=2, thinking={"type": "disabled"})
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "server_error"
    server.wait_idle()
