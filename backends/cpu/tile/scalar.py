"""C of one element of each elementwise op, and its rough cost."""

from __future__ import annotations

import struct

from deepinfer.codegen.kernels.spec import TileOp

_F32_OVERFLOW = 2.0**128 - 2.0**103  # from here on f32 rounds to infinity

_UNARY = {"neg": "-({0})", "abs": "di_abs({0})", "exp": "di_exp({0})", "log": "di_log({0})", "sqrt": "di_sqrt({0})",
          "rsqrt": "1.0f / di_sqrt({0})", "recip": "1.0f / {0}", "sigmoid": "di_sigmoid({0})",
          "softplus": "di_softplus({0})", "cos": "di_cos({0})", "sin": "di_sin({0})", "to_float": "(float)({0})"}
_BINARY = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "max": "di_max({0}, {1})",
           "min": "di_min({0}, {1})", "copysign": "di_copysign({0}, {1})", "lt": "{0} < {1}", "le": "{0} <= {1}",
           "eq": "{0} == {1}", "iadd": "di_iadd({0}, {1})", "isub": "di_isub({0}, {1})", "imul": "di_imul({0}, {1})",
           "ixor": "di_ixor({0}, {1})", "imod": "di_imod({0}, {1})"}
_FORMULAS = {**_UNARY, **_BINARY, "where": "{0} ? {1} : {2}"}

ELEMENTWISE = {*_FORMULAS, "round"}

# Additions that cost as much; what is not listed costs one.
_COSTS = {"round": 4, "exp": 20, "log": 20, "sigmoid": 25, "softplus": 40, "cos": 60, "sin": 60, "sqrt": 8, "rsqrt": 12,
          "recip": 8, "div": 8, "imod": 20}


def cost(o: TileOp) -> int:
    return _COSTS.get(o.op, 1)


def is_integer(dtype: str) -> bool:
    return dtype in ("i64", "i32", "u8", "bool")


def local_type(o: TileOp) -> str:
    """C type of a local that holds one element."""
    if o.dtype == "bool":
        return "int"
    return "int64_t" if is_integer(o.dtype) else "float"


def formula(o: TileOp, args: list[str]) -> str:
    """C expression of one element from those of the arguments (names or literals)."""
    if o.op == "round":
        return f"di_round_bf16({args[0]})" if o.get("dtype") == "bf16" else args[0]
    return _FORMULAS[o.op].format(*args)


def literal(value: float | int | bool, integer: bool) -> str:
    """A C literal with exactly this value."""
    if integer:
        return f"INT64_C({int(value)})" if int(value) > -(2**63) else "INT64_MIN"
    v = float(value)
    if v != v:
        return "NAN"
    if abs(v) >= _F32_OVERFLOW:
        return "HUGE_VALF" if v > 0 else "-HUGE_VALF"
    return f"{struct.unpack('f', struct.pack('f', v))[0]!r}f"
