"""Cycles of a kernel's pipes on an AI core, from its plan: what reports predict times with.

An instruction of a vector function is counted as a cycle, its functions as the instructions they consist of; the cube
core does 16 x 16 x 16 products of bf16 a cycle (16 x 8 x 16 of f32); paths between memories move what ``target.PATHS``
says. A copy that the scalar unit starts costs ``COPY`` cycles besides its bytes. Not modelled: conflicts of memory
banks, instruction fetch, the cache of the scalar unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from deepinfer.backends.ascend950.target import LANES, PATHS
from deepinfer.backends.grid import Grid
from deepinfer.backends.work import Work

COPY = 20.0
# Instructions for a vector of 64 elements: expansions of codes to bf16, as the functions in include/ are written.
EXPAND = {"mxfp8": 9.0, "mxfp4": 11.0, "bf16": 3.0, "f32": 3.0, "codes": 2.5, "scales": 0.9, "": 0.0}
# The same for the functions of include/di_arrays.h that tile programs call on whole arrays.
CALLS = {"widen": 3, "copy": 2, "narrow": 3, "round_array": 4, "quantise": 46, "encode8": 50, "encode4": 36,
         "rotate": 7, "rotate_steps": 16, "decode8": 8, "decode4": 6, "decode_scales": 4, "pack_bytes": 2, "take": 4,
         "topk": 40, "pool_top": 4, "pool_add": 12, "quotient": 4, "fill_array": 1}
_CALL = re.compile(r"asc_vf_call<di_(\w+)")
_NUMBER = re.compile(r", (\d+)(?=[,)])")
CALL = 20.0  # what entering and leaving a vector function takes


def call_cycles(text: str) -> float:
    """Cycles of a statement that calls a library function on an array; 0 for any other."""
    found = _CALL.search(text)
    if found is None:
        return 0.0
    elements = max((int(x) for x in _NUMBER.findall(text)), default=LANES)
    return CALL + CALLS.get(found[1], 10) * -(-elements // LANES)


def grid_of(grid: Grid) -> tuple[int, int, int, int, int]:
    return grid.of, grid.per, grid.plus, grid.times, grid.fixed


def rowwise(unit: str, grid: Grid, cycles: float, copies: int, overlapped: bool) -> Work:
    """``cycles``: of the vector unit for a row; ``copies``: in and out."""
    return Work(unit, grid_of(grid), (("V", cycles), ("S", copies * COPY)), overlapped=overlapped)


def contraction(unit: str, grid: Grid, k: int, columns: int, size: int, expands: Sequence[str],
                epilogue: float, run: int = 1) -> Work:
    """``expands``: formats of the weights of a tile that vector cores expand, "" for those they do not; ``epilogue``:
    instructions on a vector of results; ``run``: items of the same rows that a block takes at least, encoding once."""
    deep = 32 // size
    cube = math.ceil(k / deep) * math.ceil(columns / 16) / 16.0 * len(expands)
    half = columns / 2
    vector = sum(half * k / LANES * EXPAND[e] for e in expands)
    to_l1 = sum(half * k * size / PATHS["UB_L1"] for e in expands if e)
    to_l0 = k * columns * size / PATHS["L1_L0"] * len(expands)
    item = (("V", vector), ("MTE3", to_l1), ("MTE1", to_l0))
    padded = (("M", cube), ("MTE1", k * size / PATHS["L1_L0"] * len(expands)),
              ("FIX", columns * 4 / PATHS["L0C_UB"] * len(expands)))
    row = (("V", half / LANES * epilogue + (k / LANES * CALLS["quantise"] / run if size == 1 else 0.0)),)
    return Work(unit, grid_of(grid), item, row, padded, (), 32)


def attention(unit: str, grid: Grid, rows: int, wide: int, tall: int, size: int, copies: int,
              splits: int) -> Work:
    """``rows``: padded heads of an item; ``splits``: items of a row. Keys are met twice: for the largest scores, and
    for the weights. The pipes of a tile wait for each other."""
    deep = 16 if size == 2 else 8
    cube = (2 * math.ceil(wide / deep) * rows / 16 + math.ceil(tall / 16) * rows / 16) / 16.0 * 16 / deep
    vector = (2 * wide / LANES * 14 + tall / LANES * 6 + rows / 2 * 24 / LANES) / 2  # two vector cores share the keys
    paths = 2 * wide * size / PATHS["UB_L1"] + tall * size / PATHS["UB_L1"]
    key = (("M", cube * splits), ("V", vector * splits), ("MTE3", paths * splits), ("S", copies * COPY * splits))
    item = (("V", rows / 2 * tall / LANES * 8), ("FIX", rows * tall * 4 / PATHS["L0C_UB"]))
    return Work(unit, grid_of(grid), item, key=key, overlapped=False)


def scores(unit: str, grid: Grid, rows: int, wide: int, heads: int, size: int, copies: int, bits: int) -> Work:
    """Scores of entries, and their selection: a histogram for each byte of the scores, and of the numbers for ties."""
    deep = 16 if size == 2 else 8
    cube = math.ceil(wide / deep) * rows / 16 / 16.0
    vector = wide / LANES * 14 / 2 + heads * 6 / LANES + (bits / 8 * 8 + 4 * 11) / LANES
    key = (("M", cube), ("V", vector), ("MTE3", wide * size / PATHS["UB_L1"]), ("S", copies * COPY))
    return Work(unit, grid_of(grid), key=key, overlapped=False)
