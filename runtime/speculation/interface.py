"""What the loop asks a draft policy, and the policy that always verifies the same number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.integer[Any]]
Counts = NDArray[np.int32]


@dataclass(frozen=True)
class Observed:
    """A step that has ended, as far as it decoded. The arrays are views that the next step overwrites.

    Args:
        slots: [k], ``verified``, ``accepted``: [k] drafts; ``confidence``: [k, m] of the block made after the step,
            NaN where there is none. ``drafted``: [k] length of that block.
        rows: that ran, ``prompt_rows`` of prompts among them.
        seconds: time on the device, with that of drafting.
    """

    slots: Slots
    verified: Counts
    accepted: Counts
    confidence: NDArray[np.float32]
    drafted: Counts
    rows: int
    prompt_rows: int
    seconds: float


class DraftPolicy(Protocol):
    """Asked once for every step, with arrays: nothing here may loop over sequences. All decisions for a step are made
    before anything that the step before it chose is known."""

    def opened(self, slot: int) -> None:
        """Another sequence has the slot."""
        ...

    def most(self, slots: Slots) -> Counts:
        """[k] 0 .. m: drafts that each sequence may verify in this step at most."""
        ...

    def wanted(self, slots: Slots) -> NDArray[np.bool_]:
        """[k]: whether a block is drafted after this step."""
        ...

    def budget(self, most: Counts, other_rows: int) -> int:
        """Drafts that the step verifies in all; -1: as many as ``most`` says. ``other_rows``: anchors and prompt rows
        of the step."""
        ...

    def observe(self, seen: Observed) -> None:
        """A step has ended."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...


class FixedDrafts:
    """Every sequence drafts and verifies ``count`` tokens in every step."""

    def __init__(self, count: int) -> None:
        self.count = count

    def opened(self, slot: int) -> None:
        pass

    def most(self, slots: Slots) -> Counts:
        return np.full(len(slots), self.count, np.int32)

    def wanted(self, slots: Slots) -> NDArray[np.bool_]:
        return np.full(len(slots), self.count > 0)

    def budget(self, most: Counts, other_rows: int) -> int:
        return -1

    def observe(self, seen: Observed) -> None:
        pass

    def close(self) -> None:
        pass
