"""What the loop asks of the constraint of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Follower(Protocol):
    """A matcher that follows one answer (`Constraint` is one). The loop plans a constrained sequence only when the host
    knows all of its tokens and drafts; in the overlapped loop it skips a step for that."""

    def fill(self, masks: NDArray[np.uint32], drafts: Sequence[int] = ()) -> int:
        """Masks of the next token and of those behind each draft, [rows >= 1 + drafts, ceil(V / 32)]."""
        ...

    def accept(self, ids: Iterable[int]) -> None:
        """The answer goes on with ``ids``, stop cuts done."""
        ...
