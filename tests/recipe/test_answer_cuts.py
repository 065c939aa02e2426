"""An answer reads the same however it is cut, loses nothing and leaks nothing."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.recipe import ConvertedRequest, RecipeTokenizer, convert_request
from deepinfer.recipe.dialect import DSML, THINK_END
from deepinfer.recipe.vector_parse import merged, replay

FRAGMENTS = [
    THINK_END,
    "<think>",
    "\n",
    "\n\n",
    "<",
    "</",
    DSML,
    f"<{DSML}",
    f"</{DSML}",
    f"<{DSML} calls>\n",
    f"<{DSML} ca",
    f"<{DSML}" + " " * 9,
    "lls>\n",
    f"</{DSML} calls>",
    f"</{DSML}tool_calls>",
    f'<{DSML} invoke name="f">\n',
    f"</{DSML} invoke>",
    f'<{DSML} parameter name="a" string="true">',
    f'<{DSML} parameter name="b" string="false">',
    f"</{DSML} parameter>",
    ' string="True">',
    "```json\n",
    '{"k": "v"}',
    "\n```",
    "STOP",
    "ST",
    '"',
    "\\",
    "é🦀日本",
    "text ",
    "1",
]
answers = st.lists(
    st.sampled_from(FRAGMENTS) | st.text(st.characters(codec="utf-8"), max_size=4), max_size=14
).map("".join)
cut_places = st.lists(st.integers(0, 60), max_size=8)


def request(api: str = "chat", *, thinking: bool = True, tools: bool = True, **more: Any) -> ConvertedRequest:
    body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", **more}
    if api == "responses":
        body |= {"input": "json", "reasoning": {} if thinking else {"effort": "none"}}
        body |= {"tools": [{"type": "function", "name": "f", "parameters": {}}] if tools else []}
        return convert_request(api, body)
    body |= {"messages": [{"role": "user", "content": "json"}]}
    body |= {"thinking": {"type": "enabled" if thinking else "disabled"}}
    if tools and api == "messages":
        body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
    elif tools:
        body["tools"] = [{"type": "function", "function": {"name": "f"}}]
    return convert_request(api, body)


def pieces(text: str, cuts: list[int]) -> list[dict[str, Any]]:
    places = sorted({min(place, len(text)) for place in cuts} | {0, len(text)})
    return [{"text": text[start:end]} for start, end in itertools.pairwise(places)]


STOPS_IN_MARKERS = [
    ["al"],
    ["inv", "｜ ca"],
    ["DSML"],
    ["<"],
    [f"{DSML} c", "calls>\n"],
    [f"k\n\n<{DSML} ca", f"text <{DSML} c", "\n\n\n"],
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"thinking": False},
    {"tools": False},
    {"thinking": False, "tools": False, "stop": ["STOP", "T"]},
    {"stop": ["\n", "P"]},
    {"response_format": {"type": "json_object"}},
    {"thinking": False, "response_format": {"type": "json_object"}, "stop": ["1"]},
    {"thinking": False, "tool_choice": "required"},
    *({"thinking": False, "stop": stop} for stop in STOPS_IN_MARKERS),
    {"thinking": False, "response_format": {"type": "json_object"}, "stop": STOPS_IN_MARKERS[0]},
]


@pytest.mark.parametrize("repair", [False, True], ids=["exact", "repair"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: ",".join(setting) or "default")
@settings(max_examples=50)
@given(text=answers, cuts=cut_places, finish=st.sampled_from(["stop", "length"]))
def test_every_cut_gives_the_same_stream_and_body(
    setting: dict[str, Any], repair: bool, text: str, cuts: list[int], finish: str
) -> None:
    asked = request(**setting)
    whole, at_once = replay(asked, [{"text": text}], finish, None, repair=repair)
    for chunks in ([{"text": letter} for letter in text], pieces(text, cuts)):
        events, processor = replay(asked, chunks, finish, None, repair=repair)
        assert processor.body() == at_once.body()
        assert merged(events, padded=False) == merged(whole, padded=False)
        assert processor.repairs == at_once.repairs


CALL = f'<{DSML} calls>\n<{DSML} invoke name="f">\n</{DSML} invoke>\n</{DSML} calls>'


@pytest.mark.parametrize("repair", [False, True], ids=["exact", "repair"])
@pytest.mark.parametrize(
    "text", [f"ok\n\n{CALL}", f"ok <{DSML} calls> x", f"text <{DSML} call me", f"<{DSML}" + " " * 9 + "calls>"]
)
@pytest.mark.parametrize("stop", STOPS_IN_MARKERS, ids=repr)
def test_a_stop_text_inside_a_marker_gives_the_same_in_every_cut(
    v41: RecipeTokenizer, stop: list[str], text: str, repair: bool
) -> None:
    asked = request(thinking=False, stop=stop)
    at_once = replay(asked, [{"text": text}], "stop", None, repair=repair)[1]
    for width in range(1, len(text)):
        for first in range(width):
            chunks = pieces(text, list(range(first, len(text), width)))
            assert replay(asked, chunks, "stop", None, repair=repair)[1].body() == at_once.body()
    ids = v41.encode_with_special(text)
    for chunks in ([{"tokens": ids}], [{"tokens": [token]} for token in ids]):
        assert replay(asked, chunks, "stop", v41, repair=repair)[1].body()["choices"] == at_once.body()["choices"]


@pytest.mark.parametrize("repair", [False, True], ids=["exact", "repair"])
def test_a_marker_that_opens_calls_goes_before_a_stop_text_inside_it(repair: bool) -> None:
    chunks = [{"text": letter} for letter in f"ok\n\n{CALL}"]
    choice = replay(request(thinking=False, stop=["al"]), chunks, "stop", None, repair=repair)[1].body()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "ok")


@pytest.mark.parametrize("api", ["messages", "responses"])
@settings(max_examples=40)
@given(text=answers, cuts=cut_places)
def test_every_cut_gives_the_same_events_in_the_other_apis(api: str, text: str, cuts: list[int]) -> None:
    asked = request(api)
    whole, _ = replay(asked, [{"text": text}], "stop", None)
    events, _ = replay(asked, pieces(text, cuts), "stop", None)
    assert merged(events, padded=False) == merged(whole, padded=False)


@given(text=answers)
def test_without_tools_only_line_feeds_and_markers_vanish(text: str) -> None:
    _, processor = replay(request(tools=False), [{"text": text}], "stop", None)
    message = processor.body()["choices"][0]["message"]
    seen = message["reasoning_content"] + message["content"]
    assert seen.replace("\n", "") == text.replace(THINK_END, "").replace("\n", "")


@given(text=answers)
def test_in_chat_mode_text_is_kept_to_the_letter(text: str) -> None:
    kept = "x" + text.replace(THINK_END, "").replace(f"<{DSML}", "")
    _, processor = replay(request(thinking=False), [{"text": kept}], "stop", None)
    if THINK_END not in kept and f"<{DSML}" not in kept:
        assert processor.body()["choices"][0]["message"]["content"] == kept


@given(text=answers)
def test_no_opening_marker_shows_once_tools_are_declared(text: str) -> None:
    _, processor = replay(request(), [{"text": text}], "length", None)
    message = processor.body()["choices"][0]["message"]
    assert f"<{DSML}" not in message["reasoning_content"] + message["content"]
    opened = re.search(f"\n*<{DSML}", text)
    if opened is not None:
        before = text[: opened.start()].replace(THINK_END, "").replace("\n", "")
        assert (message["reasoning_content"] + message["content"]).replace("\n", "") == before


@settings(max_examples=80)
@given(
    ids=st.lists(
        st.integers(0, 129_300) | st.sampled_from([0, 1, 30, 128821, 128822, 128825, 3574, 102]), max_size=24
    )
)
def test_any_ids_in_any_cut_give_the_same_body_and_count(v41: RecipeTokenizer, ids: list[int]) -> None:
    asked = request()
    _, whole = replay(asked, [{"tokens": ids}], "stop", v41)
    _, single = replay(asked, [{"tokens": [token]} for token in ids], "stop", v41)
    assert single.body() == whole.body()
    assert whole.usage.completion_tokens <= len(ids)
    assert (whole.usage.reasoning_tokens or 0) <= whole.usage.completion_tokens


@settings(max_examples=80)
@given(text=answers, thinking=st.booleans())
def test_real_markers_as_ids_read_like_their_spelling_as_text(
    v41: RecipeTokenizer, text: str, thinking: bool
) -> None:
    asked = request(thinking=thinking)
    _, by_text = replay(asked, [{"text": text}], "stop", None)
    _, by_id = replay(asked, [{"tokens": v41.encode_with_special(text)}], "stop", v41)
    assert by_id.body()["choices"] == by_text.body()["choices"]


def test_reasoning_tokens_and_logprobs_follow_their_channel(v41: RecipeTokenizer) -> None:
    ids = [*v41.encode("think\n\n"), 128822, *v41.encode("\n\nanswer")]
    logprobs = [[-0.5, [[token, -0.5]]] for token in ids]
    _, processor = replay(request(tools=False), [{"tokens": ids, "logprobs": logprobs}], "stop", v41)
    choice = processor.body()["choices"][0]
    tokens = {
        channel: [entry["token"] for entry in entries] for channel, entries in choice["logprobs"].items()
    }
    assert tokens == {"reasoning_content": ["think"], "content": ["answer"]}
    assert processor.usage.reasoning_tokens == 1
    assert processor.usage.completion_tokens == len(ids)


def test_a_token_that_shows_in_two_pieces_counts_once(v41: RecipeTokenizer) -> None:
    ids = v41.encode("a.\nb")
    assert v41.token_text(ids[1]) == ".\n"
    logprobs = [[-0.5, []] for _ in ids]
    chunks = [{"tokens": [token], "logprobs": [entry]} for token, entry in zip(ids, logprobs, strict=True)]
    _, processor = replay(request(tools=False), chunks, "stop", v41)
    choice = processor.body()["choices"][0]
    assert choice["message"]["reasoning_content"] == "a.\nb"
    assert [entry["token"] for entry in choice["logprobs"]["reasoning_content"]] == ["a", ".\n", "b"]
    assert processor.usage.reasoning_tokens == 3


def test_a_half_character_at_the_end_is_dropped_or_shown_by_mode(v41: RecipeTokenizer) -> None:
    chunks = [{"tokens": [128822, *v41.encode("a"), 3574]}]
    _, exact = replay(request(), chunks, "stop", v41)
    _, repaired = replay(request(), chunks, "stop", v41, repair=True)
    assert exact.body()["choices"][0]["message"]["content"] == "a"
    assert exact.usage.completion_tokens == 2
    assert repaired.body()["choices"][0]["message"]["content"] == "a\ufffd"
    assert repaired.usage.completion_tokens == 3
