"""What an op sees while it runs, and the table of op implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.dsl.graph import Node
from deepinfer.dsl.interpreter.frame import Frame
from deepinfer.dsl.interpreter.state import Entries, Ring, StateValue
from deepinfer.dsl.interpreter.weights import Weights
from deepinfer.dsl.state import State
from deepinfer.dsl.types import Rows
from deepinfer.errors import InternalError

Value = Tensor | StateValue
Draw = Callable[[Tensor, Tensor], Tensor]


def greedy(logits: Tensor, positions: Tensor) -> Tensor:
    """[rows, V] logits -> [rows] i64, the largest of each row, ties to the lower id."""
    return first_largest(logits)


def first_largest(x: Tensor) -> Tensor:
    """Index of the largest of the last dim, ties to the lower index."""
    index = torch.arange(x.shape[-1])
    return torch.where(x == x.amax(-1, keepdim=True), index, x.shape[-1]).amin(-1)


@dataclass
class Context:
    """One evaluation: the step's frame, the compute dtype, parameters, and what is given from outside.

    ``states``: initial values of state handles; ``declared``: the declarations of states. ``pins``: selection
    name -> i64 rows on T [T, k] that replace what a ``topk`` of that name finds. ``draw``: (logits,
    positions) -> token ids of ``draw`` nodes.
    """

    frame: Frame
    dtype: torch.dtype
    weights: Weights
    states: Mapping[str, StateValue] = field(default_factory=dict)
    pins: Mapping[str, Tensor] = field(default_factory=dict)
    draw: Draw = greedy
    evaluate: Callable[..., dict[int, Value]] | None = None
    declared: Mapping[str, State] = field(default_factory=dict)


Op = Callable[[Context, Node, Sequence[Value]], Value]
TABLE: dict[str, Op] = {}


def implements(*names: str) -> Callable[[Op], Op]:
    """Registers the implementation of ops."""
    def add(f: Op) -> Op:
        TABLE.update(dict.fromkeys(names, f))
        return f
    return add


def tensor(v: Value) -> Tensor:
    if not isinstance(v, Tensor):
        raise InternalError(f"a tensor is needed, found {type(v).__name__}")
    return v


def ring(v: Value) -> Ring:
    if not isinstance(v, Ring):
        raise InternalError(f"a window or group tail is needed, found {type(v).__name__}")
    return v


def paged(v: Value) -> Entries:
    if not isinstance(v, Entries):
        raise InternalError(f"paged entries are needed, found {type(v).__name__}")
    return v


def row_dims(n: Node) -> int:
    """1 when the tensor of a value has a leading row dim, else 0."""
    return int(n.type.rows is not None)


def aligned(nodes: Sequence[Node], values: Sequence[Value]) -> list[Tensor]:
    """Tensors whose dims broadcast as the dims of their types do, with rows in front."""
    ranks = [len(n.type.dims) for n in nodes]
    width = max(ranks)
    out = []
    for n, rank, v in zip(nodes, ranks, values, strict=True):
        t = tensor(v)
        if rank < width and n.type.rows is not None:
            t = t.reshape(t.shape[0], *[1] * (width - rank), *t.shape[1:])
        out.append(t)
    return out


def on_rows(ctx: Context, n: Node, v: Value, rows: Rows | None) -> Tensor:
    """The value of ``n`` with a leading row dim; a value without rows is the same in every row of ``rows``."""
    t = tensor(v)
    if n.type.rows is not None or rows is None:
        return t
    return t.expand(ctx.frame.count(rows), *t.shape)
