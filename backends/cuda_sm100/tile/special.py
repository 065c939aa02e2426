"""Ops that are more than arithmetic on elements: reductions, formats, rotations, lookups, selections, state rows."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.backends.cpu.storage import Part, record_parts
from deepinfer.backends.cpu.tile.index import Ix
from deepinfer.backends.cuda_sm100.tile.axes import NOTHING, product
from deepinfer.backends.cuda_sm100.tile.chunks import chunk_of, chunked
from deepinfer.backends.cuda_sm100.tile.printer import Block, Index, Printer
from deepinfer.backends.cuda_sm100.tile.program import cleaned, size
from deepinfer.codegen.kernels.spec import TileOp, TileProgram
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError

Emit = Callable[[Printer, int, TileOp, Index], Block]
_UNROLLED = 8  # terms of a reduction that are written out


# ---- reductions ----------------------------------------------------------------------------------------------------
def _reduce(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    source, how = p.ops[o.args[0]], o.get("how")
    reduced = [d for d in o.get("dims") if source.dims[d] > 1]
    count = product([source.dims[d] for d in reduced])
    last = len(source.dims) - 1
    if count == 1:
        total = p.value(o.args[0], index)
    elif count <= _UNROLLED and last not in reduced and not p.carries:  # single elements of a carry are dear
        total = _terms(p, o, source, index, reduced)
    elif len(reduced) == 1 and source.dims[reduced[0]] > 8192 and not p.row_spans:
        total = _long(p, o, source, index, reduced[0])
    else:
        total = _block(p, o, source, index, reduced)
    if how == "mean" and count > 1:
        return p.let(f"tl.div_rn({total.text}, tl.full({p.axes.ones()}, {count}.0, tl.float32))", total.spans)
    return total


def _neutral(how: str) -> str:
    return 'float("-inf")' if how == "max" else "0.0"


def _fold(how: str, a: str, b: str) -> str:
    return f"tl.maximum({a}, {b})" if how == "max" else f"{a} + {b}"


def _terms(p: Printer, o: TileOp, source: TileOp, index: Index, reduced: list[int]) -> Block:
    places: list[Index] = [()]
    for d, n in enumerate(source.dims):
        steps = [Ix((), k) for k in range(n)] if d in reduced else [index[d]]
        places = [(*t, s) for t in places for s in steps]
    parts = [p.value(o.args[0], t) for t in places]
    total = parts[0]
    for x in parts[1:]:
        total = p.let(_fold(o.get("how"), total.text, x.text), total.spans | x.spans)
    return total


def _block(p: Printer, o: TileOp, source: TileOp, index: Index, reduced: list[int]) -> Block:
    at = list(index)
    taken = p.spans_of(*index)
    variables = []
    for d in reduced:
        at[d] = p.take(source.dims[d], taken)
        taken |= p.spans_of(at[d])
        variables.append(at[d])
    x = p.value(o.args[0], tuple(at))
    text, spans = x.text, x.spans
    for v in variables:
        (a,) = p.spans_of(v)
        masks = p.masks_of(v)
        if masks or a not in spans:
            inside = masks[0] if masks else f"{v} >= 0"
            text = f"tl.where({inside}, {text}, {_neutral(o.get('how'))})"
        fold = "tl.max" if o.get("how") == "max" else "tl.sum"
        done = p.let(f"{fold}({text}, {a}, keep_dims=True)", spans - {a})
        text, spans = done.text, done.spans
    return Block(text, spans)


def _long(p: Printer, o: TileOp, source: TileOp, index: Index, d: int) -> Block:
    """Chunks are added up before lanes are."""
    n = source.dims[d]
    v = p.take(chunk_of(n), p.spans_of(*index))
    (a,) = p.spans_of(v)
    how = o.get("how")
    spans = p.spans_of(*index) | {a}
    total = p.let(f"tl.full({p.axes.shape(spans)}, {_neutral(how)}, tl.float32)", spans, "s")

    def add(ix: Ix) -> None:
        at = chunked(p, ix, v, n)
        x = p.value(o.args[0], (*index[:d], at, *index[d + 1:]))
        text = x.text
        if p.masks_of(at):
            text = f"tl.where({p.masks_of(at)[-1]}, {text}, {_neutral(how)})"
        p.lines.append(f"{total.text} = {_fold(how, total.text, text)}")

    p.loop(p.name("i"), -(-n // chunk_of(n)), add)
    fold = "tl.max" if how == "max" else "tl.sum"
    return p.let(f"{fold}({total.text}, {a}, keep_dims=True)", spans - {a})


# ---- formats -------------------------------------------------------------------------------------------------------
def _encode(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    t = DType.parse(o.get("dtype"))
    if not t.is_encoded:
        x = p.value(o.args[0], index)
        return p.let(f"di_round({x.text})", x.spans) if t.name == "bf16" else x
    x, last = p.value(o.args[0], index), index[-1]
    first, out = 0, x
    for part, n in t.parts or ((t, o.dims[-1]),):
        y = _quantised(p, x, last, part, first) if part.is_block else (
            p.let(f"di_round({x.text})", x.spans) if part.name == "bf16" else x)
        if n == o.dims[-1]:
            return y
        inside = f"({last} >= {first}) & ({last} < {first + n})"
        out = p.let(f"tl.where({inside}, {y.text}, {out.text})", out.spans | y.spans)
        first += n
    return out


def _group_axis(p: Printer, last: Ix, group: int, first: int = 0) -> int:
    """The axis along which groups of the last dim lie whole."""
    for name, k in last.terms:
        v = p.axes.variables.get(name)
        rest = [c for n, c in last.terms if n != name]
        whole = k == 1 and v is not None and p.axes.widths[min(v.spans)] % group == 0
        if whole and v is not None and all(c % group == 0 for c in (*rest, last.const, first)):
            return min(v.spans)
    raise InternalError("groups of a format do not lie along one axis")


def _split_shape(p: Printer, x: Block, axis: int, group: int) -> tuple[list[int], list[int]]:
    shape = p.axes.shape(x.spans)
    return shape, [*shape[:axis], shape[axis] // group, group, *shape[axis + 1:]]


def _quantised(p: Printer, x: Block, last: Ix, t: DType, first: int = 0) -> Block:
    group = t.block[1]
    if p.acc is not None:
        return _quantised_tile(p, x, t)
    axis = _group_axis(p, last, group, first)
    if axis not in x.spans:
        x = p.let(f"{x.text} + tl.zeros({p.axes.shape(x.spans | {axis})}, tl.float32)", x.spans | {axis})
    whole, split = _split_shape(p, x, axis, group)
    y = p.let(f'di_quantise(tl.reshape({x.text}, {split}), "{t.name}", {axis + 1})', x.spans)
    return p.let(f"tl.reshape({y.text}, {whole})", x.spans)


def _quantised_tile(p: Printer, x: Block, t: DType) -> Block:
    """The same of a tile of an anchor's results, which holds whole groups."""
    n, m = p.tile
    group = t.block[1]
    split = f"[{n} // {group}, {group}, {m}]" if p.along == 0 else f"[{n}, {m} // {group}, {group}]"
    y = p.let(f'di_quantise(tl.reshape({x.text}, {split}), "{t.name}", {p.along + 1})', x.spans)
    return p.let(f"tl.reshape({y.text}, [{n}, {m}])", x.spans)


def decoded(p: Printer, record: str, t: DType, at: Ix, of: Block) -> Block:
    """f32 of feature ``at`` of the record behind a pointer block ``record``; ``of``: its spans and mask (text)."""
    spans = of.spans | p.spans_of(at)
    out: Block | None = None
    for part in record_parts(t):
        x = _decoded_part(p, record, part, at, of, spans)
        out = x if out is None else p.let(f"tl.where({at} < {part.first}, {out.text}, {x.text})", spans)
    assert out is not None
    return out


def _decoded_part(p: Printer, record: str, part: Part, at: Ix, of: Block, spans: frozenset[int]) -> Block:
    inside = [m for m in (of.text, *p.masks_of(at)) if m]
    if part.first or part.count < p.space.largest(at) + 1:
        inside.append(f"({at} >= {part.first}) & ({at} < {part.first + part.count})")
    mask = ", mask=" + " & ".join(f"({m})" for m in inside) + ", other=0" if inside else ""
    d = p.let(f"{at} - {part.first}" if part.first else f"{at}", p.spans_of(at), "d").text
    if not part.dtype.is_block:
        kind = {"f32": "tl.float32", "bf16": "tl.bfloat16"}[part.dtype.name]
        pointer = f"({record} + {part.codes}).to(tl.pointer_type({kind})) + {d}"
        return p.let(f"tl.load({pointer}{mask}).to(tl.float32)", spans)
    scale = f"tl.load({record} + {part.scales} + {d} // {part.dtype.block[1]}{mask})"
    value = "di_e4m3" if part.dtype.name == "fp4_e4m3" else "di_e8m0"
    if part.dtype.name == "mxfp8":
        code = f"di_e4m3(tl.load({record} + {part.codes} + {d}{mask}))"
    else:
        code = f"di_e2m1((tl.load({record} + {part.codes} + {d} // 2{mask}) >> (({d} % 2) * 4).to(tl.uint8)) & 15)"
    return p.let(f"{code} * {value}({scale})", spans)


# ---- rotations and lookups -----------------------------------------------------------------------------------------
def _pair_rotate(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    x, last = o.args[0], index[-1]
    still = o.dims[-1] - 2 * size(p.ops[o.args[1]])
    if still % 2:
        raise InternalError("pairs begin at an odd feature")
    if still and p.reads_acc(x) and p.spans_of(last):  # few tiles hold features that turn
        return p.where_any(f"({last}) >= {still}", p.value(x, index), lambda: _turned(p, o, index, still))
    return _turned(p, o, index, still)


def _turned(p: Printer, o: TileOp, index: Index, still: int) -> Block:
    """Pairs of features from ``still`` on, turned."""
    x, cos, sin = o.args
    n, width, last = size(p.ops[cos]), o.dims[-1], index[-1]
    spans = p.spans_of(last)
    other = p.opaque(f"({last}) ^ 1", width, last)
    pair = p.opaque(f"tl.maximum(({last}) - {still}, 0) // 2", n, last)
    zeros = (Ix(),) * (len(p.ops[cos].dims) - 1)
    own = p.value(x, index)
    if p.reads_acc(x):  # a tile holds both of a pair
        partner = p.let(f"di_swap({own.text}, {p.tile[0]}, {p.tile[1]}, {p.along})", own.spans)
    else:
        partner = p.value(x, (*index[:-1], other))
    c, s = p.value(cos, (*zeros, pair)), p.value(sin, (*zeros, pair))
    sign = ("1.0", "-1.0") if o.get("inverse") else ("-1.0", "1.0")
    turn = p.let(f"tl.where(({last}) % 2 == 0, {sign[0]}, {sign[1]})", spans)
    y = p.let(f"{own.text} * {c.text} + {turn.text} * ({partner.text} * {s.text})",
              own.spans | partner.spans | c.spans | s.spans | spans)
    return p.let(f"tl.where(({last}) < {still}, {own.text}, {y.text})", y.spans) if still else y


def _concat(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    d, start = o.get("dim"), 0
    at = index[d]
    out: Block | None = None
    for x in o.args:
        n = p.ops[x].dims[d]
        if not at.terms:
            if start <= at.const < start + n:
                return p.value(x, (*index[:d], Ix((), at.const - start), *index[d + 1:]))
        else:
            inner = Ix() if n == 1 else p.opaque(
                f"tl.minimum(tl.maximum(({at}) - {start}, 0), {n - 1})", n, at)
            y = p.value(x, (*index[:d], inner, *index[d + 1:]))
            spans = y.spans | p.spans_of(at)
            out = p.let(f"{y.text} + ({at} * 0)", spans) if out is None else p.let(
                f"tl.where(({at}) >= {start}, {y.text}, {out.text})", spans | out.spans)
        start += n
    assert out is not None
    return out


def _gather(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    table = p.signature.operand(o.get("operand"))
    (picked,) = o.args
    lead = len(p.ops[picked].dims)
    row = table.dims[1:]
    width = product(row)
    g = p.value(picked, index[:lead])
    at = Ix()
    for n, ix in enumerate(index[lead:]):
        at = at + ix * product(row[n + 1:])
    t, base = table.type, p.signature.param(o.get("operand"))
    spans = g.spans | p.spans_of(at)
    mask = _mask([*p.masks_of(*index), *([p.row_mask] if p.row_mask else [])])
    if not t.is_block:
        loaded = f"tl.load({base} + {g.text} * {width} + ({at}){mask})"
        if t.is_int:
            return p.let(f"{loaded}.to(tl.int64)", spans)
        return p.let(f"{loaded}.to(tl.float32)", spans)
    r, c = t.block
    n = -(-width // c)
    scales = p.signature.param(o.get("operand"), "scale")
    scale = f"di_e8m0(tl.load({scales} + {g.text} // {r} * {n} + ({at}) // {c}{mask}))"
    if t.name == "mxfp8":
        return p.let(f"di_e4m3(tl.load({base} + {g.text} * {width} + ({at}){mask})) * {scale}", spans)
    code = f"tl.load({base} + {g.text} * {width // 2} + ({at}) // 2{mask})"
    return p.let(f"di_e2m1(({code} >> ((({at}) % 2) * 4).to(tl.uint8)) & 15) * {scale}", spans)


def _mask(masks: list[str]) -> str:
    return ", mask=" + " & ".join(dict.fromkeys(masks)) + ", other=0" if masks else ""


def _take(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    values, picked = o.args
    n = p.ops[values].dims[-1]
    at = p.value(picked, index)
    name = p.let(f"tl.maximum({at.text}, 0)", at.spans, "q").text
    return p.value(values, (p.named(name, n, at.spans, p.masks_of(*index)),))


# ---- selections ----------------------------------------------------------------------------------------------------
def _topk(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    source, k = p.ops[o.args[0]], o.get("k")
    n = source.dims[-1]
    (kv,) = p.canonical((k,), index[-1:])
    canonical: list[Ix] = [*index[:-1], kv]
    key = (i, tuple(canonical))
    if key not in p.memo:
        v = p.take(n, p.spans_of(*canonical))
        (a,) = p.spans_of(v)
        x = p.value(o.args[0], (*index[:-1], v))
        inside = (p.masks_of(v) or (f"{v} >= 0",))[0]
        keys = p.let(f"tl.where({inside}, di_rank({x.text}, {v}), -0x7FFFFFFFFFFFFFFF)", x.spans | {a}, "k")
        spans = (x.spans - {a}) | p.spans_of(kv)
        out = p.let(f"tl.full({p.axes.shape(spans)}, -1, tl.int64)", spans, "k")
        best = p.name("k")
        p.lines += [f"for {best}_i in range({k}):",
                    f"    {best} = tl.max({keys.text}, {a}, keep_dims=True)",
                    f"    {out.text} = tl.where({kv} == {best}_i, di_ranked({best}).to(tl.int64), {out.text})",
                    f"    {keys.text} = tl.where({keys.text} == {best}, -0x7FFFFFFFFFFFFFFF, {keys.text})"]
        p.memo[key] = _pinned(p, o, out, tuple(canonical))
    return p.select(p.memo[key], canonical, index)


def _pinned(p: Printer, o: TileOp, found: Block, index: Index) -> Block:
    pin = o.get("pin", -1)
    if not isinstance(pin, int) or pin < 0:
        return found
    at = Ix()
    for n, ix in enumerate(index):
        at = at + ix * product(o.dims[n + 1:])
    has = f"({p.signature.pin(pin, 'given')} != 0)"  # no block: the place of a row of one entry is none either
    if p.spans_of(at):
        has = f"(tl.zeros({p.axes.ones()}, tl.int32) + {has[1:]}"
    given = p.read(p.pointer(pin), at, "*i32", True, (has,))
    return p.let(f"tl.where({has}, {given.text}, {found.text})", found.spans | given.spans)


def _argmax(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    source = p.ops[o.args[0]]
    n = source.dims[-1]
    v = p.take(n if n <= 8192 else chunk_of(n), p.spans_of(*index))
    (a,) = p.spans_of(v)
    if n <= 8192:
        x = p.value(o.args[0], (*index, v))
        inside = (p.masks_of(v) or (f"{v} >= 0",))[0]
        keys = p.let(f"tl.where({inside}, di_rank({x.text}, {v}), -0x7FFFFFFFFFFFFFFF)", x.spans | {a})
        best = p.let(f"tl.max({keys.text}, {a}, keep_dims=True)", keys.spans - {a})
    else:
        best = _long_argmax(p, o, index, v, n)
    return p.let(f"tl.maximum(di_ranked({best.text}), 0).to(tl.int64)", best.spans)


def _long_argmax(p: Printer, o: TileOp, index: Index, v: Ix, n: int) -> Block:
    (a,) = p.spans_of(v)
    spans = p.spans_of(*index) | {a}
    total = p.let(f"tl.full({p.axes.shape(spans)}, -0x7FFFFFFFFFFFFFFF, tl.int64)", spans, "s")

    def add(ix: Ix) -> None:
        at = chunked(p, ix, v, n)
        x = p.value(o.args[0], (*index, at))
        text = f"di_rank({x.text}, {at})"
        if p.masks_of(at):
            text = f"tl.where({p.masks_of(at)[-1]}, {text}, -0x7FFFFFFFFFFFFFFF)"
        p.lines.append(f"{total.text} = tl.maximum({total.text}, {text})")

    p.loop(p.name("i"), -(-n // chunk_of(n)), add)
    return p.let(f"tl.max({total.text}, {a}, keep_dims=True)", spans - {a})


# ---- repetition ----------------------------------------------------------------------------------------------------
def _scan(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    body: TileProgram = o.get("body")
    canonical = p.canonical(o.dims, index)
    key = (i, tuple(canonical))
    if key not in p.memo:
        start = p.value(o.args[0], tuple(canonical))
        spans = p.spans_of(*canonical) | start.spans
        carry = p.let(f"{start.text} + tl.zeros({p.axes.shape(spans)}, tl.float32)", spans, "c")
        inner = p.child(cleaned(body, p.signature.spec.operands), f"{p.prefix}{i}_", sorted(p.spans_of(*canonical)))
        inner.carries = {"carry": lambda at: inner.select(carry, canonical, at)}
        for n, x in enumerate(o.args[1:]):
            inner.carries[f"c{n}"] = lambda at, x=x: p.value(x, at)  # type: ignore[misc]
        out = inner.value(len(inner.ops) - 1, tuple(canonical))
        p.lines += [f"for {carry.text}_i in range({o.get('trips')}):", *("    " + x for x in inner.lines),
                    f"    {carry.text} = {out.text}"]
        p.memo[key] = carry
    return p.select(p.memo[key], canonical, index)


# ---- state ---------------------------------------------------------------------------------------------------------
def view(p: Printer, operand: int, position: str) -> str:
    """Expression of the pointer to a ring state's record of a position (i64)."""
    s, op = p.signature, p.signature.operand(operand)
    seq = p.seq
    first = f"tl.load({s.state(operand, 'first')} + {seq}).to(tl.int64)"
    return (f"di_view({s.state(operand, 'base')}, {s.state(operand, 'stride')}, {s.state(operand, 'fresh')}, "
            f"{s.state(operand, 'has_fresh')}, {first}, tl.load({s.state(operand, 'from')} + {seq}), "
            f"tl.load({s.seq('slot')} + {seq}), {op.get('ring_rows')}, {op.get('record_bytes')}, {position})")


def _position(p: Printer) -> str:
    """The row's position as a block: masks made of it are blocks like the pointers that they go with."""
    return p.let(f"tl.load({p.signature.axis('pos')} + row) + tl.zeros({p.axes.ones()}, tl.int64)", NOTHING, "a").text


def _pool(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    operand, ratio, dim, overlap = o.get("operand"), o.get("ratio"), o.get("dim"), bool(o.get("overlap"))
    op = p.signature.operand(operand)
    if any(t.name != "f32" for t, _ in op.type.parts or ((op.type, 0),)):
        raise InternalError(f"a group tail holds f32 rows, not {op.type}")
    width, rows = (2 * dim, 2 * ratio) if overlap else (dim, ratio)
    spans, masks = p.spans_of(index[-1]), p.masks_of(index[-1])
    shape, pos = p.axes.shape(spans), _position(p)
    top = p.let(f'tl.full({shape}, float("-inf"), tl.float32)', spans, "s").text
    below, total = (p.let(f"tl.zeros({shape}, tl.float32)", spans, "s").text for _ in range(2))
    t = p.name("i")
    read = [f"    {t}_p = {pos} + {t} - {rows - ratio}",
            f"    {t}_r = {view(p, operand, f'tl.maximum({t}_p, 0)')}.to(tl.pointer_type(tl.float32))"]
    read[1] += f" + tl.where({t} >= {ratio}, {dim}, 0)" if overlap else ""
    inside = " & ".join([f"({t}_p >= 0)", *masks])
    gate = f"    {t}_g = tl.load({t}_r + {width} + ({index[-1]}), mask={inside}, other=float('-inf'))"
    value = f"    {t}_x = tl.load({t}_r + ({index[-1]}), mask={inside}, other=0.0)"
    p.lines += [f"for {t} in range({rows}):", *read, gate, f"    {top} = tl.maximum({top}, {t}_g)",
                f"for {t} in range({rows}):", *read, gate, value,
                f"    {t}_e = tl.where({inside}, tl.exp({t}_g - {top}), 0.0)", f"    {below} += {t}_e",
                f"    {total} += {t}_e * {t}_x"]
    return p.let(f"tl.div_rn({total}, {below})", spans)


def _previous(p: Printer, i: int, o: TileOp, index: Index) -> Block:
    operand, s = o.get("operand"), p.signature
    op = s.operand(operand)
    at = p.value(o.args[0], ())
    where = p.let(f"{at.text} + tl.full({p.axes.ones()}, -{o.get('back')}, tl.int64)", at.spans, "a").text
    valid = f"tl.maximum(tl.load({s.state(operand, 'valid')} + {p.seq}), {op.get('first_position', 0)})"
    ok = p.let(f"{where} >= {valid}", at.spans).text
    record = p.let(view(p, operand, f"tl.maximum({where}, 0)"), at.spans, "r").text
    return decoded(p, record, op.type, index[-1], Block(ok, at.spans))


def store_record(p: Printer, i: int, o: TileOp) -> None:
    """Encodes a row into the record of a state."""
    operand, (source,), s = o.get("operand"), o.args, p.signature
    op = s.operand(operand)
    ok = ""
    if op.get("kind") == "paged":
        ok = p.name("ok")
        pos = _position(p)
        blocks = f"{s.seq('blocks')} + {p.seq}.to(tl.int64) * {s.seq('width')}"
        p.lines.append(f"{ok} = {pos} >= tl.load({s.seq('floor')} + {p.seq})")
        ratio = op.get("ratio")
        record = p.let(f"di_entry({s.state(operand, 'base')}, {s.state(operand, 'stride')}, {blocks}, "
                       f"{s.step('block_tokens')}, {ratio}, {op.get('record_bytes')}, {pos} // {ratio}, {ok})",
                       NOTHING, "r").text
    else:
        record = p.let(f"{s.state(operand, 'fresh')} + row * {op.get('record_bytes')}", NOTHING, "r").text
    for part in record_parts(op.type):
        _store_part(p, source, part, record, ok)


def _store_part(p: Printer, source: int, part: Part, record: str, ok: str) -> None:
    dims = p.ops[source].dims

    def read(at: Ix) -> Block:
        x = p.value(source, tuple(p.space.split(at, dims)))
        spans = p.spans_of(at)
        return x if spans <= x.spans else p.let(f"{x.text} + tl.zeros({p.axes.shape(spans)}, tl.float32)", spans)

    t = part.dtype
    if not t.is_block:
        v = p.take(part.count, NOTHING)
        x = read(v + part.first)
        kind = {"f32": "tl.float32", "bf16": "tl.bfloat16"}[t.name]
        place = f"({record} + {part.codes}).to(tl.pointer_type({kind})) + {v}"
        p.lines.append(f"tl.store({place}, ({x.text}).to({kind}){_masked(ok, p.masks_of(v))})")
        return
    halves = 1 if t.name == "mxfp8" else 2
    v = p.take(part.count // halves, NOTHING)
    (a,) = p.spans_of(v)
    xs = [read(v * halves + (part.first + h)) for h in range(halves)]
    group = t.block[1] // halves
    whole, split = _split_shape(p, xs[0], a, group)
    top = " , ".join(f"tl.abs({x.text})" for x in xs)
    top = f"tl.maximum({top})" if halves == 2 else top
    both = p.name("b")
    p.lines.append(f'{both}, {both}_s = di_scale(tl.max(tl.reshape({top}, {split}), {a + 1}, keep_dims=True), '
                   f'"{t.name}")')
    scale = p.let(f"tl.reshape(tl.broadcast_to({both}_s, {split}), {whole})", frozenset((a,))).text
    byte = p.let(f"tl.reshape(tl.broadcast_to({both}, {split}), {whole})", frozenset((a,))).text
    codes = [p.let(f'di_code({x.text}, {scale}, "{t.name}")', frozenset((a,))).text for x in xs]
    packed = codes[0] if halves == 1 else f"({codes[0]} | ({codes[1]} << 4))"
    p.lines.append(f"tl.store({record} + {part.codes} + {v}, {packed}.to(tl.uint8){_masked(ok, p.masks_of(v))})")
    first = _masked(ok, (*p.masks_of(v), f"({v} % {group} == 0)"))
    p.lines.append(f"tl.store({record} + {part.scales} + {v} // {group}, {byte}.to(tl.uint8){first})")


def _masked(ok: str, masks: tuple[str, ...]) -> str:
    kept = [m for m in (ok, *masks) if m]
    return f", mask={' & '.join(kept)}" if kept else ""


TABLE: dict[str, Emit] = {
    "reduce": _reduce, "encode": _encode, "pair_rotate": _pair_rotate, "concat": _concat, "gather": _gather,
    "take": _take, "topk": _topk, "argmax": _argmax, "scan": _scan, "pool": _pool, "previous": _previous,
}
