"""Index arithmetic at print time: sums of loop variables, split and joined along dims, if possible without division."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Ix:
    """``const + sum coefficient * variable``; a variable is a C name or an opaque C expression. Never negative."""

    terms: tuple[tuple[str, int], ...] = ()
    const: int = 0

    @staticmethod
    def var(name: str) -> Ix:
        return Ix(((name, 1),))

    def __add__(self, other: Ix | int) -> Ix:
        if isinstance(other, int):
            return Ix(self.terms, self.const + other)
        merged = dict(self.terms)
        for v, k in other.terms:
            merged[v] = merged.get(v, 0) + k
        return Ix(tuple((v, k) for v, k in merged.items() if k), self.const + other.const)

    def __mul__(self, k: int) -> Ix:
        return Ix(tuple((v, c * k) for v, c in self.terms), self.const * k) if k else Ix()

    def __str__(self) -> str:
        parts = [v if k == 1 else f"{v} * {k}" for v, k in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)


def strides(dims: Sequence[int]) -> list[int]:
    """Row-major strides."""
    out, n = [], 1
    for d in reversed(dims):
        out.append(n)
        n *= d
    return out[::-1]


def linear(dims: Sequence[int], index: Sequence[Ix]) -> Ix:
    """Position in a row-major array."""
    out = Ix()
    for d, i, s in zip(dims, index, strides(dims), strict=True):
        if d != 1:
            out = out + i * s
    return out


@dataclass
class Space:
    """The variables of one loop nest and how far each runs (exclusive)."""

    extents: dict[str, int] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)

    def largest(self, i: Ix) -> int:
        return i.const + sum(k * (self.extents[v] - 1) for v, k in i.terms)

    def split(self, position: Ix, dims: Sequence[int]) -> list[Ix]:
        """Index along each of ``dims`` of a row-major position."""
        out, rest = [], position
        for d, s in zip(dims, strides(dims), strict=True):
            if d == 1:
                out.append(Ix())
                continue
            high, rest = self._divide(rest, s)
            out.append(high)
        return out

    def _divide(self, i: Ix, s: int) -> tuple[Ix, Ix]:
        """Quotient and remainder by ``s``."""
        if s == 1:
            return i, Ix()
        high = Ix(tuple((v, k // s) for v, k in i.terms if k % s == 0), i.const // s)
        low = Ix(tuple((v, k) for v, k in i.terms if k % s), i.const % s)
        if self.largest(low) < s:
            return high, low
        text = f"({i})"
        n = self.largest(i) + 1
        return self._opaque(f"{text} / {s}", -(-n // s), i), self._opaque(f"{text} % {s}", s, i)

    def _opaque(self, text: str, extent: int, of: Ix) -> Ix:
        name = f"({text})"
        self.extents[name] = extent
        self.opaque.update(v for v, _ in of.terms)
        return Ix.var(name)


def refined(dims: Sequence[int], others: Sequence[Sequence[int]]) -> list[int]:
    """Extents of a loop nest over ``dims`` that also has a loop boundary wherever one of ``others`` (equal sizes) has
    one, as far as the boundaries nest; dims of 1 vanish."""
    total = 1
    for d in dims:
        total *= d
    cuts = sorted({s for s in strides(dims) if s < total} | {1}, reverse=True)
    for o in others:
        for s in strides(o):
            if s in cuts or not 1 < s < total:
                continue
            larger = min((c for c in (*cuts, total) if c > s), default=total)
            smaller = max(c for c in cuts if c < s)
            if larger % s == 0 and s % smaller == 0:
                cuts = sorted([*cuts, s], reverse=True)
    out, above = [], total
    for c in cuts:
        if above != c:
            out.append(above // c)
            above = c
    return out


def merged(variables: Sequence[str], space: Space, used: Sequence[Ix]) -> Mapping[str, tuple[str, int]]:
    """Which adjacent loops may run as one: outer variable -> (inner variable, extent of the inner loop).

    Two loops merge when every index steps through them as through one row-major axis.
    """
    out: dict[str, tuple[str, int]] = {}
    coefficients = [dict(i.terms) for i in used]
    for outer, inner in pairwise(variables):
        if outer in space.opaque or inner in space.opaque:
            continue
        n = space.extents[inner]
        if all(c.get(outer, 0) == c.get(inner, 0) * n for c in coefficients):
            out[outer] = (inner, n)
    return out
