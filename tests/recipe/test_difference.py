"""The sentence that names the first difference."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.recipe.difference import first_difference


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, "a[1]: 2, expected 3"),
        ({"a": 1}, {}, "a: unexpected 1"),
        ({}, {"a": 1}, "a: missing; expected 1"),
        ([1], [1, 2], ": 1 elements, expected 2; missing 2"),
        ([1, 2], [1], ": 2 elements, expected 1; unexpected 2"),
        ("abc", "abd", ": from character 2: 'abc', expected 'abd'"),
        ("ab", "abc", ": from character 2: 'ab', expected 'abc'"),
        (True, 1, ": True, expected 1"),
        (None, "x", ": None, expected 'x'"),
    ],
)
def test_the_first_difference_is_named_with_both_values(found: Any, wanted: Any, said: str) -> None:
    assert first_difference(found, wanted) == said


@pytest.mark.parametrize("value", [{"a": [1, 2.0, None, "é"]}, [], "", 1, False])
def test_equal_values_have_no_difference(value: Any) -> None:
    assert first_difference(value, value) is None
    assert first_difference(1, 1.0) is None
