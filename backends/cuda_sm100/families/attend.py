"""Attention: one softmax per head over keys from rings, paged entries and this step's rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer.backends.cpu.storage import Part, record_parts, stored
from deepinfer.backends.cpu.tile.index import Ix, linear
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Grid, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import NOTHING, Axes, power_of_two
from deepinfer.backends.cuda_sm100.tile.printer import Block, Index, Printer
from deepinfer.backends.cuda_sm100.tile.program import cleaned
from deepinfer.backends.cuda_sm100.tile.special import decoded
from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp
from deepinfer.errors import InternalError

HEADS, EXACT_HEADS = 64, 16  # heads of one program: they share the decoded keys
KEYS = 32


@dataclass
class Source:
    """Where the keys of a source are. ``setup``: statements before its loops, with the number of keys ``count``;
    ``find``: those that make records (or rows) and validity of keys ``j``; ``key`` and ``value``: those that make a
    block [KEYS, features] of that name."""

    count: str
    setup: list[str] = field(default_factory=list)
    find: list[str] = field(default_factory=list)
    key: list[str] = field(default_factory=list)
    value: list[str] = field(default_factory=list)
    split: bool = False


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

    def block(self, name: str, record: str, op: Operand, width: int, kv: int, ok: str = "j_ok") -> list[str]:
        """``name`` = features of the records, of kv head ``kv`` where there are several."""
        parts = record_parts(op.type)
        if kv == 1 and len(parts) == 1 and parts[0].dtype.is_block and width == op.size == power_of_two(width):
            return self._whole(name, record, parts[0], ok)
        p = self._printer(width)
        d = Ix.var("d")
        at = d if kv == 1 else d + p.named("kv", kv, NOTHING) * (op.size // kv)
        p.space.extents["d"] = width if kv > 1 or op.size != width else op.size
        if kv > 1 and len(op.type.parts or ((op.type, op.size),)) != 1:
            raise InternalError(f"heads do not divide a record of several parts ({op.type})")
        out = decoded(p, record, op.type, at, Block(ok, frozenset((0,))))
        return [*p.lines, f"{name} = {out.text}.to({self.element})"]

    def _whole(self, name: str, record: str, part: Part, ok: str) -> list[str]:
        """All of a record of one block format: codes and scales are read once, as wide as they lie."""
        t, n, group = part.dtype, part.count, part.dtype.block[1]
        exact = "_bf16" if self.element == "tl.bfloat16" else ""
        scale = f"di_e4m3({{}}).to({self.element})" if t.name == "fp4_e4m3" else f"di_e8m0{exact}({{}})"
        across = f"tl.arange(0, {n // group})[None, :]"
        lines = [f"scales = {scale.format(f'tl.load({record} + {part.scales} + {across}, mask={ok}, other=0)')}"]
        if t.name == "mxfp8":
            codes = f"tl.load({record} + tl.arange(0, {n})[None, :], mask={ok}, other=0)"
            lines.append(f"codes = {codes}.to(tl.float8e4nv, bitcast=True).to({self.element})")
        else:
            lines.append(f"codes = tl.load({record} + tl.arange(0, {n // 2})[None, :], mask={ok}, other=0)")
            lines.append(f"codes = tl.join(di_e2m1{exact}(codes & 15), di_e2m1{exact}(codes >> 4))")
        grouped = f"tl.reshape(codes, [KEYS, {n // group}, {group}]) * scales[:, :, None]"
        return [*lines, f"{name} = tl.reshape({grouped}, [KEYS, {n}])"]

    def _printer(self, width: int) -> Printer:
        p = Printer([], self.signature, Axes([0, 0], fixed=True), prefix="r")
        p.named("d", width, frozenset((1,)), ("d_ok",) if width != power_of_two(width) else ())
        return p


class Sources:
    """The sources of an attend."""

    def __init__(self, spec: KernelSpec, signature: Signature, reader: Reader) -> None:
        self.spec, self.signature, self.reader = spec, signature, reader
        self.kv, self.d, self.vd = spec.get("kv_heads"), spec.get("head_dim"), spec.get("value_dim")

    def text(self, n: int, source: tuple[str, int, int, int, int]) -> Source:
        kind, width, keys, values, picked = source
        if kind == "block":
            return self._rows(n, keys, values)
        out, find = self._records(n, kind, width, picked)
        op = self.signature.operand(keys)
        out.find.append(f"record = ({find(keys)})[:, None]")
        out.key = self.reader.block("key", "record", op, self.d, self.kv)
        if values >= 0:
            out.split = True
            out.find.append(f"other = ({find(values)})[:, None]")
            out.value = self.reader.block("value", "other", self.signature.operand(values), self.vd, self.kv)
        return out

    def _records(self, n: int, kind: str, width: int, picked: int) -> tuple[Source, Any]:
        s, low = self.signature, f"low{n}"
        if kind in ("window", "context"):
            stop = "pos + 1" if kind == "window" else f"tl.load({s.seq('c')} + seq)"
            handle = self._handle(n)
            first = s.operand(handle).get("first_position", 0)
            valid = f"tl.maximum(tl.load({s.state(handle, 'valid')} + seq), {first})"
            setup = [f"{low} = tl.maximum({valid}, {stop} - {width})"]
            return Source(f"{stop} - {low}", setup), lambda i: self.reader.view(i, low)
        if kind == "dense":
            return Source(f"(pos + 1) // {width}"), lambda i: self.reader.entry(
                i, "tl.where(j_in, j, 0)", "j_in")
        if kind == "selected":
            op = s.operand(picked)
            row = f"{s.value(picked)} + ({s.row_of(op.rows)}) * {op.size}"
            find = [f"e = tl.load({row} + j, mask=j_in, other=-1).to(tl.int64)",
                    f"e_ok = (e >= 0) & (e < (pos + 1) // {width})", "j_ok = e_ok[:, None]",
                    "e = tl.where(e_ok, e, 0)"]
            return Source(f"{op.size}", [], find), lambda i: self.reader.entry(i, "e", "e_ok")
        raise InternalError(f"attend has no sources of kind {kind}")

    def _handle(self, n: int) -> int:
        return int(self.spec.get("sources")[n][2])

    def _rows(self, n: int, keys: int, values: int) -> Source:
        rows = self.signature.operand(keys).rows
        first = self.signature.axis_of(rows, "first")

        def read(name: str, i: int, width: int) -> list[str]:
            size = self.signature.operand(i).size
            base = f"{self.signature.value(i)} + (start{n} + j)[:, None] * {size} + kv * {size // self.kv}"
            mask = "j_ok & d_ok" if width != power_of_two(width) else "j_ok"
            return [f"{name} = tl.load({base} + d, mask={mask}, other=0).to({self.reader.element})"]

        setup = [f"start{n} = tl.load({first} + seq).to(tl.int64)"]
        return Source(f"tl.load({first} + seq + 1) - start{n}", setup, [], read("key", keys, self.d),
                      read("value", values, self.vd) if values >= 0 else [], values >= 0)


def emit(spec: KernelSpec) -> CudaSource:
    signature, program = Signature(spec), spec.slot("epilogue")
    if program is None:
        raise InternalError(f"{spec.title}: an attend has an epilogue")
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"probabilities are held in bf16 or f32, not {spec.get('rounds')}")
    heads, kv, d, vd = (spec.get(x) for x in ("heads", "kv_heads", "head_dim", "value_dim"))
    q, sink = spec.operands[spec.get("q")], spec.get("sink")
    cached = [spec.operands[i] for s in spec.get("sources") for i in s[2:4] if i >= 0]
    exact = holds_bf16(q) and all(map(holds_bf16, cached)) and spec.get("rounds") == "bf16"
    share = heads // kv
    group = next(g for g in range(min(share, HEADS if exact else EXACT_HEADS), 0, -1) if share % g == 0)
    padded = max(16, power_of_two(group))
    signature.axis("seq"), signature.axis("pos")
    element = "tl.bfloat16" if exact else "tl.float32"
    printer = Sources(spec, signature, Reader(signature, element))
    if (d != power_of_two(d)) != (vd != power_of_two(vd)) or power_of_two(d) != power_of_two(vd):
        raise InternalError("keys and values of very different widths")
    sources = [printer.text(n, s) for n, s in enumerate(spec.get("sources"))]
    lines = _epilogue(spec, signature, heads, vd)
    warps = 8 if padded * power_of_two(vd) >= 64 * 256 else 4
    stage = Stage(spec.symbol, Grid(times=heads // group), warps,
                  (("H", padded), ("D", max(16, power_of_two(d))), ("KEYS", KEYS)), 2, matrix=exact and padded >= 64)
    return render(spec, signature, [Variant(0, (stage,))], sources=sources, lines=lines, heads=heads, group=group,
                  share=share, d=d, vd=vd, padded=padded, q=signature.value(spec.get("q")),
                  q_at=signature.row_of(q.rows), sink=signature.param(sink) if sink >= 0 else "", element=element,
                  scale=repr(float(spec.get("scale"))), rounds=bool(spec.get("rounds")), kv=kv,
                  precision="" if exact else ', input_precision="tf32x3"')


def _epilogue(spec: KernelSpec, signature: Signature, heads: int, vd: int) -> list[str]:
    """Stores of the tile ``acc0`` [heads of the program, features]."""
    program = spec.slot("epilogue")
    assert program is not None
    ops = cleaned(program, spec.operands)
    both = frozenset((0, 1))

    def acc(o: TileOp, index: Index) -> Block:
        return Block("acc0", both)

    p = Printer(ops, signature, Axes([0, 0], fixed=True), acc=acc, prefix="e")
    flat = p.named("head", heads, frozenset((0,)), ("h_ok",)) * vd + p.named("d", vd, frozenset((1,)), ("d_ok",))
    for o in ops:
        if o.op == "store":
            index = tuple(p.space.split(flat, o.dims))
            p.write(o.get("operand"), linear(o.dims, index), p.value(o.args[0], index))
        elif o.op == "store_record":
            raise InternalError("an epilogue of attention writes no records")
    return [*p.heads, *p.lines]


