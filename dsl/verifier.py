"""Checks that a graph is legal IR: ops known, types as inferred, values defined before use, state in order."""

from __future__ import annotations

from deepinfer.dsl import ops
from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.state import Paged
from deepinfer.errors import SpecError


def _bad(graph: Graph, n: Node, what: str, **kw: object) -> SpecError:
    return SpecError(f"{graph.name}: {n} = {n.op} ({n.scope or '-'}): {what}", where=n.loc, **kw)  # type: ignore[arg-type]


def verify(graph: Graph) -> None:
    """Raises SpecError naming graph, node, op, types and spec line of the first illegal node.

    State rule: handles of one state form a chain (each is written at most once, and not read after that), so reads and
    writes have one order.
    """
    seen: set[int] = set()
    states = _StateOrder(graph)
    for n in graph.nodes:
        if n.id in seen:
            raise _bad(graph, n, "two values have this number")
        for i in n.inputs:
            if i.id not in seen:
                raise _bad(graph, n, f"input {i} is not defined before its use")
        try:
            inferred = ops.infer(n.op, n.inputs, n.attrs)
        except SpecError as e:
            raise _bad(graph, n, e.what, found=e.found, allowed=e.allowed) from None
        if inferred != n.type:
            raise _bad(graph, n, "the stated type is not the inferred one", found=str(n.type), allowed=str(inferred))
        states.check(n)
        if n.op == "scan":
            _verify_body(graph, n)
        seen.add(n.id)
    for name, out in graph.outputs.items():
        if out.id not in seen:
            raise SpecError(f"{graph.name}: output {name} is not a value of the graph", found=str(out))


class _StateOrder:
    """Which state each handle belongs to, and which node wrote it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.state: dict[int, str] = {}
        self.written: dict[int, Node] = {}

    def check(self, n: Node) -> None:
        writes = n.op in ("extend", "append")
        for i in n.inputs:
            if i.id in self.written:
                what = f"state handle {i} is {'written twice' if writes else 'read after a write'}"
                raise _bad(self.graph, n, what, found=f"first written by {self.written[i.id]}",
                           next_step="use the handle that the write returned")
        if n.op == "state":
            self._declared(n, n.attrs["name"])
            self.state[n.id] = n.attrs["name"]
        if not writes:
            return
        name, handle = n.attrs["state"], n.inputs[0]
        self._declared(n, name)
        if self.state.get(handle.id) != name:
            raise _bad(self.graph, n, f"{handle} is no handle of state {name}", found=self.state.get(handle.id))
        if (n.op == "append") != isinstance(self.graph.states[name], Paged):
            raise _bad(self.graph, n, f"this write does not fit state {name}", found=self.graph.states[name].kind,
                       allowed="append for paged, extend for window and grouptail")
        self.state[n.id], self.written[handle.id] = name, n

    def _declared(self, n: Node, name: str) -> None:
        if name not in self.graph.states:
            raise _bad(self.graph, n, "the state is not declared", found=name)


def _verify_body(graph: Graph, n: Node) -> None:
    """A scan body is legal IR, and reads what the scan gives it: ``carry``, and ``c0``, ``c1``, .. as captured."""
    body: Graph = n.attrs["body"]
    verify(body)
    given = {"carry": n.inputs[0]} | {f"c{i}": v for i, v in enumerate(n.inputs[1:])}
    for c in body.of("carry"):
        source = given.get(c.attrs["name"])
        if source is None:
            raise _bad(graph, n, "the body reads a value that the scan does not give", found=c.attrs["name"],
                       allowed=", ".join(given))
        if (c.type.rows, c.type.dims) != (source.type.rows, source.type.dims):
            raise _bad(graph, n, f"the body sees {c.attrs['name']} with another type", found=str(c.type),
                       allowed=str(source.type))
