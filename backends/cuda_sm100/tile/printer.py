"""TileProgram -> Triton statements for one row, or for a tile of rows.

Nothing is stored in between: an element of an op is written as an expression of elements of its arguments, down to what
lies in memory, and each (op, index) is computed once and stays in registers. Views are index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepinfer.backends.cpu.tile.index import Ix, linear, refined
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.tile.axes import NOTHING, Axes, Spans, TileSpace, Variable, product
from deepinfer.backends.cuda_sm100.tile.chunks import chunk_of, chunked
from deepinfer.backends.cuda_sm100.tile.program import is_integer, literal, size
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.errors import InternalError

Index = tuple[Ix, ...]
VIEWS = ("reshape", "slice", "expand")
_UNROLLED = 8  # short dims are written out
_CHUNK = 8192  # elements that a block of a reduction or a store may have along one axis

_FORMULAS = {
    "neg": "-{0}", "abs": "tl.abs({0})", "exp": "tl.exp({0})", "log": "di_log({0})", "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({0}))", "recip": "tl.div_rn(1.0, {0})", "sigmoid": "di_sigmoid({0})",
    "softplus": "di_softplus({0})", "cos": "tl.cos({0})", "sin": "tl.sin({0})", "to_float": "{0}.to(tl.float32)",
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "tl.div_rn({0}, {1})",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "copysign": "di_copysign({0}, {1})",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}", "iadd": "{0} + {1}", "isub": "{0} - {1}",
    "imul": "{0} * {1}", "ixor": "{0} ^ {1}", "imod": "{0} % {1}", "where": "tl.where({0}, {1}, {2})",
}
ELEMENTWISE = {*_FORMULAS, "round"}
_STORE_CASTS = {"*f32": "{}", "*bf16": "({}).to(tl.bfloat16)", "*i64": "({}).to(tl.int64)", "*i32": "({}).to(tl.int32)",
                "*u8": "({}).to(tl.uint8)"}


@dataclass(frozen=True)
class Block:
    """The name of a computed block, and the axes that it varies along."""

    text: str
    spans: Spans = NOTHING


@dataclass
class Printer:
    """Prints one program. ``row``: name of the row (a scalar, or a block along axes ``row_spans`` of valid rows
    ``row_mask``); ``acc(i, index)``: element of the anchor's result i, all of whose blocks have the shape ``tile``
    (names), its last dim along the axis ``along``."""

    ops: list[TileOp]
    signature: Signature
    axes: Axes
    row: str = "row"
    row_mask: str = ""
    row_spans: Spans = NOTHING
    acc: Callable[[TileOp, Index], Block] | None = None
    tile: tuple[str, str] = ("", "")
    along: int = 0
    carries: dict[str, Callable[[Index], Block]] = field(default_factory=dict)
    prefer: tuple[int, ...] = ()
    prefix: str = "t"
    seq: str = "seq"

    def __post_init__(self) -> None:
        self.lines: list[str] = []
        self.memo: dict[tuple[int, Index], Block] = {}
        self.pointers: dict[str, str] = {}
        self.space = TileSpace()
        self.spans: dict[str, Spans] = {}
        self.masks: dict[str, tuple[str, ...]] = {}
        self.known: dict[int, Callable[[Index], Block]] = {}  # ops that are read and not made
        self.heads: list[str] = []  # lines that every later one may read
        self._count = 0

    def child(self, ops: list[TileOp], prefix: str, prefer: Sequence[int]) -> Printer:
        """Printer of the body of a loop, over the same axes and rows."""
        inner = Printer(ops, self.signature, self.axes, self.row, self.row_mask, self.row_spans, self.acc,
                        self.tile, self.along, prefer=tuple(prefer), prefix=prefix, seq=self.seq)
        inner.pointers, inner.heads, inner.space = self.pointers, self.heads, self.space
        inner.spans, inner.masks = self.spans, self.masks
        return inner

    # ---- names -----------------------------------------------------------------------------------------------------
    def name(self, stem: str = "x") -> str:
        self._count += 1
        return f"{self.prefix}{stem}{self._count}"

    def let(self, text: str, spans: Spans, stem: str = "x") -> Block:
        name = self.name(stem)
        self.lines.append(f"{name} = {text}")
        return Block(name, spans)

    def variable(self, v: Variable) -> Ix:
        """Makes a variable usable in indices."""
        self.space.extents[v.name] = v.extent
        self.spans[v.name] = v.spans
        self.masks[v.name] = (v.mask,) if v.mask else ()
        return Ix.var(v.name)

    def opaque(self, text: str, extent: int, of: Ix, stem: str = "q") -> Ix:
        """An index that is a computed block of values 0 .. extent - 1."""
        spans, masks = self.spans_of(of), self.masks_of(of)
        name = self.let(text, spans, stem).text
        return self.named(name, extent, spans, masks)

    def named(self, name: str, extent: int, spans: Spans, masks: tuple[str, ...] = ()) -> Ix:
        self.space.extents[name], self.spans[name], self.masks[name] = extent, spans, masks
        return Ix.var(name)

    def take(self, extent: int, without: Spans) -> Ix:
        return self.variable(self.axes.take(extent, without | self.row_spans, self.prefer))

    def _parts(self, ix: Ix) -> list[str]:
        """Names of variables in an index, those inside divisions as well."""
        out = []
        for v, _ in ix.terms:
            if v in self.spans:
                out.append(v)
            else:
                out += [w for w in self.spans if _mentions(v, w)]
        return out

    def spans_of(self, *indices: Ix) -> Spans:
        return frozenset().union(*(self.spans[v] for ix in indices for v in self._parts(ix)))

    def masks_of(self, *indices: Ix) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m for ix in indices for v in self._parts(ix) for m in self.masks[v]))

    # ---- memory ----------------------------------------------------------------------------------------------------
    def pointer(self, i: int) -> str:
        """Name of the pointer to this row of operand i, or to a whole parameter."""
        s, op = self.signature, self.signature.operand(i)
        key = f"p{i}"
        if key not in self.pointers:
            if op.role == "param":
                self.pointers[key] = s.param(i)
            elif op.role == "input":
                self.pointers[key] = self._row_pointer(*self._input(i))
            elif op.role == "pin":
                self.pointers[key] = self._row_pointer(s.pin(i), op.rows, op.size)
            else:
                self.pointers[key] = self._row_pointer(s.value(i), op.rows, s.elements(i))
        return self.pointers[key]

    def _row_pointer(self, base: str, rows: str, width: int | str) -> str:
        at = self.signature.row_of(rows, self.row, self.seq)
        name = self.name("r")
        self.heads.append(f"{name} = {base} + ({at}) * {width}")
        return name

    def _input(self, i: int) -> tuple[str, str, int | str]:
        s, op = self.signature, self.signature.operand(i)
        name = op.get("name")
        if name == "positions":
            return (s.axis("pos") if op.rows == s.spec.rows else s.axis_of(op.rows, "pos")), op.rows, 1
        if name == "token_ids":
            return s.input(name), op.rows, 1
        if name == "lookback":
            return s.input(name), op.rows, s.step("lookback_width")
        raise InternalError(f"the runner makes no input {name}")

    def read(self, pointer: str, at: Ix, kind: str, by_row: bool, extra: tuple[str, ...] = ()) -> Block:
        """The element at ``at`` behind a pointer, as f32 or i64."""
        spans = self.spans_of(at) | (self.row_spans if by_row else NOTHING)
        masks = [*self.masks_of(at), *extra, *([self.row_mask] if by_row and self.row_mask else [])]
        text = f"tl.load({pointer} + {_sum(at)}{_masked(masks)})"
        if kind in ("*i64", "*i32", "*u8"):
            return self.let(text if kind == "*i64" else f"{text}.to(tl.int64)", spans)
        return self.let(text if kind == "*f32" else f"{text}.to(tl.float32)", spans)

    def write(self, i: int, at: Ix, value: Block) -> None:
        kind = self.signature.element(i)
        masks = [*self.masks_of(at), *([self.row_mask] if self.row_mask else [])]
        place = f"{self.pointer(i)} + {_sum(at)}"
        if not self.spans_of(at) and not self.row_spans:
            place += f" + tl.zeros({self.axes.ones()}, tl.int32)"
        self.lines.append(f"tl.store({place}, {_STORE_CASTS[kind].format(value.text)}{_masked(masks, False)})")

    # ---- values ----------------------------------------------------------------------------------------------------
    def value(self, i: int, index: Index) -> Block:
        """Element of op i at an index."""
        key = (i, index)
        if key not in self.memo:
            self.memo[key] = self._value(i, index)
        return self.memo[key]

    def _value(self, i: int, index: Index) -> Block:
        from deepinfer.backends.cuda_sm100.tile import special

        o = self.ops[i]
        if i in self.known:
            return self.known[i](index)
        if o.op == "load":
            operand = o.get("operand")
            role = self.signature.operand(operand).role
            if role == "param" and self.signature.operand(operand).type.is_block:
                raise InternalError("a whole packed parameter is only read by a contraction or a gather")
            at = linear(o.dims, index)
            kind = "*i64" if role == "input" else "*i32" if role == "pin" else self.signature.element(operand)
            return self.read(self.pointer(operand), at, kind, role != "param")
        if o.op == "const":
            return self._constant(o, index)
        if o.op == "carry":
            return self.carries[o.get("name")](index)
        if o.op == "acc":
            if self.acc is None:
                raise InternalError("a program without an anchor reads its result")
            return self.acc(o, index)
        if o.op in VIEWS:
            return self.value(o.args[0], self._through(o, self.ops[o.args[0]], index))
        if o.op in ELEMENTWISE:
            return self._formula(o, index)
        if o.op in special.TABLE:
            return special.TABLE[o.op](self, i, o, index)
        raise InternalError(f"the Triton printer knows no op {o.op}")

    def _formula(self, o: TileOp, index: Index) -> Block:
        args = [self.value(x, broadcast(index, self.ops[x].dims)) for x in o.args]
        if o.op == "round":
            text = f"di_round({args[0].text})" if o.get("dtype") == "bf16" else args[0].text
        else:
            text = _FORMULAS[o.op].format(*(a.text for a in args))
        return self.let(text, frozenset().union(*(a.spans for a in args)))

    def _constant(self, o: TileOp, index: Index) -> Block:
        values, integer = o.get("values"), is_integer(o.dtype)
        if values is None:
            raise InternalError(f"the Triton printer has no constant made by {o.get('make')}")
        if len(set(map(repr, values))) == 1:
            return self._literal(values[0], integer)
        at = linear(o.dims, index)
        if not at.terms:
            return self._literal(values[at.const], integer)
        spans = self.spans_of(at)
        kind = "tl.int64" if integer else "tl.float32"
        where = self.let(f"{at}", spans, "q").text
        x = self.let(f"({where} * 0).to({kind}) + {literal(values[0], integer)}", spans)
        for k, v in enumerate(values[1:], 1):
            x = self.let(f"tl.where({where} == {k}, {literal(v, integer)}, {x.text})", spans)
        return x

    def _literal(self, value: float, integer: bool) -> Block:
        kind = "tl.int64" if integer else "tl.float32"
        return self.let(f"tl.full({self.axes.ones()}, {literal(value, integer)}, {kind})", NOTHING, "c")

    def _through(self, o: TileOp, source: TileOp, index: Index) -> Index:
        """Index into the source of a view."""
        if o.op == "slice":
            return tuple(i + o.get("start") if n == o.get("dim") else i for n, i in enumerate(index))
        if o.op == "expand":
            return broadcast(index, source.dims)
        return tuple(self.space.split(linear(o.dims, index), source.dims))

    def select(self, block: Block, canonical: Sequence[Ix], index: Index) -> Block:
        """A block that varies along pure variables ``canonical``, read at another index."""
        for have, want in zip(canonical, index, strict=True):
            if have == want or not have.terms:
                continue
            (a,) = self.spans_of(have)
            if a in self.spans_of(want):
                raise InternalError("a computed block is read along an axis that it lies on")
            text = f"tl.sum(tl.where({have} == {want}, {block.text}, 0), {a}, keep_dims=True)"
            block = self.let(text, (block.spans - {a}) | self.spans_of(want))
        return block

    def canonical(self, dims: Sequence[int], index: Index) -> list[Ix]:
        """Pure variables to compute all elements along: those of the index where it has such."""
        out: list[Ix] = []
        asked = self.spans_of(*index)
        for d, ix in zip(dims, index, strict=True):
            if d == 1:
                out.append(Ix())
            elif self.is_pure(ix, d):
                out.append(ix)
            else:
                out.append(self.take(d, asked | self.spans_of(*out)))
        return out

    def is_pure(self, ix: Ix, extent: int) -> bool:
        """Whether the index is a variable over a whole dim."""
        if len(ix.terms) != 1 or ix.const or ix.terms[0][1] != 1:
            return False
        v = self.axes.variables.get(ix.terms[0][0])
        return v is not None and v.extent == extent

    def reads_acc(self, i: int) -> bool:
        """Whether op i is made of an anchor's result."""
        return self.ops[i].op == "acc" or any(self.reads_acc(x) for x in self.ops[i].args)

    # ---- loops and statements --------------------------------------------------------------------------------------
    def where_any(self, condition: str, usual: Block, build: Callable[[], Block]) -> Block:
        """``usual``, or what ``build`` makes where the condition holds for an element of the tile; of one shape."""
        outer, memo = self.lines, dict(self.memo)
        self.lines = []
        other = build()
        inner, self.lines, self.memo = self.lines, outer, memo
        out = self.let(usual.text, other.spans)
        self.lines += [f"if tl.max(({condition}).to(tl.int32)) > 0:", *(f"    {line}" for line in inner),
                       f"    {out.text} = {other.text}"]
        return out

    def loop(self, name: str, count: int, build: Callable[[Ix], None]) -> None:
        """A loop over a scalar; what is computed in it ends with it."""
        outer, memo = self.lines, dict(self.memo)
        self.lines = []
        build(self.named(name, count, NOTHING))
        inner, self.lines, self.memo = self.lines, outer, memo
        self.lines += [f"for {name} in range({count}):", *("    " + line for line in inner)]

    def whole(self, dims: Sequence[int], shapes: Sequence[Sequence[int]], build: Callable[[Index], None]) -> None:
        """Calls ``build`` with indices that cover ``dims``: short and many leading dims one after the other."""
        extents = refined(dims, shapes)
        out: list[Ix] = []

        def go(rest: list[int]) -> None:
            if not rest:
                position = Ix()
                for n, ix in enumerate(out):
                    position = position + ix * product(extents[n + 1:])
                build(tuple(self.space.split(position, dims)))
                return
            d, left = rest[0], product(rest)
            if left > _CHUNK // 4 and d <= _UNROLLED and len(rest) > 1:
                for k in range(d):
                    out.append(Ix((), k))
                    go(rest[1:])
                    out.pop()
            elif left > _CHUNK and len(rest) > 1:
                def one(ix: Ix) -> None:
                    out.append(ix)
                    go(rest[1:])
                    out.pop()

                self.loop(self.name("i"), d, one)
            elif d > _CHUNK:
                v = self.take(chunk_of(d), self.spans_of(*out))

                def piece(ix: Ix) -> None:
                    out.append(chunked(self, ix, v, d))
                    go(rest[1:])
                    out.pop()

                self.loop(self.name("i"), -(-d // chunk_of(d)), piece)
            else:
                out.append(self.take(d, self.spans_of(*out)))
                go(rest[1:])
                out.pop()

        go(list(extents))

    def shapes_below(self, i: int) -> list[tuple[int, ...]]:
        """Dims of the views of all elements below op i."""
        out, total, stack, seen = [], size(self.ops[i]), [i], set[int]()
        while stack:
            x = stack.pop()
            if x in seen or size(self.ops[x]) != total:
                continue
            seen.add(x)
            o = self.ops[x]
            out.append(o.dims)
            if o.op in VIEWS or o.op in ELEMENTWISE:
                stack += o.args
        return out

    def statements(self, part: Ix | None = None) -> list[str]:
        """Everything the program writes. ``part``: index of the leading dim of all stores, where one program computes
        one part of a row."""
        from deepinfer.backends.cuda_sm100.tile import special

        for i, o in enumerate(self.ops):
            if o.op == "store":
                self._store(o, part)
            elif o.op == "store_record":
                special.store_record(self, i, o)
        return [*self.heads, *self.lines]

    def _store(self, o: TileOp, part: Ix | None) -> None:
        (source,) = o.args

        def build(index: Index) -> None:
            self.write(o.get("operand"), linear(o.dims, index), self.value(source, index))

        if part is None:
            self.whole(o.dims, self.shapes_below(source), build)
        else:
            self.whole(o.dims[1:], [], lambda index: build((part, *index)))


def broadcast(index: Sequence[Ix], dims: Sequence[int]) -> Index:
    """Index into a value of ``dims`` that is read at ``index`` of a value it broadcasts to."""
    tail = index[len(index) - len(dims):] if dims else ()
    return tuple(Ix() if d == 1 else i for i, d in zip(tail, dims, strict=True))


def _mentions(text: str, name: str) -> bool:
    at = text.find(name)
    while at >= 0:
        end = at + len(name)
        before = at == 0 or not (text[at - 1].isalnum() or text[at - 1] == "_")
        after = end == len(text) or not (text[end].isalnum() or text[end] == "_")
        if before and after:
            return True
        at = text.find(name, end)
    return False


def _sum(at: Ix) -> str:
    return f"({at})"


def _masked(masks: Sequence[str], load: bool = True) -> str:
    kept = list(dict.fromkeys(m for m in masks if m))
    if not kept:
        return ""
    return f", mask={' & '.join(kept)}" + (", other=0" if load else "")
