"""Graph IR: typed nodes in execution order, one graph per entry of a model.

Nodes are SSA values. State is threaded as handles: a write (``append``, ``extend``) returns a new handle, so
that every order between writes and reads is a data dependence. Attributes are plain literals, which makes a
graph printable, parsable and hashable without further rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer.dsl.types import Type

if TYPE_CHECKING:
    from deepinfer.dsl.state import State

Attr = Any  # int | float | str | bool | None | tuple[Attr, ...] | Graph (the body of a scan)


class _Arithmetic(Protocol):
    """What the operators of Node call, found in dsl/functional.py."""

    def add(self, a: Any, b: Any) -> Node: ...
    def sub(self, a: Any, b: Any) -> Node: ...
    def mul(self, a: Any, b: Any) -> Node: ...
    def div(self, a: Any, b: Any) -> Node: ...
    def neg(self, a: Any) -> Node: ...


@dataclass(frozen=True)
class Loc:
    """Place in a spec that made a node. ``callers``: the places that called it, the nearest first, as far as they lie
    in the same folder."""

    file: str = "?"
    line: int = 0
    callers: tuple[Loc, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def chain(self) -> tuple[str, ...]:
        """From the entry function of the spec down to the line itself."""
        return *(str(c) for c in reversed(self.callers)), str(self)


@dataclass(eq=False)
class Node:
    """One value. ``scope`` is the dotted place in the model (``layers.20.attn``), for reports only."""

    id: int
    op: str
    inputs: tuple[Node, ...]
    attrs: dict[str, Attr]
    type: Type
    loc: Loc = field(default_factory=Loc)
    scope: str = ""

    def __str__(self) -> str:
        return f"%{self.id}"

    def __repr__(self) -> str:
        return f"<%{self.id} {self.op} {self.type}>"

    @property
    def dims(self) -> tuple[int, ...]:
        return self.type.static_dims

    # Arithmetic on values while tracing; ints and floats become constants.
    def __add__(self, other: Node | float) -> Node:
        return functional().add(self, other)

    def __radd__(self, other: float) -> Node:
        return functional().add(other, self)

    def __sub__(self, other: Node | float) -> Node:
        return functional().sub(self, other)

    def __rsub__(self, other: float) -> Node:
        return functional().sub(other, self)

    def __mul__(self, other: Node | float) -> Node:
        return functional().mul(self, other)

    def __rmul__(self, other: float) -> Node:
        return functional().mul(other, self)

    def __truediv__(self, other: Node | float) -> Node:
        return functional().div(self, other)

    def __neg__(self) -> Node:
        return functional().neg(self)


def functional() -> _Arithmetic:
    """deepinfer.dsl.functional, imported late: it builds Nodes."""
    from deepinfer.dsl import functional as f

    return f


@dataclass
class Graph:
    """Nodes in topological order; ``outputs`` names the values the caller may read.

    Inputs are nodes of op ``input`` (attr ``name``). ``states`` lists the declared states by name.
    """

    name: str
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, Node] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def readers(self) -> dict[int, list[Node]]:
        """Node id -> nodes that read it, in order."""
        out: dict[int, list[Node]] = {n.id: [] for n in self.nodes}
        for n in self.nodes:
            for i in dict.fromkeys(n.inputs):
                out[i.id].append(n)
        return out

    def of(self, *ops: str) -> list[Node]:
        return [n for n in self.nodes if n.op in ops]

    def digest(self) -> str:
        """Hash of everything that computes: locations and scopes are left out, so that a moved or changed
        comment in a spec changes nothing."""
        from deepinfer.dsl.printer import print_graph

        return hashlib.sha256(print_graph(self, places=False).encode()).hexdigest()


def rebuild(graph: Graph, mapping: Mapping[int, Node], nodes: Sequence[Node]) -> Graph:
    """A graph of ``nodes`` whose outputs are those of ``graph`` seen through ``mapping`` (old id -> new node)."""
    return Graph(graph.name, list(nodes), {k: mapping[v.id] for k, v in graph.outputs.items()}, dict(graph.states))
