"""Cutting a long text for several cores never changes its ids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.recipe import RecipeTokenizer
from deepinfer.recipe import parallel as parallel_module
from deepinfer.recipe.parallel import split

# pieces at whose borders a wrong cut shows: spaces, digits, ideographs, punctuation, combining marks, line ends
ALPHABET = [
    *"abZ 019.,;:!?'\"(){}[]<>|/\\_-+=*&^%$#@~`",
    *"\n\r\t\v\f\u00a0\u2028\u3000",
    *"éǗ日本かカー龥龦한글عא🦀½Ⅷ٣",
    "\n\n",
    "  ",
    " \n",
    "\r\n",
    ";;",
    "foo |bar",
    "12345",
    " a",
    "word",
]
adversarial = st.lists(st.sampled_from(ALPHABET), max_size=80).map("".join)


@settings(max_examples=300)
@given(text=adversarial, length=st.integers(1, 12))
def test_parts_encode_to_the_ids_of_the_whole(v41: RecipeTokenizer, text: str, length: int) -> None:
    parts = split(text, length)
    assert "".join(parts) == text
    assert [token for part in parts for token in v41.encode(part)] == v41.encode(text)


@settings(max_examples=100)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200), length=st.integers(1, 20))
def test_parts_of_any_text_encode_to_the_ids_of_the_whole(
    v41: RecipeTokenizer, text: str, length: int
) -> None:
    assert [token for part in split(text, length) for token in v41.encode(part)] == v41.encode(text)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_long_text_is_cut_and_keeps_its_ids(
    v41: RecipeTokenizer, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_module, "SHORTEST_PART", 256)
    rng = random.Random(workers)
    text = "".join(rng.choice(ALPHABET) + rng.choice(("", " and then", "\nline")) for _ in range(6000))
    assert len(split(text, len(text) // (workers * parallel_module.PARTS_PER_WORKER))) > workers
    assert v41.encode(text, workers=workers) == v41.encode(text)


@pytest.mark.parametrize("text", ["foo |bar" * 99, "12|345" * 99, "a |  b" * 99, "日本" * 99, " " * 500])
def test_a_text_without_harmless_places_stays_whole(text: str) -> None:
    assert split(text, 10) == [text]


def test_cuts_stand_only_at_the_two_harmless_places() -> None:
    assert split("one two\nthree", 1) == ["one", " two\n", "three"]
    assert split("one  two 3 \n four", 1) == ["one  two 3 \n four"]
