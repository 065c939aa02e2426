"""Builds one kernel and runs it on a step made by hand, without runner or engine."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.backend import BACKEND
from deepinfer.backends.cpu.storage import stored
from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.dsl.types import DType

Array = NDArray[Any]
MAX_AXES = 12
FIXED = ("T", "T_kept", "T_wanted", "S")
NUMPY = {"f32": np.float32, "bf16": np.uint16, "i64": np.int64, "i32": np.int32, "bool": np.uint8}
_VOID = ctypes.c_void_p


class DiAxis(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int64), ("seq", _VOID), ("pos", _VOID), ("step_row", _VOID), ("first", _VOID))


class DiSeq(ctypes.Structure):
    _fields_ = (("slot", ctypes.c_int32), ("rows", ctypes.c_int32), ("kept", ctypes.c_int32),
                ("wanted", ctypes.c_int32), ("c", ctypes.c_int64), ("floor", ctypes.c_int64),
                ("start_step", ctypes.c_int64), ("start_kept", ctypes.c_int64), ("blocks", _VOID),
                ("num_blocks", ctypes.c_int32), ("reserved", ctypes.c_int32))


class DiStep(ctypes.Structure):
    _fields_ = (("seqs", ctypes.c_int32), ("block_tokens", ctypes.c_int32), ("seq", _VOID), ("axis", DiAxis * MAX_AXES),
                ("token_ids", _VOID), ("lookback", _VOID), ("lookback_width", ctypes.c_int32),
                ("tables_in_memory", ctypes.c_int32), ("pins", _VOID), ("draws", _VOID))


class DiParam(ctypes.Structure):
    _fields_ = (("data", _VOID), ("scale", _VOID))


class DiState(ctypes.Structure):
    _fields_ = (("base", _VOID), ("fresh", _VOID), ("stride", ctypes.c_int64), ("record_bytes", ctypes.c_int32),
                ("rows", ctypes.c_int32), ("axis", ctypes.c_int32), ("ratio", ctypes.c_int32))


class DiArgs(ctypes.Structure):
    _fields_ = (("step", _VOID), ("p", _VOID), ("scratch", _VOID), ("lo", ctypes.c_int64), ("hi", ctypes.c_int64),
                ("axis", ctypes.c_int32), ("stage", ctypes.c_int32), ("exchange", _VOID))


# ---- bf16 ----------------------------------------------------------------------------------------------------------
def to_bf16(x: Array) -> Array:
    """f32 -> bf16 bits, nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(h: Array) -> Array:
    return (h.astype(np.uint32) << 16).view(np.float32)


def rounded(x: Array) -> Array:
    """f32 values held in bf16."""
    return from_bf16(to_bf16(x))


def held(x: Array, dtype: str) -> Array:
    """Values as they lie in the arena for a value dtype."""
    plain = stored(DType.parse(dtype)).name
    return to_bf16(x) if plain == "bf16" else np.ascontiguousarray(x, NUMPY[plain])


def floats(x: Array) -> Array:
    """Values of an arena buffer."""
    return from_bf16(x) if x.dtype == np.uint16 else x


# ---- a step --------------------------------------------------------------------------------------------------------
@dataclass
class Seq:
    """One sequence of a step; ``kept`` and ``wanted`` default to all rows."""

    rows: int
    c: int = 0
    slot: int = 0
    kept: int | None = None
    wanted: int | None = None
    floor: int = 0
    start_step: int = 0
    start_kept: int = 0
    blocks: Sequence[int] = (0,)


@dataclass
class Step:
    """The C view of a batch; ``ratios`` give axes 4, 5, .."""

    seqs: Sequence[Seq]
    ratios: Sequence[int] = ()
    block_tokens: int = 128
    token_ids: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    lookback: Array = field(default_factory=lambda: np.zeros((0, 1), np.int64))

    def __post_init__(self) -> None:
        self._alive: list[Any] = []
        self.c = DiStep(len(self.seqs), self.block_tokens)
        records = (DiSeq * len(self.seqs))()
        for r, s in zip(records, self.seqs, strict=True):
            kept = s.rows if s.kept is None else s.kept
            wanted = kept if s.wanted is None else s.wanted
            blocks = self._keep(np.array(s.blocks, np.int32))
            r.slot, r.rows, r.kept, r.wanted, r.c, r.floor = s.slot, s.rows, kept, wanted, s.c, s.floor
            r.start_step, r.start_kept, r.blocks, r.num_blocks = s.start_step, s.start_kept, blocks, len(s.blocks)
        self._alive.append(records)
        self.c.seq = ctypes.addressof(records)
        self.axis_rows: list[int] = []
        for a in range(len(FIXED) + len(self.ratios)):
            self._axis(a, records)
        self.c.token_ids = self._keep(np.ascontiguousarray(self.token_ids, np.int64))
        look = np.ascontiguousarray(self.lookback, np.int64)
        self.c.lookback, self.c.lookback_width = self._keep(look), look.shape[1]

    def _keep(self, x: Array) -> int:
        self._alive.append(x)
        return int(x.ctypes.data)

    def _axis(self, a: int, records: Any) -> None:
        seq, pos, step_row, first = [], [], [], [0]
        start = 0
        for i, r in enumerate(records):
            if a == 3:
                rows = [(r.c, start)]
            elif a < 3:
                n = (r.rows, r.kept, r.wanted)[a]
                rows = [(r.c + t, start + t) for t in range(r.rows - n, r.rows)]
            else:
                k = self.ratios[a - 4]
                rows = [(j * k, start + k * (j + 1) - 1 - r.c) for j in range(r.c // k, (r.c + r.rows) // k)]
            seq += [i] * len(rows)
            pos += [p for p, _ in rows]
            step_row += [t for _, t in rows]
            first.append(len(seq))
            start += r.rows
        axis = self.c.axis[a]
        axis.rows = len(seq)
        axis.seq, axis.pos = self._keep(np.array(seq, np.int32)), self._keep(np.array(pos, np.int64))
        axis.step_row, axis.first = self._keep(np.array(step_row, np.int32)), self._keep(np.array(first, np.int32))
        self.axis_rows.append(len(seq))

    def axis(self, rows: str) -> int:
        return FIXED.index(rows) if rows in FIXED else 4 + list(self.ratios).index(int(rows.split("/")[1]))

    def rows(self, rows: str) -> int:
        return self.axis_rows[self.axis(rows)]


def rows_step(n: int, c: int = 0) -> Step:
    """A step of one sequence with n rows."""
    return Step([Seq(n, c)])


# ---- operands ------------------------------------------------------------------------------------------------------
@dataclass
class Param:
    """Codes or values, and scales of block formats. A list makes a stack."""

    data: Array | list[Array]
    scale: Array | list[Array] | None = None

    def pointer(self, keep: list[Any]) -> int:
        stack = self.data if isinstance(self.data, list) else [self.data]
        scales = self.scale if isinstance(self.scale, list) else [self.scale] * len(stack)
        params = (DiParam * len(stack))()
        for p, d, s in zip(params, stack, scales, strict=True):
            p.data, p.scale = d.ctypes.data, None if s is None else s.ctypes.data
        keep += [params, stack, scales]
        return ctypes.addressof(params)


@dataclass
class State:
    """``base`` [slots or blocks, rows, record_bytes] and ``fresh`` [rows of the axis, record_bytes], uint8."""

    base: Array
    fresh: Array | None = None
    axis: int = 0
    ratio: int = 1

    def pointer(self, keep: list[Any]) -> int:
        _, rows, record = self.base.shape
        fresh = None if self.fresh is None else self.fresh.ctypes.data
        s = DiState(self.base.ctypes.data, fresh, rows * record, record, rows, self.axis, self.ratio)
        keep += [s, self.base, self.fresh]
        return ctypes.addressof(s)


# ---- kernels -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Built:
    source: Source
    library: Path


_BUILT: dict[str, Built] = {}


def build_all(specs: Sequence[KernelSpec]) -> None:
    """Compiles kernels for all instruction sets, once, into one library."""
    new = {s.digest(): s for s in specs if s.digest() not in _BUILT}
    if new:
        sources = {digest: BACKEND.emit(s) for digest, s in new.items()}
        library = BACKEND.compile(list(sources.values()), jobs=2).files["kernels.so"]
        _BUILT.update({digest: Built(source, library) for digest, source in sources.items()})


def build(spec: KernelSpec) -> Built:
    build_all([spec])
    return _BUILT[spec.digest()]


@cache
def load(library: Path, isa: str) -> ctypes.CDLL:
    """The library with one instruction set chosen; the choice is made while it loads, so each gets a copy."""
    folder = Path(tempfile.mkdtemp(prefix="di-kernels-"))
    copy = Path(shutil.copy(library, folder / f"kernels-{isa or 'best'}.so"))
    before = os.environ.pop("DEEPINFER_CPU_ISA", None)
    if isa:
        os.environ["DEEPINFER_CPU_ISA"] = isa
    try:
        lib = ctypes.CDLL(str(copy))
    finally:
        os.environ.pop("DEEPINFER_CPU_ISA", None)
        if before is not None:
            os.environ["DEEPINFER_CPU_ISA"] = before
        shutil.rmtree(folder)
    lib.di_kernels_isa.restype = ctypes.c_char_p
    return lib


def available_isas(spec: KernelSpec) -> list[str]:
    """Instruction sets that this machine runs."""
    library = build(spec).library
    return [i for i in ("portable", "avx2", "avx512", "avx512_bf16") if load(library, i).di_kernels_isa() == i.encode()]


class Writer:
    """Writes a rowwise kernel op by op: ``w.load((4,))``, ``w.op("add", a, b, dims=(4,))``, ``w.store(x)``."""

    def __init__(self, rows: str = "T") -> None:
        self.rows = rows
        self.operands: list[Operand] = []
        self.ops: list[TileOp] = []

    def operand(self, role: str, dims: tuple[int, ...], dtype: str, *, rows: str = "", write: bool = False,
                **detail: Any) -> int:
        self.operands.append(Operand(role, rows or self.rows, dims, dtype, write, tuple(sorted(detail.items()))))
        return len(self.operands) - 1

    def op(self, name: str, *args: int, dims: tuple[int, ...], dtype: str = "f32", **attrs: Any) -> int:
        self.ops.append(TileOp(name, args, dims, dtype, tuple(sorted(attrs.items()))))
        return len(self.ops) - 1

    def load(self, dims: tuple[int, ...], dtype: str = "f32", role: str = "value", **detail: Any) -> int:
        return self.op("load", dims=dims, dtype=dtype, operand=self.operand(role, dims, dtype, **detail))

    def store(self, x: int) -> int:
        o = self.ops[x]
        out = self.operand("value", o.dims, o.dtype, write=True)
        return self.op("store", x, dims=o.dims, dtype=o.dtype, operand=out)

    def spec(self) -> KernelSpec:
        slots = (("body", TileProgram(tuple(self.ops))),)
        return KernelSpec("rowwise", self.rows, tuple(self.operands), (), slots, title="test")


def zeros(op: Operand, rows: int) -> Array:
    """An output buffer for rows of an operand, full of a pattern that no kernel leaves by accident."""
    plain = stored(op.type).name
    return np.full((rows, op.size), 77, NUMPY[plain])


def run(spec: KernelSpec, step: Step, operands: Sequence[Array | Param | State | None], *, isa: str = "",
        threads: int = 1, rows: str = "") -> dict[int, Array]:
    """Runs every item; returns the output buffers [rows, elements] by operand number.

    ``operands``: one entry per operand; None for outputs, inputs, literals and absent pins. ``rows``: axis of the
    launch where it is not the kernel's (a kernel of rows of T serves any suffix axis).
    """
    built = build(spec)
    lib = load(built.library, isa)
    keep: list[Any] = []
    pointers = (_VOID * max(1, len(spec.operands)))()
    outputs: dict[int, Array] = {}
    for i, (op, x) in enumerate(zip(spec.operands, operands, strict=True)):
        if isinstance(x, Param | State):
            pointers[i] = x.pointer(keep)
        elif x is not None:
            x = np.ascontiguousarray(x)
            keep.append(x)
            pointers[i] = x.ctypes.data
        elif op.role == "value" and op.write:
            outputs[i] = zeros(op, step.rows(rows or op.rows))
            pointers[i] = outputs[i].ctypes.data
    axis = step.axis(rows or spec.rows)
    items = -(-step.axis_rows[axis] // built.source.rows_per_item) * built.source.items_per_tile
    kernel = getattr(lib, built.source.symbol)
    left = np.full(built.source.exchange_bytes + 64, 0xA5, np.uint8)
    exchange = left.ctypes.data + -left.ctypes.data % 64

    def work(stage: int, lo: int, hi: int) -> None:
        raw = np.full(built.source.scratch_bytes + 64, 0xA5, np.uint8)
        scratch = raw.ctypes.data + -raw.ctypes.data % 64
        kernel(ctypes.byref(DiArgs(ctypes.addressof(step.c), ctypes.addressof(pointers), scratch, lo, hi, axis, stage,
                                   exchange)))

    for stage, count in enumerate([items, step.axis_rows[axis]] if built.source.exchange_bytes else [items]):
        cuts = [count * t // threads for t in range(threads + 1)]
        pool = [threading.Thread(target=work, args=(stage, a, b)) for a, b in pairwise(cuts)]
        for t in pool:
            t.start()
        for t in pool:
            t.join()
    return outputs
