"""How a contraction is cut up on a device: tiles for few and for many rows, and parts that its features are summed in.

A schedule is chosen from sizes alone. Its parts decide the order of sums, so they hold for every number of rows; all
the rest is speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepinfer.codegen.kernels.spec import KernelSpec

_WANTED, _PARTS, _LEAST_PART = 400, 32, 256  # programs that fill a device; most parts; least features of one
_NARROW = 1024  # columns up to which parts are summed apart however many rows there are
MANY = 8192


@dataclass(frozen=True)
class Tile:
    """``rows``: most rows it is for (of experts: pairs of one, on average), 0 for any number; ``tokens`` x ``columns``:
    results of a program; ``depth``: features of a step at most; ``warps``; ``pipeline``: steps in flight; ``group``:
    tiles of tokens that go through the columns together; ``ready``: packed weights are made bf16 ahead."""

    rows: int
    tokens: int
    columns: int
    depth: int
    warps: int
    pipeline: int
    group: int = 1
    ready: bool = False


@dataclass(frozen=True)
class Schedule:
    """``parts`` of the features are summed each on its own and then added in order; up to ``apart`` rows programs of
    their own sum them."""

    tiles: tuple[Tile, ...]
    parts: int = 1
    apart: int = 256

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(found: Mapping[str, Any]) -> Schedule:
        return Schedule(tuple(Tile(**t) for t in found["tiles"]), found["parts"], found["apart"])

    def with_tile(self, tile: Tile) -> Schedule:
        """The same with another tile for its number of rows."""
        return replace(self, tiles=tuple(tile if t.rows == tile.rows else t for t in self.tiles))


_DENSE = (Tile(16, 8, 64, 128, 4, 3), Tile(64, 64, 64, 128, 4, 4), Tile(256, 128, 64, 64, 4, 4),
          Tile(0, 128, 128, 64, 8, 4, 8, True))
_THIN = (Tile(16, 8, 64, 64, 4, 4), Tile(MANY, 64, 64, 64, 4, 3), Tile(0, 32, 64, 64, 4, 3, 8))
_EXPERTS = (Tile(2, 8, 64, 256, 4, 4), Tile(6, 16, 64, 256, 4, 3), Tile(16, 32, 64, 256, 4, 3),
            Tile(64, 64, 64, 128, 4, 3), Tile(0, 64, 128, 128, 8, 3))


def default_schedule(spec: KernelSpec) -> Schedule:
    """For a gemm or grouped_gemm: enough programs to fill a device at few rows."""
    if spec.family == "grouped_gemm":
        return Schedule(_EXPERTS)
    operands: tuple[tuple[int, int], ...] = spec.get("weights")
    rows = [(spec.operands[i].dims[0], groups) for i, groups in operands]
    programs, k = sum(-(-n // g // 64) * g for n, g in rows), spec.operands[spec.get("x")].dims[-1]
    parts = 1
    while programs * parts < _WANTED and parts < _PARTS and k >= 2 * parts * _LEAST_PART:
        parts *= 2
    if sum(n for n, _ in rows) <= _NARROW:
        return Schedule(_THIN, parts, MANY)
    return Schedule(_DENSE, parts)


def part_of(k: int, parts: int, step: int) -> tuple[int, int]:
    """(parts, features of each): whole steps, and no part without features."""
    share = -(-math.ceil(k / parts) // step) * step
    return -(-k // share), share
