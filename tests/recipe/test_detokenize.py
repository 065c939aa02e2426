
"""Ids become text without splitting or losing a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.recipe import RecipeTokenizer, StreamDecoder


@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("🦀龘ꙮé日本👩\u200d", max_size=20))
def test_pieces_are_whole_characters_and_add_up_to_the_text(v41: RecipeTokenizer, text: str) -> None:
    decoder = StreamDecoder(v41)
    pieces = [decoder.push(token) for token in v41.encode(text)]
    assert "".join(pieces) == text
    assert decoder.finish() == ""


@given(ids=st.lists(st.integers(0, 129_279), max_size=30))
def test_any_ids_read_as_the_decoder_of_all_bytes_reads_them(v41: RecipeTokenizer, ids: list[int]) -> None:
    decoder = StreamDecoder(v41)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == v41.decode(ids)


def test_a_control_token_ends_the_wait_for_a_character(v41: RecipeTokenizer) -> None:
    decoder = StreamDecoder(v41)
    assert decoder.push(3574) == ""
    assert decoder.push(1) == "\ufffd<｜end▁of▁sentence｜>"
    assert decoder.finish() == ""


def test_an_unknown_id_neither_shows_nor_breaks_a_character(v41: RecipeTokenizer) -> None:
    decoder = StreamDecoder(v41)
    assert [decoder.push(token) for token in (3574, 999_999, 102, 225)] == ["", "", "", "🦀"]
