"""What is refused: features that are not built, malformed bodies, missing keys, requests that are too large."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest
from server.running import KEY, MODEL, Running

USER: Any = [{"role": "user", "content": "say:hello"}]
SCHEMA = {"type": "object", "properties": {}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
PIXEL = ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJ"
         "RU5ErkJggg==")
IMAGE: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]
ANTHROPIC_IMAGE: Any = [{"role": "user", "content": [{"type": "image", "source": {
    "type": "base64", "media_type": "image/png", "data": PIXEL.split(",")[1]}}]}]
TOLD_BY_TOOL: Any = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": IMAGE[0]["content"]}]
FUZZ_ROUNDS = 400


@pytest.mark.parametrize(("fields", "named"), [
    ({"messages": IMAGE}, "messages[0]"),
    ({"guided_json": SCHEMA}, "guided_json"),
    ({"chat_template_kwargs": {"add_vision_id": True}}, "chat_template_kwargs.add_vision_id"),
    ({"best_of": 3}, "best_of"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
])
def test_a_feature_that_is_not_built_is_a_400_that_names_it(server: Running, fields: dict[str, Any],
                                                            named: str) -> None:
    refused = server.post("/v1/chat/completions", {"model": MODEL, "messages": USER, **fields})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "unsupported_field" and error["param"].startswith(named) and named in error["message"]


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json_object"}}, {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"messages": USER}, {"thinking": {"type": "enabled"}}])
def test_what_only_conversations_have_is_refused_in_a_plain_completion(server: Running, fields: dict[str, Any]) -> None:
    refused = server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, **fields})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "unsupported_field" and error["param"] == next(iter(fields))
    plain = {"response_format": {"type": "text"}, "thinking": {"type": "disabled"}, "tools": []}
    taken = server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1, **plain})
    assert taken.status_code == 200


def test_a_field_that_asks_for_what_is_the_case_anyway_is_taken(server: Running) -> None:
    anyway = {"skip_special_tokens": True, "add_generation_prompt": True, "include_stop_str_in_output": False, "n": 2,
              "best_of": 2, "modalities": ["text"], "continue_final_message": False, "functions": []}
    assert server.chat("stops", max_tokens=2, **anyway).status_code == 200


@pytest.mark.parametrize(("path", "fields", "named"), [
    ("/v1/chat/completions", {"messages": IMAGE}, "messages[0]"),
    ("/v1/chat/completions", {"messages": TOLD_BY_TOOL}, "messages[2]"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]},
     "input[0]"),
    ("/v1/messages", {"messages": ANTHROPIC_IMAGE, "max_tokens": 5}, "messages.0.content[0]"),
    ("/v1/messages/count_tokens", {"messages": ANTHROPIC_IMAGE}, "messages.0.content[0]"),
    ("/tokenize", {"messages": IMAGE}, "messages[0]"),
])
def test_an_image_is_a_400_that_says_where_it_is_and_what_is_missing(server: Running, path: str,
                                                                     fields: dict[str, Any], named: str) -> None:
    refused = server.post(path, {"model": MODEL, **fields})
    assert refused.status_code == 400, refused.text
    message = refused.json()["error"]["message"]
    assert named in message and "vision is not built" in message


@pytest.mark.parametrize(("fields", "named"), [
    ({"model": "gpt-4"}, "gpt-4"), ({"messages": []}, "messages"), ({"temperature": 3}, "temperature"),
    ({"top_k": -7}, "top_k"), ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"n": 99}, "n must be between 1 and 4"), ({"priority": 1}, "--allow-priority"), ({"deadline": -1}, "deadline"),
    ({"debug": "yes"}, "debug"), ({"cache_salt": ""}, "cache_salt"), ({"replay": "some"}, "replay"),
    ({"stop_token_ids": [1 << 40]}, "stop_token_ids"), ({"max_tokens": 5000}, "maximum context length"),
    ({"messages": [{"role": "user", "content": "x " * 3000}]}, "maximum context length"),
    ({"tools": [STRICT], "tool_choice": "required"}, "Thinking mode"),
])
def test_a_mistake_is_a_400_that_names_it(openai_client: openai.OpenAI, server: Running, fields: dict[str, Any],
                                          named: str) -> None:
    refused = server.post("/v1/chat/completions", {"model": MODEL, "messages": USER, **fields})
    assert refused.status_code == 400 and named in refused.json()["error"]["message"], refused.text


def test_the_key_is_needed_in_either_form_and_probes_need_none(server: Running) -> None:
    for headers in ({"Authorization": "Bearer wrong"}, {"x-api-key": KEY[:-1]}, {"Authorization": KEY}):
        refused = server.client.get("/v1/models", headers={"Authorization": "", **headers})
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    assert server.client.get("/v1/models", headers={"Authorization": "", "x-api-key": KEY}).status_code == 200
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert server.client.get(path, headers={"Authorization": ""}).status_code == 200
    assert KEY not in "".join(server.raw)


def test_no_prompt_and_no_answer_is_logged(server: Running) -> None:
    server.post("/v1/chat/completions", {"model": MODEL, "messages": [
        {"role": "user", "content": "my secret is xyzzy, say:stops"}]})
    server.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "xyzzy", "content": "xyzzy"}]})
    assert "xyzzy" not in "".join(server.raw) and "three four" not in "".join(server.raw)


def test_routes_that_are_not_there_are_named(server: Running) -> None:
    missing = server.client.get("/v1/nothing")
    assert missing.status_code == 404 and "/v1/nothing" in missing.json()["error"]["message"]
    wrong = server.client.get("/v1/chat/completions")
    assert wrong.status_code == 405 and "GET" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("body", [
    b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"model": "x"', b"[" * 100_000, b'{"a":' * 5000, b'{"model": "\\ud800"}',
    b'{"model":"scripted-model","messages":[{"role":"user","content":NaN}]}', b"1e999", b'"text"',
])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions",
                                  "/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_what_is_no_request_is_a_400(server: Running, path: str, body: bytes) -> None:
    refused = server.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["message"]


def mutated(value: Any, random: random.Random) -> Any:
    """The same with something in it replaced, removed or repeated."""
    odd = [None, True, -1, 1e308, 2**70, "", "\x00", "</think>", [], {}, [[]], {"type": "text"}, 0.5, "json"]
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(list(value))
        out = dict(value)
        if random.random() < 0.25:
            del out[key]
        else:
            out[key] = mutated(value[key], random)
        return out
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        return [*value[:place], mutated(value[place], random), *value[place + random.randrange(2):]]
    return random.choice(odd)


def test_no_malformed_body_is_more_than_a_4xx(server: Running) -> None:
    """Good bodies with a few places changed at random, of a fixed seed."""
    seeded = random.Random(11)
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
    common = {"model": MODEL, "temperature": 1, "top_p": 0.9, "stream": False}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {**common, "max_tokens": 1, "tools": [tool], "tool_choice": "auto", "stop": ["a"],
                                 "thinking": {"type": "disabled"}, "logprobs": True, "top_logprobs": 1,
                                 "messages": [{"role": "user", "content": [{"type": "text", "text": "say:hello"}]},
                                              {"role": "assistant", "content": "x", "tool_calls": [
                                                  {"id": "c", "type": "function",
                                                   "function": {"name": "f", "arguments": "{}"}}]},
                                              {"role": "tool", "tool_call_id": "c", "content": "r"}]},
        "/v1/messages": {**common, "max_tokens": 1, "system": [{"type": "text", "text": "s"}],
                         "messages": [{"role": "user", "content": [{"type": "text", "text": "say:hello"}]}],
                         "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}},
        "/v1/responses": {**common, "max_output_tokens": 1, "input": [{"role": "user", "content": [
            {"type": "input_text", "text": "say:hello"}]}], "reasoning": {"effort": "none"}, "text": {
                "format": {"type": "text"}}},
        "/v1/completions": {**common, "max_tokens": 1, "prompt": [1, 2, 3], "logprobs": 1, "stop": ["a"],
                            "stop_token_ids": [3], "seed": 3, "echo": False},
        "/tokenize": {"prompt": "text", "return_token_strs": True},
        "/detokenize": {"tokens": [1, 2]},
    }
    statuses: dict[int, int] = {}
    for round_number in range(FUZZ_ROUNDS):
        path = list(bodies)[round_number % len(bodies)]
        body = bodies[path]
        for _ in range(seeded.randrange(1, 4)):
            body = mutated(body, seeded)
        answer = server.client.post(path, content=json.dumps(body).encode())
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 400, 404), f"{path} {json.dumps(body)} {answer.text}"
    assert statuses.get(400, 0) > FUZZ_ROUNDS // 3, statuses
    server.wait_idle()
    assert server.chat("hello").status_code == 200 and server.event("engine_down") is None
