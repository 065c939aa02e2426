"""Values of a row that lie in memory: too long for UB, written there piece by piece and read again the same way.

Every block has room of its own behind ``spill`` in the scratch. Operands of the kernel, looked-up rows and rows of a
state are read where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.backends.ascend950.memory import padded
from deepinfer.backends.ascend950.signature import BYTES, C_TYPES
from deepinfer.backends.ascend950.target import LANES
from deepinfer.backends.ascend950.tile import pieces
from deepinfer.backends.cpu.storage import record_parts
from deepinfer.backends.cpu.tile.program import ROOTS, size
from deepinfer.codegen.kernels.spec import TileOp
from deepinfer.dsl.types import DType
from deepinfer.errors import PlanError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.tile.printer import Printer

_BYTES = {C_TYPES[kind]: n for kind, n in BYTES.items()} | {"uint16_t": 2}


@dataclass(frozen=True)
class Far:
    """Elements in memory: an expression of their pointer, and their type."""

    pointer: str
    kind: str

    @property
    def bytes(self) -> int:
        return _BYTES[self.kind]

    @property
    def in_ub(self) -> str:
        """Type of the elements once they are in UB."""
        return "float" if self.kind == "float" else "uint16_t"


def is_far(p: Printer, i: int) -> bool:
    """Whether a value lies in memory, or will."""
    o = p.ops[i]
    if i in p.far or pieces.is_long(p, o):
        return True
    if not p.spills or p.part or i in p.arrays or size(o) < pieces.LEAST or p.integers.has(i):
        return False
    if o.op == "gather":
        return len(p.integers.elements(o.args[0])) == 1 and not p.signature.operand(o.get("operand")).type.is_block
    return i in p.kept and o.op != "carry" and (o.op not in ROOTS or o.op in _MAKE)


def is_made_here(p: Printer, i: int) -> bool:
    """Whether the elements are still to be computed, by arithmetic."""
    return is_far(p, i) and i in p.kept and i not in p.far and p.ops[i].op not in _MAKE


def stored(p: Printer, i: int, dims: Sequence[int], to: Far) -> None:
    """Writes all elements of op i to memory, from where they are read again if they lie there as they are kept."""
    here = is_made_here(p, i) and to.in_ub == _kind(p.ops[i])
    if here:
        _between(p)
    pieces.written(p, i, dims, to)
    if here:
        _between(p)
        p.far[i] = to


def where(p: Printer, i: int) -> Far:
    """The place of such a value, which is made when it is first asked for."""
    o = p.ops[i]
    if pieces.is_long(p, o):
        s, operand = p.signature, o.get("operand")
        op, kind = s.operand(operand), C_TYPES[s.element(operand)]
        return Far(s.param(operand) if op.role == "param" else
                   f"{s.value(operand)} + ({s.row_of(op.rows)}) * {s.elements(operand)}", kind)
    if o.op == "gather":
        (pick,), s = p.integers.elements(o.args[0]), p.signature
        return Far(f"{s.param(o.get('operand'))} + {pick} * {size(o)}", C_TYPES[s.element(o.get("operand"))])
    if i not in p.far:
        p.far[i] = _MAKE.get(o.op, _arithmetic)(p, i, o)
    return p.far[i]


def _room(p: Printer, n: int, kind: str) -> Far:
    """Room for a value in the scratch of the block."""
    at, p.spilled = p.spilled, p.spilled + padded(n * _BYTES[kind])
    return Far(f"(__gm__ {kind}*)(spill + {at})", kind)


def _between(p: Printer) -> None:
    """What was written is there, what was read is no longer needed."""
    p.say("asc_sync_pipe(PIPE_ALL);")


def _kind(o: TileOp) -> str:
    """Elements as which arithmetic is kept."""
    return "uint16_t" if o.op == "round" and o.get("dtype") == "bf16" else "float"


def _arithmetic(p: Printer, i: int, o: TileOp) -> Far:
    out = _room(p, size(o), _kind(o))
    _between(p)
    pieces.written(p, i, o.dims, out)
    _between(p)
    return out


def _encode(p: Printer, i: int, o: TileOp) -> Far:
    t = DType.parse(o.get("dtype"))
    if t.parts or not t.is_block or o.dims[-1] % t.block[1] or pieces.PIECE % max(t.block[1], LANES):
        raise PlanError(f"{p.signature.spec.title}: a row of {o.dims[-1]} elements does not fall into pieces that hold "
                        f"whole groups of {t}")
    out = _room(p, size(o), "uint16_t")  # which holds encoded elements
    _between(p)
    pieces.written(p, o.args[0], o.dims, out, t)
    _between(p)
    return out


def _concat(p: Printer, i: int, o: TileOp) -> Far:
    if any(n != 1 for n in o.dims[: o.get("dim")]):
        raise PlanError(f"{p.signature.spec.title}: rows too long for UB are joined along dim {o.get('dim')}")
    out, start = _room(p, size(o), "float"), 0
    _between(p)
    for x in o.args:
        pieces.written(p, x, p.ops[x].dims, Far(f"{out.pointer} + {start}", out.kind))
        start += size(p.ops[x])
    _between(p)
    return out


def _previous(p: Printer, i: int, o: TileOp) -> Far:
    """The record where it lies, or zeros."""
    from deepinfer.backends.ascend950.tile.special import previous_record

    (part, *more) = record_parts(p.signature.operand(o.get("operand")).type)
    if more or part.dtype.is_block:
        raise PlanError(f"{p.signature.spec.title}: a record of {size(o)} elements in parts does not fit into UB")
    kind, (setup, condition, record) = C_TYPES["*" + part.dtype.name], previous_record(p, i, o)
    out, name = _room(p, size(o), kind), f"{p.prefix}{i}_f"
    zeros = p.fixed("zeros", 4 * pieces.PIECE)
    for line in [setup, f"__gm__ {kind}* {name} = {out.pointer};", f"if ({condition}) {{",
                 f"    {name} = (__gm__ {kind}*)({record});", "} else {"]:
        p.say(line)
    p.say(f"asc_vf_call<di_fill_array>({p.at(zeros, 'float')}, 0.0f, {pieces.PIECE});")
    _between(p)
    p.say(f"for (int64_t at = 0; at < {size(o)}; at += {pieces.PIECE}) {{")
    p.say(f"    di_out({name} + at, {p.at(zeros, 'uint8_t')}, (uint32_t)di_min64({pieces.PIECE}, {size(o)} - at) * "
          f"{out.bytes});")
    p.say("}")
    _between(p)
    p.say("}")
    return Far(name, kind)


_MAKE = {"encode": _encode, "concat": _concat, "previous": _previous}
