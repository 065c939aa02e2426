"""Which schedules of a contraction are worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from deepinfer.backends.cuda_sm100.schedule import MANY, Schedule, Tile, default_schedule
from deepinfer.codegen.kernels.spec import KernelSpec

# (tokens, columns, depth, warps, pipeline, group, ready) by the rows of a step (of experts: pairs of one), few first.
_DENSE: dict[int, tuple[tuple[Any, ...], ...]] = {
    16: ((8, 64, 128, 4, 3), (8, 64, 256, 4, 3)),
    64: ((64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 128, 128, 8, 3)),
    256: ((128, 64, 64, 4, 4), (128, 128, 64, 8, 4)),
    0: ((128, 128, 64, 8, 4, 8, True), (256, 128, 64, 8, 3, 8, True))}
_EXPERTS = {
    2: ((8, 64, 256, 4, 4), (8, 64, 256, 4, 3), (8, 128, 128, 4, 4)),
    6: ((16, 64, 256, 4, 3), (16, 128, 128, 4, 4)),
    16: ((32, 64, 256, 4, 3), (32, 128, 128, 4, 4)),
    64: ((64, 64, 128, 4, 3), (64, 128, 128, 8, 3)),
    0: ((64, 128, 128, 8, 3), (128, 128, 64, 8, 3))}
_THIN = {16: ((8, 64, 64, 4, 4), (8, 64, 64, 4, 6)), MANY: ((64, 64, 64, 4, 3), (128, 64, 64, 4, 3)), 0: ()}


@dataclass(frozen=True)
class Candidate:
    """A tile of a schedule: what is measured at one number of rows."""

    schedule: Schedule
    tile: Tile

    @property
    def number(self) -> int:
        return self.schedule.tiles.index(self.tile)


def candidates(spec: KernelSpec) -> Iterator[Candidate]:
    """Every tile for its rows, alone. Parts vary for few rows, and whether programs of their own sum them."""
    base = default_schedule(spec)
    table = _EXPERTS if spec.family == "grouped_gemm" else _THIN if base.apart >= MANY else _DENSE
    options = {base.parts} if base.parts == 1 else {base.parts // 2, base.parts}
    seen = set()
    for parts in sorted(options):
        below = 0
        for rows, tiles in table.items():
            split = 0 < rows <= base.apart
            for apart in (base.apart, below) if split and below and parts > 1 else (base.apart,):
                for t in tiles if split or parts == base.parts else ():
                    tile = Tile(rows, *t)
                    made = Candidate(replace(base, parts=parts, apart=apart).with_tile(tile), tile)
                    if made not in seen:
                        seen.add(made)
                        yield made
            below = rows
