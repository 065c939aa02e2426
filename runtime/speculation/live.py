"""The cost curve as steps show it while serving: a curve that was measured beside other work corrects itself.

What is estimated are logarithms of factors on the measured curve, one for each of its sizes of steps and one for blocks
of drafts. A Kalman filter (R. E. Kalman, A new approach to linear filtering and prediction problems, 1960) weighs each
step's time against what is known: sizes that were never seen follow those that were, as far as machines are fast or
slow as a whole, and a size that was seen keeps what was seen. What else a machine does only adds to a time, so a step
that took much longer than it should counts less, one that was faster counts in full. How many drafts are verified hangs
on ratios of times alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deepinfer.runtime.speculation.cost import CostCurve

_SPREAD = 0.5  # deviation of a measured time's factor, as a logarithm
_COMMON, _OWN = 0.7, 0.1  # parts of its variance that all sizes share, and that no other has; the rest halves by octave
_NOISE = 0.1  # deviation of one step's time, as a logarithm
_OUTLIER = 2.0  # deviations beyond which a longer time counts as if it were no longer
_DRIFT = 1e-4  # of the first uncertainty that every step brings back: what is true may change
_MOST = math.log(4.0)  # bounds of a factor
_RENEWED = 32  # steps from one curve to the next


class LiveCosts:
    """Args:
        measured: the curve at the start.

    Attributes: ``curve``: as corrected so far; ``steps``: how many were taken into it.
    """

    def __init__(self, measured: CostCurve) -> None:
        self.measured = self.curve = measured
        self.steps = 0
        self._sizes = np.array(measured.rows)
        octaves = np.log2(self._sizes)
        near = np.eye(len(octaves) + 1)  # the factor of blocks of drafts stands behind those of steps
        near[:-1, :-1] = np.exp2(-np.abs(octaves[:, None] - octaves))
        self._first = _SPREAD**2 * (_COMMON + _OWN * np.eye(len(near)) + (1 - _COMMON - _OWN) * near)
        self._unknown = self._first.copy()  # covariance
        self.factors = np.zeros(len(near))

    def observe(self, rows: int, blocks: int, seconds: float) -> bool:
        """A step of decoding took so long. ``rows``: that ran; ``blocks``: of drafts that were made behind it.

        Returns: whether there is a new ``curve``.
        """
        parts = np.append(self._parts(rows), self.measured.draft(blocks)) * np.exp(self.factors)
        expected = float(parts.sum())
        if seconds <= 0 or expected <= 0:
            return False
        share = parts / expected
        self._unknown += _DRIFT * (self._first - self._unknown)
        reach = self._unknown @ share
        variance = float(share @ reach) + _NOISE**2
        off = min(_OUTLIER * math.sqrt(variance), math.log(seconds / expected))
        self.factors = np.clip(self.factors + reach * (off / variance), -_MOST, _MOST)
        self._unknown -= np.outer(reach, reach) / variance
        self.steps += 1
        if self.steps % _RENEWED:
            return False
        factors, m = np.exp(self.factors), self.measured
        self.curve = replace(m, step_seconds=tuple((factors[:-1] * m.step_seconds).tolist()),
                             draft_seconds=tuple((factors[-1] * np.array(m.draft_seconds)).tolist()))
        return True

    def _parts(self, rows: int) -> NDArray[np.float64]:
        """[sizes] seconds of a step of so many rows as parts of the measured times that it is made of."""
        sizes, seconds = self._sizes, self.measured.step_seconds
        above = min(int(np.searchsorted(sizes, rows)), len(sizes) - 1)
        below = max(above - 1, 0)
        part = float(np.interp(rows, sizes[[below, above]], (0.0, 1.0))) if below < above else 1.0
        out = np.zeros(len(sizes))
        out[below] += (1 - part) * seconds[below]
        out[above] += part * seconds[above]
        out *= float(self.measured.step(rows)) / max(float(out.sum()), 1e-12)  # beyond the largest size it goes on
        return out
