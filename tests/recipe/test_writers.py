"""The forms of the three APIs around one answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deepinfer.errors import InternalError
from deepinfer.recipe import AnswerIdentity, Event, Finish, RecipeTokenizer, StreamProcessor, convert_request
from deepinfer.recipe.dialect import DSML

MODEL = "DeepSeek-V4.1-Flash"
CALL = f'r</think>t\n\n<{DSML} calls>\n<{DSML} invoke name="f">\n</{DSML} invoke>\n</{DSML} calls>'
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "user", "content": "q"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "messages": {
        "messages": [{"role": "user", "content": "q"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stop_sequences": ["STOP"],
    },
    "responses": {"input": "q", "tools": [{"type": "function", "name": "f"}]},
}


def answered(
    api: str, text: str, finish: Finish = Finish.STOP, **identity: Any
) -> tuple[list[Event], StreamProcessor]:
    request = convert_request(api, {"model": MODEL, **BODIES[api]})
    processor = StreamProcessor(request, AnswerIdentity("id-1", "m", **identity))
    events = processor.ready(10, 4, "fp")
    events += processor.text(text, 3)
    events += processor.finish(finish)
    return events, processor


@pytest.mark.parametrize("api", BODIES)
def test_a_call_id_is_new_each_time_and_tells_empty_thinking(api: str) -> None:
    ids = set()
    for text, mark in ((CALL, ""), (CALL.removeprefix("r"), "ET_"), (CALL.removeprefix("r"), "ET_")):
        found = re.findall(r"call_00_\w+", json.dumps(answered(api, text)[1].body()))
        assert found and re.fullmatch(rf"call_00_{mark}[A-Za-z0-9]{{20}}\d{{4}}", found[0])
        ids.add(found[0])
    assert len(ids) == 3


def test_a_stop_sequence_is_named_and_asks_the_backend_to_stop() -> None:
    _, processor = answered("messages", "r</think>abcSTOPdef")
    body = processor.body()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "STOP")
    assert body["content"][-1]["text"] == "abc"
    assert processor.stopped_early
    assert processor.text("more", 1) == [] and processor.finish() == []


@pytest.mark.parametrize(
    ("finish", "wanted"),
    [
        (Finish.STOP, ("tool_calls", "tool_use", "completed", None)),
        (Finish.LENGTH, ("length", "max_tokens", "incomplete", "max_output_tokens")),
        (Finish.CONTENT_FILTER, ("content_filter", "refusal", "incomplete", "content_filter")),
    ],
)
def test_length_and_filter_win_over_calls(finish: Finish, wanted: tuple[str, str, str, str | None]) -> None:
    chat, messages, responses = (answered(api, CALL, finish)[1].body() for api in BODIES)
    details = responses["incomplete_details"]
    assert chat["choices"][0]["finish_reason"] == wanted[0]
    assert messages["stop_reason"] == wanted[1]
    assert (responses["status"], details and details["reason"]) == wanted[2:]


@pytest.mark.parametrize("api", BODIES)
def test_events_go_over_the_wire_as_server_sent_events(api: str) -> None:
    events, processor = answered(api, CALL)
    for event in events:
        lines = event.sse().split("\n")
        assert lines[-2:] == ["", ""]
        assert json.loads(lines[-3].removeprefix("data: ")) == event.data
        assert lines[:-3] == ([] if event.name is None else [f"event: {event.name}"])
    assert processor.done_line == ("[DONE]" if api == "chat" else None)


def test_times_come_from_the_one_clock() -> None:
    ticks = iter([100, 107])
    body = answered("responses", "r</think>a", clock=lambda: next(ticks))[1].body()
    assert (body["created_at"], body["completed_at"]) == (100, 107)


def test_without_a_tokenizer_reasoning_tokens_are_left_out() -> None:
    chat = answered("chat", CALL)[1].body()
    assert "completion_tokens_details" not in chat["usage"]
    assert chat["usage"]["prompt_cache_hit_tokens"] + chat["usage"]["prompt_cache_miss_tokens"] == 10


def test_another_parameter_than_input_gives_a_custom_tool_its_json(v41: RecipeTokenizer) -> None:
    body = {"model": MODEL, "input": "q", "tools": [{"type": "custom", "name": "apply_patch"}]}
    shown = []
    for name in ("input", "patch"):
        call = f'<{DSML} parameter name="{name}" string="true">a\n"b"</{DSML} parameter>\n</{DSML} invoke>'
        processor = StreamProcessor(
            convert_request("responses", body), AnswerIdentity("i", "m"), tokenizer=v41
        )
        processor.ready(1)
        processor.text(f'</think><{DSML} invoke name="apply_patch">\n{call}')
        processor.finish()
        shown.append(processor.body()["output"][0]["input"])
    assert shown == ['a\n"b"', '{"patch": "a\\n\\"b\\""}']


def test_only_the_first_parameter_is_the_input_of_a_custom_tool() -> None:
    body = {"model": MODEL, "input": "q", "tools": [{"type": "custom", "name": "apply_patch"}]}
    parameters = "".join(
        f'<{DSML} parameter name="{name}" string="true">{name}!</{DSML} parameter>\n'
        for name in ("input", "more")
    )
    processor = StreamProcessor(convert_request("responses", body), AnswerIdentity("i", "m"))
    processor.ready(1)
    processor.text(f'</think><{DSML} invoke name="apply_patch">\n{parameters}</{DSML} invoke>')
    processor.finish()
    assert processor.body()["output"][0]["input"] == "input!"


def test_text_and_ids_do_not_mix(v41: RecipeTokenizer) -> None:
    request = convert_request("chat", {"model": MODEL, **BODIES["chat"]})
    processor = StreamProcessor(request, AnswerIdentity("i", "m"), tokenizer=v41)
    processor.tokens([5])
    with pytest.raises(InternalError, match="not both"):
        processor.text("a")
    with pytest.raises(InternalError, match="finish"):
        processor.body()


@pytest.mark.parametrize(
    ("api", "name", "place"),
    [("chat", None, "error"), ("messages", "error", "error"), ("responses", "response.failed", "response")],
)
def test_a_failed_answer_ends_with_the_error_of_its_api(api: str, name: str | None, place: str) -> None:
    request = convert_request(api, {"model": MODEL, **BODIES[api]})
    processor = StreamProcessor(request, AnswerIdentity("i", "m"))
    processor.ready(1)
    processor.text("r</think>half")
    events = processor.fail("the engine stopped")
    assert events[-1].name == name
    assert "the engine stopped" in json.dumps(events[-1].data[place])
    assert "the engine stopped" in json.dumps(processor.body())
    assert processor.fail("again") == [] and processor.finish() == []


def test_lack_of_resources_is_a_finish_reason_in_chat_and_a_failure_elsewhere() -> None:
    chat, messages, responses = (answered(api, "r</think>a", Finish.OVERLOADED)[1].body() for api in BODIES)
    assert chat["choices"][0]["finish_reason"] == "insufficient_system_resource"
    assert messages["error"]["type"] == "overloaded_error"
    assert responses["status"] == "failed"
