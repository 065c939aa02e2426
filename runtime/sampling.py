"""From a row of logits to a token: exact, one row at a time, in float64 where numbers are added.

With l the logits of a row as the model gives them, steps in order:

1. tokens that are not allowed, that would complete a bad word, and, before ``min_tokens``, those that end the answer:
   l = -inf; then l += logit_bias;
2. tokens of prompt or answer: l = l / r if l > 0 else l * r (``repetition_penalty`` r);
   tokens of the answer: l -= frequency_penalty * count + presence_penalty;
3. temperature 0: the largest l, ties to the lower id. Otherwise z = l / temperature, and of the tokens in the order of
   (z falling, id rising) a leading part stays: the first ``top_k``; of these the fewest whose probabilities, as if
   there were no others, sum to ``top_p`` or more; of these the ones with z >= z_max + log(min_p);
4. the token with the largest z + Gumbel(seed, answer, position, token), ties to the lower id. That draws from the
   softmax of z over the tokens left.

Log-probabilities that are reported are log_softmax(l) before step 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import RequestError
from deepinfer.runtime.noise import gumbel, mixed
from deepinfer.runtime.sampling_params import SamplingParams

Row = NDArray[np.floating]
_FIRST_LOOK = 1024  # most probable tokens that are sorted before the rest of the vocabulary is


@dataclass(frozen=True)
class Logprob:
    """``rank``: 1 for the most probable token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class TokenChooser:
    """Chooses the tokens of one answer.

    Args:
        params: of the request. ``key``: seed and answer, mixed. ``prompt``: its ids.
        ends: ids that end the answer (end of sequence, stop ids).
        bad: token sequences of the bad words.
    """

    params: SamplingParams
    key: int
    prompt: NDArray[np.int64]
    ends: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()
    output: list[int] = field(default_factory=list)
    _counts: dict[int, int] = field(default_factory=dict)
    _allowed: NDArray[np.int64] | None = None
    _seen: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        p = self.params
        if p.allowed_token_ids is not None:
            self._allowed = np.unique(np.asarray(p.allowed_token_ids, dtype=np.int64))
        if p.repetition_penalty != 1:
            self._seen = np.unique(self.prompt)
        self._bias_ids = np.fromiter(p.logit_bias or {}, dtype=np.int64)
        self._bias = np.fromiter((p.logit_bias or {}).values(), dtype=np.float64)

    @property
    def untouched(self) -> bool:
        """Whether the next token is simply the largest logit of its row."""
        p = self.params
        return (p.greedy and not p.penalised and self._allowed is None and not len(self._bias_ids) and not self.bad
                and len(self.output) >= p.min_tokens)

    def choose(self, logits: Row, position: int, purpose: int | None = None) -> int:
        """The token of ``position`` from its row of logits [V]. ``purpose``: of the draw, where there are several that
        must know nothing of each other."""
        if self.untouched:
            return int(np.argmax(logits))
        ids, z = self.left(logits, position)
        return int(ids[np.argmax(z)]) if self.params.greedy else drawn(ids, z, self.noise_key(position, purpose))

    def left(self, logits: Row, position: int, bare: bool = False) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What the options leave of a row: ids [k] in rising order and their logits [k], divided by the temperature.

        ``bare``: of a draft's row, without what depends on drafts before it.
        """
        p, z = self.params, logits.astype(np.float64)
        self._mask(z, bare)
        if p.penalised:
            self._penalise(z)
        if not np.isfinite(z.max()):
            raise nothing_left(position)
        if not p.greedy:
            z /= p.temperature
        ids = None if p.greedy else leading(z, p.top_k, p.top_p, p.min_p)
        return (np.arange(len(z), dtype=np.int64), z) if ids is None else (ids, z[ids])

    def noise_key(self, position: int, *purpose: int | None) -> int:
        """Of the draw at a position."""
        key = self.key
        for word in purpose:
            key = key if word is None else mixed(key, word)
        return mixed(key, position)

    def took(self, token: int) -> None:
        """The answer goes on with ``token``."""
        self.output.append(token)
        if self.params.penalised:
            self._counts[token] = self._counts.get(token, 0) + 1

    def _mask(self, z: NDArray[np.float64], bare: bool) -> None:
        if self._allowed is not None:
            only = np.full_like(z, -np.inf)
            only[self._allowed] = z[self._allowed]
            z[:] = only
        for word in self.bad if not bare else ():
            if len(self.output) >= len(word) - 1 and self.output[len(self.output) - len(word) + 1:] == list(word[:-1]):
                z[word[-1]] = -np.inf
        if len(self.output) < self.params.min_tokens and not bare:
            z[list(self.ends)] = -np.inf
        z[self._bias_ids] += self._bias

    def _penalise(self, z: NDArray[np.float64]) -> None:
        p = self.params
        counts = np.fromiter(self._counts.values(), dtype=np.float64)
        answered = np.fromiter(self._counts, dtype=np.int64)
        if self._seen is not None:
            seen = np.union1d(self._seen, answered)
            z[seen] = np.where(z[seen] > 0, z[seen] / p.repetition_penalty, z[seen] * p.repetition_penalty)
        z[answered] -= p.frequency_penalty * counts + p.presence_penalty


def drawn(ids: NDArray[np.int64], z: NDArray[np.float64], key: int) -> int:
    """A draw among ``ids`` with probabilities in proportion to exp(z)."""
    return int(ids[np.argmax(z + gumbel(key, ids))])


NOTHING_LEFT = "no token is left to choose from"


def nothing_left(position: int) -> RequestError:
    """What is said when every token of a position is banned."""
    return RequestError(NOTHING_LEFT, where=f"position {position}",
                        next_step="loosen allowed_token_ids, bad_words, logit_bias or min_tokens")


def leading(z: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> NDArray[np.int64] | None:
    """Ids that stay after ``top_k``, ``top_p`` and ``min_p``, in rising order; None: all."""
    size = len(z)
    k = size if top_k in (0, -1) else min(top_k, size)
    if k == size and top_p == 1 and min_p == 0:
        return None
    look = k if k < size else size if top_p == 1 else min(_FIRST_LOOK, size)
    while True:
        order = first_in_order(z, look)
        kept = _within(z, order, k, top_p, min_p)
        if kept is not None:
            return np.sort(order[:kept])
        look = size  # the first look did not reach top_p


def _within(z: NDArray[np.float64], order: NDArray[np.int64], k: int, top_p: float, min_p: float) -> int | None:
    """How many of ``order`` stay; None when it is too short to tell."""
    weights = np.exp(z[order] - z[order[0]])
    count = min(k, len(order))
    if top_p < 1:
        all_of_k = float(weights.sum()) if k == len(order) else float(np.exp(z - z[order[0]]).sum())
        reached = int(np.searchsorted(np.cumsum(weights), top_p * all_of_k)) + 1
        if reached > len(order) < min(k, len(z)):
            return None
        count = min(count, reached)
    if min_p > 0:
        count = min(count, max(1, int((weights >= min_p).sum())))
    return count


def first_in_order(z: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The first ``count`` ids in the order (z falling, id rising)."""
    if count < len(z):
        bound = -np.partition(-z, count - 1)[count - 1]
        above, ties = np.flatnonzero(z > bound), np.flatnonzero(z == bound)
        picked = np.concatenate((above, ties[: count - len(above)]))
    else:
        picked = np.arange(len(z))
    out: NDArray[np.int64] = picked[np.lexsort((picked, -z[picked]))]
    return out


def log_softmax(logits: Row) -> NDArray[np.float64]:
    """[V] f64."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    return x


def top_logprobs(logits: Row, token: int, count: int) -> dict[int, Logprob]:
    """The chosen token and the ``count`` most probable ones (-1: all) by falling probability; the chosen one comes
    first when it is not among them."""
    x = log_softmax(logits)
    order = first_in_order(x, len(x) if count == -1 else min(count, len(x))) if count else np.zeros(0, dtype=np.int64)
    out: dict[int, Logprob] = {}
    if token not in order:
        out[token] = Logprob(float(x[token]), int((x > x[token]).sum()) + 1)
    # a rank counts tokens that are strictly more probable, so tokens of equal probability share theirs
    ranks = np.searchsorted(-x[order], -x[order], side="left") + 1 if len(order) else order
    out.update((int(i), Logprob(float(x[i]), int(r))) for i, r in zip(order, ranks, strict=True))
    return out


NOT_FINITE = ("the model's logits are not finite numbers; a weight that was not looked at is damaged, or values "
              "grew beyond their format")


def bad_logits(logits: Row) -> NDArray[np.bool_]:
    """[rows]: rows of [rows, V] from which no token can be chosen: a NaN, or nothing finite as largest value."""
    out: NDArray[np.bool_] = ~np.isfinite(logits.max(axis=-1))
    return out


def sequence_key(seed: int, answer: int) -> int:
    """What the draws of one answer start from."""
    return mixed(seed, answer)


def encode_bad_words(words: Sequence[str], encode: object) -> tuple[tuple[int, ...], ...]:
    """Token sequences that must not be completed: each text as the tokenizer cuts it, alone and behind a blank.

    Other tokens that spell the same text are not among them."""
    if not callable(encode):
        return ()
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(int(i) for i in encode(text))
            if ids:
                found[ids] = None
    return tuple(found)
