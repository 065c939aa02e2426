"""Sources, state and row ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.dsl.graph import Node
from deepinfer.dsl.interpreter.context import Context, Value, implements, paged, ring, tensor
from deepinfer.dsl.state import Window
from deepinfer.dsl.types import Rows, Type
from deepinfer.errors import InternalError


# ---- sources -----------------------------------------------------------------------------------------------
@implements("input")
def _input(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    name = n.attrs["name"]
    if name == "token_ids":
        return ctx.frame.token_ids()
    if name == "positions":
        return ctx.frame.positions(Rows("step"))
    if name == "lookback":
        return ctx.frame.lookback(n.type.static_dims[0])
    raise InternalError(f"the runner makes no input {name}")


@implements("param")
def _param(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return ctx.weights.value(n)


@implements("const")
def _const(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    type_ = Type.parse(n.attrs["type"])
    if n.attrs.get("make") == "hadamard":
        return sylvester(type_.static_dims[0]).to(ctx.dtype)
    values = n.attrs["values"]
    dtype = torch.bool if type_.dtype.name == "bool" else torch.int64 if type_.dtype.is_int else ctx.dtype
    return torch.tensor(values, dtype=dtype).reshape(type_.static_dims)


def sylvester(n: int) -> Tensor:
    """n x n Hadamard matrix of +-1: the sign of entry (i, j) is the parity of the common bits of i and j."""
    if n < 1 or n & (n - 1):
        raise InternalError(f"a Sylvester matrix of {n} rows does not exist")
    m = torch.ones(1, 1)
    for _ in range(int(math.log2(n))):
        m = torch.cat((torch.cat((m, m), 1), torch.cat((m, -m), 1)), 0)
    return m


@implements("state")
def _state(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return ctx.states[n.attrs["name"]]


# ---- state -------------------------------------------------------------------------------------------------
@implements("extend")
def _extend(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    axis = n.inputs[1].type.rows
    if axis is None:
        raise InternalError("rows that extend a window have no row axis")
    state, start, rows = ctx.declared.get(n.attrs["state"]), ctx.frame.span(axis)[0], tensor(args[1])
    skip = min(max(0, state.first_position - start), len(rows)) if isinstance(state, Window) else 0
    return ring(args[0]).extended(start + skip, rows[skip:])


@implements("previous")
def _previous(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    window, at = ring(args[0]), tensor(args[1]) - n.attrs["back"]
    held = (at >= window.first) & (at < window.stop)
    out = torch.zeros(len(at), n.attrs["dim"], dtype=ctx.dtype)
    out[held] = window.rows[at[held] - window.first]
    return out


@implements("append")
def _append(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    axis, floor = n.inputs[1].type.rows, ctx.frame.rows.write_floor
    if axis is None or axis.kind not in ("groups", "step"):
        raise InternalError(f"entries on {axis} cannot be appended")
    ratio = axis.ratio if axis.kind == "groups" else 1
    if floor % ratio:
        raise InternalError(f"the write floor {floor} cuts an entry of {ratio} positions")
    return paged(args[0]).written(ctx.frame.rows.start // ratio, tensor(args[1]), floor // ratio)


@implements("pool")
def _pool(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    """Rows before position 0 have weight 0. So have rows that the tail does not hold, which only groups below the write
    floor may need: their entries are never written."""
    ratio, overlap, dim = n.attrs["ratio"], n.attrs["overlap"], n.attrs["dim"]
    tail = ring(args[0])
    width = 2 * dim if overlap else dim
    first = ctx.frame.positions(Rows("groups", ratio))
    back = ratio if overlap else 0
    at = first.unsqueeze(1) + torch.arange(-back, ratio)  # [groups, rows of a pool]
    held = (at >= tail.first) & (at < tail.stop)
    if bool((~held & (at >= 0))[first >= ctx.frame.rows.write_floor].any()):
        raise InternalError(f"{n.attrs['state']}: an entry would be made from rows that are not there")
    if not bool(held.any()):
        return torch.zeros(len(first), dim, dtype=ctx.dtype)
    rows = tail.rows[(at - tail.first).clamp(0, len(tail.rows) - 1)]
    values, gates = rows[..., :width], rows[..., width:].masked_fill(~held.unsqueeze(-1), -torch.inf)
    if overlap:  # previous group: lower half; own group: upper half
        values = torch.cat((values[:, :ratio, :dim], values[:, ratio:, dim:]), dim=1)
        gates = torch.cat((gates[:, :ratio, :dim], gates[:, ratio:, dim:]), dim=1)
    weights = torch.softmax(gates, dim=1).nan_to_num(0.0)
    return (weights * values).sum(dim=1)


# ---- rows --------------------------------------------------------------------------------------------------
@implements("keep")
def _keep(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    source = n.inputs[0].type.rows
    if source is None:
        raise InternalError("a value without rows cannot be narrowed")
    return ctx.frame.narrowed(tensor(args[0]), source, Rows.parse(n.attrs["rows"]))


@implements("group_positions")
def _group_positions(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return ctx.frame.positions(Rows("groups", n.attrs["ratio"]))


@implements("by_sequence")
def _by_sequence(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    x = tensor(args[0])
    if len(x) != n.attrs["n"]:
        raise InternalError(f"a sequence brings {len(x)} rows and {n.attrs['n']} are needed")
    return x.unsqueeze(0)


@implements("override_rows")
def _override_rows(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    if n.type.rows is None:
        raise InternalError("a value without rows cannot be overridden")
    return ctx.frame.override(n.attrs["name"], tensor(args[0]), n.type.rows)
