"""Chat Completions through the official client: plain, streaming, tools, options."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server.running import KEY, MODEL, PATIENCE, Running
from server.scripted_engine import HELLO, REASONING

TOOL: Any = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CHAT_MODE: Any = {"thinking": {"type": "disabled"}}


def ask(script: str) -> Any:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Please say:{script}"}]


def test_an_answer_has_reasoning_content_usage_and_a_reason(openai_client: openai.OpenAI) -> None:
    done = openai_client.chat.completions.create(model=MODEL, messages=ask("hello"))
    message: Any = done.choices[0].message
    assert (message.reasoning_content, message.content) == (REASONING, HELLO)
    assert done.choices[0].finish_reason == "stop" and done.model == MODEL
    assert done.usage is not None and done.usage.completion_tokens_details is not None
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert 0 < (done.usage.completion_tokens_details.reasoning_tokens or 0) < done.usage.completion_tokens
    assert done.system_fingerprint is not None and done.system_fingerprint.startswith("fp_")


def test_chat_mode_has_no_reasoning(openai_client: openai.OpenAI) -> None:
    done = openai_client.chat.completions.create(model=MODEL, messages=ask("hello"), extra_body=CHAT_MODE)
    assert done.choices[0].message.content == HELLO
    assert not hasattr(done.choices[0].message, "reasoning_content")


def test_a_stream_joins_to_the_answer_and_ends_with_its_usage(openai_client: openai.OpenAI) -> None:
    chunks = list(openai_client.chat.completions.create(
        model=MODEL, messages=ask("hello"), stream=True, stream_options={"include_usage": True}))
    deltas: list[Any] = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == HELLO
    assert "".join(d.reasoning_content or "" for d in deltas) == REASONING
    assert deltas[0].role == "assistant" and len(deltas) > 5
    assert chunks[-1].usage is not None and chunks[-1].choices[0].finish_reason == "stop"
    whole = openai_client.chat.completions.create(model=MODEL, messages=ask("hello"))
    assert whole.usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_tool_calls_come_whole_and_streamed_alike(openai_client: openai.OpenAI) -> None:
    whole = openai_client.chat.completions.create(model=MODEL, messages=ask("weather"), tools=[TOOL])
    assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.content == "Let me look."
    found: list[Any] = list(whole.choices[0].message.tool_calls or [])
    assert [json.loads(c.function.arguments)["city"] for c in found] == ["Paris", 'Zürich "West"']
    arguments: dict[int, str] = {}
    names, pieces = [], 0
    for chunk in openai_client.chat.completions.create(model=MODEL, messages=ask("weather"), tools=[TOOL], stream=True):
        for c in chunk.choices[0].delta.tool_calls or []:
            assert c.function is not None
            names += [c.function.name] if c.function.name else []
            arguments[c.index] = arguments.get(c.index, "") + (c.function.arguments or "")
            pieces += 1
    assert names == ["get_weather"] * 2 and pieces > 6
    assert list(arguments.values()) == [c.function.arguments for c in found]


def test_the_turn_after_a_tool_call_is_accepted_without_its_reasoning(openai_client: openai.OpenAI) -> None:
    first = openai_client.chat.completions.create(model=MODEL, messages=ask("weather"), tools=[TOOL])
    message: Any = first.choices[0].message
    history = [*ask("weather"), {"role": "assistant", "content": message.content, "tool_calls": [
        {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
        for c in message.tool_calls]}]
    history += [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in message.tool_calls]
    history.append({"role": "user", "content": "say:hello"})
    again = openai_client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL])
    assert again.choices[0].message.content == HELLO


def test_a_forced_call_starts_inside_the_calls(openai_client: openai.OpenAI) -> None:
    done = openai_client.chat.completions.create(model=MODEL, messages=ask("inside"), tools=[TOOL],
                                                 tool_choice="required", extra_body=CHAT_MODE)
    found: list[Any] = list(done.choices[0].message.tool_calls or [])
    assert [json.loads(c.function.arguments) for c in found] == [{"city": "Paris"}]


def test_json_mode_gives_the_json_alone(openai_client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "say:json, as JSON"}]
    done = openai_client.chat.completions.create(model=MODEL, messages=messages,  # type: ignore[call-overload]
                                                 response_format={"type": "json_object"}, extra_body=CHAT_MODE)
    assert json.loads(done.choices[0].message.content) == {"colour": "blue", "n": [1, 2]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_frees_the_engine(openai_client: openai.OpenAI, server: Running,
                                                          stream: bool) -> None:
    done: Any = openai_client.chat.completions.create(model=MODEL, messages=ask("long"), stop=["word word wo"],
                                                      extra_body=CHAT_MODE, stream=stream)
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in done)
    else:
        text = done.choices[0].message.content
        assert done.choices[0].finish_reason == "stop"
    assert text == " "
    server.wait_idle()


def test_the_length_limit_ends_the_answer(openai_client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        done = openai_client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=ask("quick"), extra_body=CHAT_MODE, **{name: 7})
        assert done.choices[0].finish_reason == "length" and done.usage.completion_tokens == 7


def test_logprobs_name_the_tokens_of_the_answer(openai_client: openai.OpenAI) -> None:
    done = openai_client.chat.completions.create(model=MODEL, messages=ask("stops"), logprobs=True, top_logprobs=2,
                                                 extra_body=CHAT_MODE)
    shown = done.choices[0].logprobs
    assert shown is not None and shown.content is not None
    assert "".join(x.token for x in shown.content) == done.choices[0].message.content == "one two three four five"
    for x in shown.content:
        assert x.logprob == pytest.approx(0, abs=1e-3) and len(x.top_logprobs) == 2
        assert x.top_logprobs[0].token == x.token and x.top_logprobs[1].logprob < -10


def test_sampling_options_of_other_servers_are_taken(openai_client: openai.OpenAI) -> None:
    for options in ({"seed": 7, "top_k": 5, "min_p": 0.1}, {"repetition_penalty": 1.01, "ignore_eos": True}):
        done = openai_client.chat.completions.create(model=MODEL, messages=ask("stops"), max_tokens=30,
                                                     extra_body={**CHAT_MODE, **options})
        assert (done.choices[0].message.content or "").startswith("one two three four five")
        assert done.choices[0].finish_reason == ("length" if "ignore_eos" in options else "stop")


def test_text_of_a_user_never_becomes_a_control_token(server: Running) -> None:
    plain = server.post("/tokenize", {"messages": [{"role": "user", "content": "<|x|>"}]}).json()
    marked = server.post("/tokenize", {"messages": [{"role": "user", "content": "</think>"}]}).json()
    assert plain["tokens"].count(128822) == marked["tokens"].count(128822) == 0
    assert plain["tokens"].count(128821) == 1


def test_the_paths_of_deepseeks_own_service_are_served(server: Running) -> None:
    for base in (server.url, f"{server.url}/beta"):
        client = openai.OpenAI(base_url=base, api_key=KEY, max_retries=0, timeout=PATIENCE)
        assert client.chat.completions.create(model=MODEL, messages=ask("hello")).choices[0].message.content == HELLO
    client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=PATIENCE)
    assert client.responses.create(model=MODEL, input="say:hello").output_text == HELLO
    assert client.models.list().data[0].id == MODEL


def test_a_continued_answer_goes_on_where_it_stopped(server: Running) -> None:
    messages = [*ask("hello"), {"role": "assistant", "content": "Well, ", "prefix": True}]
    client = openai.OpenAI(base_url=f"{server.url}/beta", api_key=KEY, max_retries=0, timeout=PATIENCE)
    done = client.chat.completions.create(model=MODEL, messages=messages, extra_body=CHAT_MODE)
    prompt = server.post("/tokenize", {"messages": messages, **CHAT_MODE}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": prompt}).json()["prompt"].endswith("</think>Well, ")
    assert done.choices[0].message.content == HELLO


def test_template_settings_of_other_servers_mean_the_fields_of_this_api(openai_client: openai.OpenAI) -> None:
    for name in ("thinking", "enable_thinking"):
        done: Any = openai_client.chat.completions.create(
            model=MODEL, messages=ask("hello"), extra_body={"chat_template_kwargs": {name: False}})
        assert done.choices[0].message.content == HELLO and not hasattr(done.choices[0].message, "reasoning_content")
    both: Any = openai_client.chat.completions.create(
        model=MODEL, messages=ask("hello"), extra_body={"chat_template_kwargs": {"thinking": True}, **CHAT_MODE})
    assert not hasattr(both.choices[0].message, "reasoning_content")  # a field of the API wins


@pytest.mark.parametrize("n", [1, 2])
def test_usage_can_come_with_every_chunk(openai_client: openai.OpenAI, n: int) -> None:
    whole = openai_client.chat.completions.create(model=MODEL, messages=ask("hello"), n=n).usage
    chunks = list(openai_client.chat.completions.create(
        model=MODEL, messages=ask("hello"), n=n, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}))  # type: ignore[typeddict-unknown-key]
    told: list[Any] = [c.usage for c in chunks]
    assert all(u is not None and u.prompt_tokens == whole.prompt_tokens for u in told if whole)  # type: ignore
    counts = [u.completion_tokens for u in told]
    assert counts == sorted(counts) and counts[0] <= n and told[-1] == whole
