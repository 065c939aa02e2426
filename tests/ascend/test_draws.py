"""Draws on the twin: the token that runtime/sampling.py chooses from the same logits, or one that f32 cannot tell from
it."""

from __future__ import annotations

from typing import Any

import numpy as np
from ascend.on_twin import launch, source_of, twin_of
from cpu.harness import Array, Seq, Step
from cpu.test_kernels_draw import kinds_of_logits, oracle, spec_of, start_of
from cuda.arguments import arguments

from deepinfer.runtime.noise import gumbel, mixed
from deepinfer.runtime.sampling_params import SamplingParams

NONE, CHOOSE, GIVEN, LARGEST = 0, 1, 3, 4
SIZE = 333
CLOSE = 2e-5  # z up to some tens and noise, in f32
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0}, {}, {"temperature": 0.7}, {"temperature": 0.02}, {"temperature": 1e-7}, {"top_k": 1},
    {"top_k": 7}, {"top_k": 250, "top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.95, "temperature": 1.3}, {"top_p": 1e-6},
    {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}]


def words(params: SamplingParams, key: int, mode: int = CHOOSE, token: int = 0, bare: int = 0) -> Array:
    """A row's words as the runner writes them."""
    reals = np.array([params.temperature, params.top_p, params.min_p]).view(np.int64)
    top_k = params.top_k if params.top_k > 0 else 0
    return np.array([mode, token, np.uint64(key).view(np.int64), reals[0], top_k, reals[1], reals[2], bare], np.int64)


def tokens(logits: Array, draws: list[Array], c: int = 40, ahead: int = 0) -> list[int]:
    spec = spec_of(logits.shape[1], ahead)
    source = source_of(spec)
    made = arguments(spec, source, Step([Seq(len(logits), c)]), [logits, None], draws=np.concatenate(draws))
    assert launch(source, twin_of([source]), made) == ""
    found: list[int] = made.outputs[1].ravel().tolist()
    return found


def near(a: int, b: int, row: Array, params: SamplingParams, key: int, position: int) -> bool:
    """Whether two tokens have all but the same score."""
    if a == b:
        return True
    score = row[[a, b]].astype(np.float64) / params.temperature + gumbel(mixed(key, position), np.array([a, b]))
    return abs(float(score[0] - score[1])) < CLOSE * (1 + float(np.abs(row[[a, b]]).max()) / params.temperature)


def test_a_draw_on_the_twin_is_the_token_that_the_oracle_chooses() -> None:
    logits = kinds_of_logits(SIZE)
    for at, options in enumerate(OPTIONS):
        params = SamplingParams(**options)
        start = start_of(params, key=mixed(at))
        found = tokens(logits, [words(params, start.key)] * len(logits))
        for i, row in enumerate(logits):
            want = oracle(start, row, 41 + i)
            assert found[i] == want or (not params.greedy and near(found[i], want, row, params, start.key, 41 + i)), (
                options, i, found[i], want)


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


def test_a_row_of_several_pieces_has_the_noise_of_its_position() -> None:
    logits = kinds_of_logits(9001)
    params = SamplingParams(temperature=1.1, top_p=0.9)
    start = start_of(params)
    found = tokens(logits, [words(params, start.key)] * len(logits), ahead=3)
    for i, row in enumerate(logits):
        want = oracle(start, row, 44 + i)
        assert near(found[i], want, row, params, start.key, 44 + i), (i, found[i], want)
