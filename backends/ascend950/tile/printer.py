"""A tile program over one row: which values get an array in UB, and the vector functions and copies that make them.

Floats live in UB as f32 arrays, or as they were loaded; arithmetic melts into the function of whoever reads it.
Integers are scalars. Everything is made when it is first asked for, in the order of the program's stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.backends.ascend950.memory import Buffer, Memory
from deepinfer.backends.ascend950.signature import BYTES, Signature
from deepinfer.backends.ascend950.target import LANES
from deepinfer.backends.ascend950.tile.function import ELEMENTWISE, LANE, Array, Function, Index
from deepinfer.backends.ascend950.tile.integers import Integers
from deepinfer.backends.cpu.tile.index import Ix, linear, refined
from deepinfer.backends.cpu.tile.program import ROOTS, analyse, is_short_reduction, size
from deepinfer.codegen.kernels.spec import TileOp, TileProgram
from deepinfer.errors import InternalError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.tile.spill import Far

_TOKEN = re.compile("\x01([^:\x02]+):([^\x02]+)\x02")
SLACK = 512  # bytes that loads of two whole registers may reach behind an array
Leaf = Callable[[Function, TileOp, Index], str]


class Constants:
    """The literal arrays of a kernel, one blob."""

    def __init__(self) -> None:
        self.blob = bytearray()
        self._known: dict[bytes, int] = {}

    def place(self, data: bytes) -> int:
        """Offset of the data, a multiple of 32."""
        if data not in self._known:
            self.blob += bytes(-len(self.blob) % 32)
            self._known[data] = len(self.blob)
            self.blob += data
        return self._known[data]


class Printer:
    """``lines``: the row's statements on the vector and scalar units; ``loads``, ``stores``: its copies; ``heads``:
    what is loaded once."""

    def __init__(self, program: TileProgram, signature: Signature, memory: Memory, prefix: str = "t",
                 acc: Leaf | None = None, last: bool = False, pieces: bool = False,
                 spills: bool = False) -> None:
        self.signature, self.memory, self.prefix, self.acc = signature, memory, prefix, acc
        self.pieces, self.spills, self.part, self.turn = pieces, spills, 0, "io"
        self.parts: dict[int, int] = {}  # leading rows of operands that belong to a part
        self.far: dict[int, Far] = {}
        self.spilled = 0  # bytes of a row in memory
        self.analysis = analyse(program, signature.spec.operands, last=last)
        self.ops = self.analysis.ops
        self.wanted = last
        self.kept = {i for i in self.analysis.roots if self.ops[i].op not in ("store", "store_record")}
        self.functions: list[str] = []
        self.lines: list[str] = []
        self.loads: list[str] = []
        self.stores: list[str] = []
        self.heads: list[str] = []
        self.constants = Constants()
        self.arrays: dict[int, Array] = {}
        self.operands: dict[int, Array] = {}
        self.carries: dict[str, Array] = {}
        self.widened: dict[str, Array] = {}
        self.integers = Integers(self.ops, lambda: self.lines, self._integers, prefix)
        self.step, self.count = 0, 0
        self.scalar_puts = False

    def child(self, body: TileProgram, prefix: str) -> Printer:
        """Printer of the body of a loop, which shares everything but the program."""
        inner = Printer(body, self.signature, self.memory, prefix, self.acc, last=True, pieces=self.pieces)
        inner.functions, inner.loads, inner.heads = self.functions, self.loads, self.heads
        inner.constants = self.constants
        inner.operands, inner.step, inner.count = self.operands, self.step, self.count
        return inner

    # ---- buffers ---------------------------------------------------------------------------------------------------
    def temporary(self, stem: str, nbytes: int) -> Buffer:
        """Room that only the vector unit touches, from this step on."""
        self.count += 1
        b = Buffer(f"{self.prefix}{self.count}_{stem}", nbytes + SLACK, self.step, self.step)
        return self.memory.add(b)

    def fixed(self, stem: str, nbytes: int, copies: int = 1) -> Buffer:
        """Room that other units touch as well."""
        self.count += 1
        b = self.memory.new(f"{self.prefix}{self.count}_{stem}", nbytes + SLACK, copies)
        b.turn = self.turn
        return b

    def say(self, text: str) -> None:
        """A statement; what it mentions lives until here."""
        self.step += 1
        self._touch(text)
        self.lines.append(text)

    def _touch(self, text: str) -> None:
        for name, _ in _TOKEN.findall(text):
            b = self.memory.buffers[name]
            if b.last < (1 << 30):
                b.last = max(b.last, self.step)

    def outlive(self, lines: Sequence[str], first: int) -> None:
        """What was made before step ``first`` and is read in a loop lives as long as the loop."""
        for name in {name for line in lines for name, _ in _TOKEN.findall(line)}:
            b = self.memory.buffers[name]
            if b.first <= first and b.last < (1 << 30):
                b.last = max(b.last, self.step)

    @staticmethod
    def at(b: Buffer, kind: str, offset: int | str = 0) -> str:
        """Address of an element of a buffer."""
        token = f"\x01{b.name}:{kind}\x02"
        return token if offset == 0 else f"{token} + {offset}"

    def resolve(self, text: str) -> str:
        """Addresses instead of names, once buffers are placed."""
        def one(match: re.Match[str]) -> str:
            b = self.memory.buffers[match[1]]
            turn = f" + {b.turn} * {b.stride}" if b.copies > 1 else ""
            return f"DI_UB({match[2]}, {b.offset}{turn})"

        return _TOKEN.sub(one, text)

    # ---- what programs read ----------------------------------------------------------------------------------------
    def loaded(self, operand: int) -> Array:
        """An operand's row, or a whole parameter, in UB."""
        if operand in self.operands:
            return self.operands[operand]
        s, op = self.signature, self.signature.operand(operand)
        element = s.element(operand)
        if element not in ("*f32", "*bf16"):
            raise InternalError(f"operand {operand} of {op.dtype} is no array of floats")
        if operand in self.parts:
            return self._loaded_part(operand)
        nbytes = op.size * BYTES[element]
        once = op.role == "param"
        b = self.fixed(f"p{operand}", nbytes, 1 if once else 2)
        if once:
            self.heads.append(f"di_in({self.at(b, 'uint8_t')}, {s.param(operand)}, {nbytes});")
        else:
            row = s.row_of(op.rows)
            self.loads.append(f"di_in({self.at(b, 'uint8_t')}, {s.value(operand)} + ({row}) * {s.elements(operand)}, "
                              f"{nbytes});")
        self.operands[operand] = Array(b, "float" if element == "*f32" else "uint16_t")
        return self.operands[operand]

    def _loaded_part(self, operand: int) -> Array:
        """Rows of the leading dim of an operand: part number ``part``."""
        s, op, element = self.signature, self.signature.operand(operand), self.signature.element(operand)
        count = op.size // op.dims[0] * self.parts[operand]
        b = self.fixed(f"p{operand}", count * BYTES[element], 2)
        row = s.param(operand) if op.role == "param" else (
            f"{s.value(operand)} + ({s.row_of(op.rows)}) * {s.elements(operand)}")
        self.loads.append(f"di_in({self.at(b, 'uint8_t')}, {row} + part * {count}, {count * BYTES[element]});")
        self.operands[operand] = Array(b, "float" if element == "*f32" else "uint16_t")
        return self.operands[operand]

    def constant(self, o: TileOp) -> Array:
        data = np.resize(np.array(o.get("values"), np.float32), size(o)).tobytes()
        key = -1 - self.constants.place(data)
        if key not in self.operands:
            b = self.fixed("const", len(data))
            source = f"{self.signature.constants()} + {-1 - key}"
            self.heads.append(f"di_in({self.at(b, 'uint8_t')}, {source}, {len(data)});")
            self.operands[key] = Array(b)
        return self.operands[key]

    def leaf(self, f: Function, i: int, index: Index) -> str | None:
        """The register of an element that lies in memory; None for arithmetic and views."""
        o = self.ops[i]
        if self.integers.has(i) or (o.op == "to_float" and self.integers.has(o.args[0])):
            return self._from_integer(f, i, index)
        if o.op == "acc":
            if self.acc is None:
                raise InternalError("a program without an anchor reads its result")
            return self.acc(f, o, index)
        if o.op == "encode" and not self._packs(o):
            x = f.value(o.args[0], index)
            return f.value(o.args[0], index) if o.get("dtype") == "f32" else self._rounded(f, x)
        if o.op in ("load", "carry") or i in self.kept or (o.op in ROOTS and not self._is_short(o)) or (
                o.op == "const" and f.scalar(i, index) is None):
            array, at = self.array(i), linear(o.dims, index)
            if not f.readable(array, at):
                array = self.wide(array, size(o))
            self._touch(self.at(array.buffer, "float"))
            return f.read(array, at)
        return None

    @staticmethod
    def _packs(o: TileOp) -> bool:
        from deepinfer.dsl.types import DType

        return DType.parse(o.get("dtype")).is_encoded

    @staticmethod
    def _rounded(f: Function, x: str) -> str:
        out = f.new()
        f.emit(f"{out} = di_round({x}, m);")
        return out

    def _is_short(self, o: TileOp) -> bool:
        return o.op == "reduce" and is_short_reduction(o, self.ops[o.args[0]])

    def _from_integer(self, f: Function, i: int, index: Index) -> str:
        o = self.ops[i]
        at = linear(o.dims, index)
        names = self.integers.elements(o.args[0] if o.op == "to_float" else i)
        if at.terms:
            if o.op != "to_float":
                raise InternalError("a vector of integer truths")
            return f.read(self.array(i), at)
        x = f.fill(f.argument(f"(float)({names[at.const]})", "float"))
        if o.op == "to_float":
            return x
        out = f.new("vector_bool")
        f.emit(f"asc_ne_scalar({out}, {x}, 0.0f, m);")
        return out

    def wide(self, array: Array, n: int) -> Array:
        """The f32 image of a bf16 array."""
        name = array.buffer.name
        if name not in self.widened:
            out = Array(self.temporary("wide", n * 4))
            to = self.at(out.buffer, "float")
            self.say(f"asc_vf_call<di_widen>({self.at(array.buffer, 'uint16_t')}, {to}, {n});")
            self.widened[name] = out
        return self.widened[name]

    # ---- arrays ----------------------------------------------------------------------------------------------------
    def array(self, i: int) -> Array:
        """The elements of op i in UB."""
        from deepinfer.backends.ascend950.tile import special

        if i in self.arrays:
            return self.arrays[i]
        o = self.ops[i]
        if o.op == "load":
            return self.loaded(o.get("operand"))
        if o.op == "carry":
            return self.carries[o.get("name")]
        if o.op == "const":
            return self.constant(o)
        make = special.TABLE.get(o.op)
        if o.op == "reduce" and self._is_short(o):
            make = None
        self.arrays[i] = make(self, i, o) if make else self.made(i)
        return self.arrays[i]

    def floats(self, i: int) -> Array:
        """The elements of op i as f32."""
        o = self.ops[i]
        if o.op in ("load", "carry", "const") or i in self.kept or i in self.arrays:
            array = self.array(i)
            return array if array.kind == "float" else self.wide(array, size(o))
        self.arrays[i] = self.made(i)
        return self.arrays[i] if self.arrays[i].kind == "float" else self.wide(self.arrays[i], size(o))

    def made(self, i: int) -> Array:
        """A new array of an op's elements."""
        o = self.ops[i]
        words = self.pieces and o.op == "round" and o.get("dtype") == "bf16" and o.dims[-1] % 16 == 0
        out = Array(self.temporary(o.op, size(o) * (2 if words else 4)), "uint16_t" if words else "float")
        self.fill(i, o.dims, out, lambda index: linear(o.dims, index))
        return out

    def function(self) -> Function:
        self.count += 1
        return Function(f"{self.signature.spec.symbol}_{self.prefix}{self.count}", self.ops, self.leaf)

    def call(self, f: Function) -> None:
        self.functions.append("\n".join(f.text()))
        self.say(f.call())

    def fill(self, i: int, dims: Sequence[int], out: Array, place: Callable[[Index], Ix]) -> None:
        """Writes all elements of op i to ``out``."""
        from deepinfer.backends.ascend950.tile import pieces

        if pieces.needed(self, i):
            pieces.fill(self, i, dims, out, place)
            return
        f = self.function()
        extents = refined(dims, self.shapes_below(i)) or [1]
        index = self.nest(f, extents, dims)
        being_made = i in self.kept and i not in self.arrays
        value = self.computed(f, i, index) if being_made else f.value(i, index)
        f.write(out, place(index), value)
        f.lines = looped(extents, f.lines)
        self.call(f)

    def computed(self, f: Function, i: int, index: Index) -> str:
        """The arithmetic of an op that has an array, which is being filled."""
        self.kept.discard(i)
        value = f.value(i, index)
        self.kept.add(i)
        return value

    @staticmethod
    def nest(f: Function, extents: Sequence[int], dims: Sequence[int]) -> Index:
        """Index into ``dims`` along loops over ``extents``, the last one along the lanes."""
        from deepinfer.backends.ascend950.tile.function import joined

        names = [*(f"i{n}" for n in range(len(extents) - 1)), LANE]
        position = Ix()
        for n, name in enumerate(names):
            f.space.extents[name] = extents[n]
            if extents[n] > 1:
                position = position + Ix.var(name) * int(np.prod(extents[n + 1:], dtype=np.int64))
        return tuple(joined(f.space, position, dims))

    def shapes_below(self, i: int) -> list[tuple[int, ...]]:
        """Dims of the arithmetic and views of all elements below op i."""
        out, total, stack, seen = [], size(self.ops[i]), [i], set[int]()
        while stack:
            x = stack.pop()
            if x in seen or size(self.ops[x]) != total:
                continue
            seen.add(x)
            o = self.ops[x]
            out.append(o.dims)
            melts = o.op in ELEMENTWISE or o.op in ("reshape", "slice", "expand")
            if melts and (x == i or x not in self.kept):
                stack += o.args
        return out

    # ---- integers --------------------------------------------------------------------------------------------------
    def _integers(self, i: int) -> list[str]:
        from deepinfer.backends.ascend950.tile import special

        return special.integers(self, i, self.ops[i])

    # ---- statements ------------------------------------------------------------------------------------------------
    def statements(self) -> None:
        """Prints everything the program writes."""
        from deepinfer.backends.ascend950.tile import stores

        for o in self.ops:
            if o.op == "store":
                stores.store(self, o)
            elif o.op == "store_record":
                stores.store_record(self, o)


def looped(extents: Sequence[int], inner: Sequence[str]) -> list[str]:
    """Loops around the statements on one vector, whose mask is m."""
    n = extents[-1]
    lines = [f"uint32_t left = {n};", f"for (uint16_t c = 0; c < {-(-n // LANES)}; ++c) {{",
             "    vector_bool m = asc_update_mask_b32(left);", *("    " + x for x in inner), "}"]
    for d in reversed(range(len(extents) - 1)):
        lines = [f"for (uint16_t i{d} = 0; i{d} < {extents[d]}; ++i{d}) {{", *("    " + x for x in lines), "}"]
    return lines
