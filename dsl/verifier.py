"""Checks that a graph is legal IR: ops known, types as inferred, values defined before use, state in order."""

from __future__ import annotations

from deepinfer.dsl import ops
from deepinfer.dsl.graph import Graph, Node
from deepinfer.errors import SpecError


def _bad(graph: Graph, n: Node, what: str, **kw: object) -> SpecError:
    return SpecError(f"{graph.name}: {n} = {n.op} ({n.scope or '-'}): {what}", where=n.loc, **kw)  # type: ignore[arg-type]


def verify(graph: Graph) -> None:
    """Raises SpecError naming graph, node, op, types and spec line of the first illegal node.

    State rule: handles of one state form a chain (each is written at most once), so reads and writes have one order.
    """
    seen: set[int] = set()
    written: dict[int, Node] = {}
    for n in graph.nodes:
        for i in n.inputs:
            if i.id not in seen:
                raise _bad(graph, n, f"input {i} is not defined before its use")
        try:
            inferred = ops.infer(n.op, n.inputs, n.attrs)
        except SpecError as e:
            raise _bad(graph, n, e.what, found=e.found, allowed=e.allowed) from None
        if inferred != n.type:
            raise _bad(graph, n, "the stated type is not the inferred one", found=str(n.type), allowed=str(inferred))
        if n.op in ("extend", "append"):
            handle = n.inputs[0]
            if handle.id in written:
                raise _bad(graph, n, f"state handle {handle} is written twice", found=f"first by {written[handle.id]}")
            written[handle.id] = n
            if n.attrs["state"] not in graph.states:
                raise _bad(graph, n, "the state is not declared", found=n.attrs["state"])
        if n.op == "scan":
            verify(n.attrs["body"])
        seen.add(n.id)
    for name, out in graph.outputs.items():
        if out.id not in seen:
            raise SpecError(f"{graph.name}: output {name} is not a value of the graph", found=str(out))
