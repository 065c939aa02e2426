"""Ids to text while they arrive: nothing split, nothing lost, stop texts wherever they are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.runtime.detokenizer import StopTexts, TextStream


def decode(ids: Sequence[int]) -> str:
    """One byte a token."""
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(max_size=60))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    stream = TextStream(decode)
    pieces = [stream.push(b) for b in text.encode()]
    assert "".join([*pieces, stream.finish()]) == text
    if "�" not in text:
        assert all("�" not in piece for piece in pieces)
        assert [p for p in pieces if p] == list(text)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_text_join_to_what_a_decoder_makes_of_them(raw: bytes) -> None:
    stream = TextStream(decode)
    assert "".join([*(stream.push(b) for b in raw), stream.finish()]).replace("�", "") == decode(raw).replace("�", "")


def test_an_unfinished_character_is_not_lost_at_the_end() -> None:
    stream = TextStream(decode)
    assert [stream.push(b) for b in b"a\xf0\x9f"] == ["a", "", ""]
    assert stream.finish() == "�" and stream.finish() == ""


@pytest.mark.parametrize("include", [False, True])
@given(st.data())
def test_a_stop_text_is_found_at_every_cut(include: bool, data: st.DataObject) -> None:
    before, stop, after = "he said </end", "</end>", "> and more"
    text = before + stop + after
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stops, seen = StopTexts((stop, "never"), include), ""
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        hit = stops.push(text[a:b])
        assert stops.text[: stops.shown].startswith(seen)  # what was shown is never taken back
        seen = stops.text[: stops.shown]
        if hit:
            break
    assert hit == stop and stops.text == before + (stop if include else "")


def test_the_first_stop_text_wins_and_text_that_may_become_one_is_held_back() -> None:
    stops = StopTexts(("abc", "b"), include=False)
    assert stops.push("xa") is None and stops.text[: stops.shown] == "x"
    assert stops.push("bc") == "abc" and stops.text == "x"
    stops = StopTexts(("end",), include=False)
    assert stops.push("the en") is None and stops.text[: stops.shown] == "the "
    stops.finish()
    assert stops.text[: stops.shown] == "the en"


def test_stop_texts_do_not_count_before_they_are_active() -> None:
    stops = StopTexts(("x",), include=False)
    assert stops.push("x", active=False) is None
    assert stops.push("x", active=True) == "x" and stops.text == "x"
