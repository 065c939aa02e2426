"""The Messages API through the official client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from server.running import MODEL, Running
from server.scripted_engine import HELLO, REASONING

TOOL: Any = {"name": "get_weather", "description": "Weather of a city.",
             "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


def ask(script: str) -> Any:
    return [{"role": "user", "content": f"Please say:{script}"}]


def test_a_message_has_thinking_text_usage_and_a_reason(anthropic_client: anthropic.Anthropic) -> None:
    message = anthropic_client.messages.create(model=MODEL, max_tokens=100, system="Be kind.", messages=ask("hello"))
    thinking, text = message.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert (thinking.thinking, text.text) == (REASONING, HELLO)  # type: ignore[union-attr]
    assert thinking.signature == message.id  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 5 < message.usage.input_tokens


def test_names_of_claude_models_are_served(anthropic_client: anthropic.Anthropic) -> None:
    message = anthropic_client.messages.create(model="claude-opus-5", max_tokens=50, messages=ask("hello"))
    assert message.model == "claude-opus-5"


def test_a_stream_brings_its_events_in_order_and_the_same_message(anthropic_client: anthropic.Anthropic) -> None:
    with anthropic_client.messages.stream(model=MODEL, max_tokens=100, messages=ask("hello")) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    wire = [k for k in kinds if k in ("message_start", "content_block_start", "content_block_stop", "message_delta",
                                      "message_stop")]
    block = ["content_block_start", "content_block_stop"]
    assert wire == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert [getattr(b, "thinking", getattr(b, "text", None)) for b in message.content] == [REASONING, HELLO]


def test_a_tool_is_used_and_its_result_taken(anthropic_client: anthropic.Anthropic) -> None:
    first = anthropic_client.messages.create(model=MODEL, max_tokens=200, messages=ask("weather"), tools=[TOOL])
    assert first.stop_reason == "tool_use"
    uses: list[Any] = [b for b in first.content if b.type == "tool_use"]
    assert [u.input for u in uses] == [{"city": "Paris"}, {"city": 'Zürich "West"'}]
    with anthropic_client.messages.stream(model=MODEL, max_tokens=200, messages=ask("weather"),
                                          tools=[TOOL]) as stream:
        streamed: list[Any] = [b for b in stream.get_final_message().content if b.type == "tool_use"]
    assert [u.input for u in streamed] == [u.input for u in uses]
    results = [{"type": "tool_result", "tool_use_id": u.id, "content": "sunny"} for u in uses]
    history = [*ask("weather"), {"role": "assistant", "content": first.content},
               {"role": "user", "content": [*results, {"type": "text", "text": "say:hello"}]}]
    second = anthropic_client.messages.create(model=MODEL, max_tokens=100, messages=history, tools=[TOOL])
    assert second.content[-1].text == HELLO  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(anthropic_client: anthropic.Anthropic, stream: bool) -> None:
    options: Any = {"model": MODEL, "max_tokens": 100, "messages": ask("stops"), "stop_sequences": ["three"],
                    "thinking": {"type": "disabled"}}
    if stream:
        with anthropic_client.messages.stream(**options) as opened:
            message = opened.get_final_message()
    else:
        message = anthropic_client.messages.create(**options)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
    assert message.content[0].text == "one two "  # type: ignore[union-attr]


def test_the_length_limit_is_a_reason(anthropic_client: anthropic.Anthropic) -> None:
    message = anthropic_client.messages.create(model=MODEL, max_tokens=3, messages=ask("hello"))
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 3


def test_counted_tokens_are_those_of_the_prompt(anthropic_client: anthropic.Anthropic) -> None:
    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=ask("hello"), tools=[TOOL])
    message = anthropic_client.messages.create(model=MODEL, max_tokens=3, messages=ask("hello"), tools=[TOOL])
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_mistakes_are_errors_of_this_api(anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as found:
        anthropic_client.messages.create(model=MODEL, max_tokens=10, messages=ask("hello"),
                                         extra_body={"temperature": 3.0})
    body: Any = found.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "temperature" in body["error"]["message"]
    assert body["request_id"] == found.value.response.headers["x-request-id"]
    wrong = anthropic.Anthropic(base_url=anthropic_client.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        wrong.messages.create(model=MODEL, max_tokens=10, messages=ask("hello"))
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@pytest.mark.parametrize(("fields", "named"), [
    ({"min_p": 7}, "min_p"), ({"ignore_eos": "yes"}, "ignore_eos"), ({"min_tokens": -1}, "min_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"repetition_penalty": 0}, "repetition_penalty"),
])
def test_a_sampling_option_of_other_servers_is_checked(server: Running, fields: dict[str, Any], named: str) -> None:
    refused = server.post("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": ask("stops"), **fields})
    assert refused.status_code == 400 and named in refused.json()["error"]["message"], refused.text


def test_sampling_options_of_other_servers_count_but_for_top_k_which_the_api_ignores(server: Running) -> None:
    body = {"model": MODEL, "max_tokens": 40, "thinking": {"type": "disabled"}, "messages": ask("stops")}
    plain, on = (server.post("/v1/messages", {**body, **more}).json() for more in ({}, {"ignore_eos": True}))
    assert (plain["stop_reason"], on["stop_reason"], on["usage"]["output_tokens"]) == ("end_turn", "max_tokens", 40)
    ignored = server.post("/v1/messages", {**body, "top_k": -7}).json()
    assert ignored["content"] == plain["content"]
