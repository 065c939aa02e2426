"""Rowwise kernels whose rows are made in parts: those that contract what they make with a few rows of a weight.

The first stage makes parts of rows, with partial sums of everything that goes over whole rows: contractions and
reductions. The second adds the partial sums up in a fixed order, and does what is left: row by row what goes over the
features, for tiles of rows what is made of the sums alone. Parts follow from sizes alone. Tiles of one row and of
several differ in speed only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from deepinfer.backends.cpu.storage import stored
from deepinfer.backends.cpu.tile.index import Ix, linear
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import NOTHING, Axes, power_of_two, product
from deepinfer.backends.cuda_sm100.tile.printer import Block, Index, Printer
from deepinfer.backends.cuda_sm100.tile.program import size
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec, TileOp
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError

WIDEST = 64  # features of a part
TILES = ((8, 1), (0, 16))  # rows, 0 for any number -> rows of a tile
TILE = 16  # rows of a product at least
SHORT = 4  # rows of a tile of what is made of sums alone
_ROW = frozenset((0,))


@dataclass
class Split:
    """A program in two phases. ``sums``: op -> first column of its partial sums; ``late``: ops of the second phase;
    ``crossing``: ops of the first that the second reads -> operand that holds them, or -1 for the scratch."""

    ops: list[TileOp]
    features: int
    sums: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    crossing: dict[int, int] = field(default_factory=dict)
    columns: int = 0

    @property
    def part(self) -> int:
        return min(WIDEST, self.features & -self.features)

    @property
    def parts(self) -> int:
        return self.features // self.part


def split(ops: list[TileOp]) -> Split:
    """Phases of a program with a contraction; InternalError where its rows cannot be made in parts."""
    first = next(o for o in ops if o.op == "contract")
    x = ops[first.args[0]]
    while x.op == "reshape":
        x = ops[x.args[0]]
    out = Split(ops, x.dims[-1])
    for i, o in enumerate(ops):
        if any(a in out.late or a in out.sums for a in o.args):
            out.late.add(i)
            if o.op == "contract":
                raise InternalError("a narrow contraction reads what whole rows are needed for")
        elif o.op == "contract" or (o.op == "reduce" and size(o) == 1 and _over_features(ops, o, out.features)):
            out.sums[i], out.columns = out.columns, out.columns + size(o)
        elif o.op == "reduce" and _over_features(ops, o, out.features):
            out.late.add(i)  # several numbers of a row
        elif o.op == "store_record" or (o.op == "store" and o.dims[-1:] != (out.features,)):
            out.late.add(i)
    for i in out.late:
        _cross(out, i)
    return out


def _over_features(ops: list[TileOp], o: TileOp, features: int) -> bool:
    """Whether an op adds up over the features of a row."""
    source = ops[o.args[0]]
    last = len(source.dims) - 1
    return last in o.get("dims") and source.dims[last] % features == 0 and o.get("how") in ("sum", "mean")


def _cross(out: Split, i: int) -> None:
    """Values of the first phase with a feature axis are kept; what is short is made again."""
    for a in out.ops[i].args:
        o = out.ops[a]
        if a in out.late or a in out.sums or a in out.crossing:
            continue
        if o.op in ("load", "const") or size(o) % out.features or o.op in ("reshape", "slice", "expand"):
            _cross(out, a)
        else:
            held = (s.get("operand") for k, s in enumerate(out.ops)
                    if s.op == "store" and s.args == (a,) and k not in out.late)
            out.crossing[a] = next(held, -1)


def emit(spec: KernelSpec, ops: list[TileOp]) -> CudaSource:
    s = split(ops)
    signature = Signature(spec)
    signature.axis("seq"), signature.scratch()
    room = _Room(s, spec)
    short, long = _groups(s)
    tiled = Grid(SHORT + 1, SHORT) if long else Grid(1, SHORT)
    first, variants = [], []
    rest = Stage(f"{spec.symbol}_rest", tiled if short else Grid(), 8, otherwise=(16, 4), hot=True)
    for limit, rows in TILES:
        axes = Axes([rows, s.part])
        _First(s, signature, axes, room).lines()
        axes = axes.again()
        first.append({"rows": rows, "body": _First(s, signature, axes, room).lines(), "axes": axes.lines,
                      "shape": axes.shape(_ROW)})
        stage = Stage(f"{spec.symbol}_{rows}", Grid(1, rows, 0, s.parts), 4, hot=True, otherwise=(8,))
        variants.append(Variant(limit, (stage, rest)))
    return render(spec, signature, variants, scratch=(0, room.bytes), template="parts", first=first,
                  short=_late(s, signature, room, short, SHORT), long=_late(s, signature, room, long),
                  parts=s.parts, wide=power_of_two(s.parts), part=s.part, room=room.bytes, columns=s.columns,
                  total=room.total)


def _groups(s: Split) -> tuple[set[int], set[int]]:
    """Late stores: those made of sums alone, and those that go over features."""
    @cache
    def over_features(i: int) -> bool:
        o = s.ops[i]
        if i in s.sums:
            return False
        return i in s.crossing or size(o) >= s.features or any(map(over_features, o.args))

    stores = [i for i in sorted(s.late) if s.ops[i].op in ("store", "store_record")]
    long = {i for i in stores if s.ops[i].op == "store_record" or over_features(i)}
    return set(stores) - long, long


class _Room:
    """Scratch of a row: partial sums, their totals, values that cross. Offsets in bytes."""

    def __init__(self, s: Split, spec: KernelSpec) -> None:
        self.total = 4 * s.parts * s.columns
        self.at: dict[int, tuple[int, str]] = {}
        end = self.total + 4 * s.columns
        for i, operand in s.crossing.items():
            if operand < 0:
                end = -(-end // 16) * 16
                kind = "*bf16" if stored(DType.parse(s.ops[i].dtype)).name == "bf16" else "*f32"
                self.at[i] = end, kind
                end += size(s.ops[i]) * (2 if kind == "*bf16" else 4)
        self.bytes = -(-end // 64) * 64

    def pointer(self, i: int) -> str:
        at, kind = self.at[i]
        return f"(room + {at}).to(tl.pointer_type({'tl.bfloat16' if kind == '*bf16' else 'tl.float32'}))"


class _First:
    """Prints the first stage: features ``part * P + v`` of a tile of rows along axis 0."""

    def __init__(self, s: Split, signature: Signature, axes: Axes, room: _Room) -> None:
        self.s, self.room = s, room
        self.p = Printer(s.ops, signature, axes, "row", "r_ok", _ROW, prefix="f")
        v = self.p.variable(axes.on(1, s.part))
        self.feature = self.p.named("part", s.parts, NOTHING) * s.part + v

    def indices(self, dims: tuple[int, ...]) -> list[Index]:
        """Places of a value that hold the features of this part, one for each leading position."""
        count = product(dims) // self.s.features
        return [tuple(self.p.space.split(self.feature + k * self.s.features, dims)) for k in range(count)]

    def lines(self) -> list[str]:
        p, s = self.p, self.s
        for i, o in enumerate(s.ops):
            if o.op == "store" and i not in s.late:
                for at in self.indices(o.dims):
                    p.write(o.get("operand"), linear(o.dims, at), self._full(o.args[0], at))
        for i, operand in s.crossing.items():
            if operand < 0:
                kind = "tl.bfloat16" if self.room.at[i][1] == "*bf16" else "tl.float32"
                for at in self.indices(s.ops[i].dims):
                    place = f"{self.room.pointer(i)} + ({linear(s.ops[i].dims, at)})"
                    p.lines.append(f"tl.store({place}, {self._full(i, at).text}.to({kind}), mask=r_ok)")
        for i, column in s.sums.items():
            self._sum(i, column)
        return [*p.heads, *p.lines]

    def _full(self, i: int, at: Index) -> Block:
        """The block with all its rows and features."""
        x, spans = self.p.value(i, at), frozenset((0, 1))
        if spans <= x.spans:
            return x
        return self.p.let(f"{x.text} + tl.zeros({self.p.axes.shape(spans)}, tl.float32)", spans)

    def _sum(self, i: int, column: int) -> None:
        p, s, o = self.p, self.s, self.s.ops[i]
        source = s.ops[o.args[0]]
        rows, part = p.axes.widths[0], s.part
        total = p.name("s")
        if o.op == "contract" and (held := self._stored(o.args[0])) >= 0:
            p.lines += self._read_again(o, held, total)
            return
        for k, at in enumerate(self.indices(source.dims)):
            x = f"tl.reshape({self._full(o.args[0], at).text}, [{rows}, {part}])"
            if o.op == "contract":
                y = self._product(o, x, f"({linear((product(source.dims),), (self.feature_start(k),))})")
            else:
                y = f"di_pairs({x}, {rows}, {part})"
            p.lines.append(f"{total} = {f'{total} + ' if k else ''}{y}")
        p.lines.append(self._keep(o, column, total))

    def _keep(self, o: TileOp, column: int, total: str) -> str:
        """Statement that stores the partial sums of an op."""
        to = f"room2.to(tl.pointer_type(tl.float32)) + part * {self.s.columns} + {column}"
        if o.op != "contract":
            return f"tl.store({to}, {total}, mask=r_ok2)"
        across = f"tl.arange(0, {max(16, power_of_two(size(o)))})[None, :]"
        return f"tl.store({to} + {across}, {total}, mask=r_ok2 & ({across} < {size(o)}))"

    def _product(self, o: TileOp, x: str, at: str) -> str:
        """Expression of the products of features ``at`` and on."""
        source = self.s.ops[o.args[0]]
        exact = stored(DType.parse(source.dtype)).name == "bf16"
        weight, n = self.p.signature.param(o.get("operand")), size(o)
        return (f"di_narrow({x}, {weight} + {at}, {n}, {max(16, power_of_two(n))}, {size(source)}, "
                f"{self.p.axes.widths[0]}, {TILE}, {self.s.part}, {exact})")

    def _stored(self, i: int) -> int:
        """The operand that this stage has written op i to, -1 without one."""
        while self.s.ops[i].op == "reshape":
            i = self.s.ops[i].args[0]
        return next((int(o.get("operand")) for k, o in enumerate(self.s.ops)
                     if o.op == "store" and o.args == (i,) and k not in self.s.late), -1)

    def _read_again(self, o: TileOp, held: int, total: str) -> list[str]:
        """The products of rows that are in memory, one leading position after the other: few registers."""
        rows, part, count = self.p.axes.widths[0], self.s.part, size(self.s.ops[o.args[0]]) // self.s.features
        across = max(16, power_of_two(size(o)))
        at = f"({total}_k * {self.s.features} + part * {part})"
        x = (f"tl.load(tl.reshape({self.p.pointer(held)}, [{rows}, 1]) + {at} + tl.arange(0, {part})[None, :], "
             "mask=r_ok2, other=0.0).to(tl.float32)")
        column = self.s.sums[next(i for i, x in enumerate(self.s.ops) if x is o)]
        return ["tl.debug_barrier()", f"{total} = tl.zeros([{rows}, {across}], tl.float32)",
                f"for {total}_k in range({count}):", f"    {total} += {self._product(o, x, at)}",
                self._keep(o, column, total)]

    def feature_start(self, k: int) -> Ix:
        """The first feature of this part at leading position ``k``."""
        return Ix.var("part") * self.s.part + k * self.s.features


def _late(s: Split, signature: Signature, room: _Room, stores: set[int], rows: int = 0) -> dict[str, Any] | None:
    """A group of late stores as the skeleton takes it, for tiles of ``rows`` rows or for single ones; None if empty."""
    if not stores:
        return None
    axes = Axes([rows] if rows else [])
    _second(s, signature, axes, room, stores, rows > 0)
    axes = axes.again()
    body, used = _second(s, signature, axes, room, stores, rows > 0)
    return {"rows": max(1, rows), "body": body, "axes": axes.lines, "shape": axes.shape(_ROW) if rows else [],
            "first": min(used, default=0), "stop": max(used, default=0),
            "across": power_of_two(max(1, max(used, default=0) - min(used, default=0)))}


def _second(s: Split, signature: Signature, axes: Axes, room: _Room, stores: set[int],
            tiled: bool) -> tuple[list[str], set[int]]:
    """Prints stores of the second stage, with sums and values that cross read from memory: of one row, or of a tile of
    rows along axis 0. Also where columns of sums that are read begin and end."""
    ops = [replace(o, op="const", args=(), attrs=(("values", (0.0,)),)) if i not in stores and
           o.op in ("store", "store_record") else o for i, o in enumerate(s.ops)]
    p = Printer(ops, signature, axes, "row", "r_ok", _ROW, prefix="m") if tiled else Printer(ops, signature, axes)
    used = set[int]()

    def total(i: int) -> Callable[[Index], Block]:
        o, base = s.ops[i], f"(room + {room.total}).to(tl.pointer_type(tl.float32)) + {s.sums[i]}"

        def read(at: Index) -> Block:
            used.update((s.sums[i], s.sums[i] + size(o)))
            x = p.read(base, linear(o.dims, at), "*f32", tiled)
            if o.op == "reduce" and o.get("how") == "mean":
                count = size(s.ops[o.args[0]]) // size(o)
                return p.let(f"tl.div_rn({x.text}, {float(count)!r})", x.spans)
            return x
        return read

    def kept(i: int, operand: int) -> Callable[[Index], Block]:
        def read(at: Index) -> Block:
            place = linear(s.ops[i].dims, at)
            if operand >= 0:
                return p.read(p.pointer(operand), place, signature.element(operand), True)
            return p.read(room.pointer(i), place, room.at[i][1], True)
        return read

    p.known = {**{i: total(i) for i in s.sums}, **{i: kept(i, operand) for i, operand in s.crossing.items()}}
    return p.statements(), used
