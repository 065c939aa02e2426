"""A tile program as the printer takes it."""

from __future__ import annotations

from deepinfer.backends.cpu.tile.program import cleaned, size
from deepinfer.backends.cpu.tile.scalar import is_integer
from deepinfer.codegen.kernels.spec import TileOp

__all__ = ["cleaned", "is_integer", "literal", "parts_of", "size"]

_F32_OVERFLOW = 2.0**128 - 2.0**103  # from here on f32 rounds to infinity
_MIXING = ("concat", "topk", "argmax", "scan", "take", "store_record", "pool", "previous")


def literal(value: float | int | bool, integer: bool) -> str:
    """Python text of a number with exactly this value."""
    if integer:
        return repr(int(value))
    v = float(value)
    if v != v:
        return 'float("nan")'
    if abs(v) >= _F32_OVERFLOW:
        return 'float("inf")' if v > 0 else 'float("-inf")'
    return repr(v)


def parts_of(ops: list[TileOp]) -> int:
    """Parts that a row falls into, each of which is computed without the others: the leading dim that all stores share.
    1 where there is none."""
    stores = [o for o in ops if o.op == "store"]
    if not stores or any(o.op in _MIXING for o in ops) or len(stores[0].dims) < 2:
        return 1
    lead = stores[0].dims[0]
    if any(len(o.dims) < 2 or o.dims[0] != lead for o in stores):
        return 1
    for o in ops:
        if o.op == "reduce" and 0 in o.get("dims") and ops[o.args[0]].dims[0] == lead:
            return 1
    return lead
