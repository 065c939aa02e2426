"""Choice of numerics: which rounding points of the reference stay in the graph."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.dsl import ops
from deepinfer.dsl.graph import Attr, Graph, Node, rebuild
from deepinfer.dsl.types import bf16


def drop_rounding(graph: Graph) -> Graph:
    """The graph without its bf16 rounding points (profile ``wide``).

    Removes ``round`` nodes to bf16, also inside scan bodies, and clears the ``rounds`` attribute of ``attend`` and
    ``index_score``. Rounding to f32 and encoding into storage formats stay. Types are inferred anew.
    """
    seen: dict[int, Node] = {}
    nodes: list[Node] = []
    for n in graph.nodes:
        inputs = tuple(seen[i.id] for i in n.inputs)
        if n.op == "round" and n.attrs["dtype"] == str(bf16):
            seen[n.id] = inputs[0]
            continue
        seen[n.id] = _renewed(n, inputs, len(nodes))
        nodes.append(seen[n.id])
    return rebuild(graph, seen, nodes)


def _renewed(n: Node, inputs: Sequence[Node], number: int) -> Node:
    attrs: dict[str, Attr] = dict(n.attrs)
    if "rounds" in attrs:
        attrs["rounds"] = ""
    if "body" in attrs:
        attrs["body"] = drop_rounding(attrs["body"])
    return Node(number, n.op, tuple(inputs), attrs, ops.infer(n.op, inputs, attrs), n.loc, n.scope)
