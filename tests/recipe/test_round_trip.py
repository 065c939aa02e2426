
"""What the history shows the model is what the reader understands when the model writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.recipe import (
    DIALECTS,
    Assistant,
    Conversation,
    RecipeTokenizer,
    Tool,
    ToolCall,
    ToolResult,
    User,
    convert_request,
    render,
)
from deepinfer.recipe.conversation import Message
from deepinfer.recipe.json_text import parse_json, python_style
from deepinfer.recipe.vector_parse import replay

texts = st.text(st.characters(codec="utf-8"), max_size=12)
names = st.text("abcxyz_-.é日", min_size=1, max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.dictionaries(names, values, max_size=3), min_size=1, max_size=3)
REQUEST = convert_request(
    "chat",
    {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "q"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
)


@pytest.mark.parametrize("repair", [False, True], ids=["exact", "repair"])
@pytest.mark.parametrize("dialect", ["v4", "v4.1"])
@settings(max_examples=40)
@given(reasoning=texts, content=texts, arguments=calls)
def test_calls_of_the_history_read_back_equal(
    tokenizers: Mapping[str, RecipeTokenizer],
    dialect: str,
    repair: bool,
    reasoning: str,
    content: str,
    arguments: list[dict[str, Any]],
) -> None:
    reasoning, content = f"r{reasoning}!", f"c{content}!"
    made = tuple(ToolCall(str(k), f"f{k}", python_style(each)) for k, each in enumerate(arguments))
    history: tuple[Message, ...] = (
        User(("q",)),
        Assistant(content, reasoning, made),
        *(ToolResult((), call.id) for call in made),
    )
    prompt = render(Conversation(history, True, None, (Tool("f", None, {}),)), DIALECTS[dialect])
    tokenizer = tokenizers[dialect]
    ids = tokenizer.encode_prompt(prompt)
    think, end = tokenizer.special_id("<think>"), tokenizer.special_id("<｜end▁of▁sentence｜>")
    begin = max(place for place, token in enumerate(ids[: ids.index(end)]) if token == think)
    answer = ids[begin + 1 : ids.index(end)]
    _, processor = replay(REQUEST, [{"tokens": answer}], "stop", tokenizer, repair=repair)
    message = processor.body()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    read = [
        (call["function"]["name"], parse_json(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]
    assert read == [(call.name, each) for call, each in zip(made, arguments, strict=True)]
    assert processor.repairs == ()
