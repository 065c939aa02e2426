"""What a launch moves and multiplies: exact counts per row, which a step's shape turns into bytes and multiply-adds.

Counted once a step: dense weights. Of an expert stack: the distinct experts that the rows are expected to pick, each
row picking k of E at random, ``E (1 - (1 - k/E)^rows)``. Per row: values read and written, looked-up rows of tables,
records written, entries that a row picked. Per sequence: ring rows within reach, and entries that are scanned from the
first to the last visible one. Caches of a processor are not modelled: what two kernels read, counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.codegen.passes.liveness import matmul_work
from deepinfer.codegen.plan.launch import EntryTable, Launch
from deepinfer.codegen.plan.table import Lowered
from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.types import KEPT, SEQ, STEP, WANTED, Rows


@dataclass(frozen=True)
class StepShape:
    """A step to be counted: ``sequences``, each with ``rows`` new rows behind ``context`` earlier ones, of which the
    last ``kept`` are on the kept axis and the last ``wanted`` want logits."""

    sequences: int
    rows: int
    context: int
    kept: int
    wanted: int = 1

    def on(self, axis: str) -> float:
        """Rows of an axis in this step."""
        kind = Rows.parse(axis)
        each = {STEP.kind: self.rows, KEPT.kind: self.kept, WANTED.kind: self.wanted, SEQ.kind: 1}
        if kind.kind in each:
            return float(self.sequences * each[kind.kind])
        return self.sequences * self.rows / kind.ratio

    def seen(self, ratio: int) -> float:
        """Entries of a ratio that a row of the step sees, on average."""
        return (self.context + (self.rows + 1) / 2) / ratio


@dataclass(frozen=True)
class LaunchCost:
    """Counts of one launch.

    Args:
        axis: its row axis as printed.
        weights: bytes of parameters that are read whole.
        experts: (experts of a stack, bytes of one in all stacks, picked by a row); 0 experts: none.
        row_bytes, row_macs: per row of the axis.
        windows: (ring rows within reach, bytes of one) for each window that is read.
        scans: (tokens an entry, bytes of an entry, multiply-adds of a row with an entry, most entries of a row; 0: all
            that are visible).
        picks: (most entries of a row, tokens an entry, bytes of an entry), entries that a row chose.
        key_macs: multiply-adds of a row with one key of a window, a picked entry or a dense one.
    """

    axis: str
    weights: int = 0
    experts: tuple[int, int, int] = (0, 0, 0)
    row_bytes: int = 0
    row_macs: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    scans: tuple[tuple[int, int, int, int], ...] = ()
    picks: tuple[tuple[int, int, int], ...] = ()
    key_macs: int = 0

    def bytes(self, shape: StepShape) -> float:
        """Bytes that the launch has to move in a step."""
        rows = shape.on(self.axis)
        if not rows:
            return 0.0
        total = self.weights + rows * self.row_bytes
        count, each, picked = self.experts
        if count:
            total += each * count * (1 - (1 - picked / count) ** rows)
        for reach, size in self.windows:
            total += shape.sequences * min(reach + shape.rows, shape.context + shape.rows) * size
        for ratio, size, _, most in self.scans:
            seen = shape.seen(ratio)
            total += min(rows * min(most or seen, seen), shape.sequences * seen) * size
        for most, ratio, size in self.picks:
            total += rows * min(most, shape.seen(ratio)) * size
        return total

    def keys(self, shape: StepShape) -> float:
        """Keys of windows, and entries, that a row meets on average."""
        keys = sum(min(reach, shape.context + (shape.rows + 1) / 2) for reach, _ in self.windows)
        return keys + sum(min(most, shape.seen(ratio)) for most, ratio, _ in self.picks)

    def met(self, shape: StepShape) -> float:
        """The same with the entries that are scanned."""
        scanned = sum(min(most or shape.seen(ratio), shape.seen(ratio)) for ratio, _, _, most in self.scans)
        return self.keys(shape) + scanned

    def macs(self, shape: StepShape) -> float:
        """Multiply-adds of the launch in a step."""
        rows = shape.on(self.axis)
        keys = self.keys(shape)
        scanned = sum(min(most or shape.seen(ratio), shape.seen(ratio)) * macs for ratio, _, macs, most in self.scans)
        return rows * (self.row_macs + keys * self.key_macs + scanned)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, those that are not zero."""
        return {k: v for k, v in asdict(self).items() if v and v != (0, 0, 0)}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> LaunchCost:
        """What ``as_dict`` wrote, also through JSON."""
        nested = {k: tuple(map(tuple, raw[k])) for k in ("windows", "scans", "picks") if k in raw}
        experts = {"experts": tuple(raw["experts"])} if "experts" in raw else {}
        return LaunchCost(**{**raw, **nested, **experts})


def launch_cost(launch: Launch, entry: EntryTable, lowered: Lowered) -> LaunchCost:
    """Counts of a launch of an entry, from the kernel's spec and what it is given."""
    spec = lowered.specs[launch.kernel]
    if launch.stage:
        return LaunchCost(launch.axis)
    looked_up = _lookups(spec)
    weights = stack = expert = picked = row_bytes = 0
    for i, (operand, arg) in enumerate(zip(spec.operands, launch.args, strict=True)):
        if i in looked_up:
            row_bytes += looked_up[i]
        elif operand.role == "param":
            decl = lowered.params[arg.index]
            stack = max(stack, decl.stack)
            expert += tensor_bytes(decl) if decl.stack else 0
            weights += 0 if decl.stack else tensor_bytes(decl)
        elif operand.role == "value":
            row_bytes += entry.buffers[arg.index].row_bytes
        elif operand.role == "state" and operand.write:
            row_bytes += int(operand.get("record_bytes"))
        elif operand.role == "input":
            row_bytes += 8 * operand.size
    if spec.family == "grouped_gemm":
        picked = spec.operands[spec.get("experts")].dims[-1]
    macs = sum(matmul_work(n) for n in spec.region)
    return LaunchCost(launch.axis, weights, (stack, expert, picked), row_bytes, macs, **_reads(spec))


def tensor_bytes(decl: ParamDecl) -> int:
    """Bytes of one tensor of a parameter with its scales, as the checkpoint stores it."""
    return decl.stored().nbytes + (decl.stored_scale().nbytes if decl.dtype.is_block else 0)


def _lookups(spec: KernelSpec) -> dict[int, int]:
    """Operand -> bytes that a row looks up in it; fetching ahead moves none of its own."""
    found: dict[int, int] = {}
    for _, program in spec.slots:
        for op in _ops(program):
            if op.op == "fetch":
                found.setdefault(op.get("operand"), 0)
            if op.op == "gather" and op.get("operand") is not None:
                dtype = spec.operands[op.get("operand")].type
                width = op.dims[-1] if op.dims else 1
                count = math.prod(op.dims) // width if width else 0
                size = count * (dtype.data_bytes(width) + dtype.scale_bytes(width))
                found[op.get("operand")] = found.get(op.get("operand"), 0) + size
    return found


def _ops(program: TileProgram) -> Iterator[TileOp]:
    for op in program.ops:
        yield op
        body = op.get("body")
        if isinstance(body, TileProgram):
            yield from _ops(body)


def _reads(spec: KernelSpec) -> dict[str, Any]:
    """What attention and selection read of states."""
    windows, scans, picks = [], [], []
    key_macs = 0
    if spec.family == "attend":
        key_macs = spec.get("heads") * (spec.get("head_dim") + spec.get("value_dim"))
        for kind, n, keys, values, chosen in spec.get("sources"):
            size = sum(_record(spec.operands[i]) for i in (keys, values) if i >= 0)
            if kind in ("window", "context"):
                windows.append((n, size))
            elif kind == "selected":
                picks.append((spec.operands[chosen].dims[-1], n, size))
            elif kind == "dense":
                scans.append((n, size, key_macs, 0))
    elif spec.family == "score_select":
        macs = spec.get("heads") * spec.get("head_dim")
        within = [dict(s) for s in spec.get("selections")]
        some = all(s["within"] >= 0 for s in within)
        most = max(spec.operands[s["within"]].dims[-1] * s["within_block"] for s in within) if some else 0
        scans.append((spec.get("ratio"), _record(spec.operands[spec.get("keys")]), macs, most))
    return {"windows": tuple(windows), "scans": tuple(scans), "picks": tuple(picks), "key_macs": key_macs}


def _record(operand: Operand) -> int:
    if operand.role == "state":
        return int(operand.get("record_bytes"))
    return operand.type.data_bytes(operand.size)
