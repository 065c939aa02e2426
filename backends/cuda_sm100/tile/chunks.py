"""Dims that are too long for one block, a piece at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.backends.cpu.tile.index import Ix

if TYPE_CHECKING:
    from deepinfer.backends.cuda_sm100.tile.printer import Printer

_LONGEST, _LEAST = 4096, 256


def chunk_of(n: int) -> int:
    """Elements of a piece of a long dim: a power of two, a divisor where one is long enough."""
    return next((c for c in (4096, 2048, 1024, 512, _LEAST) if n % c == 0), _LONGEST)


def chunked(p: Printer, piece: Ix, v: Ix, n: int) -> Ix:
    """Index of element ``v`` of a piece; masked where pieces do not divide the dim."""
    c = chunk_of(n)
    at = piece * c + v
    if n % c == 0:
        return at
    name = p.let(f"{at}", p.spans_of(v), "q").text
    mask = p.let(f"{name} < {n}", p.spans_of(v), "m").text
    return p.named(name, n, p.spans_of(v), (mask,))
