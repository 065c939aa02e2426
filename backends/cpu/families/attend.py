"""Attention: one softmax per head over keys from rings, paged entries and this step's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.families.gemm import Component, Epilogue
from deepinfer.backends.cpu.operands import FIXED, Operands, row_of
from deepinfer.backends.cpu.source import render
from deepinfer.backends.cpu.storage import C_TYPES, c_type, decode_lines, format_arguments
from deepinfer.backends.cpu.tile.program import analyse
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.errors import InternalError

HEADS = 16  # most heads of one item: they share the decoded keys
KEYS = 32  # DI_KEYS
LANES = 32  # words of a vector


def padded(n: int, to: int = LANES) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class _Read:
    """How key j of a source is found: C statements before the loops, an expression for the number of keys, and one for
    the record (``const char*``) or row of key ``j``."""

    setup: list[str]
    count: str
    record: str


def decode_slice(op: Operand, source: str, out: str, kv_heads: int, width: int) -> list[str]:
    """C statements that decode the part of a record that belongs to kv head ``kv``, ``width`` features of it."""
    if kv_heads == 1 and op.size == width:
        return decode_lines(op.type, source, out)
    parts = op.type.parts or ((op.type, op.size),)
    if len(parts) != 1:
        raise InternalError(f"heads do not divide a record of several parts ({op.type})")
    (t, n), head = parts[0], op.size // kv_heads
    if not t.is_block:
        return [f"di_decode_plain((const {C_TYPES[t.name]}*)({source}) + kv * {head}, {width}, {out});"]
    if head % t.block[1] or width % t.block[1]:
        raise InternalError(f"heads of {width} features do not divide into groups of {t}")
    return [f"di_decode<{format_arguments(t)}>((const uint8_t*)({source}) + kv * {t.data_bytes(head)}, "
            f"(const uint8_t*)({source}) + {t.data_bytes(n)} + kv * {head // t.block[1]}, {width}, {out});"]


class _Sources:
    """Prints the sources of an attend."""

    def __init__(self, spec: KernelSpec, operands: Operands) -> None:
        self.spec, self.operands = spec, operands
        self.kv_heads, self.head_dim, self.value_dim = spec.get("kv_heads"), spec.get("head_dim"), spec.get("value_dim")

    def text(self, n: int, source: tuple[str, int, int, int, int]) -> dict[str, Any]:
        kind, width, keys, values, picked = source
        if kind == "block":
            return self._block(n, width, keys, values)
        read = self._read(n, kind, width, keys, picked)
        key = decode_slice(self.operands[keys], "r", "out", self.kv_heads, self.head_dim)
        other = self._read(n, kind, width, values, picked).record if values >= 0 else ""
        value = decode_slice(self.operands[values], "r", "out", self.kv_heads, self.value_dim) if values >= 0 else []
        return {"setup": read.setup, "count": read.count, "key": [f"const char* const r = {read.record};", *key],
                "value": [f"const char* const r = {other};", *value] if values >= 0 else [], "split": values >= 0,
                "bound": self._bound(kind, width, picked)}

    def _bound(self, kind: str, width: int, picked: int) -> int:
        """Most keys of the source, 0 where only the context length limits them."""
        if kind in ("window", "context"):
            return width
        return self.operands[picked].size if kind == "selected" else 0

    def _read(self, n: int, kind: str, width: int, handle: int, picked: int) -> _Read:
        st = self.operands.state(handle)
        first = self.operands[handle].get("first_position", 0)
        view = f"di_view(step, {st}, seq, low{n} + j)"
        low = f"const int64_t low{n} = di_max64(di_first_valid(step, {st}, seq, {first}), {{}} - {width});"
        if kind == "window":
            return _Read([low.format("pos + 1")], f"pos + 1 - low{n}", view)
        if kind == "context":
            return _Read([low.format("step->seq[seq].c")], f"step->seq[seq].c - low{n}", view)
        if kind == "dense":
            return _Read([], f"(pos + 1) / {width}", f"di_entry(step, {st}, seq, j)")
        if kind == "selected":
            place = self.operands.place(picked).pointer
            setup = [f"int64_t found{n} = 0;", f"for (int i = 0; i < {self.operands[picked].size}; ++i) {{",
                     f"    const int64_t e = {place}[i];",
                     f"    if (e >= 0 && e < (pos + 1) / {width}) list{n}[found{n}++] = (int32_t)e;", "}"]
            return _Read(setup, f"found{n}", f"di_entry(step, {st}, seq, list{n}[j])")
        raise InternalError(f"attend has no sources of kind {kind}")

    def _block(self, n: int, width: int, keys: int, values: int) -> dict[str, Any]:
        op = self.operands[keys]
        axis = "axis" if op.rows == self.spec.rows else f"(&step->axis[{FIXED[op.rows]}])"

        def row(i: int, out_width: int) -> list[str]:
            size = self.operands[i].size
            base = f"{self.operands.base(i)} + ({axis}->first[seq] + j) * {size} + kv * {size // self.kv_heads}"
            return [f"di_decode_plain({base}, {out_width}, out);"]

        return {"setup": [], "count": f"(int64_t){axis}->first[seq + 1] - {axis}->first[seq]",
                "key": row(keys, self.head_dim), "value": row(values, self.value_dim) if values >= 0 else [],
                "split": values >= 0, "bound": 0}


def _holds_words(spec: KernelSpec, operands: Operands) -> bool:
    """Whether queries, keys, values and probabilities are all held in bf16."""
    handles = {h for _, _, keys, values, _ in spec.get("sources") for h in (keys, values) if h >= 0}
    places = (*handles, spec.get("q"))
    return spec.get("rounds") == "bf16" and all(c_type(operands[i].type) == "uint16_t" for i in places)


def emit(spec: KernelSpec) -> Source:
    operands, statics = Operands(spec), list[str]()
    program = spec.slot("epilogue")
    if program is None:
        raise InternalError(f"{spec.title}: an attend has an epilogue")
    heads, kv_heads, d, vd = (spec.get(x) for x in ("heads", "kv_heads", "head_dim", "value_dim"))
    share = heads // kv_heads
    most = min(share // 2, HEADS) if share >= HEADS else share  # a single row should keep more than one thread busy
    group = next(g for g in range(most, 0, -1) if share % g == 0)
    printer = _Sources(spec, operands)
    sources = [printer.text(n, s) for n, s in enumerate(spec.get("sources"))]
    analysis = analyse(program, spec.operands, keeps=False)
    epilogue = Epilogue(analysis, operands, statics)
    stores = tuple(i for i, o in enumerate(analysis.ops) if o.op == "store")
    lines = epilogue.lines(Component((0,), stores), (heads,), "head")
    dp, vp = padded(d), padded(vd)
    words = _holds_words(spec, operands)
    at = 4 * (group * dp + KEYS * max(dp, vp) + group * KEYS + group * vp)
    for s, source in zip(sources, spec.get("sources"), strict=True):
        s["kept"], s["rows"], s["list"] = 0, 0, 0
        if s["bound"]:
            s["kept"], at = at, at + 4 * group * padded(s["bound"], KEYS)
            if words and not s["split"]:
                s["rows"], at = padded(at, 64), padded(at, 64) + 2 * max(dp, vp) * padded(s["bound"], KEYS)
        if source[0] == "selected":
            s["list"], at = at, at + padded(4 * s["bound"], 64)
    q = spec.operands[spec.get("q")]
    sink = operands.place(spec.get("sink")).pointer if spec.get("sink") >= 0 else ""
    if sink and operands[spec.get("sink")].dtype != "f32":
        raise InternalError("sinks are f32")
    base = operands.base(spec.get("q"))
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"probabilities are held in bf16 or f32, not {spec.get('rounds')}")
    return render(spec, rows_per_item=1, items_per_tile=heads // group, scratch_bytes=at, statics=statics,
                  call_lines=operands.call_lines(), row_lines=operands.row_lines(), sources=sources, lines=lines,
                  heads=heads, group=group, share=share, d=d, dp=dp, vd=vd, vp=vp, sink=sink, q=base,
                  q_kind=c_type(q.type), q_at=row_of(spec.rows, q.rows), scale=spec.get("scale"),
                  round="true" if spec.get("rounds") else "false",
                  attention="DiAttentionBf16" if words else "DiAttention")
