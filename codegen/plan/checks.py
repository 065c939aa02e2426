"""Static checks on the launch table that runs, after every merge has been made."""

from __future__ import annotations

from deepinfer.codegen.kernels.spec import KernelSpec
from deepinfer.codegen.plan.launch import Commit, EntryTable, Launch, LaunchTable
from deepinfer.codegen.plan.table import axis_limits
from deepinfer.errors import InternalError


def _fail(what: str, entry: EntryTable, launch: int, found: str = "") -> InternalError:
    text = f"launch table, entry {entry.name}, launch {launch}: {what}"
    return InternalError(f"{text} ({found})" if found else text)


def _reads_follow_writes(entry: EntryTable, specs: list[KernelSpec]) -> None:
    """Each buffer has one writing launch, whose second stage follows at once, and every reader comes after it."""
    writer: dict[int, int] = {}
    for i, step in enumerate(entry.launches):
        if isinstance(step, Commit):
            continue
        if step.stage:
            first = entry.launches[i - 1] if i else None
            if not isinstance(first, Launch) or (first.kernel, first.args, first.stage) != (step.kernel, step.args, 0):
                raise _fail("a second stage without its first right before it", entry, i)
            continue
        spec = specs[step.kernel]
        for arg, op in zip(step.args, spec.operands, strict=True):
            if arg.kind == "b" and op.write:
                if arg.index in writer:
                    raise _fail(f"buffer {arg.index} is written twice", entry, i, f"first in {writer[arg.index]}")
                writer[arg.index] = i
        for arg, op in zip(step.args, spec.operands, strict=True):
            if arg.kind == "b" and entry.buffers[arg.index].borrowed:
                if op.write:
                    raise _fail(f"borrowed buffer {arg.index} is written", entry, i, found=spec.symbol)
            elif arg.kind == "b" and not op.write and writer.get(arg.index, i) >= i:
                raise _fail(f"buffer {arg.index} is read before it is written", entry, i, found=spec.symbol)
    for name, index in entry.outputs.items():
        if index not in writer:
            raise _fail(f"output {name} is never written", entry, len(entry.launches))


def _lifetimes_do_not_overlap(entry: EntryTable, limits: dict[str, int]) -> None:
    spans = sorted((b.offset, b.offset + b.row_bytes * (b.rows or limits[b.axis]), b.first, b.last, i)
                   for i, b in enumerate(entry.buffers))
    live: list[tuple[int, int, int, int, int]] = []
    for s in spans:
        live = [o for o in live if o[1] > s[0]]
        for o in live:
            if o[2] <= s[3] and s[2] <= o[3]:
                raise _fail(f"buffers {o[4]} and {s[4]} share bytes while both live", entry, max(o[2], s[2]))
        live.append(s)
    if spans and max(s[1] for s in spans) > entry.arena_bytes:
        raise _fail("a buffer ends past the arena", entry, 0)


def _rings_commit_after_last_read(table: LaunchTable, entry: EntryTable, specs: list[KernelSpec]) -> None:
    """A ring written in this entry commits once, after the last kernel that reads or writes it."""
    written: dict[int, int] = {}
    last: dict[int, int] = {}
    commits: dict[int, int] = {}
    for i, step in enumerate(entry.launches):
        if isinstance(step, Commit):
            if step.state in commits:
                raise _fail(f"state {table.states[step.state].name} commits twice", entry, i)
            commits[step.state] = i
            continue
        for arg, op in zip(step.args, specs[step.kernel].operands, strict=True):
            if arg.kind == "s" and table.states[arg.index].kind == "ring":
                last[arg.index] = i
                if op.write:
                    written[arg.index] = i
    for state, i in written.items():
        if commits.get(state, -1) < last[state]:
            name = table.states[state].name
            raise _fail(f"state {name} is read after its ring committed, or never commits", entry, i)


def _row_counts_have_kernels(table: LaunchTable, entry: EntryTable) -> None:
    """Every row count from 1 to its limit maps to a launch: items are counted by rows, so the rule must be positive."""
    for i, step in enumerate(entry.launches):
        if not isinstance(step, Commit) and (step.rows_per_item < 1 or step.items_per_tile < 1):
            raise _fail("a launch has no items", entry, i)
    if min(table.limits.values()) < 1:
        raise InternalError(f"launch table: a row limit is below 1 ({table.limits})")


def check_table(table: LaunchTable, specs: list[KernelSpec]) -> None:
    """Raises InternalError for a table that could compute something wrong: a read before its write, two writers, shared
    bytes between live buffers, a ring committed too early, a row count without items."""
    for entry in table.entries.values():
        limits = axis_limits(entry.limits or table.limits, table.ratios)
        _reads_follow_writes(entry, specs)
        _lifetimes_do_not_overlap(entry, limits)
        _rings_commit_after_last_read(table, entry, specs)
        _row_counts_have_kernels(table, entry)
