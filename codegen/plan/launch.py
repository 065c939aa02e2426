"""The launch table: what the native runner executes, and its text form ``lib/launch.txt``.

Everything is resolved but row counts: buffers have offsets in one arena, kernels have symbols, arguments name buffers,
parameters, states and pins by index. The text form has one record a line, words separated by blanks, so that the runner
needs no parser library and a reader no tool:

    deepinfer-launch 1
    block_tokens 128
    lookback 3
    positions 1048581                             # most of a sequence, with those of a verify beyond its end
    sequence vocab 512 drafts 5 filler 2 ids 256 tail 64 drafts 2112 confidence 2176 counts 2240 logits 4288 end 14528
    axis 4 groups 2                               # axes 0..3 are fixed
    limit step 512 kept 512 wanted 64 seq 8
    param 0 layers.0.attn.wq_a.weight stack 0
    state 0 win.0 ring rows 133 record 528 axis 0
    state 1 kv.2 paged entries 64 record 288 ratio 2
    pin 0 experts.0 k 6
    kernel 0 di_norm_1f2e3d scratch 81920          # "exchange 4096" behind it: a kernel in two stages
    entry step arena 1234567
    limit step 40 kept 40 wanted 40 seq 8          # (optional) most rows in this entry
    buffer 0 axis 0 row_bytes 40960 offset 0       # buffers of the entry above
    buffer 1 axis 0 row_bytes 512 offset 0 rows 64 # a value that lives inside a row loop: room for one tile
    loop 0 64 2                                    # the next 2 launches run for 64 rows of axis 0 at a time
    launch 0 items 0 1 1 args b0 p0 s1 i0 n0       # kernel, item rule: axis, rows per item, items per row tile
    launch 0 items 0 1 1 stage 1 args b0 p0        # the second stage of the launch before
    commit 0                                       # copy the fresh rows of state 0 into its ring
    output logits 7                                # buffer
    fresh 0 3                                      # (before the launches) state 0 keeps its new rows in buffer 3
    end
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.codegen.plan.sequence_state import SequenceState
from deepinfer.dsl.types import Rows

FORMAT = 1
FIXED_AXES = ("T", "T_kept", "T_wanted", "S")


@dataclass(frozen=True)
class Arg:
    """``kind``: b buffer, p parameter, s state, n pin, i input (0 token_ids, 1 positions, 2 lookback; kernels find
    these in
    the step), z nothing (a constant that lies in the kernel)."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


INPUTS = ("token_ids", "positions", "lookback")


@dataclass(frozen=True)
class Buffer:
    """Rows of one value in the arena. ``first`` and ``last``: launches between which it lives. ``rows``: most rows it
    holds, 0 for the limit of its axis; else it belongs to a row loop, and row r of the axis is its row r - r0, r0 being
    the first row of the tile at work. ``borrowed``: an output of the entry that ran before, at its place."""

    axis: str
    row_bytes: int
    first: int
    last: int
    offset: int = 0
    value: int = -1
    scope: str = ""
    rows: int = 0
    borrowed: bool = False


@dataclass(frozen=True)
class Launch:
    """One kernel over a row axis. Items of a launch: ``ceil(rows / rows_per_item) * items_per_tile``; a kernel derives
    row tile and column tile from the item number: tile = item // items_per_tile, column = item % items_per_tile.
    ``stage``: 1 for the second stage of the launch before, which has the same arguments."""

    kernel: int
    axis: str
    rows_per_item: int
    items_per_tile: int
    args: tuple[Arg, ...]
    scope: str = ""
    why: str = ""
    nodes: tuple[int, ...] = ()
    stage: int = 0


@dataclass(frozen=True)
class Commit:
    """Copy this step's rows of a ring state into the ring, after its last reader."""

    state: int
    scope: str = ""


@dataclass(frozen=True)
class Loop:
    """``count`` launches from ``first`` on run for ``rows`` rows of ``axis`` at a time."""

    first: int
    count: int
    axis: str
    rows: int


@dataclass(frozen=True)
class TableParam:
    name: str
    stack: int


@dataclass(frozen=True)
class TableState:
    """``kind`` ring or paged; ``rows``: ring rows, or entries per block; ``fresh``: arena buffer of each entry that
    extends the state (entry name -> buffer index)."""

    name: str
    kind: str
    rows: int
    record_bytes: int
    axis: str
    ratio: int = 1
    fresh: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class TableKernel:
    symbol: str
    scratch_bytes: int = 0
    exchange_bytes: int = 0


@dataclass
class EntryTable:
    """``limits``: most rows of each axis in this entry, where fewer than the table's (a draft brings whole blocks)."""

    name: str
    buffers: list[Buffer] = field(default_factory=list)
    launches: list[Launch | Commit] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    arena_bytes: int = 0
    limits: dict[str, int] = field(default_factory=dict)


@dataclass
class LaunchTable:
    """All entries of an engine over shared parameters, states, pins and kernels. ``limits``: most rows of each axis."""

    block_tokens: int
    lookback: int
    ratios: tuple[int, ...]
    limits: dict[str, int]
    params: list[TableParam] = field(default_factory=list)
    states: list[TableState] = field(default_factory=list)
    pins: list[tuple[str, int]] = field(default_factory=list)
    kernels: list[TableKernel] = field(default_factory=list)
    entries: dict[str, EntryTable] = field(default_factory=dict)
    sequence: SequenceState | None = None
    positions: int = 0

    def axis(self, rows: str) -> int:
        """Axis number of the ABI."""
        if rows in FIXED_AXES:
            return FIXED_AXES.index(rows)
        return len(FIXED_AXES) + self.ratios.index(Rows.parse(rows).ratio)

    def text(self) -> str:
        """``lib/launch.txt``."""
        out = [f"deepinfer-launch {FORMAT}", f"block_tokens {self.block_tokens}", f"lookback {self.lookback}"]
        out += [f"positions {self.positions}"] if self.positions else []
        out += [self.sequence.text()] if self.sequence else []
        out += [f"axis {self.axis(f'T/{r}')} groups {r}" for r in self.ratios]
        out.append("limit " + " ".join(f"{k} {v}" for k, v in self.limits.items()))
        out += [f"param {i} {p.name} stack {p.stack}" for i, p in enumerate(self.params)]
        for i, s in enumerate(self.states):
            shape = f"entries {s.rows} record {s.record_bytes} ratio {s.ratio}" if s.kind == "paged" else (
                f"rows {s.rows} record {s.record_bytes} axis {self.axis(s.axis)}")
            out.append(f"state {i} {s.name} {s.kind} {shape}")
        out += [f"pin {i} {name} k {k}" for i, (name, k) in enumerate(self.pins)]
        out += [f"kernel {i} {k.symbol} scratch {k.scratch_bytes}"
                + (f" exchange {k.exchange_bytes}" if k.exchange_bytes else "") for i, k in enumerate(self.kernels)]
        for e in self.entries.values():
            out += self._entry(e)
        return "\n".join([*out, "end", ""])

    def _entry(self, e: EntryTable) -> list[str]:
        out = [f"entry {e.name} arena {e.arena_bytes}"]
        if e.limits:
            out.append("limit " + " ".join(f"{k} {v}" for k, v in e.limits.items()))
        out += [f"buffer {i} axis {self.axis(b.axis)} row_bytes {b.row_bytes} offset {b.offset}"
                + (f" rows {b.rows}" if b.rows else "") for i, b in enumerate(e.buffers)]
        for i, s in enumerate(self.states):
            out += [f"fresh {i} {b}" for name, b in s.fresh if name == e.name]
        loops = {loop.first: loop for loop in e.loops}
        for i, step in enumerate(e.launches):
            if i in loops:
                out.append(f"loop {self.axis(loops[i].axis)} {loops[i].rows} {loops[i].count}")
            if isinstance(step, Commit):
                out.append(f"commit {step.state}")
            else:
                args = " ".join(map(str, step.args))
                out.append(f"launch {step.kernel} items {self.axis(step.axis)} {step.rows_per_item} "
                           f"{step.items_per_tile} {'stage 1 ' if step.stage else ''}args {args}")
        out += [f"output {k} {v}" for k, v in e.outputs.items()]
        return out
