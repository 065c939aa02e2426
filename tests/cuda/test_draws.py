"""Draws on NVIDIA devices, interpreted: each token is the one that runtime/sampling.py chooses from the same logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu.harness import Array, Seq, Step
from cpu.test_kernels_draw import kinds_of_logits, oracle, spec_of, start_of
from cuda.interpreted import run

from deepinfer.runtime.noise import mixed
from deepinfer.runtime.sampling_params import SamplingParams

NONE, CHOOSE, GIVEN, LARGEST = 0, 1, 3, 4
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0}, {}, {"temperature": 0.7}, {"temperature": 0.02}, {"temperature": 1e-7}, {"top_k": 1},
    {"top_k": 7}, {"top_k": 400, "top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.95, "temperature": 1.3}, {"top_p": 1e-6},
    {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}]


def words(params: SamplingParams, key: int, mode: int = CHOOSE, token: int = 0, bare: int = 0) -> Array:
    """A row's words as the runner writes them."""
    reals = np.array([params.temperature, params.top_p, params.min_p]).view(np.int64)
    top_k = params.top_k if params.top_k > 0 else 0
    return np.array([mode, token, np.uint64(key).view(np.int64), reals[0], top_k, reals[1], reals[2], bare], np.int64)


def tokens(logits: Array, draws: list[Array], c: int = 40, ahead: int = 0) -> list[int]:
    step = Step([Seq(len(logits), c)])
    return run(spec_of(logits.shape[1], ahead), step, [logits, None], draws=np.concatenate(draws))[1].ravel().tolist()


@pytest.mark.parametrize(("size", "rows", "every"), [(300, 10, 1), (5003, 4, 5)])
def test_a_draw_on_the_device_is_the_token_that_the_oracle_chooses(size: int, rows: int, every: int) -> None:
    logits = kinds_of_logits(size)[-rows:]
    for at, options in list(enumerate(OPTIONS))[::-every]:
        params = SamplingParams(**options)
        start = start_of(params, key=mixed(at))
        want = [oracle(start, row, 41 + i) for i, row in enumerate(logits)]
        assert tokens(logits, [words(params, start.key)] * len(logits)) == want, options


def test_rows_of_one_launch_have_options_of_their_own_and_bad_rows_say_so() -> None:
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


def test_a_draw_further_ahead_has_the_noise_of_its_position() -> None:
    logits = kinds_of_logits(300)
    params = SamplingParams(temperature=1.1)
    start = start_of(params)
    want = [oracle(start, row, 44 + i) for i, row in enumerate(logits)]
    assert tokens(logits, [words(params, start.key)] * len(logits), ahead=3) == want
