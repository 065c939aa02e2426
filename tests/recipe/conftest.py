"""The published tokenizers and the recorded vectors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepinfer.recipe import RecipeTokenizer, packaged_tokenizer
from deepinfer.recipe.check_vectors import read_vectors

VECTORS = Path(__file__).resolve().parents[1] / "golden" / "recipe" / "vectors_dev.json.gz"


@pytest.fixture(scope="session")
def tokenizers() -> Mapping[str, RecipeTokenizer]:
    return {name: packaged_tokenizer(name) for name in ("v4", "v4.1")}


@pytest.fixture(scope="session")
def v41(tokenizers: Mapping[str, RecipeTokenizer]) -> RecipeTokenizer:
    return tokenizers["v4.1"]


@pytest.fixture(scope="session")
def vector_file() -> Path:
    return VECTORS


@pytest.fixture(scope="session")
def vectors() -> dict[str, Any]:
    return read_vectors(VECTORS)
