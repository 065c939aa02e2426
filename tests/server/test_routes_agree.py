"""The three conversation routes against each other, and answers that are cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.running import MODEL, Running
from server.scripted_engine import HELLO, REASONING
from server.test_chat import TOOL

HISTORY: Any = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."},
                {"role": "user", "content": "say:hello"}]


@pytest.mark.parametrize("thinking", [None, True, False])
def test_one_conversation_is_one_prompt_and_one_answer_through_every_route(server: Running,
                                                                          thinking: bool | None) -> None:
    switch: Any = {} if thinking is None else {"thinking": {"type": "enabled" if thinking else "disabled"}}
    effort: Any = {} if thinking is None else {"reasoning": {"effort": "high" if thinking else "none"}}
    chat = server.post("/v1/chat/completions", {"model": MODEL, "messages": HISTORY, **switch}).json()
    messages = server.post("/v1/messages", {"model": MODEL, "messages": HISTORY, "max_tokens": 200, **switch}).json()
    responses = server.post("/v1/responses", {"model": MODEL, "input": HISTORY, **effort}).json()
    assert chat["usage"]["prompt_tokens"] == messages["usage"]["input_tokens"] == responses["usage"]["input_tokens"]
    assert (chat["usage"]["completion_tokens"] == messages["usage"]["output_tokens"]
            == responses["usage"]["output_tokens"])
    reasoned = thinking is not False
    assert chat["choices"][0]["message"]["content"] == messages["content"][-1]["text"] == HELLO
    assert responses["output"][-1]["content"][0]["text"] == HELLO
    assert len(messages["content"]) == len(responses["output"]) == 1 + reasoned
    if reasoned:
        assert chat["choices"][0]["message"]["reasoning_content"] == messages["content"][0]["thinking"] == REASONING
        assert responses["output"][0]["content"][0]["text"] == REASONING


def test_an_answer_that_is_cut_anywhere_ends_well_formed(server: Running) -> None:
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": "say:weather"}], "tools": [TOOL]}
    full = server.post("/v1/chat/completions", body).json()
    for limit in range(1, full["usage"]["completion_tokens"], 2):
        cut = {**body, "max_tokens": limit}
        whole = server.post("/v1/chat/completions", cut).json()
        assert whole["choices"][0]["finish_reason"] == "length" and whole["usage"]["completion_tokens"] == limit
        with server.client.stream("POST", "/v1/chat/completions", json={**cut, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line[6:]) for line in lines[:-1]]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        arguments = "".join(c["function"]["arguments"] for e in events
                            for c in e["choices"][0]["delta"].get("tool_calls") or [])
        calls = whole["choices"][0]["message"].get("tool_calls", [])
        assert arguments == "".join(c["function"]["arguments"] for c in calls)
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        assert text == whole["choices"][0]["message"]["content"]
    message = server.post("/v1/messages", {"model": MODEL, "messages": body["messages"], "max_tokens": 40, "tools": [
        {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}]}).json()
    assert message["stop_reason"] == "max_tokens"
