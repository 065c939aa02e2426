"""Draws on NVIDIA devices, interpreted: each token is the one that runtime/sampling.py chooses from the same logits."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.harness import Array, Seq, Step
from cpu.test_kernels_draw import kinds_of_logits, oracle, spec_of, start_of
from cuda.draw_rows import OPTIONS, check_mixed_rows, words
from cuda.interpreted import run

from deepinfer.runtime.noise import mixed
from deepinfer.runtime.sampling_params import SamplingParams


def tokens(logits: Array, draws: list[Array], c: int = 40, ahead: int = 0) -> list[int]:
    step = Step([Seq(len(logits), c)])
    return run(spec_of(logits.shape[1], ahead), step, [logits, None], draws=np.concatenate(draws))[1].ravel().tolist()


@pytest.mark.parametrize(("size", "shifts", "every"), [(300, (0, 7), 1), (5003, (6, 9), 5)])
def test_a_draw_on_the_device_is_the_token_that_the_oracle_chooses(size: int, shifts: tuple[int, ...],
                                                                   every: int) -> None:
    """Each of the options on two kinds of logits, all in one launch."""
    kinds, draws, want, rows = kinds_of_logits(size), [], [], []
    for at, options in list(enumerate(OPTIONS))[::-every]:
        params = SamplingParams(**options)
        start = start_of(params, key=mixed(at))
        for shift in shifts:
            rows.append(kinds[(at + shift) % len(kinds)])
            draws.append(words(params, start.key))
            want.append(oracle(start, rows[-1], 40 + len(rows)))
    assert tokens(np.array(rows), draws) == want


def test_rows_of_one_launch_have_options_of_their_own_and_bad_rows_say_so() -> None:
    check_mixed_rows(tokens)


def test_a_draw_further_ahead_has_the_noise_of_its_position() -> None:
    logits = kinds_of_logits(300)
    params = SamplingParams(temperature=1.1)
    start = start_of(params)
    want = [oracle(start, row, 44 + i) for i, row in enumerate(logits)]
    assert tokens(logits, [words(params, start.key)] * len(logits), ahead=3) == want
