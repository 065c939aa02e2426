"""The inside of one loop: elements of inline ops as C locals, each computed once per index."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer.backends.cpu.storage import Place, holds
from deepinfer.backends.cpu.tile.index import Ix, Space, linear
from deepinfer.backends.cpu.tile.program import VIEWS, Analysis, size
from deepinfer.backends.cpu.tile.scalar import ELEMENTWISE, formula, is_integer, literal, local_type
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.errors import InternalError

Index = tuple[Ix, ...]
_TOKEN = re.compile("\x01(\\d+)\x02")


def broadcast(index: Sequence[Ix], dims: Sequence[int]) -> Index:
    """Index into a value of ``dims`` that is read at ``index`` of a value it broadcasts to."""
    tail = index[len(index) - len(dims):] if dims else ()
    return tuple(Ix() if d == 1 else i for i, d in zip(tail, dims, strict=True))


@dataclass
class Env:
    """What a program reads: ``memory(i)`` is the place of a load, const array, carry or kept op; ``acc(i, index)`` an
    element of an anchor's result."""

    analysis: Analysis
    memory: Callable[[int], Place]
    acc: Callable[[TileOp, Index], str] | None = None
    prefix: str = "t"


@dataclass
class Body:
    """Lines of a loop body. Index expressions are held back as tokens until the loops around are known."""

    env: Env
    space: Space
    lines: list[str] = field(default_factory=list)
    used: list[Ix] = field(default_factory=list)
    memo: dict[tuple[int, Index], str] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)

    def at(self, ix: Ix) -> str:
        self.used.append(ix)
        return f"\x01{len(self.used) - 1}\x02"

    def local(self, i: int, expression: str) -> str:
        """A named local of op ``i``."""
        stem = f"{self.env.prefix}{i}"
        n = self._names[stem] = self._names.get(stem, 0) + 1
        name = stem if n == 1 else f"{stem}_{n}"
        self.lines.append(f"const {local_type(self.env.analysis.ops[i])} {name} = {expression};")
        return name

    def know(self, i: int, index: Index, expression: str) -> str:
        """States the value of op ``i`` at an index."""
        name = self.memo[i, index] = self.local(i, expression)
        return name

    def value(self, i: int, index: Index) -> str:
        """Name or literal of an element."""
        hit = self.memo.get((i, index))
        if hit is None:
            hit = self.memo[i, index] = self._value(i, index)
        return hit

    def _value(self, i: int, index: Index) -> str:
        a = self.env.analysis
        o = a.ops[i]
        if o.op == "const":
            return self._constant(i, o, index)
        if o.op == "acc":
            if self.env.acc is None:
                raise InternalError("a program without an anchor reads its result")
            return self.local(i, self.env.acc(o, index))
        if i in a.kept or o.op in ("load", "carry"):
            return self.local(i, self.env.memory(i).read(self.at(linear(o.dims, index))))
        if i in a.roots:
            raise InternalError(f"t{i} = {o.op} is read where it is not in memory")
        return self.compute(i, index)

    def compute(self, i: int, index: Index) -> str:
        """Name of an element of an inline op, computed from its arguments."""
        a = self.env.analysis
        o = a.ops[i]
        if o.op in VIEWS:
            return self.value(o.args[0], self._through(o, a.ops[o.args[0]], index))
        if o.op == "reduce":
            return self._short_reduction(i, o, index)
        if o.op in ELEMENTWISE:
            args = [self.value(x, broadcast(index, a.ops[x].dims)) for x in o.args]
            return self.local(i, formula(o, args))
        raise InternalError(f"the CPU printer has no element of {o.op}")

    def _constant(self, i: int, o: TileOp, index: Index) -> str:
        values = o.get("values")
        if values is None:
            raise InternalError(f"the CPU prints no constant made by {o.get('make')}")
        if len(set(map(repr, values))) == 1:
            return literal(values[0], is_integer(o.dtype))
        where = linear(o.dims, index)
        if not where.terms:
            return literal(values[where.const], is_integer(o.dtype))
        return self.local(i, self.env.memory(i).read(self.at(where)))

    def _through(self, o: TileOp, source: TileOp, index: Index) -> Index:
        """Index into the source of a view."""
        if o.op == "slice":
            d = o.get("dim")
            return tuple(i + o.get("start") if n == d else i for n, i in enumerate(index))
        if o.op == "expand":
            return broadcast(index, source.dims)
        return tuple(self.space.split(linear(o.dims, index), source.dims))

    def _short_reduction(self, i: int, o: TileOp, index: Index) -> str:
        source = self.env.analysis.ops[o.args[0]]
        terms: list[Index] = [()]
        for d, n in enumerate(source.dims):
            steps = [Ix((), k) for k in range(n)] if d in o.get("dims") else [index[d]]
            terms = [(*t, s) for t in terms for s in steps]
        parts = [self.value(o.args[0], t) for t in terms]
        total = parts[0]
        for p in parts[1:]:
            total = f"di_max({total}, {p})" if o.get("how") == "max" else f"{total} + {p}"
        if o.get("how") == "mean":
            total = f"({total}) / {len(parts)}.0f"
        return self.local(i, total)

    def write(self, place: Place, ix: Ix, value: str, source: int | None = None) -> None:
        """Stores a value; ``source``: the op that it is of, whose dtype may spare a rounding."""
        exact = source is not None and holds(place.kind, self.env.analysis.ops[source].dtype)
        self.lines.append(place.write(self.at(ix), value, exact))

    def text(self, lines: Sequence[str], rename: Mapping[str, tuple[str, int]] = {}) -> list[str]:
        """Lines with their indices written out; ``rename``: loops that run as one with the loop inside them."""
        def show(m: re.Match[str]) -> str:
            ix = self.used[int(m[1])]
            return str(Ix(tuple((v, k) for v, k in ix.terms if v not in rename), ix.const))
        return [_TOKEN.sub(show, line) for line in lines]


def shared_shapes(a: Analysis, i: int) -> list[tuple[int, ...]]:
    """Dims of reshapes below op ``i`` that view all of its elements: loop boundaries worth having."""
    out: list[tuple[int, ...]] = []
    total = size(a.ops[i])

    def walk(x: int, seen: set[int]) -> None:
        if x in seen or size(a.ops[x]) != total:
            return
        seen.add(x)
        o = a.ops[x]
        if o.op == "reshape":
            out.append(a.ops[o.args[0]].dims)
        out.append(o.dims)
        if x in a.inline or x == i:
            for y in o.args:
                walk(y, seen)

    walk(i, set())
    return out
