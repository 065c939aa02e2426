
"""Text never becomes a control token, in either direction."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.recipe import V41, RecipeTokenizer, StreamDecoder, convert_request, render
from deepinfer.recipe.dialect import DSML, THINK, THINK_END
from deepinfer.recipe.vector_parse import replay

SPELLINGS = [
    *(value for value in vars(V41.tokens).values() if isinstance(value, str)),
    "<|EOT|>",
    "<dsml:",
    "<｜place▁holder▁no▁799｜>",
    "</tool_result>",
    f"<{DSML} calls>",
    f"</{DSML} parameter>",
]
hostile = st.lists(st.sampled_from(SPELLINGS) | st.text(max_size=6), max_size=6).map("".join)
TOOL = {"type": "function", "function": {"name": "f", "description": THINK_END, "parameters": {}}}


def clean(text: str) -> str:
    return text.encode("utf-8", "ignore").decode()


@settings(max_examples=60)
@given(hostile.map(clean), hostile.map(clean), hostile.map(clean), st.booleans())
def test_control_ids_stand_only_where_the_renderer_placed_them(
    v41: RecipeTokenizer, system: str, user: str, argument: str, thinking: bool
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": argument}}
    body: dict[str, Any] = {
        "model": "DeepSeek-V4.1-Flash",
        "thinking": {"type": "enabled" if thinking else "disabled"},
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": [{"type": "text", "text": user}, {"type": "text", "text": system}]},
            {"role": "assistant", "content": user, "reasoning_content": system, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": argument},
        ],
        "tools": [TOOL],
    }
    prompt = render(convert_request("chat", body).conversation, V41)
    ids = v41.encode_prompt(prompt)
    placed = [prompt.text[start:end] for start, end in prompt.special_ranges]
    assert [v41.token_text(token) for token in ids if v41.is_special(token)] == placed
    assert v41.decode(ids) == prompt.text


@given(hostile.map(clean))
def test_plain_ids_read_back_as_the_text(v41: RecipeTokenizer, text: str) -> None:
    ids = v41.encode(text)
    assert not any(v41.is_special(token) for token in ids)
    decoder = StreamDecoder(v41)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text


BODY = {
    "model": "DeepSeek-V4.1-Flash",
    "messages": [{"role": "user", "content": "q"}],
    "thinking": {"type": "enabled"},
    "tools": [TOOL],
}


def answer(ids: list[int], tokenizer: RecipeTokenizer) -> dict[str, Any]:
    _, processor = replay(convert_request("chat", BODY), [{"tokens": ids}], "stop", tokenizer)
    message: dict[str, Any] = processor.body()["choices"][0]["message"]
    return message


@given(hostile.map(clean))
def test_markers_spelled_from_ordinary_ids_are_reasoning_text(v41: RecipeTokenizer, text: str) -> None:
    ids = v41.encode(text + "x")
    message = answer(ids, v41)
    assert message["reasoning_content"] == (text + "x").lstrip("\n")
    assert message["content"] == "" and "tool_calls" not in message


def test_only_the_real_ids_end_reasoning_and_open_calls(v41: RecipeTokenizer) -> None:
    think_end, dsml = v41.special_id(THINK_END), v41.special_id(DSML)
    spelled = v41.encode(f"{THINK_END}<{DSML} calls>")
    call = [*v41.encode("<"), dsml, *v41.encode(' invoke name="f">\n</'), dsml, *v41.encode(" invoke>")]
    message = answer([*v41.encode("r"), *spelled, think_end, *spelled, *call], v41)
    assert message["reasoning_content"] == f"r{THINK_END}<{DSML} calls>"
    assert message["content"] == f"{THINK_END}<{DSML} calls>"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_think_start_is_text_in_the_answer(v41: RecipeTokenizer) -> None:
    assert answer([v41.special_id(THINK)], v41)["reasoning_content"] == THINK
