
"""Requests of any content: converted, or refused with a sentence and a body."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import InternalError, SpecError
from deepinfer.recipe import (
    DIALECTS,
    ApiError,
    Assistant,
    ConversionError,
    ConversionOptions,
    SchemaError,
    convert_request,
    render,
    resolve_max_tokens,
)
from deepinfer.recipe.options import CLAUDE_PREFIXES, HOSTED_MODELS
from deepinfer.recipe.requests import APIS

MODEL = "DeepSeek-V4.1-Flash"
keys = st.sampled_from(
    [
        "model",
        "messages",
        "input",
        "role",
        "content",
        "type",
        "text",
        "tools",
        "tool_calls",
        "function",
        "name",
        "id",
        "arguments",
        "thinking",
        "tool_choice",
        "response_format",
        "stop",
        "temperature",
        "max_tokens",
        "system",
        "call_id",
    ]
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats()
    | st.sampled_from(
        [
            "user",
            "assistant",
            "tool",
            "system",
            "function",
            "text",
            "image_url",
            "enabled",
            MODEL,
            "\ud800",
            "",
        ]
    )
)
junk = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=10,
)


def convertible(api: str, body: Any) -> None:
    """Convert and render, or fail in the documented way."""
    try:
        request = convert_request(api, body)
    except ApiError as error:
        assert error.http_status == 400
        assert error.message and "\n" not in str(error)
        assert error.body()["error"]["message"] == error.message
        return
    for dialect in DIALECTS.values():
        assert render(request.conversation, dialect).text.startswith("<｜begin")


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=100)
@given(body=st.dictionaries(keys, junk, max_size=6))
def test_no_body_breaks_the_conversion(api: str, body: dict[str, Any]) -> None:
    convertible(api, {"model": MODEL, **body})


@pytest.mark.parametrize("section", ["encode"])
@settings(max_examples=150)
@given(data=st.data())
def test_no_recorded_request_with_a_part_exchanged_breaks_the_conversion(
    section: str, data: st.DataObject, vectors: dict[str, Any]
) -> None:
    vector = data.draw(st.sampled_from(vectors[section]))
    body = copy.deepcopy(vector["request"])
    place: Any = body
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if data.draw(st.booleans()) or not isinstance(place[key], dict | list):
            place[key] = data.draw(junk)
            break
        place = place[key]
    convertible(vector["api"], body)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", '{"model": NaN}', '{"a": "\\ud800"}', "[" * 9999]
)
def test_a_body_that_is_no_json_object_is_a_schema_error(body: str | bytes) -> None:
    with pytest.raises(SchemaError, match="invalid request body"):
        convert_request("chat", body)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "json"}], **fields}


def test_bytes_text_and_object_convert_alike() -> None:
    body = chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": 1e-7}}}]
    )
    text = json.dumps(body)
    assert (
        convert_request("chat", text)
        == convert_request("chat", text.encode())
        == convert_request("chat", body)
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content: found null, expected a string or a list of parts",
        ),
        ({"temperature": "hot"}, 'temperature: found "hot", expected a number'),
        ({"max_tokens": -1}, "max_tokens: found -1, expected a whole number in [0, 2^32)"),
        ({"tools": [{"type": "function"}]}, "tools[0]: missing field `function`"),
        (
            {"thinking": {"type": "on"}},
            "unknown variant `on`, expected one of `enabled`, `disabled`, `adaptive`",
        ),
    ],
)
def test_a_schema_error_names_place_finding_and_what_is_allowed(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError) as caught:
        convert_request("chat", chat(**fields))
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("thinking", "effort", "wanted"),
    [
        (None, None, (True, "high")),
        (None, "none", (False, None)),
        (None, "minimal", (True, "low")),
        (None, "medium", (True, "high")),
        (None, "xhigh", (True, "xhigh")),
        (None, "ultra", (True, "max")),
        ("enabled", "none", (True, "high")),
        ("adaptive", "low", (True, "low")),
        ("disabled", "max", (False, None)),
    ],
)
def test_the_switch_wins_over_the_effort(
    thinking: str | None, effort: str | None, wanted: tuple[bool, str]
) -> None:
    body = chat(thinking={"type": thinking} if thinking else None, reasoning_effort=effort)
    conversation = convert_request("chat", body).conversation
    assert (conversation.thinking, conversation.effort and conversation.effort.value) == wanted


def test_an_effort_alone_switches_thinking_on_where_the_default_is_off() -> None:
    off = ConversionOptions(default_thinking=False)
    assert not convert_request("chat", chat(), off).conversation.thinking
    assert convert_request("chat", chat(reasoning_effort="low"), off).conversation.thinking


def test_reasoning_text_and_calls_of_one_responses_turn_merge() -> None:
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "T"}]},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "A"},
        {"type": "function_call_output", "call_id": "b", "output": "B"},
        {"type": "web_search_call", "id": "w"},
    ]
    messages = convert_request("responses", {"model": MODEL, "input": items}).conversation.messages
    turn = messages[1]
    assert isinstance(turn, Assistant)
    assert (turn.reasoning, turn.content, [call.id for call in turn.calls]) == ("R", "T", ["b", "a"])
    assert [getattr(message, "call_id", None) for message in messages[2:]] == ["b", "a"]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "Input items array must not be empty"),
        (
            [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}],
            "No tool output found for tool call a.",
        ),
        (
            [{"type": "function_call_output", "call_id": "a", "output": ""}],
            "No tool call found for tool output with call_id a.",
        ),
        (
            [
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": ""},
                {"type": "function_call_output", "call_id": "a", "output": ""},
            ],
            "Duplicate tool output for call_id: a.",
        ),
        (
            [
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": ""},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            ],
            "Duplicate 'call_id': a.",
        ),
    ],
)
def test_responses_calls_and_outputs_come_in_pairs(items: list[Any], said: str) -> None:
    with pytest.raises(ConversionError) as caught:
        convert_request("responses", {"model": MODEL, "input": items})
    assert caught.value.message == said


@pytest.mark.parametrize(
    ("prompt", "limit", "wanted"), [(10, 10**6, 8192), (0, 1, 1), (1000, 1000, 1), (600, 1000, 400)]
)
def test_the_default_length_is_what_the_context_leaves(prompt: int, limit: int, wanted: int) -> None:
    request = convert_request("chat", chat(thinking={"type": "disabled"}))
    assert resolve_max_tokens(request, prompt, limit) == wanted


def test_a_name_is_served_by_table_first_and_by_prefix_then() -> None:
    options = ConversionOptions(models=HOSTED_MODELS, prefixes=CLAUDE_PREFIXES)
    wanted = {"deepseek-v4-pro": "v4", "deepseek-flash": "v4.1", "claude-opus-9": "v4", "claude-x": "v4.1"}
    for name, dialect in wanted.items():
        assert convert_request("chat", chat(model=name), options).dialect == dialect
    with pytest.raises(ConversionError) as caught:
        convert_request("chat", chat(model="gpt"), options)
    assert caught.value.message.endswith("deepseek-v4-pro, but you passed gpt.")


def test_an_unknown_option_word_is_refused() -> None:
    with pytest.raises(SpecError, match=r"missing_reasoning.*rejct.*fill, reject"):
        ConversionOptions(missing_reasoning="rejct")


def test_an_unknown_api_is_our_own_bug() -> None:
    with pytest.raises(InternalError, match="chat, responses, messages"):
        convert_request("completions", chat())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {1: 2}, b"bytes", object()])
def test_what_is_not_json_is_refused_wherever_it_hides(value: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"default": value}}}
    with pytest.raises(SchemaError, match="not JSON"):
        convert_request(
            "chat", chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
        )
