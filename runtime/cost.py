"""How many prompt rows a step takes while others decode, so that their tokens keep coming.

The law: a step with prompt rows lasts at most ``stretch`` times as long as the same step without them. Both times are
measured while serving; nothing is known of an engine beforehand. Chunk sizes change no result, so measured times may
decide them.
"""

from __future__ import annotations

_WEIGHT = 0.2  # of a new measurement in a running mean
_AIM = 0.85  # part of the extra time that is planned for: times scatter
_MOST_GROWTH, _MOST_SHRINK = 2.0, 0.25  # of a chunk from one step to the next


class ChunkBudget:
    """Args:
        stretch: see the module; None: chunks are as long as the engine's limits allow.
        first: rows of the first chunk beside decoding sequences.
    """

    def __init__(self, stretch: float | None, first: int) -> None:
        self.stretch = stretch
        self.rows = float(first)
        self._alone: dict[int, float] = {}

    def chunk(self, decoding: int, most: int) -> int:
        """Prompt rows of a step in which ``decoding`` rows decode; at most ``most``. None of them until a step of that
        many rows (to a power of two) was measured without: that takes one step."""
        if self.stretch is None or not decoding:
            return most
        if decoding.bit_length() not in self._alone:
            return 0
        return max(1, min(most, int(self.rows)))

    def observe(self, decoding: int, prompt: int, seconds: float, cut: bool) -> None:
        """A step took so long. ``cut``: its prompt rows were as many as ``chunk`` allowed."""
        if self.stretch is None or not decoding:
            return
        size = decoding.bit_length()
        alone = self._alone.get(size)
        if not prompt:
            self._alone[size] = seconds if alone is None else alone + _WEIGHT * (seconds - alone)
        elif alone is not None:
            aim = _AIM * (self.stretch - 1) * alone
            factor = aim / max(seconds - alone, 1e-9)
            if factor < 1 or cut:
                self.rows = max(1.0, prompt * min(_MOST_GROWTH, max(_MOST_SHRINK, factor)))
