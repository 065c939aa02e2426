"""Fetching ahead: rows of lookup tables are asked for when the step begins and read when they are needed.

A lookup table (``ParamDecl.table``) may be larger than memory; its rows then come from a disk. Which rows a step reads
follows from its token ids, so every lookup gets a ``fetch`` node that asks for its rows without waiting, and the lookup
itself, with all that only it feeds, moves down to the level that first needs it. What lies between hides the disk; and
the rows of a whole prompt are asked for at once, where a lookup would wait for one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from deepinfer.dsl import ops
from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.params import ParamDecl

if TYPE_CHECKING:
    from deepinfer.codegen.passes.fuse import Levels


def add_fetches(graph: Graph, params: Mapping[str, ParamDecl]) -> Graph:
    """The graph with a ``fetch`` behind everything else for each lookup in a table of the checkpoint."""
    tables = [n for n in graph.of("gather") if n.inputs[0].op == "param"
              and (decl := params[n.inputs[0].attrs["name"]]).table and not decl.derive]
    first = max((n.id for n in graph.nodes), default=-1) + 1
    nodes = [Node(first + i, "fetch", n.inputs, {}, ops.infer("fetch", n.inputs, {}), n.loc, n.scope)
             for i, n in enumerate(tables)]
    return Graph(graph.name, [*graph.nodes, *nodes], graph.outputs, graph.states)


def delay_lookups(levels: Levels, outputs: Collection[int]) -> None:
    """Moves each fetched lookup, and all that it alone feeds, down to its first reader outside. ``outputs``: units that
    the caller reads, which stay where they are."""
    asked = {(n.inputs[0].attrs["name"], n.inputs[1].id) for n in levels.graph.of("fetch")}
    for root in levels.order:
        head = levels.units[root][0]
        if head.op != "gather" or head.inputs[0].op != "param":
            continue
        if (head.inputs[0].attrs["name"], head.inputs[1].id) in asked:
            fed = _fed_alone(levels, root)
            if fed.isdisjoint(outputs):
                levels.move(fed, _room(levels, fed))


def _fed_alone(levels: Levels, root: int) -> set[int]:
    """The lookup and the units that read nothing else of the step but what the lookup reads."""
    before, stack = set[int](), [root]
    while stack:
        for d in levels.inputs(stack.pop()):
            if d not in before:
                before.add(d)
                stack.append(d)
    fed = {root}
    for u in levels.order:
        read = set(levels.inputs(u))
        if read & fed and read <= fed | before and not _touches_state(levels.units[u]):
            fed.add(u)
    return fed


def _touches_state(nodes: Collection[Node]) -> bool:
    return any(n.op in ("extend", "append") or any(i.op in ("state", "extend", "append") for i in n.inputs)
               for n in nodes)


def _room(levels: Levels, fed: set[int]) -> int:
    """Levels by which all of ``fed`` can move down."""
    return min((levels.level[r] - levels.distance(u, r) - levels.level[u]
                for u in fed for r in levels.readers[u] if r not in fed), default=0)
