"""Repair mode reads malformed calls for what they mean and says what it changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.recipe import StreamProcessor, convert_request
from deepinfer.recipe.dialect import DSML
from deepinfer.recipe.vector_parse import replay

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": ["object", "null"]}},
}


def read(text: str, *, repair: bool = True, finish: str = "stop", **more: Any) -> StreamProcessor:
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "json"}],
        "thinking": {"type": "disabled"},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        **more,
    }
    marked = text.replace("@", DSML)
    whole = replay(convert_request("chat", body), [{"text": marked}], finish, None, repair=repair)[1]
    letters = [{"text": letter} for letter in marked]
    assert (
        replay(convert_request("chat", body), letters, finish, None, repair=repair)[1].body() == whole.body()
    )
    return whole


def arguments(processor: StreamProcessor) -> list[Any]:
    calls = processor.body()["choices"][0]["message"].get("tool_calls", [])
    return [json.loads(call["function"]["arguments"]) for call in calls]


def block(inner: str) -> str:
    return f'<@ calls>\n<@ invoke name="f">\n{inner}\n</@ invoke>\n</@ calls>'


WELL_FORMED = block(
    '<@ parameter name="s" string="true">x\n"y"</@ parameter>\n<@ parameter name="n" string="false">1</@ parameter>'
)


@pytest.mark.parametrize(
    "text", [WELL_FORMED, WELL_FORMED.replace("@ ", "@").replace("@calls", "@tool_calls")]
)
def test_a_well_formed_call_is_read_alike_in_both_modes_and_needs_no_repair(text: str) -> None:
    repaired, exact = read(text), read(text, repair=False)
    assert repaired.body() == exact.body()
    assert repaired.repairs == ()
    assert arguments(repaired) == [{"s": 'x\n"y"', "n": 1}]


@pytest.mark.parametrize(
    ("inner", "wanted", "kinds"),
    [
        ('<@ parameter name="a" string="True">x</@ parameter>', {"a": "x"}, {"attributes"}),
        ('<@ parameter string="true" name="a">x</@ parameter>', {"a": "x"}, {"attributes"}),
        ("<@ parameter name='a' string='true'>x</@ parameter>", {"a": "x"}, {"attributes"}),
        ('<@ parameter name="a">[1, 2]</@ parameter>', {"a": [1, 2]}, {"attributes"}),
        ('<@ parameter name="a">plain words</@ parameter>', {"a": "plain words"}, {"attributes"}),
        ('<@ parameter name="n">7</@ parameter>', {"n": 7}, {"attributes"}),
        ('<@ parameter name="n" string="true">7</@ parameter>', {"n": 7}, set()),
        ('<@ parameter name="s" string="false">7</@ parameter>', {"s": "7"}, {"type"}),
        ('<@ parameter name="s" string="false">"7"</@ parameter>', {"s": "7"}, set()),
        ('<@ parameter name="o" string="false">{"k": </@ parameter>', {"o": '{"k": '}, {"not JSON"}),
        (
            '<@ parameter name="a" string="true">1</@ parameter><@ parameter name="a" string="true">2</@ parameter>',
            {"a": "1"},
            {"duplicate parameter"},
        ),
        ('<@ parameter name="a" string="true">x </@ y</@ parameter>', {"a": "x </@ y"}, {"marker in value"}),
        ('<@ parameter name="a" string="true">x', {"a": "x\n"}, set()),
        (
            '<@ parameter name="shipping address" string="true">x</@ parameter>',
            {"shipping address": "x"},
            set(),
        ),
        ('<@ parameter name="a\\b" string="true">x</@ parameter>', {"a\\b": "x"}, set()),
    ],
)
def test_a_malformed_parameter_becomes_valid_arguments(
    inner: str, wanted: dict[str, Any], kinds: set[str]
) -> None:
    processor = read(block(inner))
    assert arguments(processor) == [json.loads(json.dumps(wanted, ensure_ascii=False).replace("@", DSML))]
    assert {repair.kind for repair in processor.repairs} == kinds


def test_a_mention_of_the_marker_in_prose_swallows_nothing() -> None:
    text = "The token <@ is special, and </@ too."
    assert read(text).body()["choices"][0]["message"]["content"] == text.replace("@", DSML)
    assert read(text, repair=False).body()["choices"][0]["message"]["content"] == "The token "


def test_a_second_block_is_read_too() -> None:
    assert arguments(read(WELL_FORMED + "\n\n" + WELL_FORMED)) == [{"s": 'x\n"y"', "n": 1}] * 2


def test_an_unfinished_call_is_closed_only_when_the_model_ended_itself() -> None:
    text = '<@ calls>\n<@ invoke name="f">\n<@ parameter name="s" string="true">rm -r /tm'
    ended, cut = read(text), read(text, finish="length")
    assert arguments(ended) == [{"s": "rm -r /tm"}]
    assert {repair.kind for repair in ended.repairs} == {"unclosed parameter", "unclosed call"}
    broken = cut.body()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert broken == '{"s": "rm -r /tm'


def test_a_fence_inside_a_json_string_does_not_end_the_json() -> None:
    text = '```json\n{"a": "x\n```\ny"}\n```\nbye'
    exact = read(text, repair=False, response_format={"type": "json_object"})
    repaired = read(text, response_format={"type": "json_object"})
    assert exact.body()["choices"][0]["message"]["content"].strip() == '{"a": "x'
    assert repaired.body()["choices"][0]["message"]["content"].strip() == '{"a": "x\n```\ny"}'


def test_a_forced_call_starts_inside_the_block() -> None:
    inner = WELL_FORMED.removeprefix("<@ calls>\n")
    assert arguments(read(inner, tool_choice="required")) == [{"s": 'x\n"y"', "n": 1}]
