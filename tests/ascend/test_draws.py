"""Draws on the twin: the token that runtime/sampling.py chooses from the same logits, or one that f32 cannot tell from
it."""

from __future__ import annotations

import numpy as np
from ascend.on_twin import launch, source_of, twin_of
from cpu.harness import Array, Seq, Step
from cpu.test_kernels_draw import kinds_of_logits, oracle, spec_of, start_of
from cuda.arguments import arguments
from cuda.draw_rows import OPTIONS, check_mixed_rows, words

from deepinfer.runtime.noise import gumbel, mixed
from deepinfer.runtime.sampling_params import SamplingParams

SIZE = 333
CLOSE = 2e-5  # z up to some tens and noise, in f32


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
    check_mixed_rows(tokens)


def test_a_row_of_several_pieces_has_the_noise_of_its_position() -> None:
    logits = kinds_of_logits(9001)
    params = SamplingParams(temperature=1.1, top_p=0.9)
    start = start_of(params)
    found = tokens(logits, [words(params, start.key)] * len(logits), ahead=3)
    for i, row in enumerate(logits):
        want = oracle(start, row, 44 + i)
        assert near(found[i], want, row, params, start.key, 44 + i), (i, found[i], want)
