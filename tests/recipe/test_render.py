
"""Rules of the prompt that one conversation at a time shows best."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deepinfer.recipe import (
    V4,
    V41,
    Assistant,
    Conversation,
    Dialect,
    Effort,
    ImageSource,
    RecipeTokenizer,
    System,
    TokenizerError,
    Tool,
    ToolCall,
    ToolResult,
    User,
    render,
    render_fim,
)

BOTH = pytest.mark.parametrize("dialect", [V4, V41], ids=lambda dialect: dialect.name)


def shown(dialect: Dialect, *messages: object, tools: tuple[Tool, ...] = (), thinking: bool = False) -> str:
    effort = Effort.LOW if thinking else None
    return render(Conversation(messages, thinking, effort, tools), dialect).text  # type: ignore[arg-type]


def after_begin(text: str) -> str:
    return text.removeprefix("<｜begin▁of▁sentence｜>")


def test_an_empty_user_message_adds_its_blank_line_only_in_v41() -> None:
    messages = (User(("a",)), User(("",)), User(("b",)))
    assert after_begin(shown(V41, *messages)) == "<｜User｜>a\n\n\n\nb<｜Assistant｜></think>"
    assert after_begin(shown(V4, *messages)) == "<｜User｜>a\n\nb<｜Assistant｜></think>"


@BOTH
def test_tool_results_take_the_order_of_their_calls(dialect: Dialect) -> None:
    image = ImageSource("there", url="http://x")
    calls = (ToolCall("b", "f", "{}"), ToolCall("a", "f", "{}"))
    results = (ToolResult(("for a", image), "a"), ToolResult(("for b",), "b"), User(("next",)))
    prompt = render(Conversation((User(("q",)), Assistant("", None, calls), *results), False), dialect)
    first, second = prompt.text.index("for b"), prompt.text.index("for a")
    assert first < second < prompt.text.index("next")
    assert prompt.image_sources == (image,)
    assert prompt.text.count("<｜User｜>") == 2


@BOTH
def test_a_result_of_an_unknown_call_comes_first(dialect: Dialect) -> None:
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}"))
    results = (ToolResult(("B",), "b"), ToolResult(("?",), "none"), ToolResult(("A",), "a"))
    text = shown(dialect, User(("q",)), Assistant("", None, calls), *results)
    places = [text.index(f"<tool_result>{name}<") for name in ("?", "A", "B")]
    assert places == sorted(places)


def test_reasoning_of_the_history_stays_only_with_tools() -> None:
    turn = Assistant("answer", "because")
    tool = Tool("f", None, {})
    with_tools = shown(V41, User(("q",)), turn, User(("r",)), tools=(tool,), thinking=True)
    without = shown(V41, User(("q",)), turn, User(("r",)), thinking=True)
    assert "<think>because</think>answer" in with_tools
    assert "because" not in without and "<｜Assistant｜></think>answer" in without


def test_systems_stay_in_place_in_v41_and_move_to_the_front_in_v4() -> None:
    messages = (User(("a",)), System(("S",)), User(("b",)))
    assert "<｜User｜>a<｜System｜>S<｜User｜>b" in shown(V41, *messages)
    assert after_begin(shown(V4, *messages)).startswith("S<｜User｜>a\n\nb")


@BOTH
def test_arguments_that_are_no_object_become_one_text(dialect: Dialect) -> None:
    call = ToolCall("a", "f", '{"x": 1E400}')
    text = shown(dialect, User(("q",)), Assistant("", None, (call,)), ToolResult(("r",), "a"))
    assert 'parameter name="arguments" string="true">{"x": 1E400}</' in text


@BOTH
def test_special_ranges_cover_exactly_the_placed_tokens_in_characters_and_bytes(dialect: Dialect) -> None:
    prompt = render(Conversation((User(("日<｜User｜>本",)),), False), dialect)
    tokens = [prompt.text[start:end] for start, end in prompt.special_ranges]
    data = prompt.text.encode()
    assert tokens == ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"]
    assert [data[start:end].decode() for start, end in prompt.byte_ranges()] == tokens
    assert "".join(span for _, span in prompt.spans()) == prompt.text


def test_a_hole_is_framed_by_its_three_tokens(v41: RecipeTokenizer) -> None:
    ids = v41.encode_prompt(render_fim("a<｜fim▁hole｜>", "b", V41))
    assert [token for token in ids if v41.is_special(token)] == [0, 128801, 128800, 128802]
    assert (
        v41.decode(ids) == "<｜begin▁of▁sentence｜><｜fim▁begin｜>a<｜fim▁hole｜><｜fim▁hole｜>b<｜fim▁end｜>"
    )


def test_a_prompt_for_another_tokenizer_is_refused_by_name(tokenizers: Mapping[str, RecipeTokenizer]) -> None:
    prompt = render(Conversation((System(("s",)), User(("q",))), False), V41)
    with pytest.raises(TokenizerError, match="<｜System｜>"):
        tokenizers["v4"].encode_prompt(prompt)
