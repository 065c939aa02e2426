"""How often the threads of a step wait for each other: the rule of runtime/native/runner.cpp, counted ahead of time.

After a launch or commit everybody waits, unless it and what follows it have a single item each: both are then the first
thread's. A launch without items (no group ends in the step) is not met at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.codegen.plan.launch import EntryTable, Launch


def items(entry: EntryTable, rows: Mapping[str, int]) -> list[int]:
    """Items of each launch and commit in a step with so many rows of each axis; ``S``: sequences."""
    out = []
    for x in entry.launches:
        if isinstance(x, Launch):
            out.append(-(-rows.get(x.axis, 0) // x.rows_per_item) * x.items_per_tile)
        else:
            out.append(rows["S"])
    return out


def barriers(entry: EntryTable, rows: Mapping[str, int]) -> int:
    """Barriers of one step of several threads; a row loop that fits into one tile is as none."""
    met, alone = 0, False
    for n in reversed(items(entry, rows)):
        if not n:
            continue
        met += not (n == 1 and alone)
        alone = n == 1
    return met


def decode_rows(entry: EntryTable, sequences: int = 1) -> dict[str, int]:
    """Rows of a decode step in which every group ends: the most launches that one can have."""
    axes = {x.axis for x in entry.launches if isinstance(x, Launch)}
    return {axis: sequences for axis in {*axes, "S"}}
