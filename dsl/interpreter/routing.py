"""Contractions, lookups and selections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.dsl.graph import Node
from deepinfer.dsl.interpreter.context import Context, Value, first_largest, implements, on_rows, tensor
from deepinfer.dsl.types import STEP
from deepinfer.errors import InternalError


@implements("contract")
def _contract(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    x, w = tensor(args[0]), tensor(args[1])
    g = n.attrs.get("groups", 1)
    if g == 1:
        return x @ w.T
    return torch.einsum("...gk,grk->...gr", x, w.unflatten(0, (g, -1)))


@implements("grouped_contract")
def _grouped_contract(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    x, experts = (on_rows(ctx, i, v, n.type.rows) for i, v in zip(n.inputs[:2], args[:2], strict=True))
    w = tensor(args[2])
    if len(n.inputs[0].type.dims) == 1:
        x = x.unsqueeze(-2).expand(*x.shape[:-1], experts.shape[-1], x.shape[-1])
    _check_index(experts, w.shape[0], "experts")
    out = torch.zeros(*experts.shape, w.shape[1], dtype=x.dtype)
    for e in experts.unique().tolist():
        chosen = experts == e
        out[chosen] = x[chosen] @ w[e].T
    return out


@implements("gather")
def _gather(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    table, index = tensor(args[0]), tensor(args[1]).long()
    _check_index(index, table.shape[0], "table rows")
    return table[index]


@implements("fetch")
def _fetch(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return args[1]


@implements("take")
def _take(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    values, index = (on_rows(ctx, i, v, n.type.rows) for i, v in zip(n.inputs, args, strict=True))
    _check_index(index, values.shape[-1], "values")
    return values.gather(-1, index.long())


def _check_index(index: Tensor, size: int, what: str) -> None:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        raise InternalError(f"index {int(index.min())}..{int(index.max())} into {size} {what}")


def top_k(x: Tensor, k: int) -> Tensor:
    """[.., n] -> [.., k] i64: best first, ties to the lower index, -1 where fewer than k are above -inf."""
    kept, width = min(k, x.shape[-1]), x.shape[-1]
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    index = torch.where(order.values > -torch.inf, order.indices, -1)[..., :kept]
    return torch.nn.functional.pad(index, (0, max(0, k - width)), value=-1)


@implements("topk")
def _topk(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    x = tensor(args[0])
    pinned = ctx.pins.get(n.attrs.get("pin") or "")
    if pinned is None:
        return top_k(x, n.attrs["k"])
    if n.type.rows is None:
        raise InternalError(f"the pinned selection {n.attrs['pin']} has no rows")
    rows = ctx.frame.narrowed(pinned.long(), STEP, n.type.rows)
    want = (*x.shape[:-1], n.attrs["k"])
    if tuple(rows.shape) != want:
        raise InternalError(f"the pinned selection {n.attrs['pin']} has shape {list(rows.shape)}, needed {list(want)}")
    return rows


@implements("argmax")
def _argmax(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return first_largest(tensor(args[0]))


@implements("draw")
def _draw(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    if n.type.rows is None:
        raise InternalError("a draw has no rows")
    return ctx.draw(tensor(args[0]), ctx.frame.positions(n.type.rows) + n.attrs["ahead"])
