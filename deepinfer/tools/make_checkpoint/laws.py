"""What random values a parameter gets, by what the graph does with it, so that activations stay near unit size."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.model import Program
from deepinfer.dsl.params import ParamDecl

_SPREAD_OF_FACTORS = 0.1  # norm weights, gates' scales: near one, but no two alike
_SPREAD_OF_TERMS = 0.2  # biases: enough to matter, too little to decide alone
_SAME_VALUES = frozenset({"slice", "reshape", "expand", "round", "cast", "to_float", "concat", "take"})


@dataclass(frozen=True)
class Law:
    """Normal values of this mean and deviation; integers are drawn evenly whatever it says."""

    mean: float
    deviation: float


UNUSED = Law(0.0, 0.02)  # tensors that the engine leaves out


def laws_of(program: Program) -> dict[str, Law]:
    """Parameter name -> law.

    A matrix of K columns keeps unit inputs at unit size: N(0, 1/K). A factor is near one, a term near zero, a looked-up
    row and an attention sink are N(0, 1).
    """
    found: dict[str, Law] = {}
    for graph in program.graphs.values():
        readers = graph.readers()
        for node in graph.of("param"):
            decl = program.model.params.declared[node.attrs["name"]]
            found.setdefault(decl.name, _law(graph, node, readers, decl))
    return found


def _law(graph: Graph, node: Node, readers: dict[int, list[Node]], decl: ParamDecl) -> Law:
    for reader in readers[node.id]:
        if reader.op in _SAME_VALUES:
            return _law(graph, reader, readers, decl)
        if reader.op in ("contract", "grouped_contract"):
            return Law(0.0, decl.shape[-1] ** -0.5)
        if reader.op in ("mul", "div"):
            return Law(1.0, _SPREAD_OF_FACTORS)
        if reader.op in ("add", "sub"):
            return Law(0.0, _SPREAD_OF_TERMS)
    return Law(0.0, 1.0)
