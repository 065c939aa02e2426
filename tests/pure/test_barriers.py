"""Barriers of a step, counted from the launch table."""

from __future__ import annotations

from deepinfer.codegen.plan.barriers import barriers, decode_rows, items
from deepinfer.codegen.plan.launch import Commit, EntryTable, Launch


def entry(*items_per_tile: int | None) -> EntryTable:
    """Launches of so many items for a row; None: a commit."""
    return EntryTable("step", launches=[Commit(0) if n is None else Launch(0, "T", 1, n, ()) for n in items_per_tile])


def test_threads_meet_where_items_are_shared() -> None:
    one = {"T": 1, "S": 1}
    assert barriers(entry(1, 1, 1), one) == 0
    assert barriers(entry(4, 1, 1, 4), one) == 2
    assert barriers(entry(4, 4, 4), one) == 3
    assert barriers(entry(1, None, 4), one) == 1  # the commit of one sequence is one item


def test_more_rows_have_more_items_and_more_barriers() -> None:
    table = entry(1, 1, 4)
    assert items(table, {"T": 3, "S": 3}) == [3, 3, 12]
    assert barriers(table, decode_rows(table)) == 1
    assert barriers(table, decode_rows(table, sequences=2)) == 3


def test_launches_without_rows_are_not_met() -> None:
    table = EntryTable("step", launches=[Launch(0, axis, 1, 4, ()) for axis in ("T", "T/2", "T")])
    assert barriers(table, {"T": 1, "T/2": 0, "S": 1}) == 2
    assert decode_rows(table) == {"T": 1, "T/2": 1, "S": 1}
