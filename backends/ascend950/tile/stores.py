"""What a tile program writes: rows of values, and records of states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.backends.ascend950.signature import BYTES, C_TYPES
from deepinfer.backends.ascend950.tile import pieces, spill
from deepinfer.backends.ascend950.tile.function import FORMATS, Array
from deepinfer.backends.cpu.storage import Part, record_parts
from deepinfer.backends.cpu.tile.index import linear, refined
from deepinfer.backends.cpu.tile.program import size
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.errors import InternalError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.tile.printer import Printer

def store(p: Printer, o: TileOp) -> None:
    s, operand, (source,) = p.signature, o.get("operand"), o.args
    op = s.operand(operand)
    element = s.element(operand)
    target = f"{s.value(operand)} + ({s.row_of(op.rows)}) * {s.elements(operand)}"
    if p.part:
        target += f" + part * {size(o)}"
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
    parts = pieces.splits(p, o) if p.pieces else None
    if parts:
        pieces.split(p, o, parts)
        return
    if p.pieces and size(o) >= pieces.LEAST and not p.part:
        joined, to = p.ops[source], spill.Far(target, C_TYPES[element])
        if p.spills:
            spill.stored(p, source, o.dims, to)
        elif joined.op == "concat" and source in p.kept and joined.get("dim") < len(joined.dims) - 1:
            _joined(p, joined, to)
        else:
            pieces.written(p, source, o.dims, to)
        return
    out = Array(p.fixed("out", nbytes, 2), "float" if element == "*f32" else "uint16_t")
    extents = refined(o.dims, p.shapes_below(source)) or [1]
    if out.kind == "uint16_t" and extents[-1] % 16 and len(extents) > 1:
        array = p.floats(source)
        narrow = p.at(out.buffer, "uint16_t")
        p.say(f"asc_vf_call<di_narrow<uint16_t>>({p.at(array.buffer, 'float')}, {narrow}, {size(o)});")
    else:
        p.fill(source, o.dims, out, lambda index: linear(o.dims, index))
    p.stores.append(f"di_out({target}, {p.at(out.buffer, 'uint8_t')}, {nbytes});")


def _joined(p: Printer, joined: TileOp, to: spill.Far) -> None:
    """Long rows one behind the other, each written by itself."""
    start, d = 0, joined.get("dim")
    if any(n != 1 for n in joined.dims[:d]):
        raise InternalError(f"{p.signature.spec.title}: long rows are joined along dim {d}")
    for x in joined.args:
        pieces.written(p, x, p.ops[x].dims, spill.Far(f"{to.pointer} + {start}", to.kind))
        start += size(p.ops[x])


def store_record(p: Printer, o: TileOp) -> None:
    """Encodes a row into the record of a state."""
    s, operand = p.signature, o.get("operand")
    op = s.operand(operand)
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
    parts = record_parts(op.type)
    if p.spills and len(parts) == 1 and not parts[0].dtype.is_block and size(o) >= pieces.LEAST:
        kind = C_TYPES["*" + parts[0].dtype.name]
        for line in (condition, f"__gm__ {kind}* {name} = (__gm__ {kind}*)({record});"):
            p.say(line)
        pieces.written(p, o.args[0], o.dims, spill.Far(name, kind))
        p.say("}")
        return
    x, copies = p.floats(o.args[0]), list[str]()
    for part in parts:
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
