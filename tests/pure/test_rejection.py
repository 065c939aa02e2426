"""Drafts judged on the host: what comes out follows the target's distribution, whatever the drafts were drawn from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deepinfer.runtime.sampling import TokenChooser, leading, sequence_key
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.speculation.rejection import draft, judge

Array = NDArray[Any]
SIZE, DRAWS = 6, 6000


def probabilities(logits: Array, params: SamplingParams) -> Array:
    z = logits.astype(np.float64) / params.temperature
    ids = leading(z, params.top_k, params.top_p, params.min_p)
    p = np.exp(z - z.max())
    if ids is not None:
        p[np.setdiff1d(np.arange(len(z)), ids)] = 0
    out: Array = p / p.sum()
    return out


def chance(found: Counter[int], p: Array) -> float:
    """Of a chi-square at least as large."""
    live = np.flatnonzero(p)
    assert set(found) <= set(live.tolist())
    expected = p[live] * found.total()
    distance = float(((np.array([found[int(i)] for i in live]) - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(live) - 1) / 2), torch.tensor(distance / 2)))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}])
@pytest.mark.parametrize("distance", [0.3, 3.0])
def test_a_judged_draft_is_a_draw_from_the_target(options: dict[str, Any], distance: float) -> None:
    params, rng = SamplingParams(**options), np.random.default_rng(3)
    target = rng.normal(size=SIZE).astype(np.float32)
    drafter = (target + distance * rng.normal(size=SIZE)).astype(np.float32)
    chooser, found, accepted = TokenChooser(params, sequence_key(1, 0), np.array([1])), Counter[int](), 0
    for position in range(DRAWS):
        x = draft(chooser, drafter, position, position)
        token = judge(chooser, target, drafter, x, position)
        found[token] += 1
        accepted += token == x
    p, q = probabilities(target, params), probabilities(drafter, params)
    assert chance(found, p) > 1e-3
    assert abs(accepted / DRAWS - np.minimum(p, q).sum()) < 4 * 0.5 / np.sqrt(DRAWS)


@pytest.mark.parametrize("drafted", [None, np.full(SIZE, np.nan, np.float32)])
def test_a_certain_draft_and_one_from_broken_logits_cost_nothing_but_acceptance(drafted: Array | None) -> None:
    target = np.random.default_rng(5).normal(size=SIZE).astype(np.float32)
    chooser, found = TokenChooser(SamplingParams(), sequence_key(2, 0), np.array([1])), Counter[int]()
    for position in range(DRAWS):
        found[judge(chooser, target, drafted, 2, position)] += 1
    assert chance(found, probabilities(target, SamplingParams())) > 1e-3


def test_a_draft_is_never_what_penalties_and_bans_of_its_row_forbid() -> None:
    """The row of the target knows what the draft's does not: the drafts before it and the least answer."""
    chooser = TokenChooser(SamplingParams(min_tokens=5), sequence_key(3, 0), np.array([1]), ends=(4,), bad=((2,),))
    row = np.zeros(SIZE, np.float32)
    drafts = {draft(chooser, row, position, 0) for position in range(200)}
    kept = {judge(chooser, row, row, x, position) for x in (2, 4) for position in range(200)}
    assert drafts == set(range(SIZE)) and kept == set(range(SIZE)) - {2, 4}


def test_a_decision_that_shares_the_noise_of_the_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: drafts, decisions and the target's draws must know nothing of each other."""
    monkeypatch.setattr(TokenChooser, "noise_key", lambda self, position, *purpose: self.key + 1000 * position)
    with pytest.raises(AssertionError):
        test_a_judged_draft_is_a_draw_from_the_target({}, 3.0)
