"""Where keys lie and how blocks of them are read, for attention and for index scores."""

from __future__ import annotations

from deepinfer.backends.cpu.storage import Part, record_parts, stored
from deepinfer.backends.cpu.tile.index import Ix
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.tile.axes import NOTHING, Axes, power_of_two
from deepinfer.backends.cuda_sm100.tile.printer import Block, Printer
from deepinfer.backends.cuda_sm100.tile.special import decoded
from deepinfer.codegen.kernels.spec import Operand
from deepinfer.errors import InternalError


def holds_bf16(op: Operand) -> bool:
    """Whether bf16 holds every value that is read of an operand."""
    return stored(op.type).name == "bf16"


_CODES = {"mxfp8": 4, "mxfp4": 8, "fp4_e4m3": 8}  # codes in a word
_LOWERED = {"mxfp8": 120, "mxfp4": 126, "fp4_e4m3": 126}  # power of two by which they are too small (records.py)
RAISED = 60  # what is left of it when their scales have taken the rest: scales up to 2^61 are exact


def in_words(op: Operand, width: int) -> bool:
    """Whether records of one kv head are decoded a word of codes at a time, as bf16 times 2^-RAISED."""
    t, *others = record_parts(op.type)
    return (not others and t.dtype.name in _CODES and width == op.size == power_of_two(width) and
            t.dtype.block[1] % _CODES[t.dtype.name] == 0 and op.get("record_bytes") % 4 == 0)


class Reader:
    """Prints how records are found and decoded into blocks of keys along axis 0 and features along axis 1. ``words``:
    all of them are decoded by words, and the blocks are too small by 2^-RAISED."""

    def __init__(self, signature: Signature, element: str, words: bool = False) -> None:
        self.signature, self.element, self.words = signature, element, words

    @property
    def up(self) -> float:
        """Factor of products with the blocks."""
        return 2.0**RAISED if self.words else 1.0

    def view(self, operand: int, first: str) -> str:
        """Pointer to the record of position ``first + j``."""
        s, op = self.signature, self.signature.operand(operand)
        at = f"tl.load({s.state(operand, 'first')} + seq).to(tl.int64)"
        return (f"di_view({s.state(operand, 'base')}, {s.state(operand, 'stride')}, {s.state(operand, 'fresh')}, "
                f"{s.state(operand, 'has_fresh')}, {at}, tl.load({s.state(operand, 'from')} + seq), "
                f"tl.load({s.seq('slot')} + seq), {op.get('ring_rows')}, {op.get('record_bytes')}, {first} + j)")

    def entry(self, operand: int, entries: str, ok: str = "j_ok") -> str:
        """Pointer to paged entries."""
        s, op = self.signature, self.signature.operand(operand)
        blocks = f"{s.seq('blocks')} + seq.to(tl.int64) * {s.seq('width')}"
        return (f"di_entry({s.state(operand, 'base')}, {s.state(operand, 'stride')}, {blocks}, "
                f"{s.step('block_tokens')}, {op.get('ratio')}, {op.get('record_bytes')}, {entries}, {ok})")

    def entries_within(self, operand: int, block: str, places: str) -> str:
        """Pointer to paged entries by their places in one block of the sequence."""
        s, op = self.signature, self.signature.operand(operand)
        number = f"tl.load({s.seq('blocks')} + seq.to(tl.int64) * {s.seq('width')} + {block}).to(tl.int64)"
        base = f"{s.state(operand, 'base')} + {number} * {s.state(operand, 'stride')}"
        return f"{base} + {places} * {op.get('record_bytes')}"

    def block(self, name: str, record: str, op: Operand, width: int, kv: int, ok: str = "j_ok", *, span: str = "D",
              first: str = "0", d: str = "d") -> list[str]:
        """``name`` = features ``first`` to ``first + span`` of the records, of kv head ``kv`` where there are several.
        ``span``: name of a compile-time power of two; ``d``: name of the block of these features."""
        parts = record_parts(op.type)
        if self.words:
            return self._words(name, record, parts[0], ok, span, first)
        if kv == 1 and len(parts) == 1 and parts[0].dtype.is_block and width == op.size == power_of_two(width):
            return self._whole(name, record, parts[0], ok, span, first)
        p = self._printer(width, d)
        feature = Ix.var(d)
        at = feature if kv == 1 else feature + p.named("kv", kv, NOTHING) * (op.size // kv)
        p.space.extents[d] = width if kv > 1 or op.size != width else op.size
        if kv > 1 and len(op.type.parts or ((op.type, op.size),)) != 1:
            raise InternalError(f"heads do not divide a record of several parts ({op.type})")
        out = decoded(p, record, op.type, at, Block(ok, frozenset((0,))))
        return [*p.lines, f"{name} = {out.text}.to({self.element})"]

    def _whole(self, name: str, record: str, part: Part, ok: str, span: str, first: str) -> list[str]:
        """Features of one block format: codes and scales are read once, as wide as they lie."""
        t, group = part.dtype, part.dtype.block[1]
        exact = "_bf16" if self.element == "tl.bfloat16" else ""
        scale = f"di_e4m3({{}}).to({self.element})" if t.name == "fp4_e4m3" else f"di_e8m0{exact}({{}})"

        def read(at: int, share: int) -> str:
            begin = record + (f" + {at}" if at else "") + (f" + {first} // {share}" if first != "0" else "")
            return f"tl.load({begin} + tl.arange(0, {span} // {share})[None, :], mask={ok}, other=0)"

        lines = [f"scales = {scale.format(read(part.scales, group))}"]
        if t.name == "mxfp8":
            lines.append(f"codes = {read(0, 1)}.to(tl.float8e4nv, bitcast=True).to({self.element})")
        else:
            lines.append(f"codes = {read(0, 2)}")
            lines.append(f"codes = tl.join(di_e2m1{exact}(codes & 15), di_e2m1{exact}(codes >> 4))")
        grouped = f"tl.reshape(codes, [KEYS, {span} // {group}, {group}]) * scales[:, :, None]"
        return [*lines, f"{name} = tl.reshape({grouped}, [KEYS, {span}])"]

    def _words(self, name: str, record: str, part: Part, ok: str, span: str, first: str) -> list[str]:
        """Features of one block format, whole words of codes at a time."""
        t, group = part.dtype, part.dtype.block[1]
        codes = _CODES[t.name]

        def read(base: str, share: int) -> str:
            begin = base + (f" + {first} // {share}" if first != "0" else "")
            return f"tl.load({begin} + tl.arange(0, {span} // {share})[None, :], mask={ok}, other=0)"

        scales = read(f"{record} + {part.scales}", group)
        return [f'scales = di_record_scales({scales}, {_LOWERED[t.name] - RAISED}, "{t.name}")',
                f"codes = {read(f'{record}.to(tl.pointer_type(tl.int32))', codes)}",
                f"scales = tl.broadcast_to(scales[:, :, None], [KEYS, {span} // {group}, {group // codes}])",
                f"scales = tl.reshape(scales, [KEYS, {span} // {codes}])",
                f'{name} = di_record_words(codes, scales, KEYS, {span}, "{t.name}")']

    def _printer(self, width: int, d: str) -> Printer:
        p = Printer([], self.signature, Axes([0, 0], fixed=True), prefix="r")
        p.named(d, width, frozenset((1,)), (f"{d}_ok",) if width != power_of_two(width) else ())
        return p
