"""One vector function: loops, lanes, and expressions of elements in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepinfer.backends.ascend950.memory import Buffer
from deepinfer.backends.ascend950.target import LANES
from deepinfer.backends.cpu.tile.index import Ix, Space, linear, strides
from deepinfer.backends.cpu.tile.scalar import literal
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.errors import InternalError

Index = tuple[Ix, ...]
LANE = "L"
VIEWS = ("reshape", "slice", "expand")
FORMATS = {"mxfp8": "DI_MXFP8", "mxfp4": "DI_MXFP4", "fp4_e4m3": "DI_FP4_E4M3"}  # DiFormat of di_codes.h

_CALLS = {"rsqrt": "di_rsqrt", "recip": "di_recip", "sigmoid": "di_sigmoid", "softplus": "di_softplus",
          "cos": "di_cos", "sin": "di_sin", "round": "di_round", "copysign": "di_copysign"}
_INSTRUCTIONS = {"neg": "asc_neg", "abs": "asc_abs", "exp": "asc_exp", "log": "asc_ln", "sqrt": "asc_sqrt",
                 "add": "asc_add", "sub": "asc_sub", "mul": "asc_mul", "div": "asc_div", "max": "asc_max",
                 "min": "asc_min"}
_COMPARISONS = {"lt": "asc_lt", "le": "asc_le", "eq": "asc_eq"}
_WITH_SCALAR = {"add": "asc_add_scalar", "mul": "asc_mul_scalar", "max": "asc_max_scalar", "min": "asc_min_scalar"}
ELEMENTWISE = {*_CALLS, *_INSTRUCTIONS, *_COMPARISONS, "where", "to_float"}


@dataclass(frozen=True)
class Array:
    """Elements in UB: ``kind`` ``float`` or ``uint16_t`` (bf16). ``stream``: the array holds a piece of a long row, its
    first element is number ``start`` of the row."""

    buffer: Buffer
    kind: str = "float"
    stream: bool = False


@dataclass
class Function:
    """Text of a vector function under way. ``value(i, index)``: the source of values that are no arithmetic."""

    name: str
    ops: Sequence[TileOp]
    leaf: Callable[[Function, int, Index], str | None]
    space: Space = field(default_factory=Space)
    arguments: dict[str, tuple[str, str]] = field(default_factory=dict)  # call text -> (parameter type, name)
    lines: list[str] = field(default_factory=list)
    memo: dict[tuple[int, Index], str] = field(default_factory=dict)
    piece: str = "c"  # variable that counts vectors along the lanes
    outer: bool = False  # all loops but that over vectors are around the call: places come as arguments
    count: int = 0

    # ---- names -----------------------------------------------------------------------------------------------------
    def argument(self, call: str, kind: str) -> str:
        """Name of a parameter that is passed ``call``."""
        if call not in self.arguments:
            stem = "s" if not kind.endswith("*") else "p"
            self.arguments[call] = (kind, f"{stem}{len(self.arguments)}")
        return self.arguments[call][1]

    def pointer(self, array: Array) -> str:
        return self.argument(f"\x01{array.buffer.name}:{array.kind}\x02", f"__ubuf__ {array.kind}*")

    def new(self, kind: str = "vector_float") -> str:
        self.count += 1
        self.lines.append(f"{kind} r{self.count};")
        return f"r{self.count}"

    def emit(self, text: str) -> None:
        self.lines.append(text)

    def instruct(self, name: str, *args: str, kind: str = "vector_float", mask: str = "m") -> str:
        out = self.new(kind)
        self.emit(f"{name}({', '.join((out, *args, mask))});")
        return out

    # ---- memory ----------------------------------------------------------------------------------------------------
    def split(self, at: Ix) -> tuple[int, Ix]:
        """Coefficient of the lanes and the rest of an index."""
        if any(LANE in name and name != LANE for name, _ in at.terms):
            raise InternalError(f"{self.name}: lanes do not step evenly through {at}")
        step = dict(at.terms).get(LANE, 0)
        return step, Ix(tuple((v, k) for v, k in at.terms if v != LANE), at.const)

    def place(self, rest: Ix, step: int) -> str:
        text = str(rest)
        if self.outer and rest.terms:
            text = self.argument(f"(uint32_t)({rest})", "uint32_t")
        return text if not step else f"{text} + {self.piece} * {LANES * step}"

    @staticmethod
    def aligned(rest: Ix, kind: str) -> bool:
        """``at`` counts whole pieces, which are aligned."""
        grain = 8 if kind == "float" else 16
        return rest.const % grain == 0 and all(v == "at" or k % grain == 0 for v, k in rest.terms)

    def read(self, array: Array, at: Ix) -> str:
        """A register of the elements at an index."""
        step, rest = self.split(at)
        p = self.pointer(array)
        out = self.new()
        if step == 0:
            self.emit(f"di_load_one({out}, {p} + ({self.place(rest, 0)}));")
        elif step == 1 and self.aligned(rest, array.kind):
            self.emit(f"di_load({out}, {p} + ({self.place(rest, 1)}));")
        elif array.kind == "float":
            self.emit(f"di_load_steps({out}, {p}, {self.place(rest, step)}, {step}, m);")
        else:
            raise InternalError(f"{self.name}: bf16 elements are not read in steps")
        return out

    def readable(self, array: Array, at: Ix) -> bool:
        """Whether the elements can be read where they lie."""
        step, rest = self.split(at)
        return step == 0 or array.kind == "float" or (step == 1 and self.aligned(rest, array.kind))

    def write(self, array: Array, at: Ix, value: str) -> None:
        step, rest = self.split(at)
        p = self.pointer(array)
        if step == 1 and self.aligned(rest, array.kind):
            self.emit(f"di_store({p} + ({self.place(rest, 1)}), {value}, m);")
        elif array.kind == "float":
            self.emit(f"di_store_steps({p}, {value}, {self.place(rest, step)}, {max(step, 1)}, m);")
        else:
            raise InternalError(f"{self.name}: bf16 elements are not written in steps")

    # ---- expressions -----------------------------------------------------------------------------------------------
    def value(self, i: int, index: Index) -> str:
        """Register of element ``index`` of op i."""
        key = (i, index)
        if key not in self.memo:
            self.memo[key] = self._value(i, index)
        return self.memo[key]

    def _value(self, i: int, index: Index) -> str:
        o = self.ops[i]
        found = self.leaf(self, i, index)
        if found is not None:
            return found
        if o.op in VIEWS:
            return self.through(o, index)
        if o.op == "const":
            return self.literal(o, index)
        if o.op == "reduce":
            return self._terms(o, index)
        if o.op in ELEMENTWISE:
            return self._formula(o, index)
        raise InternalError(f"the AscendC printer knows no op {o.op}")

    def through(self, o: TileOp, index: Index) -> str:
        (x,) = o.args
        source = self.ops[x]
        if o.op == "slice":
            at = tuple(i + o.get("start") if n == o.get("dim") else i for n, i in enumerate(index))
        elif o.op == "expand":
            at = broadcast(index, source.dims)
        else:
            at = tuple(joined(self.space, linear(o.dims, index), source.dims))
        return self.value(x, at)

    def scalar(self, i: int, index: Index) -> str | None:
        """Literal of an element that is known."""
        o = self.ops[i]
        if o.op == "reshape" and self.ops[o.args[0]].op == "const":
            return self.scalar(o.args[0], tuple(joined(self.space, linear(o.dims, index), self.ops[o.args[0]].dims)))
        if o.op != "const" or o.get("values") is None:
            return None
        values = o.get("values")
        if len(set(map(repr, values))) == 1:
            return literal(values[0], False)
        at = linear(o.dims, index)
        return None if at.terms else literal(values[at.const], False)

    def literal(self, o: TileOp, index: Index) -> str:
        i = next(n for n, x in enumerate(self.ops) if x is o)
        known = self.scalar(i, index)
        if known is None:
            raise InternalError(f"{self.name}: a table of constants has no array")
        return self.fill(known)

    def fill(self, number: str) -> str:
        out = self.new()
        self.emit(f"di_fill({out}, {c_float(number)}, m);")
        return out

    def _terms(self, o: TileOp, index: Index) -> str:
        """A short reduction, its terms written out."""
        source, how = self.ops[o.args[0]], o.get("how")
        places: list[Index] = [()]
        for d, n in enumerate(source.dims):
            steps = [Ix((), k) for k in range(n)] if d in o.get("dims") else [index[d]]
            places = [(*t, s) for t in places for s in steps]
        total = self.value(o.args[0], places[0])
        for at in places[1:]:
            total = self.instruct("asc_max" if how == "max" else "asc_add", total, self.value(o.args[0], at))
        if how == "mean" and len(places) > 1:
            total = self.instruct("asc_mul_scalar", total, c_float(literal(1.0 / len(places), False)))
        return total

    def _formula(self, o: TileOp, index: Index) -> str:
        at = [broadcast(index, self.ops[x].dims) for x in o.args]
        if o.op == "round" and o.get("dtype") != "bf16":
            return self.value(o.args[0], at[0])
        if o.op in _WITH_SCALAR:
            for n in (1, 0):
                number = self.scalar(o.args[n], at[n])
                if number is not None:
                    return self.instruct(_WITH_SCALAR[o.op], self.value(o.args[1 - n], at[1 - n]), c_float(number))
        args = [self.value(x, i) for x, i in zip(o.args, at, strict=True)]
        if o.op in _COMPARISONS:
            return self.instruct(_COMPARISONS[o.op], *args, kind="vector_bool")
        if o.op == "where":
            out = self.new()
            self.emit(f"asc_select({out}, {args[1]}, {args[2]}, {args[0]});")
            return out
        if o.op in _INSTRUCTIONS:
            return self.instruct(_INSTRUCTIONS[o.op], *args)
        out = self.new()
        self.emit(f"{out} = {_CALLS[o.op]}({', '.join((*args, 'm'))});")
        return out

    # ---- text ------------------------------------------------------------------------------------------------------
    def text(self) -> list[str]:
        parameters = ", ".join(f"{kind} {name}" for kind, name in self.arguments.values())
        return [f"__simd_vf__ inline void {self.name}({parameters}) {{", *("    " + x for x in self.lines), "}"]

    def call(self) -> str:
        return f"asc_vf_call<{self.name}>({', '.join(self.arguments)});"


def c_float(number: str) -> str:
    """CANN has no math.h macros in device code."""
    return {"HUGE_VALF": "INFINITY", "-HUGE_VALF": "-INFINITY"}.get(number, number)


def broadcast(index: Sequence[Ix], dims: Sequence[int]) -> Index:
    """Index into a value of ``dims`` that is read at ``index`` of a value it broadcasts to."""
    tail = index[len(index) - len(dims):] if dims else ()
    return tuple(Ix() if d == 1 else i for i, d in zip(tail, dims, strict=True))


def joined(space: Space, position: Ix, dims: Sequence[int]) -> list[Ix]:
    """Index along ``dims`` of a position; kept in one piece (in the last dim) where it does not split evenly, which
    ``linear`` undoes: memory is read at the same place."""
    out, rest = [], position
    for d, s in zip(dims, strides(dims), strict=True):
        if d == 1:
            out.append(Ix())
            continue
        if s == 1:
            out.append(rest)
            break
        high = Ix(tuple((v, k // s) for v, k in rest.terms if k % s == 0), rest.const // s)
        low = Ix(tuple((v, k) for v, k in rest.terms if k % s), rest.const % s)
        if space.largest(low) < s:
            out.append(high)
            rest = low
        else:
            out.append(Ix())
    return out + [Ix()] * (len(dims) - len(out))
