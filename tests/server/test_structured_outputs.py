"""Forms of answers through the official clients, from a model that would rather write something else."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
import zmq
from pydantic import BaseModel
from server.running import MODEL, PATIENCE, Running
from server.scripted_engine import ScriptedPackage

from deepinfer.runtime.llm import LLM
from deepinfer.runtime.server import wire
from deepinfer.runtime.server.engine_loop import EngineLoop

CHAT_MODE: Any = {"thinking": {"type": "disabled"}}
CITIES = ["Paris", "Rome"]
CHOICE: Any = {"type": "object", "required": ["city", "days"], "additionalProperties": False,
               "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}}
CITY: Any = {"type": "object", "required": ["city"], "additionalProperties": False,
             "properties": {"city": {"type": "string", "enum": CITIES}}}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}}


class Trip(BaseModel):
    """What the clients' own helpers make a schema of."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def ask(script: str) -> Any:
    return [{"role": "user", "content": f"Please say:{script}, as JSON."}]


def fits(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["city", "days"] and found["city"] in CITIES and 1 <= found["days"] <= 9


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answer_follows_its_schema_behind_free_reasoning(openai_client: openai.OpenAI, stream: bool,
                                                                thinks: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": CHOICE, "strict": True}}
    done: Any = openai_client.chat.completions.create(
        model=MODEL, messages=ask("prose"), response_format=form, stream=stream,  # type: ignore[arg-type]
        extra_body={} if thinks else CHAT_MODE)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in done if chunk.choices]
        content = "".join(d.content or "" for d in deltas)
        reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    else:
        content = done.choices[0].message.content
        reasoning = getattr(done.choices[0].message, "reasoning_content", "")
    assert fits(content) and reasoning == ("Some prose." if thinks else "")


def test_the_clients_own_helpers_parse_the_answer(openai_client: openai.OpenAI,
                                                  anthropic_client: anthropic.Anthropic) -> None:
    chat = openai_client.chat.completions.parse(model=MODEL, messages=ask("prose"), response_format=Trip,
                                                extra_body=CHAT_MODE)
    assert isinstance(chat.choices[0].message.parsed, Trip)
    response = openai_client.responses.parse(model=MODEL, input=ask("prose"), text_format=Trip)
    assert isinstance(response.output_parsed, Trip)
    message = anthropic_client.messages.parse(model=MODEL, max_tokens=200, messages=ask("prose"), output_format=Trip)
    assert isinstance(message.parsed_output, Trip)


def test_json_mode_gives_an_object_whatever_the_model_prefers(openai_client: openai.OpenAI) -> None:
    done = openai_client.chat.completions.create(model=MODEL, messages=ask("json"), extra_body=CHAT_MODE,
                                                 response_format={"type": "json_object"})
    assert json.loads(done.choices[0].message.content or "") == {"colour": "blue", "n": [1, 2]}
    form: Any = {"format": {"type": "json_object"}}
    response = openai_client.responses.create(model=MODEL, input=ask("json"), text=form)
    assert json.loads(response.output_text) == {"colour": "blue", "n": [1, 2]}


@pytest.mark.parametrize("form", [{"regex": "[0-9]{3}"}, {"choice": ["100", "200"]}, {"json": {"enum": [100, 200]}},
                                  {"grammar": 'start: "1" "0" "0"'}])
def test_the_extension_field_works_on_both_routes_of_that_family(openai_client: openai.OpenAI,
                                                                form: dict[str, Any]) -> None:
    chat = openai_client.chat.completions.create(model=MODEL, messages=ask("prose"),
                                                 extra_body={"structured_outputs": form})
    text = openai_client.completions.create(model=MODEL, prompt="say:prose", extra_body={"structured_outputs": form})
    assert all(str(found).isdigit() and len(str(found)) == 3
               for found in (chat.choices[0].message.content, text.choices[0].text))


@pytest.mark.parametrize(("script", "choice", "extra"), [("wrong", "auto", {}), ("wrong", "auto", CHAT_MODE),
                                                         ("wrongs", "required", CHAT_MODE)])
def test_a_strict_tool_gets_arguments_of_its_schema(openai_client: openai.OpenAI, script: str, choice: Any,
                                                    extra: Any) -> None:
    done = openai_client.chat.completions.create(model=MODEL, messages=ask(script), tools=[TOOL], tool_choice=choice,
                                                 extra_body=extra)
    assert done.choices[0].finish_reason == "tool_calls"
    found: list[Any] = list(done.choices[0].message.tool_calls or [])
    assert found and all(call.function.name == "get_weather" for call in found)
    assert all(json.loads(call.function.arguments)["city"] in CITIES for call in found)
    assert all(list(json.loads(call.function.arguments)) == ["city"] for call in found)


def test_a_tool_that_is_not_strict_is_left_to_the_model(openai_client: openai.OpenAI) -> None:
    loose = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
    done = openai_client.chat.completions.create(model=MODEL, messages=ask("wrong"), tools=[loose])  # type: ignore[list-item]
    calls: list[Any] = list(done.choices[0].message.tool_calls or [])
    assert [json.loads(c.function.arguments) for c in calls] == [{"town": "Atlantis"}]


def test_strict_tools_hold_on_the_other_two_routes(openai_client: openai.OpenAI,
                                                   anthropic_client: anthropic.Anthropic) -> None:
    response = openai_client.responses.create(model=MODEL, input=ask("wrong"), tools=[
        {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}])
    calls: list[Any] = [item for item in response.output if item.type == "function_call"]
    assert calls and all(json.loads(call.arguments)["city"] in CITIES for call in calls)
    message = anthropic_client.messages.create(model=MODEL, max_tokens=300, messages=ask("wrong"), tools=[
        {"name": "get_weather", "input_schema": CITY, "strict": True}])
    uses: list[Any] = [block for block in message.content if block.type == "tool_use"]
    assert uses and all(use.input["city"] in CITIES for use in uses)


def test_a_format_beside_tools_leaves_both_ways_open(openai_client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": CHOICE}}
    for script in ("wrong", "prose"):
        done = openai_client.chat.completions.create(model=MODEL, messages=ask(script), response_format=form,
                                                     tools=[TOOL], extra_body=CHAT_MODE)
        message: Any = done.choices[0].message
        if message.tool_calls:
            assert json.loads(message.tool_calls[0].function.arguments)["city"] in CITIES
        else:
            assert fits(message.content)


UNFIT: Any = {"type": "object", "properties": {"list": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(("fields", "words"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": UNFIT}}},
     ["response_format.json_schema.schema.properties.list", "uniqueItems"]),
    ({"response_format": {"type": "regex", "regex": "(a"}}, ["response_format.regex", "unclosed"]),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": UNFIT, "strict": True}}]},
     ["tools.f.function.parameters.properties.list", "uniqueItems"]),
    ({"structured_outputs": {"json": UNFIT}}, ["structured_outputs.json.properties.list"]),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, ["structured_outputs", "exactly one"]),
    ({"structured_outputs": {"nothing": 1}}, ["structured_outputs", "nothing"]),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "regex", "regex": "a"}}, ["combined"]),
    ({"response_format": {"type": "regex", "regex": "a"}, "messages": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "prefix": True}]}, ["prefix"]),
])
def test_a_form_that_cannot_be_enforced_is_a_400_that_names_the_place(server: Running, fields: dict[str, Any],
                                                                      words: list[str]) -> None:
    body = {"model": MODEL, "messages": ask("hello"), **CHAT_MODE, **fields}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400, refused.text
    assert all(word in refused.json()["error"]["message"] for word in words), refused.text


def test_the_other_routes_name_their_own_fields(openai_client: openai.OpenAI,
                                                anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema\.properties\.list"):
        openai_client.responses.create(model=MODEL, input="x", text={  # type: ignore[call-overload]
            "format": {"type": "json_schema", "name": "n", "schema": UNFIT}})
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema\.properties\.list"):
        anthropic_client.messages.create(model=MODEL, max_tokens=9, messages=ask("hello"), output_config={
            "format": {"type": "json_schema", "schema": UNFIT}})


def test_a_form_that_is_being_compiled_stalls_nobody(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop in a thread of its own; the compiler waits until another answer is complete, a third is given up."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://forms")
    theirs.connect("inproc://forms")
    release = threading.Event()
    with LLM(ScriptedPackage(), checkpoint, progress=False) as llm:
        build = llm.core.grammars._build
        monkeypatch.setattr(llm.core.grammars, "_build", lambda asked: release.wait(PATIENCE) and build(asked))
        loop = threading.Thread(target=EngineLoop(llm.core, theirs).run, daemon=True)
        loop.start()

        def submit(key: int, **sampling: Any) -> None:
            ours.send(wire.encode(wire.Submit(key, wire.pack_ids([7, 8, 9]), {"temperature": 0, **sampling})))

        finished: list[tuple[int, str]] = []

        def wait_for(count: int) -> None:
            while len(finished) < count:
                assert ours.poll(1000 * PATIENCE), finished
                message = wire.decode_from_engine(ours.recv_multipart()[1])
                if isinstance(message, wire.Step):
                    finished.extend((u.id, u.finish) for u in message.all() if u.finish is not None)

        submit(1, structured_outputs={"choice": ["yes"]})
        submit(2, structured_outputs={"regex": "("})
        submit(3, structured_outputs={"regex": "never"})
        submit(4, max_tokens=5)
        wait_for(1)
        ours.send(wire.encode(wire.Abort(3)))
        submit(5, max_tokens=5)
        wait_for(2)
        release.set()
        wait_for(4)
        ours.send(wire.encode(wire.Stop()))
        loop.join(PATIENCE)
    assert finished[:2] == [(4, "length"), (5, "length")] and sorted(finished[2:]) == [(1, "stop"), (2, "refused")]
    context.destroy(linger=0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_fields_that_contradict_each_other_are_a_400_that_names_them(server: Running, path: str) -> None:
    asked = {"/v1/chat/completions": {"messages": ask("prose"), **CHAT_MODE}, "/v1/completions": {"prompt": "a"},
             "/v1/responses": {"input": "a", "reasoning": {"effort": "none"}}}[path]
    body = {"model": MODEL, **asked, "allowed_token_ids": [5], "structured_outputs": {"regex": "a+"}}
    for stream in (False, True):
        refused = server.post(path, {**body, "stream": stream})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert "allowed_token_ids and structured_outputs contradict each other" in error["message"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "allowed_token_ids")


def test_a_format_and_allowed_ids_that_part_later_end_the_stream_with_an_error_that_names_both(server: Running) -> None:
    only = server.post("/tokenize", {"prompt": "{"}).json()["tokens"]
    body = {"model": MODEL, "messages": ask("prose"), **CHAT_MODE, "allowed_token_ids": only,
            "response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": CHOICE}}}
    named = "allowed_token_ids and response_format contradict each other"
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400 and named in refused.json()["error"]["message"], refused.text
    stream = server.post("/v1/chat/completions", {**body, "stream": True})
    events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
    assert stream.status_code == 200 and events[-1] == "[DONE]"
    assert named in json.loads(events[-2])["error"]["message"]
