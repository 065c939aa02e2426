"""What a tile program writes: rows of values, and records of states."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from deepinfer.backends.ascend950.signature import BYTES, C_TYPES
from deepinfer.backends.ascend950.tile.function import LANE, Array, Function, Index
from deepinfer.backends.ascend950.tile.special import FORMATS
from deepinfer.backends.cpu.storage import Part, record_parts
from deepinfer.backends.cpu.tile.index import Ix, linear, refined
from deepinfer.backends.cpu.tile.program import size
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.errors import InternalError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.tile.printer import Printer

PIECE = 4096  # elements of a long row that are worked on at once
PIECE_IN, PIECE_OUT = 6, 7  # locks of the pieces


def store(p: Printer, o: TileOp) -> None:
    s, operand, (source,) = p.signature, o.get("operand"), o.args
    op = s.operand(operand)
    element = s.element(operand)
    target = f"{s.value(operand)} + ({s.row_of(op.rows)}) * {s.elements(operand)}"
    nbytes = size(o) * BYTES[element]
    if p.integers.has(source):
        names = p.integers.elements(source)
        b = p.fixed("out", nbytes, 2)
        kind = C_TYPES[element]
        p.say("di_copies_to_scalar();")
        for n, name in enumerate(names):
            p.say(f"di_ub_store({p.at(b, kind, n)}, ({kind}){name});")
        p.say("di_scalar_to_copies();")
        p.stores.append(f"di_out({target}, {p.at(b, 'uint8_t')}, {nbytes});")
        return
    if size(o) > LONG_ROW:
        _pieces(p, o, target, element)
        return
    out = Array(p.fixed("out", nbytes, 2), "float" if element == "*f32" else "uint16_t")
    extents = refined(o.dims, p.shapes_below(source)) or [1]
    if out.kind == "uint16_t" and extents[-1] % 16 and len(extents) > 1:
        array = p.floats(source)
        to = p.at(out.buffer, "uint16_t")
        p.say(f"asc_vf_call<di_narrow<uint16_t>>({p.at(array.buffer, 'float')}, {to}, {size(o)});")
    else:
        p.fill(source, o.dims, out, lambda index: linear(o.dims, index))
    p.stores.append(f"di_out({target}, {p.at(out.buffer, 'uint8_t')}, {nbytes});")


LONG_ROW = 8192


def _pieces(p: Printer, o: TileOp, target: str, element: str) -> None:
    """A long row, a piece after the other."""
    out = Array(p.fixed("piece", 4 * PIECE, 2), "float" if element == "*f32" else "uint16_t")
    n = o.dims[-1]
    for lead in product(*(range(d) for d in o.dims[:-1])):
        f = p.function()
        f.space.extents[LANE] = PIECE
        f.space.extents["at"] = n
        rooms: dict[str, tuple[Array, str]] = {}
        f.leaf = lambda g, i, index, rooms=rooms: _piece(p, rooms, g, i, index)  # type: ignore[misc]
        index = (*(Ix((), k) for k in lead), Ix.var(LANE) + Ix.var("at"))
        value = f.value(o.args[0], index)
        f.write(out, Ix.var(LANE), value)
        count = f.argument("n", "uint32_t")
        f.lines = [f"uint32_t left = {count};", f"const uint16_t chunks = ({count} + 63) / 64;",
                   "for (uint16_t c = 0; c < chunks; ++c) {", "    vector_bool m = asc_update_mask_b32(left);",
                   *("    " + x for x in f.lines), "}"]
        p.functions.append("\n".join(f.text()))
        first = int(linear(o.dims, tuple(Ix((), k) for k in (*lead, 0))).const)
        p.say(f"for (int64_t at = 0; at < {n}; at += {PIECE}) {{")
        for line in (f"const uint32_t n = (uint32_t)di_min64({PIECE}, {n} - at);", f"asc_lock(PIPE_MTE2, {PIECE_IN});",
                     *(copy for _, copy in rooms.values()), f"asc_unlock(PIPE_MTE2, {PIECE_IN});",
                     f"asc_lock(PIPE_V, {PIECE_IN});", f"asc_lock(PIPE_V, {PIECE_OUT});", f.call(),
                     f"asc_unlock(PIPE_V, {PIECE_OUT});", f"asc_unlock(PIPE_V, {PIECE_IN});",
                     f"asc_lock(PIPE_MTE3, {PIECE_OUT});",
                     f"di_out({target} + {first} + at, {p.at(out.buffer, 'uint8_t')}, n * {BYTES[element]});",
                     f"asc_unlock(PIPE_MTE3, {PIECE_OUT});"):
            p.say("    " + line)
        p.say("}")


def _piece(p: Printer, rooms: dict[str, tuple[Array, str]], f: Function, i: int, index: Index) -> str | None:
    o = p.ops[i]
    if o.op == "concat":
        at = index[o.get("dim")]
        if at.terms:
            raise InternalError("a long row is joined along its features")
        first = at.const
        for x in o.args:
            n = p.ops[x].dims[o.get("dim")]
            if first < n:
                d = o.get("dim")
                return f.value(x, (*index[:d], Ix((), first), *index[d + 1:]))
            first -= n
    if o.op != "load" or size(o) <= LONG_ROW:
        melts = i in p.kept and size(o) > LONG_ROW and o.op != "reduce"
        return None if melts else p.leaf(f, i, index)
    at = linear(o.dims, index)
    terms = dict(at.terms)
    if terms.get(LANE) != 1 or terms.get("at") != 1 or len(terms) != 2:
        raise InternalError(f"a long row is read at {at}")
    s, operand = p.signature, o.get("operand")
    op, element = s.operand(operand), s.element(operand)
    key = f"{operand} {at}"
    if key not in rooms:
        room = Array(p.fixed("piece", 4 * PIECE, 1), "float" if element == "*f32" else "uint16_t")
        row = s.param(operand) if op.role == "param" else (
            f"{s.value(operand)} + ({s.row_of(op.rows)}) * {s.elements(operand)}")
        rooms[key] = room, (f"di_in({p.at(room.buffer, 'uint8_t')}, {row} + {at.const} + at, n * {BYTES[element]});")
    return f.read(rooms[key][0], Ix.var(LANE))


def store_record(p: Printer, o: TileOp) -> None:
    """Encodes a row into the record of a state."""
    s, operand = p.signature, o.get("operand")
    op = s.operand(operand)
    x = p.floats(o.args[0])
    copies: list[str] = []
    name = f"record{operand}"
    if op.get("kind") == "paged":
        ratio = op.get("ratio")
        blocks = f"{s.seq('blocks')} + seq * {s.seq('width')}"
        pos = f"di_gm_load({s.axis('pos')} + row)"
        record = (f"di_entry({s.state(operand, 'base')}, {s.state(operand, 'stride')}, {blocks}, "
                  f"{s.step('block_tokens')}, {ratio}, {op.get('record_bytes')}, {pos} / {ratio})")
        condition = f"if ({pos} >= di_gm_load({s.seq('floor')} + seq)) {{"
    else:
        record, condition = f"{s.state(operand, 'fresh')} + row * {op.get('record_bytes')}", "{"
    for part in record_parts(op.type):
        copies += _part(p, x, part, name)
    p.stores += [condition, f"    __gm__ uint8_t* {name} = {record};", *("    " + c for c in copies), "}"]


def _part(p: Printer, x: Array, part: Part, name: str) -> list[str]:
    """Work on a part of a record; returns its copies out."""
    t, n = part.dtype, part.count
    nbytes = t.data_bytes(n)
    if part.first % 8:
        raise InternalError(f"a part of a record begins at feature {part.first}")
    source = p.at(x.buffer, "float", part.first)
    codes = p.fixed("codes", nbytes, 2)
    copies = [f"di_out({name} + {part.codes}, {p.at(codes, 'uint8_t')}, {nbytes});"]
    if not t.is_block:
        kind = "uint16_t" if t.name == "bf16" else "float"
        p.say(f"asc_vf_call<di_narrow<{kind}>>({source}, {p.at(codes, kind)}, {n});")
        return copies
    count = t.scale_bytes(n)
    words, scales = p.temporary("words", 4 * count), p.fixed("scales", count, 2)
    call = "di_encode8" if t.name == "mxfp8" else "di_encode4"
    p.say(f"asc_vf_call<{call}>({FORMATS[t.name]}, {source}, {p.at(codes, 'uint8_t')}, {p.at(words, 'uint32_t')}, {n}, "
          f"{t.block[1]});")
    p.say(f"asc_vf_call<di_pack_bytes>({p.at(words, 'uint32_t')}, {p.at(scales, 'uint8_t')}, {count});")
    return [*copies, f"di_out({name} + {part.scales}, {p.at(scales, 'uint8_t')}, {count});"]
