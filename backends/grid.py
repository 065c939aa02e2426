"""How many blocks a launch has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """``min(n * of, ceil(n * of / per) + plus) * times`` blocks for n rows; ``fixed`` > 0: that many whatever n is.

    NVIDIA's kernels need exactly as many; Ascend's go over them in steps of the blocks that there are.
    """

    of: int = 1
    per: int = 1
    plus: int = 0
    times: int = 1
    fixed: int = 0

    def blocks(self, n: int) -> int:
        if self.fixed:
            return self.fixed
        return min(n * self.of, -(-n * self.of // self.per) + self.plus) * self.times

    def as_json(self) -> dict[str, int]:
        if self.fixed:
            return {"fixed": self.fixed}
        return {"of": self.of, "per": self.per, "plus": self.plus, "times": self.times}
