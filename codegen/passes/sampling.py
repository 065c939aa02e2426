"""Draws: the entry ``sample`` of every model on targets that draw, and the largest logit on those that do not.

``sample`` reads the logits of the step that has just run, where that step left them, and makes ``tokens``: one for
each wanted row, under the options of the row's request.
"""

from __future__ import annotations

from deepinfer.dsl import ops
from deepinfer.dsl.build import tracing
from deepinfer.dsl.functional import draw, output
from deepinfer.dsl.graph import Graph, Node, rebuild

ENTRY, LOGITS, TOKENS = "sample", "logits", "tokens"


def sampling(step: Graph) -> Graph | None:
    """The graph of the entry for a narrowed step; None where the step has no logits to draw from."""
    logits = step.outputs.get(LOGITS)
    if logits is None:
        return None
    with tracing(ENTRY) as b, b.scope("sample"):
        output(TOKENS, draw(b.add("input", name=LOGITS, type=str(logits.type))))
    return b.graph


def without_draws(graph: Graph) -> Graph:
    """The graph with the largest logit in place of every draw."""
    if not graph.of("draw"):
        return graph
    seen: dict[int, Node] = {}
    for n in graph.nodes:
        inputs = tuple(seen[i.id] for i in n.inputs)
        op, attrs = ("argmax", {}) if n.op == "draw" else (n.op, n.attrs)
        seen[n.id] = Node(n.id, op, inputs, attrs, ops.infer(op, inputs, attrs), n.loc, n.scope)
    return rebuild(graph, seen, list(seen.values()))
