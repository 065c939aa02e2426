"""Arguments of a kernel in the order of its parameters, from a step and operands made as for a CPU kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from cpu.harness import Array, Param, State, Step, zeros

from deepinfer.backends.cuda_sm100.families.score_select import ALIGNED
from deepinfer.backends.cuda_sm100.source import CudaSource
from deepinfer.backends.signature import Parameter
from deepinfer.codegen.kernels.spec import KernelSpec

LARGEST = np.array([4, 0, 0, 0, 0, 0, 0, 0], np.int64)  # words of a row of which nothing is known


def _array(pointer: int | None, count: int, kind: Any) -> Array:
    if not pointer or not count:
        return np.zeros(1, kind)
    return np.ctypeslib.as_array((ctypes.c_char * (count * np.dtype(kind).itemsize)).from_address(pointer)).view(kind)


class Launchable(Protocol):
    """What the sources of all device backends have."""

    @property
    def parameters(self) -> Sequence[Parameter]: ...
    @property
    def scratch(self) -> tuple[int, int]: ...


class StepArrays:
    """A step as a runner would lay it out on a device: plain arrays."""

    def __init__(self, step: Step) -> None:
        self.step, self.seqs = step, len(step.seqs)
        records = step._alive
        self.records = next(r for r in records if isinstance(r, ctypes.Array))
        widest = max(1, *(len(s.blocks) for s in step.seqs))
        self.blocks = np.full((self.seqs, widest), 0, np.int32)
        for i, s in enumerate(step.seqs):
            self.blocks[i, : len(s.blocks)] = s.blocks

    def axis(self, number: int, what: str) -> Array:
        a, n = self.step.c.axis[number], self.step.axis_rows[number]
        if what == "rows":
            return np.array([n], np.int32)
        if what == "first":
            return _array(a.first, self.seqs + 1, np.int32)
        return _array(getattr(a, what), n, np.int64 if what == "pos" else np.int32)

    def seq(self, what: str) -> Array | int:
        if what == "width":
            return int(self.blocks.shape[1])
        if what == "blocks":
            return self.blocks
        kind = np.int32 if what == "slot" else np.int64
        return np.array([getattr(r, what) for r in self.records], kind)

    def first_new(self, axis: int) -> Array:
        return np.array([r.c + (r.rows - r.kept if axis == 1 else 0) for r in self.records], np.int64)

    def first_valid(self, axis: int) -> Array:
        return np.array([r.start_kept if axis == 1 else r.start_step for r in self.records], np.int64)

    def input(self, name: str) -> Array:
        return self.step.token_ids if name == "token_ids" else np.ascontiguousarray(self.step.lookback)


@dataclass
class Arguments:
    """``values``: an array (whose address is passed) or an integer per parameter; ``outputs``: by operand number."""

    values: list[Array | int]
    outputs: dict[int, Array] = field(default_factory=dict)
    rows: int = 0


def _flat(x: Array | list[Array] | None) -> Array:
    if isinstance(x, list):
        return np.ascontiguousarray(np.stack(x))
    return np.zeros(16, np.uint8) if x is None else np.ascontiguousarray(x)


def arguments(spec: KernelSpec, source: Launchable, step: Step, operands: Sequence[Array | Param | State | None],
              rows: str = "", draws: Array | None = None) -> Arguments:
    """``operands`` and ``rows`` as for ``cpu.harness.run``; ``draws``: words of rows that draw; None: the largest."""
    arrays, axis = StepArrays(step), step.axis(rows or spec.rows)
    count = step.axis_rows[axis]
    made = Arguments([], rows=count)
    values: dict[int, Array] = {}
    for i, (op, x) in enumerate(zip(spec.operands, operands, strict=True)):
        if op.role == "value":
            if op.write:
                made.outputs[i] = values[i] = zeros(op, step.rows(rows or op.rows))
            else:
                values[i] = np.ascontiguousarray(x)  # type: ignore[arg-type]
    fixed = source.scratch[0] + source.scratch[1] * max(1, count)
    if isinstance(source, CudaSource):
        capacity = -(-int(arrays.blocks.shape[1]) * step.block_tokens // source.entries[1] // ALIGNED) * ALIGNED
        fixed += source.entries[0] * capacity

    def state(i: int, what: str) -> Array | int:
        s = operands[i]
        assert isinstance(s, State)
        here: dict[str, Any] = {
            "base": s.base, "stride": int(s.base.shape[1] * s.base.shape[2]), "has_fresh": int(s.fresh is not None),
            "fresh": s.fresh if s.fresh is not None else np.zeros(16, np.uint8), "first": arrays.axis(s.axis, "first"),
            "from": arrays.first_new(s.axis), "valid": arrays.first_valid(s.axis)}
        result: Array | int = here[what]
        return result

    def one(where: tuple[Any, ...]) -> Array | int:
        match where:
            case ("launch", what):
                return 0 if what == "row_first" else count
            case ("axis", what):
                return arrays.axis(axis, what)
            case ("axis_of", name, what):
                return arrays.axis(step.axis(name), what)
            case ("seq", what):
                return arrays.seq(what)
            case ("step", "block_tokens"):
                return step.block_tokens
            case ("step", _):
                return int(step.lookback.shape[1])
            case ("input", name):
                return arrays.input(name)
            case ("value", i):
                return values[i]
            case ("param", i, what):
                p = operands[i]
                assert isinstance(p, Param)
                return _flat(p.data if what == "data" else p.scale)
            case ("state", i, what):
                return state(i, what)
            case ("draw", "rows"):
                return np.tile(LARGEST, max(1, count)) if draws is None else draws
            case ("pin", i, "given"):
                return int(operands[i] is not None)
            case ("pin", i):
                return _flat(operands[i]) if operands[i] is not None else np.zeros(4, np.int32)  # type: ignore[arg-type]
            case ("constants",):
                return _flat(np.frombuffer(getattr(source, "constants", b""), np.uint8))
            case ("scratch",):
                return np.full(fixed + 64, 0xA5, np.uint8)
        raise AssertionError(where)

    made.values = [one(p.where) for p in source.parameters]
    return made


