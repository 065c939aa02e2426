"""Integer ops of a tile program: few elements, computed by the scalar unit, one C++ name or literal each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer.backends.cpu.tile.scalar import is_integer, literal
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.errors import InternalError

MOST = 4096  # elements of an integer value

_FORMULAS = {"iadd": "di_iadd({0}, {1})", "isub": "di_isub({0}, {1})", "imul": "di_imul({0}, {1})",
             "ixor": "({0} ^ {1})", "imod": "({0} % {1})", "lt": "({0} < {1})", "le": "({0} <= {1})",
             "eq": "({0} == {1})", "where": "({0} ? {1} : {2})"}


class Integers:
    """Names of the elements of integer ops, row-major. ``memory(i)``: elements of an op that is no arithmetic."""

    def __init__(self, ops: Sequence[TileOp], lines: Callable[[], list[str]], memory: Callable[[int], list[str]],
                 prefix: str) -> None:
        self.ops, self.lines, self.memory, self.prefix = ops, lines, memory, prefix
        self.known: dict[int, list[str]] = {}

    def has(self, i: int) -> bool:
        """Whether op i is an integer value, or a truth about integers."""
        o = self.ops[i]
        if o.op in ("lt", "le", "eq"):
            return all(self.has(x) for x in o.args)
        return is_integer(o.dtype) and o.dtype != "bool"

    def elements(self, i: int) -> list[str]:
        if i not in self.known:
            self.known[i] = self._elements(i)
        return self.known[i]

    def _elements(self, i: int) -> list[str]:
        o = self.ops[i]
        n = int(np.prod(o.dims, dtype=np.int64))
        if n > MOST:
            raise InternalError(f"{n} integers of {o.op} are too many for the scalar unit")
        if o.op == "const":
            values = o.get("values")
            return [literal(values[k if len(values) > 1 else 0], True) for k in range(n)]
        if o.op in ("reshape", "slice", "expand", "concat"):
            return self._moved(o)
        if o.op in _FORMULAS:
            args = [self._broadcast(x, o.dims) for x in o.args]
            names = []
            for k in range(n):
                name = f"{self.prefix}{i}_{k}"
                self.lines().append(f"const int64_t {name} = {_FORMULAS[o.op].format(*(a[k] for a in args))};")
                names.append(name)
            return names
        return self.memory(i)

    def _array(self, i: int) -> np.ndarray:
        return np.array(self.elements(i), dtype=object).reshape(self.ops[i].dims)

    def _broadcast(self, i: int, dims: Sequence[int]) -> list[str]:
        return list(np.broadcast_to(self._array(i), tuple(dims)).reshape(-1))

    def _moved(self, o: TileOp) -> list[str]:
        if o.op == "expand":
            return self._broadcast(o.args[0], o.dims)
        if o.op == "concat":
            return list(np.concatenate([self._array(x) for x in o.args], axis=o.get("dim")).reshape(-1))
        a = self._array(o.args[0])
        if o.op == "slice":
            cut = [slice(None)] * a.ndim
            cut[o.get("dim")] = slice(o.get("start"), o.get("stop"))
            a = a[tuple(cut)]
        return list(a.reshape(-1))
