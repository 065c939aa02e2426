"""Row liveness: which rows of a step each node has to be computed for.

Every node gets one bound with two anchors. Of a sequence that brings rows from position c on, of a prompt
that ends before position N, the node is needed at positions ``>= min(c - a, N - b)``; a component that is
None asks for nothing. Bounds are joined by the larger component, from the readers of a node to what it
reads:

- a write that the prefix cache keeps needs every new row and no other, (0, none): what older rows would write
  exists, and nothing rewrites it;
- a window ring needs its last rows at the end of the prompt: (none, rows);
- an output needs the rows that were asked for: (none, wanted);
- a reader that reaches r rows back in a window adds r to both components; where the window carries a licence
  (rows more than ``absent_before`` positions back may be missing) it adds only as much as reaches that far:
  ``max(a, min(a + r, absent_before))``.

Nodes with an ``a`` run for all rows of a step, the others for the last rows of a prompt, kept or wanted.
``a`` beyond 0 counts only where no ring holds the rows before c: it is how far a prefix hit without windows
goes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.state import State, Window
from deepinfer.dsl.types import KEPT, STEP, WANTED, Rows


@dataclass(frozen=True)
class Bound:
    """Rows at positions >= min(c - a, N - b)."""

    a: int | None = None
    b: int | None = None

    def join(self, other: Bound) -> Bound:
        return Bound(_larger(self.a, other.a), _larger(self.b, other.b))

    def back(self, reach: int, licence: int | None) -> Bound:
        """What a reader with this bound needs of rows up to ``reach`` positions before its own."""
        def far(x: int | None) -> int | None:
            return None if x is None else x + reach if licence is None else max(x, min(x + reach, licence))
        return Bound(far(self.a), far(self.b))

    def __str__(self) -> str:
        return f"(c-{'_' if self.a is None else self.a}, N-{'_' if self.b is None else self.b})"


NOTHING, NEW_ROWS = Bound(), Bound(0, None)


def _larger(x: int | None, y: int | None) -> int | None:
    return y if x is None else x if y is None else max(x, y)


@dataclass(frozen=True)
class Liveness:
    """Bound of every node of one graph by node id; ``wanted``: rows whose outputs were taken as asked for."""

    graph: Graph
    bounds: dict[int, Bound]
    wanted: int

    def axis(self, n: Node) -> Rows | None:
        """The narrowest row axis that covers a node's bound (a write: the rows written); None: no reader."""
        bound = self.bounds[n.id]
        if bound.a is not None:
            return STEP
        return None if bound.b is None else KEPT if bound.b > self.wanted else WANTED

    @property
    def keep(self) -> int:
        """Rows at the end of a prompt that cover every node that needs no more than those (b)."""
        return max((b.b for b in self.bounds.values() if b.a is None and b.b is not None), default=0)

    @property
    def rerun(self) -> int:
        """Rows before c that have to run again when no window holds them (a)."""
        return max((b.a for b in self.bounds.values() if b.a is not None), default=0)


def liveness(graph: Graph, *, licensed: bool, wanted: int = 1) -> Liveness:
    """Bounds of all nodes. ``licensed``: use the windows' licences; else every bound is the exact halo."""
    bounds = {n.id: NOTHING for n in graph.nodes}
    for o in graph.outputs.values():
        bounds[o.id] = Bound(None, wanted)
    for n in reversed(graph.nodes):
        bounds[n.id] = bounds[n.id].join(_root(n, graph.states, wanted))
        for i, need in _needs(n, bounds[n.id], graph.states, licensed):
            bounds[i.id] = bounds[i.id].join(need)
    return Liveness(graph, bounds, wanted)


def _root(n: Node, states: dict[str, State], wanted: int) -> Bound:
    if n.op == "append":
        return NEW_ROWS
    if n.op == "extend" and isinstance(state := states[n.attrs["state"]], Window):
        return Bound(None, max(state.rows, wanted + 1))  # a ring outlives the step: never on the wanted axis
    return NOTHING


def _needs(n: Node, bound: Bound, states: dict[str, State], licensed: bool) -> Iterator[tuple[Node, Bound]]:
    """(input, what n needs of it)."""
    if bound == NOTHING:
        return
    if n.op in ("append", "by_sequence", "group_positions") or (n.type.rows and n.type.rows.kind == "groups"):
        bound = NEW_ROWS  # entries of older rows exist; groups and whole sequences have no narrower axis
    reach = dict(_reaches(n))
    for at, i in enumerate(n.inputs):
        state = _state_of(i, states)
        if n.op == "pool":
            yield i, bound.back(n.attrs["ratio"] if n.attrs["overlap"] else 0, None)
        elif at in reach:
            licence = state.absent_before if licensed and isinstance(state, Window) else None
            yield i, bound.back(reach[at], licence)
        elif n.op == "attend" and i.type.rows is not None and at in block_operands(n):
            yield i, bound.join(NEW_ROWS)
        else:
            yield i, bound


def _state_of(handle: Node, states: dict[str, State]) -> State | None:
    if handle.op not in ("state", "extend", "append"):
        return None
    return states[handle.attrs["name" if handle.op == "state" else "state"]]


def _sources(n: Node) -> Iterator[tuple[str, int, int]]:
    """(kind, size, operand) of each source operand of an attend that holds keys or values."""
    at = 1 + int(n.attrs["sink"])
    for kind, size, has_values in n.attrs["sources"]:
        yield kind, size, at
        if has_values:
            yield kind, size, at + 1
        at += 1 + int(has_values) + int(kind == "selected")


def _reaches(n: Node) -> Iterator[tuple[int, int]]:
    """(operand, rows) of every window operand: how many rows before its own a row of n reads."""
    if n.op == "previous":
        yield 0, n.attrs["back"]
    elif n.op == "attend":
        for kind, size, at in _sources(n):
            if kind in ("window", "context"):
                yield at, size - 1 if kind == "window" else size


def block_operands(n: Node) -> set[int]:
    """Operands of an attend whose rows are read whole, by every row of the same sequence."""
    return {at for kind, _, at in _sources(n) if kind == "block"}


def matmul_work(n: Node) -> int:
    """Multiply-adds of one row of a contraction with weights (0 for other ops)."""
    if n.op == "contract":
        return math.prod(n.dims) * n.inputs[1].dims[-1]
    if n.op == "grouped_contract":
        return math.prod(n.dims) * n.inputs[2].dims[-1]
    return 0

