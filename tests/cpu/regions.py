"""Every kernel of a program against the reference interpreter, on the values that a real step brings to it.

The interpreter runs a step; each region of the compiled program is then run alone, on the interpreter's values of its
inputs and states, and its outputs are compared with the interpreter's values of the same nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cpu.harness import NUMPY, Array, Param, Seq, State, Step, from_bf16, held, run
from golden.cases import Case

from deepinfer.backends.base import Capabilities
from deepinfer.backends.cpu.backend import BACKEND
from deepinfer.backends.cpu.storage import record_parts
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.codegen.kernels.specify import Bound, specify
from deepinfer.codegen.passes.fuse import fuse, owner
from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.interpreter import Entries, Interpreter, Ring, StepRows, Value, formats
from deepinfer.dsl.params import ParamDecl
from deepinfer.dsl.types import DType


@dataclass(frozen=True)
class Kernel:
    """A kernel as the launch table would have it, and the axis it is launched on."""

    spec: KernelSpec
    bindings: tuple[Bound, ...]
    rows: str


def kernels_of(graph: Graph, caps: Capabilities | None = None) -> Iterator[Kernel]:
    """The kernels of an entry; ``caps``: of the target, by default the CPU."""
    regions = fuse(graph, caps or BACKEND.capabilities("cpu"))
    region_of = {n.id: r for r in regions for n in r.nodes}
    read = {owner(v).id for v in graph.outputs.values()}
    for r in regions:
        for n in r.nodes:
            read |= {owner(i).id for i in n.inputs if region_of.get(owner(i).id) is not r}
    for r in regions:
        s = specify(graph, r, read)
        yield Kernel(s.spec, s.bindings, str(r.rows))


def encode_record(x: torch.Tensor, record: DType) -> Array:
    """[n, features] -> [n, record bytes]: stored form of rows."""
    out = np.zeros((len(x), record.row_bytes(record.features)), np.uint8)
    for p in record_parts(record):
        part = x[:, p.first: p.first + p.count].float()
        if p.dtype.is_block:
            e = formats.encode(part, p.dtype)
            codes = e.codes if p.dtype.name == "mxfp8" else formats.pack_nibbles(e.codes)
            out[:, p.codes: p.codes + codes.shape[1]] = codes.numpy()
            out[:, p.scales: p.scales + e.scales.shape[1]] = e.scales.numpy()
        else:
            raw = held(part.numpy(), p.dtype.name).view(np.uint8).reshape(len(x), p.dtype.data_bytes(p.count))
            out[:, p.codes: p.codes + raw.shape[1]] = raw
    return out


def decode_record(raw: Array, record: DType) -> Array:
    """[n, record bytes] -> [n, features] f32."""
    out = np.zeros((len(raw), record.features), np.float32)
    for p in record_parts(record):
        nbytes = p.dtype.data_bytes(p.count)
        codes = np.ascontiguousarray(raw[:, p.codes: p.codes + nbytes])
        if p.dtype.is_block:
            c = torch.from_numpy(codes)
            scales = torch.from_numpy(np.ascontiguousarray(raw[:, p.scales: p.scales + p.dtype.scale_bytes(p.count)]))
            e = formats.Encoded(c if p.dtype.name == "mxfp8" else formats.unpack_nibbles(c), scales)
            out[:, p.first: p.first + p.count] = formats.decode(e, p.dtype).numpy()
        else:
            values = codes.view(NUMPY[p.dtype.name])
            out[:, p.first: p.first + p.count] = from_bf16(values) if p.dtype.name == "bf16" else values
    return out


@dataclass
class Checked:
    """What became of one kernel: largest difference of each output relative to its largest value."""

    family: str
    title: str
    scope: str
    errors: dict[str, float] = field(default_factory=dict)


@dataclass
class RegionRunner:
    """Runs the regions of one entry on the values of one step of one sequence."""

    case: Case
    interpreter: Interpreter
    entry: str
    before: Mapping[str, Value]
    step: StepRows
    values: dict[int, Value]
    slot: int = 1
    block_tokens: int = 128

    def __post_init__(self) -> None:
        graph = self.interpreter.graphs[self.entry]
        self.graph = graph
        ratios = sorted({n.type.rows.ratio for n in graph.nodes if n.type.rows and n.type.rows.ratio})
        stop = self.step.stop
        count = stop // self.block_tokens + 1
        self.blocks = np.random.default_rng(3).permutation(count + 2)[:count].tolist()
        starts, kept_from = self.step.window_start, self.step.first_kept
        gap = kept_from if kept_from > self.step.start else 0  # rows in between were never written
        seq = Seq(len(self.step.ids), self.step.start, self.slot, stop - kept_from, stop - self.step.first_wanted,
                  self.step.write_floor, starts.get("T", 0), max(gap, starts.get("T_kept", 0)), self.blocks)
        known = [*self.step.history, *self.step.ids]
        width = 8
        look = np.full((len(self.step.ids), width), -1, np.int64)
        for row in range(len(look)):
            for back in range(width):
                at = self.step.start + row - back - (self.step.start - len(self.step.history))
                if at >= 0:
                    look[row, back] = known[at]
        self.c_step = Step([seq], ratios, self.block_tokens, np.array(self.step.ids, np.int64), look)

    # ---- operands --------------------------------------------------------------------------------------------------
    def operand(self, op: Operand, b: Bound) -> Any:
        if b.kind == "value":
            return None if op.write else self.value(b.node, op)
        if b.kind == "param":
            assert b.node is not None
            return self.param(b.node)
        if b.kind == "state":
            return self.state(str(b.name), op)
        return None

    def value(self, n: Node | None, op: Operand) -> Array:
        assert n is not None
        t = self.values[n.id]
        assert isinstance(t, torch.Tensor)
        flat = t.reshape(t.shape[0], op.size // op.get("by_sequence", 1))
        return held(flat.numpy().astype(np.float32) if t.is_floating_point() else flat.numpy(), op.dtype)

    def param(self, n: Node) -> Param:
        decl: ParamDecl = self.case.program(**self.options).model.params.declared[n.attrs["name"]]
        if decl.derive:
            return Param(self.interpreter._weights.value(n).numpy().copy())
        datas = [self.raw(self.case.weights[name]) for name in decl.names]
        scales = [self.raw(self.case.weights[name]) for name in decl.scale_names] or None
        return Param(datas, scales) if decl.stack else Param(datas[0], scales[0] if scales else None)

    options: dict[str, Any] = field(default_factory=dict)
    launch: Callable[..., dict[int, Array]] = run

    @staticmethod
    def raw(t: torch.Tensor) -> Array:
        if t.dtype == torch.bfloat16:
            return t.contiguous().view(torch.int16).numpy().view(np.uint16)
        if t.dtype in (torch.float32, torch.int64):
            return t.contiguous().numpy()
        return t.contiguous().view(torch.uint8).numpy()

    def state(self, name: str, op: Operand) -> State:
        s = self.interpreter.states[name]
        record, nbytes = s.record, s.record_bytes
        old = self.before[name]
        written = [n for n in self.graph.of("extend", "append") if n.attrs["state"] == name]
        reads_new = not op.write and written
        if op.get("kind") == "paged":
            entries = self.values[written[0].id] if reads_new else old
            assert isinstance(entries, Entries)
            per = self.block_tokens // op.get("ratio")
            base = np.full((max(self.blocks) + 1, per, nbytes), 0xEE, np.uint8)
            raw = encode_record(entries.rows, record)
            for j in range(len(raw)):
                base[self.blocks[j * op.get("ratio") // self.block_tokens], j % per] = raw[j]
            return State(base, None, 0, op.get("ratio"))
        assert isinstance(old, Ring)
        ring = op.get("ring_rows")
        base = np.full((self.slot + 2, ring, nbytes), 0xEE, np.uint8)
        raw = encode_record(old.rows, record)
        for i in range(max(0, len(raw) - ring), len(raw)):
            base[self.slot, (old.first + i) % ring] = raw[i]
        fresh, axis = None, 0
        if written:
            value = written[0].inputs[1]
            axis = self.c_step.axis(str(value.type.rows))
            rows = self.values[value.id]
            assert isinstance(rows, torch.Tensor)
            fresh = encode_record(rows, record) if not op.write else np.full((len(rows), nbytes), 0xEE, np.uint8)
        return State(base, fresh, axis)

    # ---- one kernel ------------------------------------------------------------------------------------------------
    def check(self, s: Kernel, isa: str = "") -> Checked:
        operands = [self.operand(op, b) for op, b in zip(s.spec.operands, s.bindings, strict=True)]
        done = Checked(s.spec.family, s.spec.title, s.spec.region[-1].scope)
        out = self.launch(s.spec, self.c_step, operands, isa=isa, rows=s.rows)
        for i, (op, b) in enumerate(zip(s.spec.operands, s.bindings, strict=True)):
            if not op.write:
                continue
            if b.kind == "state":
                done.errors[f"p{i} {b.name}"] = self.state_error(str(b.name), op, operands[i])
            else:
                done.errors[f"p{i} %{b.name} {op.dtype}"] = self.error(out[i], op, b)
        return done

    def error(self, got: Array, op: Operand, b: Bound) -> float:
        assert b.node is not None
        want = self.values[b.node.id]
        assert isinstance(want, torch.Tensor)
        if not want.is_floating_point():
            return float((got.reshape(-1) != want.numpy().reshape(-1)).any())
        return relative(from_bf16(got) if got.dtype == np.uint16 else got, want.numpy())

    def state_error(self, name: str, op: Operand, state: State) -> float:
        s = self.interpreter.states[name]
        written = next(n for n in self.graph.of("extend", "append") if n.attrs["state"] == name)
        rows = self.values[written.inputs[1].id]
        assert isinstance(rows, torch.Tensor)
        if op.get("kind") != "paged":
            assert state.fresh is not None
            return relative(decode_record(state.fresh, s.record), rows.numpy())
        ratio, worst = op.get("ratio"), 0.0
        per = self.block_tokens // ratio
        first = self.step.start // ratio
        for k in range(len(rows)):
            j = first + k
            raw = state.base[self.blocks[j * ratio // self.block_tokens], j % per][None]
            if j * ratio < self.step.write_floor:
                assert self.untouched(name, j, raw), "an entry below the floor was written"
                continue
            worst = max(worst, relative(decode_record(raw, s.record), rows[k: k + 1].numpy()))
        return worst

    def untouched(self, name: str, j: int, raw: Array) -> bool:
        old = self.before[name]
        assert isinstance(old, Entries)
        record = self.interpreter.states[name].record
        return bool((raw == (encode_record(old.rows[j: j + 1], record) if j < len(old.rows) else 0xEE)).all())


def relative(got: Array, want: Array) -> float:
    want = want.reshape(got.shape)
    if not want.size:
        return 0.0
    return float(np.abs(got.astype(np.float64) - want).max() / max(1e-30, np.abs(want).max()))


def regions_of(case: Case, prompt: int, rows: int, entry: str = "step", *, options: Mapping[str, Any] | None = None,
               keep: int | None = None, wanted: int | None = None,
               caps: Capabilities | None = None) -> tuple[RegionRunner, Sequence[Kernel]]:
    """A sequence that fed ``prompt`` tokens and now brings ``rows`` more, ready to run its regions."""
    opts = dict(options or {"profile": "wide"})
    interpreter = case.interpreter(torch.float32, narrowed=True, **opts)
    session = case.session(torch.float32, narrowed=True, **opts)
    ids = (case.ids * 8)[: prompt + rows]
    if prompt:
        session.feed(ids[:prompt])
    if entry == "draft":
        filler = session.model.draft_filler
        step = StepRows([ids[0]] + [filler] * (session.model.draft_tokens - 1), prompt)
    else:
        step = StepRows(ids[prompt:], prompt, prompt_end=prompt + rows, keep=keep, wanted=wanted, history=ids[:prompt])
    ctx = interpreter.context(step, session.state, {})
    before = dict(ctx.states)
    result = interpreter.run(entry, session.state.fork(), step, watch=lambda n: True)
    values = {n.id: v for n, v in result.watched}
    runner = RegionRunner(case, interpreter, entry, before, step, values, options=opts)
    return runner, list(kernels_of(interpreter.graphs[entry], caps))
