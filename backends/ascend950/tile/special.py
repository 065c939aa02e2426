"""Ops that are more than arithmetic on elements: reductions, formats, rotations, lookups, selections, state rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.backends.ascend950.signature import BYTES
from deepinfer.backends.ascend950.target import LANES
from deepinfer.backends.ascend950.tile import pieces
from deepinfer.backends.ascend950.tile.function import FORMATS, LANE, Array, c_float, joined
from deepinfer.backends.cpu.storage import Part, record_parts
from deepinfer.backends.cpu.tile.index import Ix, linear, refined
from deepinfer.backends.cpu.tile.program import size
from deepinfer.backends.cpu.tile.scalar import literal
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.tile.printer import Printer

Make = Callable[["Printer", int, TileOp], Array]
DYNAMIC = 5  # lock of rows that are fetched in the middle of a program


# ---- reductions ----------------------------------------------------------------------------------------------------
def _reduce(p: Printer, i: int, o: TileOp) -> Array:
    source, how = p.ops[o.args[0]], o.get("how")
    reduced = [d for d in o.get("dims") if source.dims[d] > 1]
    kept = [d for d, n in enumerate(source.dims) if n > 1 and d not in reduced]
    out = Array(p.temporary("reduce", size(o) * 4))
    count = int(np.prod([source.dims[d] for d in reduced], dtype=np.int64))
    across = not kept or max(reduced) > max(kept)  # the lanes are reduced as well
    if pieces.needed(p, o.args[0]):
        return pieces.reduce(p, o, reduced, kept, out)
    f = p.function()
    index: list[Ix] = [Ix()] * len(source.dims)
    outer: list[tuple[str, int]] = []
    inner: list[tuple[str, int]] = []
    if not kept:
        extents = refined(source.dims, p.shapes_below(o.args[0]))
        index = list(p.nest(f, extents, source.dims))
        inner, lanes = [(f"i{n}", e) for n, e in enumerate(extents[:-1])], extents[-1]
    else:
        last = max(*reduced, *kept)
        lanes = source.dims[last]
        for d in (*kept, *reduced):
            name = LANE if d == last else f"i{d}"
            f.space.extents[name] = source.dims[d]
            index[d] = Ix.var(name)
            if d != last:
                (outer if d in kept else inner).append((name, source.dims[d]))
    at = linear(o.dims, tuple(Ix() if d in reduced else ix for d, ix in enumerate(index)))
    neutral = "-INFINITY" if how == "max" else "0.0f"
    x = f.value(o.args[0], tuple(index))
    fold = ["vector_float x;", f"asc_select(x, {x}, none, m);", "asc_max(total, total, x, all);"] if how == "max" else [
        f"asc_add(total, total, {x}, all);"]
    share = [f"asc_mul_scalar(total, total, {c_float(literal(1.0 / count, False))}, all);"] if how == "mean" else []
    begin = ["vector_bool all = di_all();", "vector_float total, none;",
             f"asc_duplicate_scalar(none, {neutral}, all);", f"asc_duplicate_scalar(total, {neutral}, all);"]
    pointer = f.pointer(out)
    head = [f"for (uint16_t {name} = 0; {name} < {n}; ++{name}) {{" for name, n in inner]
    tail = ["}"] * len(inner)
    masked = "vector_bool m = asc_update_mask_b32(left);"
    vectors = f"for (uint16_t c = 0; c < {-(-lanes // 64)}; ++c) {{"
    if across:
        op = "asc_reduce_max" if how == "max" else "asc_reduce_sum"
        body = [*begin, *head, f"uint32_t left = {lanes};", vectors, masked, *f.lines, *fold, "}", *tail,
                f"{op}(total, total, all);", *share, f"asc_storealign_1st({pointer} + ({at}), total);"]
    else:
        f_lines, f.lines = f.lines, []
        f.write(out, at, "total")
        body = [f"uint32_t left = {lanes};", vectors, masked, *begin, *head, *f_lines, *fold, *tail, *share, *f.lines,
                "}"]
    for name, n in reversed(outer):
        body = [f"for (uint16_t {name} = 0; {name} < {n}; ++{name}) {{", *body, "}"]
    f.lines = body
    p.call(f)
    return out


# ---- formats -------------------------------------------------------------------------------------------------------
def _encode(p: Printer, i: int, o: TileOp) -> Array:
    t = DType.parse(o.get("dtype"))
    x = p.floats(o.args[0])
    parts = t.parts or ((t, o.dims[-1]),)
    alone = p.pieces and p.analysis.readers[o.args[0]] == [i] and x.buffer.last < (1 << 30) and o.args[0] in p.arrays
    apart = any(part.is_block and part.block[1] > LANES for part, _ in parts)  # such groups are read twice
    out = x if alone and not apart else Array(p.temporary("encode", size(o) * 4))
    rows = size(o) // o.dims[-1] if len(parts) > 1 else 1
    for row in range(rows):
        first = row * o.dims[-1]
        for part, n in parts:
            n = n if len(parts) > 1 else size(o)
            a, b = p.at(x.buffer, "float", first), p.at(out.buffer, "float", first)
            if first % 8:
                raise InternalError(f"a part of {t} begins at feature {first}")
            if part.is_block:
                p.say(f"asc_vf_call<di_quantise>({FORMATS[part.name]}, {a}, {b}, {n}, {part.block[1]});")
            else:
                p.say(f"asc_vf_call<{'di_round_array' if part.name == 'bf16' else 'di_copy'}>({a}, {b}, {n});")
            first += n
    return out


def decode(p: Printer, part: Part, codes: str, scales: str, words: str, out: str) -> list[str]:
    """Statements that decode a part of a record; ``words``: room for its scales in f32."""
    t, n = part.dtype, part.count
    if not t.is_block:
        return [f"asc_vf_call<{'di_widen' if t.name == 'bf16' else 'di_copy'}>({codes}, {out}, {n});"]
    group = t.block[1]
    call = "di_decode8" if t.name == "mxfp8" else "di_decode4"
    return [f"asc_vf_call<di_decode_scales>({FORMATS[t.name]}, {scales}, {words}, {n // group});",
            f"asc_vf_call<{call}>({codes}, {words}, {out}, {n}, {group.bit_length() - 1});"]


def fetched(p: Printer, copies: list[str], work: list[str]) -> list[str]:
    """Copies into rooms of their own, and the work on them."""
    return [f"asc_lock(PIPE_MTE2, {DYNAMIC});", *copies, f"asc_unlock(PIPE_MTE2, {DYNAMIC});",
            f"asc_lock(PIPE_V, {DYNAMIC});", *work, f"asc_unlock(PIPE_V, {DYNAMIC});"]


def record(p: Printer, pointer: str, op_type: DType, out: Array, at: int = 0) -> tuple[list[str], list[str]]:
    """Copies and work that decode the record at ``pointer`` into ``out``."""
    copies, work = [], []
    for part in record_parts(op_type):
        t = part.dtype
        kind = {"f32": "float", "bf16": "uint16_t"}.get(t.name, "uint8_t")
        codes = p.fixed("codes", t.data_bytes(part.count))
        copies.append(f"di_in({p.at(codes, 'uint8_t')}, {pointer} + {part.codes}, {t.data_bytes(part.count)});")
        scales = words = ""
        if t.is_block:
            n = t.scale_bytes(part.count)
            s = p.fixed("scales", n)
            copies.append(f"di_in({p.at(s, 'uint8_t')}, {pointer} + {part.scales}, {n});")
            scales, words = p.at(s, "uint8_t"), p.at(p.temporary("words", n * 4), "float")
        work += decode(p, part, p.at(codes, kind), scales, words, p.at(out.buffer, "float", at + part.first))
    return copies, work


# ---- rotations, joins, lookups -------------------------------------------------------------------------------------
def _pair_rotate(p: Printer, i: int, o: TileOp) -> Array:
    x, cos, sin = (p.floats(a) for a in o.args)
    n, width = size(p.ops[o.args[1]]), o.dims[-1]
    call = "di_rotate" if width % 8 == 0 and n % 4 == 0 else "di_rotate_steps"
    out = Array(p.temporary("turned", size(o) * 4))
    at = [p.at(a.buffer, "float") for a in (x, cos, sin, out)]
    sign = "-1.0f" if o.get("inverse") else "1.0f"
    p.say(f"asc_vf_call<{call}>({', '.join(at)}, {size(o) // width}, {width}, {n}, {sign});")
    return out


def _concat(p: Printer, i: int, o: TileOp) -> Array:
    out, d, start = Array(p.temporary("concat", size(o) * 4)), o.get("dim"), 0
    for x in o.args:
        dims = p.ops[x].dims

        def place(index: tuple[Ix, ...], start: int = start) -> Ix:
            return linear(o.dims, (*index[:d], index[d] + start, *index[d + 1:]))

        f = p.function()
        extents = list(dims)
        names = [*(f"i{n}" for n in range(len(extents) - 1)), LANE]
        f.space.extents.update(zip(names, extents, strict=True))
        index = tuple(Ix.var(name) if n > 1 else Ix() for name, n in zip(names, extents, strict=True))
        f.write(out, place(index), f.value(x, index))
        from deepinfer.backends.ascend950.tile.printer import looped

        f.lines = looped(extents, f.lines)
        p.call(f)
        start += dims[d]
    return out


def _gather(p: Printer, i: int, o: TileOp) -> Array:
    table, s = p.signature.operand(o.get("operand")), p.signature
    picked = p.integers.elements(o.args[0])
    width = size(o) // len(picked)
    base, t = s.param(o.get("operand")), table.type
    if not t.is_block:
        kind = "float" if t.name == "f32" else "uint16_t"
        nbytes = width * BYTES[s.element(o.get("operand"))]
        if nbytes % 32 and len(picked) > 1:
            raise InternalError(f"rows of {nbytes} bytes are looked up side by side")
        out = Array(p.fixed("rows", nbytes * len(picked), 1), kind)
        copies = [f"di_in({p.at(out.buffer, 'uint8_t', n * nbytes)}, {base} + {g} * {width}, {nbytes});"
                  for n, g in enumerate(picked)]
        wide = Array(p.temporary("looked", size(o) * 4))
        call = "di_copy" if kind == "float" else "di_widen"
        work = [f"asc_vf_call<{call}>({p.at(out.buffer, kind)}, {p.at(wide.buffer, 'float')}, {size(o)});"]
        for line in fetched(p, copies, work):
            p.say(line)
        return wide
    out = Array(p.temporary("looked", size(o) * 4))
    r, c = t.block
    scales, groups = s.param(o.get("operand"), "scale"), -(-width // c)
    nbytes = t.data_bytes(width)
    copies, work = [], []
    for n, g in enumerate(picked):
        codes, bytes_ = p.fixed("codes", nbytes), p.fixed("scales", groups)
        words = p.temporary("words", groups * 4)
        copies += [f"di_in({p.at(codes, 'uint8_t')}, {base} + {g} * {nbytes}, {nbytes});",
                   f"di_in({p.at(bytes_, 'uint8_t')}, {scales} + {g} / {r} * {groups}, {groups});"]
        work += decode(p, Part(t, 0, width, 0, 0), p.at(codes, "uint8_t"), p.at(bytes_, "uint8_t"),
                       p.at(words, "float"), p.at(out.buffer, "float", n * width))
    for line in fetched(p, copies, work):
        p.say(line)
    return out


def _put(p: Printer, names: list[str]) -> Array:
    """Integers as an array, written by the scalar unit."""
    out = Array(p.fixed("integers", 4 * len(names)), "int32_t")
    p.say("di_vector_to_scalar();")
    for n, name in enumerate(names):
        p.say(f"di_ub_store({p.at(out.buffer, 'int32_t', n)}, (int32_t)({name} < 0 ? 0 : {name}));")
    p.say("di_scalar_to_vector();")
    return out


def _take(p: Printer, i: int, o: TileOp) -> Array:
    values, picked = p.floats(o.args[0]), p.integers.elements(o.args[1])
    at = _put(p, picked)
    out = Array(p.temporary("taken", size(o) * 4))
    p.say(f"asc_vf_call<di_take>({p.at(values.buffer, 'float')}, {p.at(at.buffer, 'int32_t')}, "
          f"{p.at(out.buffer, 'float')}, {len(picked)});")
    return out


def _to_float(p: Printer, i: int, o: TileOp) -> Array:
    names = p.integers.elements(o.args[0])
    out = Array(p.fixed("numbers", 4 * len(names)))
    p.say("di_vector_to_scalar();")
    for n, name in enumerate(names):
        p.say(f"di_ub_store({p.at(out.buffer, 'float', n)}, (float)({name}));")
    p.say("di_scalar_to_vector();")
    return out


# ---- selections and integers from memory ---------------------------------------------------------------------------
def integers(p: Printer, i: int, o: TileOp) -> list[str]:
    """Names of the elements of an integer op that is no arithmetic."""
    if o.op == "load":
        return _loaded(p, i, o)
    if o.op == "gather":
        return _named(p, i, _looked_up(p, o))
    if o.op == "take":
        values = p.integers.elements(o.args[0])
        if len(values) > 64:
            raise InternalError("integers are taken out of more than 64")
        picked, names = p.integers.elements(o.args[1]), []
        for k in picked:
            text = values[0]
            for n, v in enumerate(values[1:], 1):
                text = f"({k} == {n} ? {v} : {text})"
            names.append(text)
        return _named(p, i, names)
    if o.op in ("topk", "argmax"):
        return _topk(p, i, o)
    raise InternalError(f"the AscendC printer makes no integers by {o.op}")


def _named(p: Printer, i: int, texts: list[str]) -> list[str]:
    names = [f"{p.prefix}{i}_{k}" for k in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        p.say(f"const int64_t {name} = {text};")
    return names


def _loaded(p: Printer, i: int, o: TileOp) -> list[str]:
    s, operand = p.signature, o.get("operand")
    op = s.operand(operand)
    if op.role == "param":
        return _named(p, i, [f"di_gm_load({s.param(operand)} + {k})" for k in range(size(o))])
    if op.role == "input":
        name = op.get("name")
        width: int | str = 1
        if name == "positions":
            base = s.axis("pos") if op.rows == s.spec.rows else s.axis_of(op.rows, "pos")
        else:
            base = s.input(name)
            width = s.step("lookback_width") if name == "lookback" else 1
    else:
        base, width = s.value(operand), s.elements(operand)
    row = f"({s.row_of(op.rows)}) * {width}"
    return _named(p, i, [f"di_gm_load({base} + {row} + {k})" for k in range(size(o))])


def _looked_up(p: Printer, o: TileOp) -> list[str]:
    base = p.signature.param(o.get("operand"))
    picked = p.integers.elements(o.args[0])
    width = size(o) // len(picked)
    return [f"di_gm_load({base} + {g} * {width} + {k})" for g in picked for k in range(width)]


def _topk(p: Printer, i: int, o: TileOp) -> list[str]:
    source = p.ops[o.args[0]]
    k, n = (o.get("k") if o.op == "topk" else 1), source.dims[-1]
    lead = size(source) // n
    if p.pieces and n > 8192:
        return pieces.best(p, i, o, k, lead)
    work = Array(p.temporary("work", size(source) * 4))
    p.fill(o.args[0], source.dims, work, lambda index: linear(source.dims, index))
    out = p.fixed("picked", 4 * k * lead)
    room = Array(p.temporary("one", n * 4)) if lead > 1 and n % 8 else None
    if room is not None:
        raise InternalError(f"rows of {n} scores are selected side by side")
    for row in range(lead):
        to = p.at(out, "int32_t", row * k)
        p.say(f"asc_vf_call<di_topk>({p.at(work.buffer, 'float', row * n)}, {to}, {n}, {k});")
    p.say("di_vector_to_scalar();")
    texts = [f"(int64_t)di_ub_load({p.at(out, 'int32_t', j)})" for j in range(k * lead)]
    pin = o.get("pin", -1) if o.op == "topk" else -1
    if isinstance(pin, int) and pin >= 0:
        s, op = p.signature, p.signature.operand(pin)
        at = f"({s.row_of(op.rows)}) * {op.size}"
        texts = [f"{s.pin(pin, 'given')} ? (int64_t)di_gm_load({s.pin(pin)} + {at} + {j}) : {t}"
                 for j, t in enumerate(texts)]
    if o.op == "argmax":
        texts = [f"di_max64({t}, 0)" for t in texts]
    names = _named(p, i, texts)
    p.say("di_scalar_to_vector();")
    return names


# ---- repetition ----------------------------------------------------------------------------------------------------
def _scan(p: Printer, i: int, o: TileOp) -> Array:
    start = p.floats(o.args[0])
    n = size(o)
    carry = Array(p.temporary("carry", n * 4))
    p.say(f"asc_vf_call<di_copy>({p.at(start.buffer, 'float')}, {p.at(carry.buffer, 'float')}, {n});")
    captured = {f"c{k}": p.floats(x) for k, x in enumerate(o.args[1:])}
    inner = p.child(o.get("body"), f"{p.prefix}{i}_")
    inner.carries = {"carry": carry, **captured}
    first = p.step
    out = inner.floats(len(inner.ops) - 1)
    inner.say(f"asc_vf_call<di_copy>({p.at(out.buffer, 'float')}, {p.at(carry.buffer, 'float')}, {n});")
    p.step = inner.step + 1
    p.outlive(inner.lines, first)
    p.lines += [f"for (uint16_t {p.prefix}{i} = 0; {p.prefix}{i} < {o.get('trips')}; ++{p.prefix}{i}) {{",
                *("    " + x for x in inner.lines), "}"]
    return carry


# ---- state ---------------------------------------------------------------------------------------------------------
def view(p: Printer, operand: int, position: str) -> str:
    """Expression of the pointer to a ring state's record of a position."""
    s, op = p.signature, p.signature.operand(operand)
    return (f"di_view({s.state(operand, 'base')}, {s.state(operand, 'stride')}, {s.state(operand, 'fresh')}, "
            f"{s.state(operand, 'has_fresh')}, di_gm_load({s.state(operand, 'first')} + seq), "
            f"di_gm_load({s.state(operand, 'from')} + seq), di_gm_load({s.seq('slot')} + seq), "
            f"{op.get('ring_rows')}, {op.get('record_bytes')}, {position})")


def _pool(p: Printer, i: int, o: TileOp) -> Array:
    operand, ratio, dim, overlap = o.get("operand"), o.get("ratio"), o.get("dim"), bool(o.get("overlap"))
    op = p.signature.operand(operand)
    if any(t.name != "f32" for t, _ in op.type.parts or ((op.type, 0),)):
        raise InternalError(f"a group tail holds f32 rows, not {op.type}")
    width, rows = (2 * dim, 2 * ratio) if overlap else (dim, ratio)
    values, gates = p.fixed("values", 4 * dim), p.fixed("gates", 4 * dim)
    top, below, total, out = (Array(p.temporary("pool", 4 * dim)) for _ in range(4))
    v, g, t, b, s, y = (p.at(x, "float") for x in (values, gates, top.buffer, below.buffer, total.buffer, out.buffer))
    name = f"{p.prefix}{i}"
    pos = f"di_gm_load({p.signature.axis('pos')} + row)"
    later = f" + ({name} >= {ratio} ? {4 * dim} : 0)" if overlap else ""
    head = [f"const int64_t {name}_p = {pos} + {name} - {rows - ratio};", f"if ({name}_p < 0) continue;",
            f"__gm__ uint8_t* {name}_r = {view(p, operand, name + '_p')}{later};"]
    gate = f"di_in({p.at(gates, 'uint8_t')}, {name}_r + {4 * width}, {4 * dim});"
    value = f"di_in({p.at(values, 'uint8_t')}, {name}_r, {4 * dim});"
    for copies, work in (([gate], [f"asc_vf_call<di_pool_top>({g}, {t}, {dim}, {name}_first);"]),
                         ([gate, value], [f"asc_vf_call<di_pool_add>({v}, {g}, {t}, {b}, {s}, {dim}, {name}_first);"])):
        p.say("{")
        p.say(f"int32_t {name}_first = 1;")
        p.say(f"for (int32_t {name} = 0; {name} < {rows}; ++{name}) {{")
        for line in [*head, *fetched(p, copies, work), f"{name}_first = 0;"]:
            p.say("    " + line)
        p.say("}")
        p.say("}")
    p.say(f"asc_vf_call<di_quotient>({s}, {b}, {y}, {dim});")
    return out


def previous_record(p: Printer, i: int, o: TileOp) -> tuple[str, str, str]:
    """A row of a state that came before: the statement of its position, whether there is one, and its pointer."""
    operand, s = o.get("operand"), p.signature
    first, name = s.operand(operand).get("first_position", 0), f"{p.prefix}{i}_p"
    return (f"const int64_t {name} = {p.integers.elements(o.args[0])[0]} - {o.get('back')};",
            f"{name} >= di_max64(di_gm_load({s.state(operand, 'valid')} + seq), {first})", view(p, operand, name))


def _previous(p: Printer, i: int, o: TileOp) -> Array:
    name, op = f"{p.prefix}{i}_r", p.signature.operand(o.get("operand"))
    out = Array(p.temporary("previous", 4 * size(o)))
    position, known, place = previous_record(p, i, o)
    for line in (position, f"if ({known}) {{", f"    __gm__ uint8_t* {name} = {place};"):
        p.say(line)
    for line in fetched(p, *record(p, name, op.type, out)):
        p.say("    " + line)
    p.say("} else {")
    p.say(f"    asc_vf_call<di_fill_array>({p.at(out.buffer, 'float')}, 0.0f, {size(o)});")
    p.say("}")
    return out


TABLE: dict[str, Make] = {
    "reduce": _reduce, "encode": _encode, "pair_rotate": _pair_rotate, "concat": _concat, "gather": _gather,
    "take": _take, "scan": _scan, "pool": _pool, "previous": _previous, "to_float": _to_float,
}

__all__ = ["TABLE", "fetched", "integers", "joined", "record", "view"]
