"""Token choice: each step against a plain computation, draws against their distribution, bad options refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer.errors import RequestError
from deepinfer.runtime.noise import gumbel, mixed
from deepinfer.runtime.sampling import (
    TokenChooser,
    bad_logits,
    encode_bad_words,
    first_in_order,
    leading,
    log_softmax,
    sequence_key,
    top_logprobs,
)
from deepinfer.runtime.sampling_params import SamplingParams

Array = NDArray[np.float64]


def chooser(prompt: list[int] = [1, 2], ends: tuple[int, ...] = (0,), bad: Any = (), **params: Any) -> TokenChooser:  # noqa: B006
    p = SamplingParams(**params)
    return TokenChooser(p, sequence_key(p.seed or 0, 0), np.array(prompt, dtype=np.int64), ends, bad)


def logits(seed: int, size: int = 50, levels: int = 0) -> NDArray[np.float32]:
    """Random logits; with ``levels`` only so many values, so that there are ties."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, levels, size) if levels else 3 * rng.standard_normal(size)).astype(np.float32)


def plain_leading(z: Array, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The documented rule, token by token."""
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    kept = order[: top_k or None]
    weights = [math.exp(z[i] - z[order[0]]) for i in kept]
    if top_p < 1:
        total, reached, count = sum(weights), 0.0, 0
        while reached < top_p * total:
            reached += weights[count]
            count += 1
        kept, weights = kept[:count], weights[:count]
    return sorted(i for i, w in zip(kept, weights, strict=True) if w >= min_p or i == order[0])


@given(st.integers(0, 10**6), st.integers(0, 60), st.sampled_from((0.05, 0.5, 0.9, 0.99, 1.0)),
       st.sampled_from((0.0, 0.02, 0.5, 1.0)), st.sampled_from((0, 3)))
def test_top_k_top_p_and_min_p_keep_what_the_rule_says(seed: int, k: int, p: float, m: float, levels: int) -> None:
    z = logits(seed, levels=levels).astype(np.float64)
    kept = leading(z, k, p, m)
    got = list(range(len(z))) if kept is None else kept.tolist()
    assert got == plain_leading(z, k, p, m)


def test_top_p_looks_beyond_the_first_tokens_of_a_flat_distribution() -> None:
    z = np.zeros(5000)
    kept = leading(z, 0, 0.9, 0)
    assert kept is not None and kept.tolist() == list(range(4500))


@given(st.integers(0, 10**6), st.integers(1, 50), st.sampled_from((0, 2, 5)))
def test_order_is_by_value_then_by_id(seed: int, count: int, levels: int) -> None:
    z = logits(seed, levels=levels).astype(np.float64)
    assert first_in_order(z, count).tolist() == sorted(range(50), key=lambda i: (-z[i], i))[:count]


def test_the_largest_logit_wins_and_a_tie_goes_to_the_lower_id() -> None:
    row = np.array([1, 5, 5, 2], dtype=np.float32)
    assert chooser(temperature=0).choose(row, 9) == 1
    assert chooser(temperature=0, logit_bias={2: 0.5}).choose(row, 9) == 2


def test_draws_have_the_softmax_distribution() -> None:
    """Chi-square on 20,000 draws from 8 tokens; 7 degrees of freedom pass 24.3 with probability 0.001."""
    row = logits(1, 8)
    c, draws = chooser(temperature=0.7, seed=5), 20_000
    counts = np.bincount([c.choose(row, at) for at in range(draws)], minlength=8)
    expected = draws * np.exp(log_softmax(row / 0.7))
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


def test_draws_among_kept_tokens_have_the_renormalised_distribution() -> None:
    row = logits(2, 20)
    c, draws = chooser(temperature=1, top_k=4, seed=8), 20_000
    counts = np.bincount([c.choose(row, at) for at in range(draws)], minlength=20)
    kept = first_in_order(row.astype(np.float64), 4)
    weights = np.exp(row[kept].astype(np.float64))
    expected = draws * weights / weights.sum()
    assert counts.sum() == counts[kept].sum()
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 16.3  # 3 degrees of freedom, 0.001


def test_a_draw_depends_on_seed_answer_and_position_alone() -> None:
    row = logits(3)
    first = [chooser(seed=4).choose(row, at) for at in range(40)]
    again = chooser(seed=4)
    assert [again.choose(row, at) for at in reversed(range(40))] == first[::-1]
    assert [chooser(seed=5).choose(row, at) for at in range(40)] != first
    other = TokenChooser(SamplingParams(seed=4), sequence_key(4, 1), np.array([1]))
    assert [other.choose(row, at) for at in range(40)] != first


def test_noise_is_that_of_a_gumbel_distribution() -> None:
    x = gumbel(mixed(1, 2), np.arange(200_000))
    assert abs(x.mean() - 0.5772) < 4 * math.pi / math.sqrt(6 * 200_000)
    assert abs(x.var() - math.pi**2 / 6) < 0.03
    assert np.isfinite(x).all() and len(np.unique(x)) > 199_990


def test_noise_of_neighbouring_keys_is_unrelated() -> None:
    columns = np.array([gumbel(mixed(7, at), np.arange(4000)) for at in range(6)])
    r = np.corrcoef(columns)
    assert np.abs(r - np.eye(6)).max() < 5 / math.sqrt(4000)


def test_penalties_follow_their_formulas() -> None:
    row = np.array([2.0, -2.0, 1.0, 3.0, 0.5], dtype=np.float32)
    c = chooser(prompt=[0, 1], temperature=1, repetition_penalty=2, frequency_penalty=0.25, presence_penalty=0.5)
    for token in (3, 3, 2):
        c.took(token)
    z = row.astype(np.float64)
    c._penalise(z)
    assert z.tolist() == [1.0, -4.0, 0.5 - 0.25 - 0.5, 1.5 - 0.5 - 0.5, 0.5]


def test_allowed_banned_and_biased_tokens() -> None:
    row = np.array([9, 8, 7, 6, 5], dtype=np.float32)
    assert chooser(temperature=0, allowed_token_ids=[3, 2]).choose(row, 0) == 2
    assert chooser(temperature=0, logit_bias={4: 5.0}).choose(row, 0) == 4
    assert chooser(temperature=0, min_tokens=1).choose(row, 0) == 1
    c = chooser(temperature=0, bad=((0,), (1, 1)))
    assert c.choose(row, 0) == 1
    c.took(1)
    assert c.choose(row, 1) == 2
    with pytest.raises(RequestError, match="position 4: no token is left to choose from"):
        chooser(temperature=0, allowed_token_ids=[0], min_tokens=1).choose(row, 4)


def test_bad_words_are_banned_at_the_start_of_a_word_and_inside_one() -> None:
    table = {"cat": [5], " cat": [6, 7]}
    assert encode_bad_words(["cat"], table.__getitem__) == ((5,), (6, 7))


def test_logprobs_hold_the_chosen_and_the_most_probable_tokens() -> None:
    row = logits(9)
    x = row.astype(np.float64) - math.log(np.exp(row.astype(np.float64)).sum())
    order = sorted(range(50), key=lambda i: (-x[i], i))
    found = top_logprobs(row, order[7], 3)
    assert list(found) == [order[7], *order[:3]]
    assert [f.rank for f in found.values()] == [8, 1, 2, 3]
    assert all(f.logprob == pytest.approx(x[i], abs=1e-12) for i, f in found.items())
    assert list(top_logprobs(row, order[0], 2)) == order[:2]
    assert len(top_logprobs(row, 4, -1)) == 50 and list(top_logprobs(row, 4, 0)) == [4]


def test_rows_without_a_largest_finite_number_are_found() -> None:
    rows = np.zeros((4, 3), dtype=np.float32)
    rows[1, 2], rows[2], rows[3, 0] = np.nan, -np.inf, -np.inf
    assert bad_logits(rows).tolist() == [False, True, True, False]


@pytest.mark.parametrize(("params", "sentence"), [
    ({"temperature": -0.1}, "temperature: out of range; found -0.1; allowed >= 0"),
    ({"temperature": math.nan}, "temperature: a finite number is needed; found nan"),
    ({"temperature": "hot"}, "temperature: a finite number is needed; found 'hot'"),
    ({"top_p": 0}, "top_p: out of range; found 0; allowed > 0 and <= 1"),
    ({"top_p": 1.01}, "top_p: out of range; found 1.01; allowed > 0 and <= 1"),
    ({"top_k": -2}, "top_k: out of range; found -2; allowed >= -1"),
    ({"top_k": 2.5}, "top_k: a whole number is needed; found 2.5"),
    ({"min_p": 2}, "min_p: out of range; found 2; allowed >= 0 and <= 1"),
    ({"n": 0}, "n: out of range; found 0; allowed >= 1"),
    ({"n": True}, "n: a whole number is needed; found True"),
    ({"n": 2, "temperature": 0}, "n: several answers at temperature 0 would be equal; found 2; allowed 1; raise"),
    ({"repetition_penalty": 0}, "repetition_penalty: out of range; found 0; allowed > 0"),
    ({"presence_penalty": 3}, "presence_penalty: out of range; found 3; allowed >= -2 and <= 2"),
    ({"max_tokens": 0}, "max_tokens: out of range; found 0; allowed >= 1"),
    ({"min_tokens": 17}, "min_tokens: out of range; found 17; allowed >= 0 and <= 16"),
    ({"logprobs": -2}, "logprobs: out of range; found -2; allowed >= -1"),
    ({"ignore_eos": "no"}, "ignore_eos: True or False is needed; found 'no'"),
    ({"stop": 5}, "stop: a list is needed; found 5"),
    ({"stop": "a\ud800"}, "stop, character 1: the text holds a lone surrogate; found U+D800; decode the text"),
    ({"bad_words": 5}, "bad_words: a list is needed; found 5"),
    ({"bad_words": "cat"}, "bad_words: a list is needed; found 'cat'"),
    ({"bad_words": ["a", "\udfff"]}, "bad_words, character 0: the text holds a lone surrogate; found U+DFFF"),
    ({"stop_token_ids": 5}, "stop_token_ids: a list is needed; found 5"),
    ({"stop_token_ids": [True]}, "stop_token_ids: a whole number is needed; found True"),
    ({"allowed_token_ids": 5}, "allowed_token_ids: a list is needed; found 5"),
    ({"logit_bias": [1]}, "logit_bias: a mapping from token ids to numbers is needed; found [1]"),
    ({"stop": [""]}, "stop: texts with at least one character are needed"),
    ({"stop": "a", "detokenize": False}, "stop: stop strings need text; leave detokenize on, or use stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids: no token is allowed; list at least one id"),
    ({"logit_bias": {3: math.inf}}, "logit_bias[3]: a finite number is needed; found inf"),
    ({"seed": 1 << 64}, "seed: out of range; found 18446744073709551616; allowed >= "),
])
def test_a_bad_option_is_refused_in_one_sentence(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as found:
        SamplingParams(**params)
    assert str(found.value).startswith(sentence)


def test_none_and_iterators_are_lists_of_a_request() -> None:
    p = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)  # type: ignore[arg-type]
    assert (p.stop_strings, p.stop_token_ids, p.bad_words) == ((), (), ())
    p.check_vocabulary(3)
    p = SamplingParams(stop_token_ids=iter([1, 7]), allowed_token_ids=iter([1]))  # type: ignore[arg-type]
    assert (p.stop_token_ids, p.allowed_token_ids) == ((1, 7), (1,))
    with pytest.raises(RequestError, match=r"stop_token_ids: token id out of range; found 7; allowed 0\.\.6"):
        p.check_vocabulary(7)
