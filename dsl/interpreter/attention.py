"""Attention over several sources in one softmax, and the scores that choose entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepinfer.dsl.graph import Node
from deepinfer.dsl.interpreter.context import Context, Value, implements, on_rows, paged, ring, tensor
from deepinfer.dsl.interpreter.formats import rounded
from deepinfer.dsl.types import Dim, DType, Rows
from deepinfer.errors import InternalError

_LOWEST = -1e30  # the running maximum starts here, so that a row with no key has weight on its sink only


def _positions(ctx: Context, n: Node) -> tuple[Rows, Tensor]:
    if n.type.rows is None:
        raise InternalError(f"{n.op} has no rows")
    return n.type.rows, ctx.frame.positions(n.type.rows)


def ratio_of(dim: Dim) -> int:
    """``entries/2`` -> 2: tokens per entry of a symbolic dim."""
    return int(str(dim).split("/")[1])


def visible(positions: Tensor, ratio: int, entries: int) -> Tensor:
    """[rows, entries] bool: entry j of row i is visible iff j < (i + 1) // ratio."""
    return torch.arange(entries) < ((positions + 1) // ratio).unsqueeze(1)


# ---- sources of keys ---------------------------------------------------------------------------------------
class _Keys:
    """Keys and values [entries, features] shared by all rows or [rows, entries, features]; ``mask`` [rows, entries]."""

    def __init__(self, keys: Tensor, values: Tensor, mask: Tensor) -> None:
        self.keys, self.values, self.mask = keys, values, mask


def _ring_rows(v: Value, start: int, stop: int, first: int) -> tuple[int, Tensor]:
    """(first position, rows) of the ring rows in [start, stop), not before ``first``."""
    r = ring(v)
    a = max(start, first, r.first)
    b = max(a, min(stop, r.stop))
    return a, r.rows[a - r.first: b - r.first]


def _source(at: Tensor, kind: str, width: int, operands: Sequence[Value], first: int) -> _Keys:
    """One source of ``attend`` for queries at positions ``at``; operands are keys, values (the keys again when they are
    the values), picked; ``first``: position of the first window row that may be read."""
    keys, values = operands[0], operands[1]
    if kind in ("window", "context"):
        start = int(at[0]) if len(at) else 0
        stop = (int(at[-1]) + 1 if len(at) else 0) if kind == "window" else start
        back = width - 1 if kind == "window" else width
        origin, k = _ring_rows(keys, start - back, stop, first)
        _, v = _ring_rows(values, start - back, stop, first)
        held = origin + torch.arange(len(k))
        low = (at - width + 1).unsqueeze(1)
        inside = (held >= low) & (held <= at.unsqueeze(1)) if kind == "window" else torch.ones(len(at), len(k)).bool()
        return _Keys(k, v, inside)
    if kind == "block":
        k, v = tensor(keys), tensor(values)
        return _Keys(k, v, torch.ones(len(at), len(k)).bool())
    k, v = paged(keys).rows, paged(values).rows
    if kind == "dense":
        return _Keys(k, v, visible(at, width, len(k)))
    if kind == "selected":
        picked = tensor(operands[2])
        held = picked >= 0
        if bool((held & (picked >= ((at + 1) // width).unsqueeze(1))).any()):
            raise InternalError("an entry was selected that its row cannot see")
        if not bool(held.any()):
            return _Keys(k[:0], v[:0], held[:, :0])
        index = picked.clamp_min(0)
        return _Keys(k[index], v[index], held)
    raise InternalError(f"unknown source of attend: {kind}")


def _sources(ctx: Context, n: Node, args: Sequence[Value]) -> Iterator[_Keys]:
    """Keys and values of each source in order."""
    _, at = _positions(ctx, n)
    rest = list(zip(n.inputs, args, strict=True))[1 + int(n.attrs["sink"]):]
    for kind, width, has_values in n.attrs["sources"]:
        handle, keys = rest.pop(0)
        values = rest.pop(0)[1] if has_values else keys
        picked = [rest.pop(0)[1]] if kind == "selected" else []
        name = handle.attrs.get("name" if handle.op == "state" else "state", "")
        first = ctx.frame.rows.window_start.get(name, 0) if kind in ("window", "context") else 0
        yield _source(at, kind, width, [keys, values, *picked], first)


@implements("attend")
def _attend(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    kv_heads, value_dim = n.attrs["kv_heads"], n.attrs["value_dim"]
    q = tensor(args[0])
    rows, heads, features = q.shape
    q = q.reshape(rows, kv_heads, heads // kv_heads, features)
    scores, values = [], []
    for s in _sources(ctx, n, args):
        keys = s.keys.unflatten(-1, (kv_heads, -1))
        dots = torch.einsum("rghd,rlgd->rghl" if keys.dim() == 4 else "rghd,lgd->rghl", q, keys)
        scores.append((dots * n.attrs["scale"]).masked_fill(~s.mask[:, None, None, :], -torch.inf))
        values.append(s.values.unflatten(-1, (kv_heads, -1))[..., :value_dim])
    joint = torch.cat(scores, dim=-1)
    lowest = joint.new_full((*joint.shape[:-1], 1), _LOWEST)
    top = torch.cat((joint, lowest), dim=-1).amax(-1, keepdim=True)
    weights = torch.exp(joint - top)
    below = weights.sum(-1, keepdim=True)
    if n.attrs["sink"]:
        below = below + torch.exp(tensor(args[1]).reshape(kv_heads, -1, 1) - top)
    if n.attrs["rounds"]:
        weights = rounded(weights, DType.parse(n.attrs["rounds"]))
    out = torch.zeros(rows, kv_heads, heads // kv_heads, value_dim, dtype=q.dtype)
    for w, v in zip(weights.split([s.shape[-1] for s in scores], dim=-1), values, strict=True):
        out = out + torch.einsum("rghl,rlgd->rghd" if v.dim() == 4 else "rghl,lgd->rghd", w, v)
    return (out / below).reshape(rows, heads, value_dim)


# ---- choosing entries --------------------------------------------------------------------------------------
@implements("index_score")
def _index_score(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    rows, at = _positions(ctx, n)
    q, w = on_rows(ctx, n.inputs[0], args[0], rows), on_rows(ctx, n.inputs[2], args[2], rows)
    keys = paged(args[1]).rows
    dots = torch.einsum("rhd,ld->rhl", q, keys)
    if n.attrs["rounds"]:
        held = DType.parse(n.attrs["rounds"])
        terms = rounded(rounded(dots, held).relu() * w.unsqueeze(-1), held)
        scores = torch.zeros_like(terms[:, 0])
        for h in range(terms.shape[1]):
            scores = scores + terms[:, h]
        scores = rounded(scores, held)
    else:
        scores = torch.einsum("rhl,rh->rl", dots.relu(), w)
    return scores.masked_fill(~visible(at, n.attrs["ratio"], len(keys)), -torch.inf)


@implements("block_max")
def _block_max(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    scores, block = tensor(args[0]), n.attrs["block"]
    _, at = _positions(ctx, n)
    pad = -scores.shape[-1] % block
    padded = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf)
    best: Tensor = padded.unflatten(-1, (-1, block)).amax(-1)
    if n.attrs.get("newest", False):
        newest = (at + 1) // ratio_of(n.inputs[0].type.dims[0]) - 1
        blocks = torch.arange(best.shape[-1])
        best = best.masked_fill((blocks == newest.div(block, rounding_mode="floor").unsqueeze(1)), torch.inf)
    return best


@implements("within_blocks")
def _within_blocks(ctx: Context, n: Node, args: Sequence[Value]) -> Value:
    scores, blocks = tensor(args[0]), tensor(args[1])
    count = -(-scores.shape[-1] // n.attrs["block"])
    listed = torch.zeros(scores.shape[0], count + 1, dtype=torch.bool)
    listed.scatter_(1, torch.where(blocks < 0, count, blocks), True)  # -1 lands in the extra column
    spread = listed[:, :count].repeat_interleave(n.attrs["block"], dim=1)[:, : scores.shape[-1]]
    return scores.masked_fill(~spread, -torch.inf)
