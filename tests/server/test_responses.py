"""The Responses API through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
from server.running import MODEL
from server.scripted_engine import HELLO, REASONING

TOOL: Any = {"type": "function", "name": "get_weather", "description": "Weather of a city.", "strict": False,
             "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


def test_a_response_has_reasoning_message_and_usage(openai_client: openai.OpenAI) -> None:
    response = openai_client.responses.create(model=MODEL, instructions="Be kind.", input="say:hello")
    reasoning, message = response.output
    assert (reasoning.type, message.type, response.status) == ("reasoning", "message", "completed")
    assert response.output_text == HELLO
    assert reasoning.content[0].text == REASONING  # type: ignore[union-attr, index]
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0


def test_a_stream_is_numbered_and_completes_with_the_same_response(openai_client: openai.OpenAI) -> None:
    events = list(openai_client.responses.create(model=MODEL, input="say:hello", stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == HELLO and len(deltas) > 3
    assert events[-1].response.output_text == HELLO  # type: ignore[union-attr]


def test_a_call_and_its_output_make_the_next_turn(openai_client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": "say:weather"}
    first = openai_client.responses.create(model=MODEL, input=[question], tools=[TOOL])
    found: list[Any] = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(c.arguments)["city"] for c in found] == ["Paris", 'Zürich "West"']
    outputs: Any = [{"type": "function_call_output", "call_id": c.call_id, "output": "sunny"} for c in found]
    history: Any = [question, *[item.model_dump(exclude_none=True) for item in first.output], *outputs,
                    {"role": "user", "content": "say:hello"}]
    second = openai_client.responses.create(model=MODEL, input=history, tools=[TOOL])
    assert second.output_text == HELLO


def test_the_length_limit_leaves_the_response_incomplete(openai_client: openai.OpenAI) -> None:
    response = openai_client.responses.create(model=MODEL, input="say:quick", max_output_tokens=16,
                                              reasoning={"effort": "none"})
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == " word" * 16
