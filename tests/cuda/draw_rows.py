"""Rows that draw on a device: their words, options worth trying, and what every device has to make of mixed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cpu.harness import Array
from cpu.test_kernels_draw import kinds_of_logits, oracle, start_of

from deepinfer.runtime.sampling_params import SamplingParams

NONE, CHOOSE, GIVEN, LARGEST = 0, 1, 3, 4
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0}, {}, {"temperature": 0.7}, {"temperature": 0.02}, {"temperature": 1e-7}, {"top_k": 1},
    {"top_k": 7}, {"top_k": 250, "top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.95, "temperature": 1.3}, {"top_p": 1e-6},
    {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}]


def words(params: SamplingParams, key: int, mode: int = CHOOSE, token: int = 0, bare: int = 0) -> Array:
    """A row's words as the runner writes them."""
    reals = np.array([params.temperature, params.top_p, params.min_p]).view(np.int64)
    top_k = params.top_k if params.top_k > 0 else 0
    return np.array([mode, token, np.uint64(key).view(np.int64), reals[0], top_k, reals[1], reals[2], bare], np.int64)


def check_mixed_rows(tokens: Callable[[Array, list[Array]], list[int]]) -> None:
    """Rows of one launch have options of their own, and rows without numbers say so. ``tokens``: draws rows of logits
    by their words, the first one at position 40."""
    logits = kinds_of_logits(300)[:8]
    logits[0, 299], logits[1, 5], logits[2, :], logits[3, 7] = np.nan, np.inf, -np.inf, -np.inf
    warm = SamplingParams(temperature=0.9, top_p=0.7)
    rows = [words(warm, 5), words(warm, 5), words(warm, 5), words(warm, 5), words(warm, 5, GIVEN, 17),
            words(warm, 5, NONE), words(warm, 5, LARGEST), words(warm, 5, bare=1)]
    found = tokens(logits, rows)
    assert found[:3] == [-1, -1, -1] and found[4:6] == [17, 0]
    assert found[6] == logits[6].argmax()
    start = start_of(warm, key=5)
    assert [found[3], found[7]] == [oracle(start, logits[3], 44), oracle(start, logits[7], 48)]
    assert tokens(logits[:1], [words(warm, 5, bare=1)]) == [0]
