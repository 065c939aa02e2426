"""Arena layout: buffers whose lifetimes do not overlap share bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.codegen.plan.launch import Buffer

ALIGNMENT = 64  # a cache line; also the widest vector load


def lay_out(buffers: list[Buffer], limits: Mapping[str, int]) -> tuple[list[Buffer], int]:
    """Offsets for all buffers and the bytes of the arena.

    ``limits``: most rows of each axis (printed name). Greedy by size: each buffer takes the lowest gap that is free
    during its whole life; the result depends on the buffers only. Borrowed buffers stay where they are.
    """
    sizes = [-(-b.row_bytes * (b.rows or limits[b.axis]) // ALIGNMENT) * ALIGNMENT for b in buffers]
    placed: list[tuple[int, int, int, int]] = []  # first, last, start, end
    out: list[Buffer | None] = [b if b.borrowed else None for b in buffers]
    placed += [(b.first, b.last, b.offset, b.offset + n) for b, n in zip(buffers, sizes, strict=True) if b.borrowed]
    for i in sorted((i for i, b in enumerate(buffers) if not b.borrowed), key=lambda i: (-sizes[i], i)):
        b = buffers[i]
        busy = sorted((s, e) for first, last, s, e in placed if first <= b.last and b.first <= last)
        start = 0
        for s, e in busy:
            if start + sizes[i] <= s:
                break
            start = max(start, e)
        placed.append((b.first, b.last, start, start + sizes[i]))
        out[i] = replace(b, offset=start)
    return [b for b in out if b is not None], max((e for *_, e in placed), default=0)
