"""Drafts judged by rejection: as exact in distribution as drawing from the target alone.

A draft x that was drawn from q stays with probability p(x) / q(x), else the token is drawn from what p has more than q
(Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding, 2023). Three draws know nothing
of each other: of a block of drafts, of decisions, of the target. It is the meaning of what compiled engines do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import RequestError
from deepinfer.runtime.noise import uniform
from deepinfer.runtime.sampling import Row, TokenChooser, bad_logits, drawn

DRAFT, TARGET, DECISION = 1, 2, 3  # DI_NOISE_* of runtime/native/abi.h


def draft(chooser: TokenChooser, logits: Row, position: int, block: int) -> int:
    """A draft for ``position`` from the draft head's row [V]. ``block``: sets blocks over the same positions apart."""
    ids, z = chooser.left(logits, position, bare=True)
    return drawn(ids, z, chooser.noise_key(position, DRAFT, block))


def judge(chooser: TokenChooser, logits: Row, drafted: Row | None, token: int, position: int) -> int:
    """``token``, or another one: a draw from the target's row [V] either way.

    ``drafted``: the row that the draft was drawn from; None: it was certain.
    """
    ids, z = chooser.left(logits, position)
    p = np.zeros(len(logits))
    p[ids] = _probabilities(z)
    q = _draft_probabilities(chooser, drafted, token, position, len(logits))
    key = chooser.noise_key(position, TARGET)
    if q is None:
        return drawn(ids, z, key)
    if uniform(chooser.noise_key(position, DECISION)) * q[token] < p[token]:
        return token
    more = np.flatnonzero(p > q)
    return drawn(more, np.log(p[more] - q[more]), key) if len(more) else drawn(ids, z, key)


def _draft_probabilities(chooser: TokenChooser, drafted: Row | None, token: int, position: int,
                         size: int) -> NDArray[np.float64] | None:
    """None: the draft's row says nothing."""
    q = np.zeros(size)
    if drafted is None:
        q[token] = 1
        return q
    if bad_logits(drafted):
        return None
    try:
        ids, z = chooser.left(drafted, position, bare=True)
    except RequestError:
        return None
    q[ids] = _probabilities(z)
    return q


def _probabilities(z: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(z - z.max())
    out: NDArray[np.float64] = weights / weights.sum()
    return out
