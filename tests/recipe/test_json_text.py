"""Numbers, escapes and limits of the two JSON styles."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.recipe.json_text import compact_style, escaped, parse_json, python_style, quoted
from deepinfer.recipe.render import call_parameters

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(st.characters(codec="utf-8"))
values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_both_styles_read_back_equal(value: Any) -> None:
    assert parse_json(python_style(value)) == value
    assert parse_json(compact_style(value)) == value


@given(texts, texts)
def test_escapes_of_a_concatenation_are_the_concatenated_escapes(left: str, right: str) -> None:
    assert escaped(left) + escaped(right) == escaped(left + right)
    assert json.loads(quoted(left)) == left


@pytest.mark.parametrize(
    ("text", "prompt", "compact"),
    [
        ("1.0", "1.0", "1.0"),
        ("1e5", "100000.0", "100000.0"),
        ("1e16", "1e+16", "1e16"),
        ("1e22", "1e+22", "1e22"),
        ("1e-7", "1e-07", "1e-7"),
        ("1.5e-7", "1.5e-07", "1.5e-7"),
        ("0.00001", "1e-05", "0.00001"),
        ("123456789.125", "123456789.125", "123456789.125"),
        ("-0.0", "-0.0", "-0.0"),
        ("-0", "-0.0", "-0.0"),
        ("18446744073709551615", "18446744073709551615", "18446744073709551615"),
        ("-9223372036854775808", "-9223372036854775808", "-9223372036854775808"),
        ("18446744073709551616", "1.8446744073709552e+19", "1.8446744073709552e19"),
        ("-9223372036854775809", "-9.223372036854776e+18", "-9.223372036854776e18"),
    ],
)
def test_a_number_has_the_spelling_of_its_style(text: str, prompt: str, compact: str) -> None:
    assert python_style(parse_json(text)) == prompt
    assert compact_style(parse_json(text)) == compact


@pytest.mark.parametrize(
    "text",
    [
        "1E400",
        "-1e999",
        "1" + "0" * 5000,
        "NaN",
        "Infinity",
        '"\\ud800"',
        "[" * 128 + "]" * 128,
        "[" * 100_000,
        "",
        "{",
    ],
)
def test_what_the_official_reader_refuses_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    assert call_parameters(text) == {"arguments": text}


def test_127_levels_are_read() -> None:
    assert parse_json("[" * 127 + "]" * 127)


def test_a_later_duplicate_key_wins_in_the_first_place() -> None:
    assert python_style(parse_json('{"a": 1, "b": 2, "a": 3}')) == '{"a": 3, "b": 2}'


def test_line_separators_and_high_characters_are_kept_and_controls_escaped() -> None:
    assert python_style("\u2028é\x7f\x01\n") == '"\u2028é\x7f\\u0001\\n"'
