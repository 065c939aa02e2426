"""Ops that have a loop or a call of their own."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.backends.cpu.storage import C_TYPES, Place, decode_lines, encode_lines, format_arguments
from deepinfer.backends.cpu.tile.body import Body, Index, shared_shapes
from deepinfer.backends.cpu.tile.index import Ix, Space, linear, refined, strides
from deepinfer.backends.cpu.tile.printer import Printer, indented
from deepinfer.backends.cpu.tile.program import analyse, size
from deepinfer.backends.cpu.tile.scalar import is_integer
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError

Emit = Callable[[Printer, int, TileOp], list[str]]
STRIP = 512  # DI_STRIP


def _store(p: Printer, i: int, o: TileOp) -> list[str]:
    source = o.args[0]
    if p.analysis.ops[source].op == "concat" and source not in p.analysis.roots:
        raise InternalError("a concat is a root")
    return p.loop(o.dims, shared_shapes(p.analysis, source), lambda b, at: p.finish_reader(b, i, at))


# ---- nests written out here: loops whose bodies hold loops ---------------------------------------------------------
class Nest:
    """Plain loops over the dims of size > 1, outermost first; inside, ``body`` takes lines."""

    def __init__(self, p: Printer, dims: tuple[int, ...]) -> None:
        self.space = Space()
        self.body = Body(p.env, self.space)
        self.heads: list[str] = []
        index = []
        for n, d in enumerate(dims):
            if d == 1:
                index.append(Ix())
                continue
            index.append(self.variable(f"o{n}", d))
            self.heads.append(f"for (int o{n} = 0; o{n} < {d}; ++o{n}) {{")
        self.index = tuple(index)

    def variable(self, name: str, extent: int) -> Ix:
        self.space.extents[name] = extent
        return Ix.var(name)

    def inner(self, name: str, extent: int, build: Callable[[Ix], None], count: str = "", ivdep: bool = True) -> None:
        """A loop inside the body; locals made in it end with it."""
        v = self.variable(name, extent)
        b = self.body
        outer, b.lines, memo = b.lines, [], dict(b.memo)
        build(v)
        made, b.lines, b.memo = b.lines, outer, memo
        if ivdep:
            b.lines.append("#pragma GCC ivdep")
        b.lines += [f"for (int {name} = 0; {name} < {count or extent}; ++{name}) {{", *indented(made), "}"]

    def text(self) -> list[str]:
        lines = self.body.text(self.body.lines)
        for h in reversed(self.heads):
            lines = [h, *indented(lines), "}"]
        return lines if self.heads else ["{", *indented(lines), "}"]


def _reduce(p: Printer, i: int, o: TileOp) -> list[str]:
    source = p.analysis.ops[o.args[0]]
    last = len(source.dims) - 1
    if source.dims[last] > 1 and last not in o.get("dims"):
        return _reduce_apart(p, i, o, source)
    nest = Nest(p, o.dims)
    b, how = nest.body, o.get("how")
    lanes = "di_max_lanes" if how == "max" else "di_add_lanes"
    b.lines.append("DiV acc = di_splat(-HUGE_VALF);" if how == "max" else "DiV acc = di_splat(0.0f);")
    opened, index = 0, list(nest.index)
    for d in o.get("dims"):
        if d != last and source.dims[d] > 1:
            index[d] = nest.variable(f"r{d}", source.dims[d])
            b.lines.append(f"for (int r{d} = 0; r{d} < {source.dims[d]}; ++r{d}) {{")
            opened += 1
    n, base = source.dims[last], Ix()
    if n == size(source):  # a flat view of several dims: loops along these, so that no index needs a division
        *above, n = refined((n,), shared_shapes(p.analysis, o.args[0]))
        for d, (extent, stride) in enumerate(zip(above, strides((*above, n)), strict=False)):
            base = base + nest.variable(f"f{d}", extent) * stride
            b.lines.append(f"for (int f{d} = 0; f{d} < {extent}; ++f{d}) {{")
            opened += 1
    width, strips = min(n, STRIP), n > STRIP
    start = nest.variable("s", n - width + 1) if strips else Ix()
    count = f"m{i}" if strips else str(n)
    if strips:
        b.lines.append(f"for (int s = 0; s < {n}; s += {STRIP}) {{")
        b.lines.append(f"const int {count} = {n} - s < {STRIP} ? {n} - s : {STRIP};")
    b.lines.append(f"float strip[{width}];")

    def element(v: Ix) -> None:
        at = tuple(base + start + v if d == last else x for d, x in enumerate(index))
        b.write(Place("strip", "float"), v, b.value(o.args[0], at))

    nest.inner("l", width, element, count)
    b.lines.append(f"acc = {lanes}(acc, strip, {count});")
    b.lines += ["}"] * (opened + strips)
    total = "di_maximum(acc)" if how == "max" else "di_sum(acc)"
    if how == "mean":
        total = f"{total} / {size(source) // size(o)}.0f"
    p.finish(b, i, nest.index, total)
    return nest.text()


def _reduce_apart(p: Printer, i: int, o: TileOp, source: TileOp) -> list[str]:
    """Many terms that lie apart: results are accumulated in memory, one term of all at a time."""
    place, how = p.memory(i), o.get("how")
    reduced = [d for d in o.get("dims") if source.dims[d] > 1]
    start = "-HUGE_VALF" if how == "max" else "0.0f"
    out = p.loop(o.dims, [], lambda b, at: b.write(place, linear(o.dims, at), start))
    nest = Nest(p, tuple(source.dims[d] if d in reduced else 1 for d in range(len(source.dims))))
    at = list(nest.index)
    kept = [d for d in range(len(source.dims)) if source.dims[d] > 1 and d not in reduced]
    b = nest.body
    for d in kept[:-1]:
        at[d] = nest.variable(f"k{d}", source.dims[d])
        b.lines.append(f"for (int k{d} = 0; k{d} < {source.dims[d]}; ++k{d}) {{")

    def element(v: Ix) -> None:
        at[kept[-1]] = v
        where = linear(o.dims, tuple(Ix() if d in reduced else x for d, x in enumerate(at)))
        old, x = place.read(b.at(where)), b.value(o.args[0], tuple(at))
        b.write(place, where, f"di_max({old}, {x})" if how == "max" else f"{old} + {x}")

    nest.inner("l", source.dims[kept[-1]], element)
    b.lines += ["}"] * len(kept[:-1])
    out += nest.text()
    if how == "mean":
        def divide(b: Body, at: Index) -> None:
            where = linear(o.dims, at)
            b.write(place, where, f"{place.read(b.at(where))} / {size(source) // size(o)}.0f")

        out += p.loop(o.dims, [], divide)
    return out


def _encode(p: Printer, i: int, o: TileOp) -> list[str]:
    t = DType.parse(o.get("dtype"))
    if not t.is_encoded:
        return p.loop(o.dims, [], lambda b, at: p.finish(b, i, at, _plain_round(b.value(o.args[0], at), t)))
    out, first = [], 0
    for part, n in t.parts or ((t, o.dims[-1]),):
        out += _encode_part(p, i, o, part, first, n)
        first += n
    return out


def _plain_round(value: str, t: DType) -> str:
    return f"di_round_bf16({value})" if t.name == "bf16" else value


def _encode_part(p: Printer, i: int, o: TileOp, t: DType, first: int, n: int) -> list[str]:
    group = t.block[1] if t.is_block else n
    nest = Nest(p, (*o.dims[:-1], n // group))
    b = nest.body
    base = nest.index[-1] * group + first

    def fill(v: Ix) -> None:
        b.write(Place("x", "float"), v, b.value(o.args[0], (*nest.index[:-1], base + v)))

    def spread(v: Ix) -> None:
        value = f"y[{b.at(v)}]" if t.is_block else _plain_round(f"x[{b.at(v)}]", t)
        p.finish(b, i, (*nest.index[:-1], base + v), value)

    b.lines.append(f"float x[{group}]{f', y[{group}]' if t.is_block else ''};")
    nest.inner("l", group, fill)
    if t.is_block:
        b.lines.append(f"di_quantise<{format_arguments(t)}>(x, {group}, y);")
    nest.inner("l", group, spread)
    return nest.text()


def _pair_rotate(p: Printer, i: int, o: TileOp) -> list[str]:
    x, cos, sin = o.args
    a = p.analysis
    n, width = size(a.ops[cos]), o.dims[-1]
    nest = Nest(p, o.dims[:-1])
    b, still = nest.body, width - 2 * n
    zeros = (Ix(),) * (len(a.ops[cos].dims) - 1)

    def same(v: Ix) -> None:
        at = (*nest.index, v)
        p.finish(b, i, at, b.value(x, at))

    def turn(v: Ix) -> None:
        even, odd = (*nest.index, v * 2 + still), (*nest.index, v * 2 + (still + 1))
        u, w = b.value(x, even), b.value(x, odd)
        c, s = b.value(cos, (*zeros, v)), b.value(sin, (*zeros, v))
        plus, minus = ("-", "+") if not o.get("inverse") else ("+", "-")
        p.finish(b, i, even, f"{u} * {c} {plus} {w} * {s}")
        p.finish(b, i, odd, f"{w} * {c} {minus} {u} * {s}")

    if still:
        nest.inner("l", still, same)
    nest.inner("l", n, turn)
    return nest.text()


def _concat(p: Printer, i: int, o: TileOp) -> list[str]:
    d, start, out = o.get("dim"), 0, []
    for x in o.args:
        dims = p.analysis.ops[x].dims
        begin = start

        def build(b: Body, at: Index, x: int = x, begin: int = begin) -> None:
            whole = tuple(v + begin if n == d else v for n, v in enumerate(at))
            p.finish(b, i, whole, b.value(x, at))

        out += p.loop(dims, [], build)
        start += dims[d]
    return out


# ---- lookups and selections ----------------------------------------------------------------------------------------
def _gather(p: Printer, i: int, o: TileOp) -> list[str]:
    table = p.analysis.operands[o.get("operand")]
    (index,) = o.args
    lead = p.analysis.ops[index].dims
    row = table.dims[1:]
    width = 1
    for d in row:
        width *= d
    nest = Nest(p, lead)
    b, name, t = nest.body, f"p{o.get('operand')}", table.type
    p.place(o.get("operand"))  # declares the pointer
    b.lines.append(f"const int64_t g = {b.value(index, nest.index)};")
    if not t.is_block:
        kind = C_TYPES[t.name]
        b.lines.append(f"const {kind}* const row = {name} + g * {width};")
        source = Place("row", kind)

        def element(v: Ix) -> None:
            p.finish(b, i, (*nest.index, *nest.space.split(v, row)), source.read(b.at(v)))

        if row:
            nest.inner("l", width, element)
        else:
            element(Ix())
        return nest.text()
    r, c = t.block
    n = -(-width // c)
    b.lines.append(f"const uint8_t* const row = {name} + g * {t.data_bytes(width)};")
    b.lines.append(f"const uint8_t* const scales = {name}_scale + g / {r} * {n};")
    codec = format_arguments(DType(t.name, (1, c)))
    b.lines.append(f"float y[{width}];")
    b.lines.append(f"di_decode<{codec}>(row, scales, {width}, y);")
    nest.inner("l", width, lambda v: p.finish(b, i, (*nest.index, *nest.space.split(v, row)), f"y[{b.at(v)}]"))
    return nest.text()


def _fetch(p: Printer, i: int, o: TileOp) -> list[str]:
    table = p.analysis.operands[o.get("operand")]
    width = table.size // table.dims[0]
    r, c = table.type.block if table.type.is_block else (1, width)
    nest = Nest(p, o.dims)
    b, name = nest.body, f"p{o.get('operand')}"
    p.place(o.get("operand"))  # declares the pointer
    b.lines.append(f"const int64_t g = {b.value(o.args[0], nest.index)};")
    row_bytes = table.type.data_bytes(width)
    b.lines.append(f"di_fetch(step, (const char*){name} + g * {row_bytes}, {row_bytes});")
    if table.type.is_block:
        n = -(-width // c)
        b.lines.append(f"di_fetch(step, (const char*){name}_scale + g / {r} * {n}, {n});")
    return nest.text()


def _take(p: Printer, i: int, o: TileOp) -> list[str]:
    values, index = o.args
    while p.analysis.ops[values].op == "reshape":
        (values,) = p.analysis.ops[values].args
    place = p.memory(values)
    return p.loop(o.dims, [], lambda b, at: p.finish(b, i, at, place.read(b.value(index, at))))


def _topk(p: Printer, i: int, o: TileOp) -> list[str]:
    source = p.analysis.ops[o.args[0]]
    n, k = source.dims[-1], o.get("k")
    keys = p.temporary(i, "uint64_t", n, 8).pointer
    nest = Nest(p, o.dims[:-1])
    b = nest.body
    nest.inner("l", n, lambda v: b.lines.append(
        f"{keys}[{b.at(v)}] = di_rank({b.value(o.args[0], (*nest.index, v))}, {b.at(v)});"), ivdep=False)
    b.lines.append(f"const int64_t found = di_best({keys}, {n}, {k});")
    nest.inner("l", k, lambda v: p.finish(b, i, (*nest.index, v), f"di_ranked({keys}, {b.at(v)}, found)"), ivdep=False)
    lines = nest.text()
    pin = o.get("pin", -1)
    if not isinstance(pin, int) or pin < 0:
        return lines
    given = p.place(pin)
    pinned = p.loop(o.dims, [], lambda b, at: p.finish(b, i, at, given.read(b.at(linear(o.dims, at)))))
    return [f"if ({given.pointer}) {{", *indented(pinned), "} else {", *indented(lines), "}"]


def _argmax(p: Printer, i: int, o: TileOp) -> list[str]:
    source = p.analysis.ops[o.args[0]]
    nest = Nest(p, o.dims)
    b = nest.body
    b.lines += ["float best = -HUGE_VALF;", "int64_t which = 0;"]

    def element(v: Ix) -> None:
        x, at = b.value(o.args[0], (*nest.index, v)), b.at(v)
        b.lines.append(f"which = {x} > best ? {at} : which;")
        b.lines.append(f"best = {x} > best ? {x} : best;")

    nest.inner("l", source.dims[-1], element, ivdep=False)
    p.finish(b, i, nest.index, "which")
    return nest.text()


# ---- repetition ----------------------------------------------------------------------------------------------------
def _scan(p: Printer, i: int, o: TileOp) -> list[str]:
    carry = p.memory(i)
    body = o.get("body")
    inner = Printer(analyse(body, p.analysis.operands, last=True), p.place, p.scratch, p.statics,
                    prefix=f"{p.prefix}{i}_", fixed_time=p.time(i))
    inner.carries = {"carry": carry} | {f"c{n}": p.memory(x) for n, x in enumerate(o.args[1:])}
    result = len(inner.analysis.ops) - 1
    lines = p.loop(o.dims, shared_shapes(p.analysis, o.args[0]),
                   lambda b, at: b.write(carry, linear(o.dims, at), b.value(o.args[0], at)))
    step = inner.lines()
    step += inner.loop(o.dims, [], lambda b, at: b.write(carry, linear(o.dims, at), b.value(result, at)))
    return [*lines, f"for (int trip = 0; trip < {o.get('trips')}; ++trip) {{", *indented(step), "}"]


# ---- state ---------------------------------------------------------------------------------------------------------
def _state(p: Printer, operand: int) -> str:
    if p.state is None:
        raise InternalError("only a rowwise kernel touches states")
    return p.state(operand)


def _store_record(p: Printer, i: int, o: TileOp) -> list[str]:
    op = p.analysis.operands[o.get("operand")]
    st, source = _state(p, o.get("operand")), o.args[0]
    if source in p.analysis.kept and not is_integer(p.analysis.ops[source].dtype):
        lines, x = [], p.memory(source).pointer
    else:
        place = p.temporary(i, "float", size(o), 4)
        lines = p.loop(o.dims, [], lambda b, at: b.write(place, linear(o.dims, at), b.value(source, at)))
        x = place.pointer
    where = (f"di_append_at(step, {st}, seq, pos)" if op.get("kind") == "paged"
             else f"{st}->fresh + row * (int64_t){st}->record_bytes")
    return [*lines, "{", f"    char* const record = {where};", "    if (record) {",
            *indented(encode_lines(op.type, x, "record"), 2), "    }", "}"]


def _pool(p: Printer, i: int, o: TileOp) -> list[str]:
    op = p.analysis.operands[o.get("operand")]
    if any(t.name != "f32" for t, _ in op.type.parts):
        raise InternalError(f"a group tail holds f32 rows, not {op.type}")
    call = (f"di_pool<{o.get('ratio')}, {o.get('dim')}, {str(bool(o.get('overlap'))).lower()}>"
            f"(step, {_state(p, o.get('operand'))}, seq, pos, {p.memory(i).pointer});")
    return [call]


def _previous(p: Printer, i: int, o: TileOp) -> list[str]:
    op = p.analysis.operands[o.get("operand")]
    st, out = _state(p, o.get("operand")), p.memory(i).pointer
    b = Body(p.env, Space())
    at = b.value(o.args[0], ())
    first = op.get("first_position", 0)
    return ["{", *indented(b.text(b.lines)), f"    const int64_t at = {at} - {o.get('back')};",
            f"    if (at >= di_first_valid(step, {st}, seq, {first})) {{",
            f"        const char* const record = di_view(step, {st}, seq, at);",
            *indented(decode_lines(op.type, "record", out), 2),
            "    } else {", f"        memset({out}, 0, {size(o)} * sizeof *{out});", "    }", "}"]


TABLE: dict[str, Emit] = {
    "store": _store, "reduce": _reduce, "encode": _encode, "pair_rotate": _pair_rotate, "concat": _concat,
    "gather": _gather, "fetch": _fetch, "take": _take, "topk": _topk, "argmax": _argmax, "scan": _scan,
    "store_record": _store_record, "pool": _pool, "previous": _previous,
}
