"""The fixed texts are the ones the models were trained with, to the byte."""

from __future__ import annotations

import hashlib

import pytest

from deepinfer.recipe.prompt_texts import PROMPT_TEXTS


@pytest.mark.parametrize(
    ("text", "size", "begin", "end"),
    [
        ("tools_v41", 884, "2ae2ff83", "231d"),
        ("tools_v4", 890, "c7c90426", "329c"),
        ("tools_tail", 99, "69070285", "b5a7"),
        ("effort_high_v4", 476, "f7a24f3b", "50f7"),
        ("effort_max_v4", 528, "53fb31b8", "5d2c"),
        ("apply_patch_description", 2904, "61ba80c1", "842c"),
    ],
)
def test_a_fixed_text_has_the_published_size_and_hash(text: str, size: int, begin: str, end: str) -> None:
    data = getattr(PROMPT_TEXTS, text).encode("utf-8")
    digest = hashlib.sha256(data).hexdigest()
    assert (len(data), digest[:8], digest[-4:]) == (size, begin, end)
