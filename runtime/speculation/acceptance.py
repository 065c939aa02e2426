"""What drafts were worth so far, over all sequences: how often they stayed by position, and what confidences said."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_FADE = 0.98  # of what is known, at each step
_USUAL = 0.75  # of drafts that stay if those before them do, as long as nothing is known
_WARY = 0.3  # the same while it is not even known whether confidences are stated
_PRIOR = 20.0  # judged drafts that are made up at the start
_TRUST = (0.05, 3.0)  # bounds of the calibration
_REMEMBERED = 5  # blocks that an earlier life of the engine counts for: what is asked of it may be another thing now
_COLUMNS = ("judged", "kept", "hoped", "stated")


class Acceptance:
    """Args:
        m: drafts of a block.

    Attributes: ``judged``, ``kept``: [m] drafts of a position that were verified, and those of them that stayed;
    ``hoped``: what confidences said of the judged ones; ``stated``: running mean of what they said of all drafts,
    ``told``: blocks in it. All fade.
    """

    def __init__(self, m: int) -> None:
        self.judged = np.full(m, _PRIOR)
        self.kept = _PRIOR * _USUAL ** np.arange(1, m + 1)
        self.hoped = self.kept.copy()
        self.stated, self.told = np.zeros(m), 0

    @property
    def trust(self) -> NDArray[np.float64]:
        """[m]: by how much confidences of each position over- or understate."""
        out: NDArray[np.float64] = np.clip(self.kept / np.maximum(self.hoped, 1e-9), *_TRUST)
        return out

    def usual(self, silent: bool) -> NDArray[np.float64]:
        """[m]: how probable it is that a draft of which nothing is known stays together with those before it.
        ``silent``: the draft head states no confidences."""
        if self.told:
            out: NDArray[np.float64] = np.minimum(1.0, self.stated * self.trust)
        else:
            out = self.kept / self.judged if silent else _WARY ** np.arange(1.0, len(self.kept) + 1)
        return out

    def observe(self, verified: NDArray[np.int32], accepted: NDArray[np.int32], said: NDArray[np.float64],
                fresh: NDArray[np.bool_]) -> None:
        """A step of k sequences has ended.

        Args:
            verified, accepted: [k] drafts. ``said``: [k, m] cumulative confidences of those drafts, NaN: none.
            fresh: [k] whether the block was not there in an earlier step.
        """
        places = np.arange(len(self.kept))
        looked = places < verified[:, None]
        likely = np.where(np.isnan(said), self.kept / self.judged, np.minimum(said, 1.0))
        told = ~np.isnan(said[:, 0]) & fresh
        if told.any():
            self.told += 1
            self.stated += max(1 - _FADE, 1 / self.told) * (said[told].mean(axis=0) - self.stated)
        at = looked.any(axis=0)
        weight = (1 - _FADE) * _PRIOR / max(1, len(verified))
        for total, values in ((self.hoped, np.where(looked, likely, 0.0)), (self.judged, looked),
                              (self.kept, looked & (places < accepted[:, None]))):
            total[at] = _FADE * total[at] + weight * values.sum(axis=0)[at]

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return {"told": self.told, **{name: getattr(self, name).tolist() for name in _COLUMNS}}

    def recall(self, record: object) -> None:
        """Begin with what an earlier life of the engine knew; anything that is no ``record`` of such drafts says
        nothing."""
        if not isinstance(record, dict):
            return
        try:
            columns = np.array([record[name] for name in _COLUMNS], np.float64)
            told = int(record["told"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        fits = columns.shape == (len(_COLUMNS), len(self.kept)) and np.isfinite(columns).all()
        if fits and (columns >= 0).all() and (columns[0] > 0).all():
            self.judged, self.kept, self.hoped, self.stated = columns
            self.told = min(max(told, 0), _REMEMBERED)
