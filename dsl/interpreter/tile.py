"""Row-local arithmetic and shape ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepinfer.dsl.graph import Node
from deepinfer.dsl.interpreter.context import Context, Value, aligned, implements, row_dims, tensor
from deepinfer.dsl.interpreter.formats import quantised, rounded
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError


def softplus(x: Tensor) -> Tensor:
    """``log(1 + e^x)`` without a cut-over: ``max(x, 0) + log1p(e^-|x|)``."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "rsqrt": lambda x: 1.0 / torch.sqrt(x), "recip": torch.reciprocal, "sigmoid": torch.sigmoid, "softplus": softplus,
    "cos": torch.cos, "sin": torch.sin,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum,
    "min": torch.minimum, "copysign": torch.copysign, "lt": torch.lt, "le": torch.le, "eq": torch.eq,
    "iadd": torch.add, "isub": torch.sub, "imul": torch.mul, "ixor": torch.bitwise_xor, "imod": torch.remainder,
}


@implements(*UNARY)
def _unary(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return UNARY[n.op](tensor(args[0]))


@implements(*BINARY)
def _binary(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    a, b = aligned(n.inputs, args)
    return BINARY[n.op](a, b)


@implements("where")
def _where(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    c, a, b = aligned(n.inputs, args)
    return torch.where(c, a, b)


@implements("to_float")
def _to_float(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return tensor(args[0]).to(ctx.dtype)


@implements("round")
def _round(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return rounded(tensor(args[0]), DType.parse(n.attrs["dtype"]))


@implements("encode")
def _encode(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return quantised(tensor(args[0]), DType.parse(n.attrs["dtype"]))


@implements("reduce")
def _reduce(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    x = tensor(args[0])
    dims = [d + row_dims(n) for d in n.attrs["dims"]]
    if n.attrs["how"] == "max":
        return x.amax(dims, keepdim=True)
    return x.sum(dims, keepdim=True) if n.attrs["how"] == "sum" else x.mean(dims, keepdim=True)


@implements("pair_rotate")
def _pair_rotate(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    x, cos, sin = aligned(n.inputs, args)
    if n.attrs["inverse"]:
        sin = -sin
    turned = 2 * cos.shape[-1]
    still, pairs = x[..., :-turned], x[..., -turned:].unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    out = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((still.expand(*out.shape[:-1], -1), out), dim=-1)


@implements("scan")
def _scan(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    body = n.attrs["body"]
    if ctx.evaluate is None:
        raise InternalError("a scan needs an evaluator")
    carried = tensor(args[0])
    captured = {f"c{i}": v for i, v in enumerate(args[1:])}
    entry = {m.id: captured[m.attrs["name"]] for m in body.of("carry") if m.attrs["name"] in captured}
    start = [m.id for m in body.of("carry") if m.attrs["name"] == "carry"]
    changing = set(start)
    for m in body.nodes:
        if any(i.id in changing for i in m.inputs):
            changing.add(m.id)
    fixed = ctx.evaluate(ctx, [m for m in body.nodes if m.id not in changing], entry)
    repeated = [m for m in body.nodes if m.id in changing]
    for _ in range(n.attrs["trips"]):
        values = ctx.evaluate(ctx, repeated, {**fixed, **dict.fromkeys(start, carried)})
        carried = tensor(values[body.outputs["carry"].id])
    return carried


# ---- shape -------------------------------------------------------------------------------------------------
@implements("reshape")
def _reshape(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    x = tensor(args[0])
    return x.reshape(*x.shape[: row_dims(n)], *n.attrs["dims"])


@implements("slice")
def _slice(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    return tensor(args[0]).narrow(n.attrs["dim"] + row_dims(n), n.attrs["start"], n.attrs["stop"] - n.attrs["start"])


@implements("concat")
def _concat(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    xs = aligned(n.inputs, args)
    if n.type.rows is not None:
        xs = [x if row_dims(i) else x.expand(ctx.frame.count(n.type.rows), *x.shape)
              for i, x in zip(n.inputs, xs, strict=True)]
    return torch.cat(xs, dim=n.attrs["dim"] + row_dims(n))


@implements("expand")
def _expand(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    x = tensor(args[0])
    rows = row_dims(n)
    lifted = x.reshape(*x.shape[:rows], *[1] * (len(n.attrs["dims"]) - x.dim() + rows), *x.shape[rows:])
    return lifted.expand(*x.shape[:rows], *n.attrs["dims"])
