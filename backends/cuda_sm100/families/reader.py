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


class Reader:
    """Prints how records are found and decoded into blocks of keys along axis 0 and features along axis 1."""

    def __init__(self, signature: Signature, element: str) -> None:
        self.signature, self.element = signature, element

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

    def block(self, name: str, record: str, op: Operand, width: int, kv: int, ok: str = "j_ok", *, span: str = "D",
              first: str = "0", d: str = "d") -> list[str]:
        """``name`` = features ``first`` to ``first + span`` of the records, of kv head ``kv`` where there are several.
        ``span``: name of a compile-time power of two; ``d``: name of the block of these features."""
        parts = record_parts(op.type)
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

    def _printer(self, width: int, d: str) -> Printer:
        p = Printer([], self.signature, Axes([0, 0], fixed=True), prefix="r")
        p.named(d, width, frozenset((1,)), (f"{d}_ok",) if width != power_of_two(width) else ())
        return p
