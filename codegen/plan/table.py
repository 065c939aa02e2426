"""Regions of all entries -> one launch table and the distinct kernels it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deepinfer.backends.base import Backend, Source
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.codegen.kernels.specify import Bound, Specified, specify
from deepinfer.codegen.passes.fuse import Region, owner
from deepinfer.codegen.plan.arena import lay_out
from deepinfer.codegen.plan.launch import (
    INPUTS,
    Arg,
    Buffer,
    Commit,
    EntryTable,
    Launch,
    LaunchTable,
    TableKernel,
    TableParam,
    TableState,
)
from deepinfer.codegen.plan.row_loops import add_row_loops, lifetimes
from deepinfer.dsl.graph import Graph
from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.state import Paged, State
from deepinfer.dsl.types import groups
from deepinfer.errors import InternalError, PlanError


@dataclass
class Lowered:
    """What ``build_table`` returns: the table, one KernelSpec and Source per kernel of it, parameters by table
    index."""

    table: LaunchTable
    specs: list[KernelSpec] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    params: list[ParamDecl] = field(default_factory=list)


def extension_axes(graphs: Mapping[str, Graph]) -> dict[str, str]:
    """State name -> row axis it is extended or appended on; a state that no entry writes is an error of the spec."""
    axes: dict[str, str] = {}
    for g in graphs.values():
        for n in g.of("extend", "append"):
            axes[n.attrs["state"]] = str(n.inputs[1].type.rows)
    for g in graphs.values():
        for name in g.states:
            if name not in axes:
                raise PlanError(f"state {name} is read but never written", where=g.name)
    return axes


def axis_limits(limits: Mapping[str, int], ratios: tuple[int, ...]) -> dict[str, int]:
    """Most rows of every axis: a sequence of q rows completes at most q // r + 1 groups of r."""
    out = {"T": limits["step"], "T_kept": limits["kept"], "T_wanted": limits["wanted"], "S": limits["seq"]}
    return out | {str(groups(r)): limits["step"] // r + limits["seq"] for r in ratios}


def entry_limits(graph: Graph, limits: Mapping[str, int]) -> dict[str, int]:
    """Most rows of an entry whose sequences bring a fixed number of rows each; {} where any number may come."""
    rows = {n.attrs["n"] for n in graph.of("by_sequence")}
    if not rows:
        return {}
    most = {axis: min(limit, max(rows) * limits["seq"]) for axis, limit in limits.items() if axis != "seq"}
    return most | {"seq": limits["seq"]}


class _TableBuilder:
    def __init__(self, graphs: Mapping[str, Graph], params: Mapping[str, ParamDecl], backend: Backend,
                 limits: dict[str, int], block_tokens: int, lookback: int, workspace_bytes: int) -> None:
        self.graphs, self.decls, self.backend = graphs, params, backend
        self.workspace_bytes = workspace_bytes
        self.axes = extension_axes(graphs)
        states: dict[str, State] = {}
        for g in graphs.values():
            states |= g.states
        ratios = {s.tokens_per_entry for s in states.values() if isinstance(s, Paged)}
        ratios |= {n.type.rows.ratio for g in graphs.values() for n in g.nodes if n.type.rows and n.type.rows.ratio}
        self.out = Lowered(LaunchTable(block_tokens, lookback, tuple(sorted(ratios)), limits))
        self.state_index = {name: i for i, name in enumerate(states)}
        for name, s in states.items():
            self.out.table.states.append(self._table_state(name, s, block_tokens))
        self.kernel_index: dict[str, int] = {}
        self.param_index: dict[str, int] = {}
        self.pin_index: dict[str, int] = {}

    def _table_state(self, name: str, s: State, block_tokens: int) -> TableState:
        if isinstance(s, Paged):
            if block_tokens % s.tokens_per_entry:
                raise PlanError("a block of the prefix cache must hold whole entries", where=f"state {name}",
                                found=f"{s.tokens_per_entry} tokens an entry", allowed=f"a divisor of {block_tokens}")
            entries = block_tokens // s.tokens_per_entry
            return TableState(name, "paged", entries, s.record_bytes, "T", s.tokens_per_entry)
        return TableState(name, "ring", s.ring_rows, s.record_bytes, self.axes[name])  # type: ignore[attr-defined]

    def kernel(self, spec: KernelSpec) -> int:
        key = spec.digest()
        if key not in self.kernel_index:
            source = self.backend.emit(spec)
            self.kernel_index[key] = len(self.out.specs)
            self.out.specs.append(spec)
            self.out.sources.append(source)
            self.out.table.kernels.append(TableKernel(source.symbol, source.scratch_bytes, source.exchange_bytes))
        return self.kernel_index[key]

    def param(self, name: str) -> int:
        if name not in self.param_index:
            self.param_index[name] = len(self.out.params)
            self.out.params.append(self.decls[name])
            self.out.table.params.append(TableParam(name, self.decls[name].stack))
        return self.param_index[name]

    def pin(self, name: str, op: Operand) -> int:
        if name not in self.pin_index:
            self.pin_index[name] = len(self.out.table.pins)
            self.out.table.pins.append((name, op.dims[-1]))
        return self.pin_index[name]


class _EntryBuilder:
    """One entry: launches in order, buffers with lifetimes, commits after last readers."""

    def __init__(self, parent: _TableBuilder, graph: Graph, regions: list[Region]) -> None:
        self.parent, self.graph, self.regions = parent, graph, regions
        self.table = EntryTable(graph.name)
        self.buffer_of: dict[int, int] = {}
        self.fresh: dict[str, int] = {}
        region_of = {n.id: r for r in regions for n in r.nodes}
        self.read_outside = {owner(v).id for v in graph.outputs.values()}
        for r in regions:
            for n in r.nodes:
                for i in n.inputs:
                    src = owner(i)
                    if region_of.get(src.id) is not r:
                        self.read_outside.add(src.id)

    def build(self) -> EntryTable:
        specified = [specify(self.graph, r, self.read_outside) for r in self.regions]
        last_reader: dict[str, int] = {}
        for i, s in enumerate(specified):
            for op, b in zip(s.spec.operands, s.bindings, strict=True):
                if b.kind == "state" and op.get("kind") != "paged":
                    last_reader[str(b.name)] = i
        commits: dict[int, list[str]] = {}
        extended = {n.attrs["state"] for n in self.graph.of("extend")}
        for name, i in last_reader.items():
            if name in extended:
                commits.setdefault(i, []).append(name)
        for i, (r, s) in enumerate(zip(self.regions, specified, strict=True)):
            self._launch(r, s)
            for name in commits.get(i, []):
                self.table.launches.append(Commit(self.parent.state_index[name], r.scope))
        self.table.outputs = {name: self.buffer_of[owner(v).id] for name, v in self.graph.outputs.items()}
        self.table.limits = entry_limits(self.graph, self.parent.out.table.limits)
        limits = axis_limits(self.table.limits or self.parent.out.table.limits, self.parent.out.table.ratios)
        fresh = {self.parent.state_index[name]: b for name, b in self.fresh.items()}
        add_row_loops(self.table, self.parent.out.specs, fresh, limits, self.parent.workspace_bytes)
        self.table.buffers, self.table.arena_bytes = lay_out(lifetimes(self.table, fresh), limits)
        return self.table

    def _buffer(self, axis: str, row_bytes: int, value: int, scope: str) -> int:
        self.table.buffers.append(Buffer(axis, row_bytes, 0, 0, value=value, scope=scope))
        return len(self.table.buffers) - 1

    def _arg(self, op: Operand, b: Bound, scope: str) -> Arg:
        p = self.parent
        if b.kind == "param":
            return Arg("p", p.param(str(b.name)))
        if b.kind == "pin":
            return Arg("n", p.pin(str(b.name), op))
        if b.kind == "input":
            return Arg("i", INPUTS.index(str(b.name)))
        if b.kind == "const":
            return Arg("z", 0)
        if b.kind == "state":
            name = str(b.name)
            if op.get("kind") != "paged":
                self._ring(name, op, scope)
            return Arg("s", p.state_index[name])
        return Arg("b", self._value(op, b, scope))

    def _ring(self, name: str, op: Operand, scope: str) -> None:
        if op.write:
            self.fresh[name] = self._buffer(self.parent.axes[name], op.get("record_bytes"), -1, scope)

    def _value(self, op: Operand, b: Bound, scope: str) -> int:
        assert b.node is not None
        key = int(b.name)
        if key not in self.buffer_of and b.node.op == "input" and not op.write:
            self.buffer_of[key] = self._borrowed(str(b.node.attrs["name"]))
        if key not in self.buffer_of:
            if not op.write:
                raise InternalError(f"{scope}: a kernel reads %{key} ({b.node.op}) before it is written")
            stored = self.parent.backend.stored(b.node.type.dtype)
            self.buffer_of[key] = self._buffer(str(b.node.type.rows), stored.data_bytes(b.node.type.size), key, scope)
        return self.buffer_of[key]

    def _borrowed(self, name: str) -> int:
        """A buffer for an output of the step that ran before."""
        step = self.parent.out.table.entries["step"]
        self.table.buffers.append(replace(step.buffers[step.outputs[name]], borrowed=True))
        return len(self.table.buffers) - 1

    def _launch(self, r: Region, s: Specified) -> None:
        k = self.parent.kernel(s.spec)
        source = self.parent.out.sources[k]
        args = tuple(self._arg(op, b, r.scope) for op, b in zip(s.spec.operands, s.bindings, strict=True))
        first = Launch(k, str(r.rows), source.rows_per_item, source.items_per_tile, args, r.scope, r.why,
                       tuple(n.id for n in r.nodes))
        self.table.launches.append(first)
        if source.exchange_bytes:
            why = "second stage: the rest of a row when all its items are done"
            self.table.launches.append(replace(first, rows_per_item=1, items_per_tile=1, why=why, stage=1))


def build_table(graphs: Mapping[str, Graph], regions: Mapping[str, list[Region]], params: Mapping[str, ParamDecl],
                backend: Backend, *, limits: dict[str, int], block_tokens: int, lookback: int,
                workspace_bytes: int) -> Lowered:
    """The launch table of an engine.

    ``limits``: most rows of ``step``, ``kept``, ``wanted`` and ``seq``; ``workspace_bytes``: what the values inside a
    row loop may take. Equal KernelSpecs share one kernel. Raises PlanError when entries do not
    divide a block, InternalError when a value would be read before it is written.
    """
    b = _TableBuilder(graphs, params, backend, limits, block_tokens, lookback, workspace_bytes)
    fresh: dict[int, list[tuple[str, int]]] = {}
    for name, graph in graphs.items():
        entry = _EntryBuilder(b, graph, regions[name])
        b.out.table.entries[name] = entry.build()
        for state, buffer in entry.fresh.items():
            fresh.setdefault(b.state_index[state], []).append((name, buffer))
    for i, pairs in fresh.items():
        b.out.table.states[i] = replace(b.out.table.states[i], fresh=tuple(pairs))
    return b.out
