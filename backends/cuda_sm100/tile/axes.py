"""Axes of the blocks that a kernel computes with, and index arithmetic on them.

All blocks of a kernel have one rank: one dimension for each axis, of size 1 where a block does not vary along it, so
that any two of them broadcast. An axis is a power of two wide; a variable is an axis seen with a number of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deepinfer.backends.cpu.tile.index import Ix, Space
from deepinfer.errors import InternalError

Spans = frozenset[int]
NOTHING: Spans = frozenset()


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Variable:
    """``mask``: name of the block that is true where the variable is in range, "" where it always is."""

    name: str
    extent: int
    spans: Spans
    mask: str = ""


class TileSpace(Space):
    """Splits positions with integer division where it has to."""

    def _divide(self, i: Ix, s: int) -> tuple[Ix, Ix]:
        high, low = super()._divide(i, s)
        return _renamed(self, high), _renamed(self, low)


def _renamed(space: Space, i: Ix) -> Ix:
    """The C text of a division as Python."""
    terms = []
    for name, k in i.terms:
        if " / " in name:
            new = name.replace(" / ", " // ")
            space.extents[new] = space.extents[name]
            name = new
        terms.append((name, k))
    return Ix(tuple(terms), i.const)


@dataclass
class Axes:
    """The axes of a kernel. They are found while its text is written; ``known`` starts a second pass with all of them,
    since their number is the rank of every block."""

    widths: list[int] = field(default_factory=list)
    fixed: bool = False
    variables: dict[str, Variable] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return len(self.widths)

    def again(self) -> Axes:
        return Axes(list(self.widths), fixed=True)

    def take(self, extent: int, without: Spans = NOTHING, prefer: Iterable[int] = ()) -> Variable:
        """A variable over ``extent`` elements on an axis that is not among ``without``."""
        width = power_of_two(extent)
        for a in [*prefer, *range(len(self.widths))]:
            if a not in without and self.widths[a] == width:
                return self.on(a, extent)
        if self.fixed:
            raise InternalError("the second pass of a kernel met an axis that the first did not")
        self.widths.append(width)
        return self.on(len(self.widths) - 1, extent)

    def on(self, axis: int, extent: int) -> Variable:
        name, width = f"v{axis}_{extent}", self.widths[axis]
        if name not in self.variables:
            mask = f"m{axis}_{extent}" if extent < width else ""
            self.variables[name] = Variable(name, extent, frozenset((axis,)), mask)
            slots = ", ".join(":" if a == axis else "None" for a in range(self.rank))
            span = f"tl.arange(0, {width})" + (f"[{slots}]" if self.rank > 1 else "")
            self.lines.append(f"{name} = {span}")
            if mask:
                self.lines.append(f"{mask} = {name} < {extent}")
        return self.variables[name]

    def ones(self) -> list[int]:
        """Shape of a block of one element."""
        return [1] * max(1, self.rank)

    def shape(self, spans: Spans) -> list[int]:
        return [w if a in spans else 1 for a, w in enumerate(self.widths)]


def product(dims: Sequence[int]) -> int:
    n = 1
    for d in dims:
        n *= d
    return n
