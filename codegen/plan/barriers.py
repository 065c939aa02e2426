"""How often the threads of a step meet: the rule of runtime/native/team.cpp, counted ahead of time.

A launch or commit of several items is shared by the threads, and ends when all of its items have been done. One of a
single item is the calling thread's alone; one without items (no group ends in the step) is not met at all.
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
    return sum(n > 1 for n in items(entry, rows))


def decode_rows(entry: EntryTable, sequences: int = 1) -> dict[str, int]:
    """Rows of a decode step in which every group ends: the most launches that one can have."""
    axes = {x.axis for x in entry.launches if isinstance(x, Launch)}
    return {axis: sequences for axis in {*axes, "S"}}
