"""Attention: one softmax per head over keys from rings, paged entries and this step's rows.

An AI core takes up to 64 heads of a row. The vector cores fetch and decode 64 keys at a time, the cube core multiplies;
the largest scores are found first, so that what is rounded does not depend on the order of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer.backends.ascend950.cost import Question
from deepinfer.backends.ascend950.families.contract import places, resolved
from deepinfer.backends.ascend950.memory import Memory, padded
from deepinfer.backends.ascend950.signature import BYTES, C_TYPES, Signature
from deepinfer.backends.ascend950.source import MIX, AscendSource, Stage, render
from deepinfer.backends.ascend950.tile.function import FORMATS, LANE, Array, Function, Index
from deepinfer.backends.cpu.storage import Part, record_parts, stored
from deepinfer.backends.cpu.tile.index import Ix
from deepinfer.backends.cpu.tile.program import cleaned
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec, Operand
from deepinfer.errors import InternalError, PlanError

HEADS, EXACT_HEADS = 64, 32  # most heads of one item, as bf16 and as f32: they share the decoded keys
MOVED = (8, 4, 2, 1)  # heads whose queries, or results, are on their way: as many as fit
KEYS, MINE = 64, 32  # keys of a tile, and of a vector core
_CHOSEN = (("pos", 1 << 40), ("e", 0))  # work is asked for where selections have no gaps


@dataclass
class Slot:
    """Where one part of a record lies in UB: offsets in a key's slot."""

    part: Part
    codes: int
    scales: int
    code_at: str
    scale_at: str
    kind: str


@dataclass
class Rows:
    """How rows of keys or values are fetched. ``find``: statements that set ``record``."""

    find: list[str]
    slots: list[Slot]
    pitch: int
    width: int


@dataclass
class Source:
    setup: list[str]
    count: str
    keys: Rows
    values: Rows | None
    picks: str = ""
    limit: str = "0"
    check: list[str] = field(default_factory=list)


def slots_of(op: Operand, width: int, kv: int, plain: str = "") -> tuple[list[Slot], int]:
    """The parts of a record that belong to kv head ``kv``, and the bytes of a key's slot."""
    if plain:
        size = {"bf16": 2, "f32": 4}[plain]
        nbytes = width * size
        part = Part(stored(op.type), 0, width, 0, 0)
        at = f"kv * {op.size // kv * size}" if kv > 1 else "0"
        return [Slot(part, 0, 0, at, "0", {2: "uint16_t", 4: "float"}[size])], padded(nbytes, 32)
    parts = record_parts(op.type)
    if kv > 1 and len(parts) > 1:
        raise InternalError(f"heads do not divide a record of several parts ({op.type})")
    out: list[Slot] = []
    used = 0
    for p in parts:
        t, n = p.dtype, p.count if kv == 1 else op.size // kv
        n = min(n, width - p.first) if kv == 1 else width
        if n <= 0:
            continue
        if t.is_block and n % t.block[1]:
            raise InternalError(f"heads of {width} features do not divide into groups of {t}")
        whole = op.size // kv
        code_at = f"{p.codes}" + (f" + kv * {t.data_bytes(whole)}" if kv > 1 else "")
        scale_at = f"{p.scales}" + (f" + kv * {t.scale_bytes(whole)}" if kv > 1 and t.is_block else "")
        codes, used = used, used + padded(t.data_bytes(n), 32)
        scales = used
        if t.is_block:
            used += padded(t.scale_bytes(n), 32)
        kind = {"f32": "float", "bf16": "uint16_t"}.get(t.name, "uint8_t")
        out.append(Slot(Part(t, p.first, n, 0, 0), codes, scales, code_at, scale_at, kind))
    return out, used


class Sources:
    """The sources of an attend."""

    def __init__(self, spec: KernelSpec, signature: Signature) -> None:
        self.spec, self.signature = spec, signature
        self.kv, self.d, self.vd = spec.get("kv_heads"), spec.get("head_dim"), spec.get("value_dim")

    def made(self, n: int, source: tuple[str, int, int, int, int]) -> Source:
        kind, width, keys, values, picked = source
        s = self.signature
        if kind == "block":
            first = s.axis_of(s.operand(keys).rows, "first")
            setup = [f"const int64_t start{n} = di_gm_load({first} + seq);"]
            return Source(setup, f"di_gm_load({first} + seq + 1) - start{n}", self._rows(n, keys, self.d),
                          self._rows(n, values, self.vd) if values >= 0 else None)
        out = Source([], "", self._records(n, kind, keys, self.d),
                     self._records(n, kind, values, self.vd) if values >= 0 else None)
        if kind in ("window", "context"):
            stop = "pos + 1" if kind == "window" else f"di_gm_load({s.seq('c')} + seq)"
            valid = f"di_max64(di_gm_load({s.state(keys, 'valid')} + seq), {s.operand(keys).get('first_position', 0)})"
            out.setup = [f"const int64_t low{n} = di_max64({valid}, {stop} - {width});"]
            out.count = f"{stop} - low{n}"
        elif kind == "dense":
            out.count = f"(pos + 1) / {width}"
        elif kind == "selected":
            op = s.operand(picked)
            if s.element(picked) != "*i32":
                raise InternalError("a selection holds 32-bit integers")
            out.setup = [f"__gm__ int32_t* const picks{n} = {s.value(picked)} + ({s.row_of(op.rows)}) * {op.size};"]
            out.limit, out.picks = f"(pos + 1) / {width}", f"picks{n}"
            out.count = f"({out.limit} > 0 ? {op.size} : 0)"
        else:
            raise InternalError(f"attend has no sources of kind {kind}")
        return out

    def _records(self, n: int, kind: str, i: int, width: int) -> Rows:
        s, op = self.signature, self.signature.operand(i)
        slots, pitch = slots_of(op, width, self.kv)
        if kind in ("window", "context"):
            text = (f"di_view({s.state(i, 'base')}, {s.state(i, 'stride')}, {s.state(i, 'fresh')}, "
                    f"{s.state(i, 'has_fresh')}, di_gm_load({s.state(i, 'first')} + seq), "
                    f"di_gm_load({s.state(i, 'from')} + seq), di_gm_load({s.seq('slot')} + seq), "
                    f"{op.get('ring_rows')}, {op.get('record_bytes')}, low{n} + j)")
            return Rows([f"__gm__ uint8_t* const record = {text};"], slots, pitch, width)
        find = [] if kind == "dense" else [f"int64_t e = di_gm_load(picks{n} + j);",
                                           f"e = e >= 0 && e < (pos + 1) / {self.spec.get('sources')[n][1]} ? e : 0;"]
        entry = "j" if kind == "dense" else "e"
        blocks = f"{s.seq('blocks')} + seq * {s.seq('width')}"
        text = (f"di_entry({s.state(i, 'base')}, {s.state(i, 'stride')}, {blocks}, {s.step('block_tokens')}, "
                f"{op.get('ratio')}, {op.get('record_bytes')}, {entry})")
        return Rows([*find, f"__gm__ uint8_t* const record = {text};"], slots, pitch, width)

    def _rows(self, n: int, i: int, width: int) -> Rows:
        s, op = self.signature, self.signature.operand(i)
        element = s.element(i)
        slots, pitch = slots_of(op, width, self.kv, {"*bf16": "bf16", "*f32": "f32"}[element])
        row = f"(__gm__ uint8_t*)({s.value(i)} + (start{n} + j) * {op.size})"
        return Rows([f"__gm__ uint8_t* const record = {row};"], slots, pitch, width)


def emit(spec: KernelSpec) -> AscendSource:
    signature, program = Signature(spec), spec.slot("epilogue")
    if program is None:
        raise InternalError(f"{spec.title}: an attend has an epilogue")
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"probabilities are held in bf16 or f32, not {spec.get('rounds')}")
    heads, kv, d, vd = (spec.get(x) for x in ("heads", "kv_heads", "head_dim", "value_dim"))
    q, sink = spec.operands[spec.get("q")], spec.get("sink")
    cached = [spec.operands[i] for s in spec.get("sources") for i in s[2:4] if i >= 0]
    exact = spec.get("rounds") == "bf16" and all(stored(o.type).name == "bf16" for o in (q, *cached))
    size = 2 if exact else 4
    share = heads // kv
    group = next(g for g in range(min(share, HEADS if exact else EXACT_HEADS), 0, -1) if share % g == 0)
    rows = 32 if group <= 32 else 64
    wide, tall = padded(d, 64), padded(vd, 16)
    signature.axis("seq"), signature.axis("pos")
    made = Sources(spec, signature)
    sources = [made.made(n, s) for n, s in enumerate(spec.get("sources"))]
    moved, memories, function, store = _fitting(spec, signature, sources, size, rows, wide, tall)
    ub = memories[0]
    at: dict[str, Any] = {}
    for m in memories:
        at |= places(m)
    stage = Stage(spec.symbol, MIX, Grid(times=heads // group))
    most = [spec.operands[s[4]].size if s[0] == "selected" else s[1] if s[0] in ("window", "context") else 1
            for s in spec.get("sources")]
    question = Question(spec.symbol, MIX, stage.grid, overlapped=False, known=_CHOSEN,
                        keys=tuple((f"count{n}", m / sum(most)) for n, m in enumerate(most)))
    text = resolved(["\n".join(function.text()), function.call()], ub)
    return render(spec, signature, [stage], memories, question=question, sources=sources, at=at, heads=heads,
                  group=group, rows=rows, d=d, vd=vd, wide=wide, tall=tall, size=size, kv=kv, share=share, keys=KEYS,
                  mine=MINE, part=MINE // 2 if exact else MINE, grain=32 // size, moved=moved,
                  element="bfloat16_t" if exact else "float", ub_element="uint16_t" if exact else "float",
                  q=signature.value(spec.get("q")), q_at=signature.row_of(q.rows),
                  q_kind=signature.element(spec.get("q")), sink=signature.param(sink) if sink >= 0 else "",
                  scale=f"{float(spec.get('scale'))!r}f",
                  rounds=bool(spec.get("rounds")) and not exact, formats=FORMATS, function=text[0], call=text[1],
                  store=store, turned="di_turned_words" if exact else "di_turned_rows", depth=256 // size,
                  ub_buffers=ub.declared(), l1_buffers=memories[1].declared(),
                  cube_buffers=[x for m in memories[1:] for x in m.declared()])


def _fitting(spec: KernelSpec, signature: Signature, sources: list[Source], size: int, rows: int, wide: int,
             tall: int) -> tuple[int, list[Memory], Function, dict[str, Any]]:
    """Heads that are moved at once, memories, and the epilogue's function and store."""
    for moved in MOVED:
        memories = _memories(spec, sources, size, rows, wide, tall, moved)
        function, store = _epilogue(spec, signature, memories[0], tall, moved)
        try:
            for m in memories:
                m.place()
        except PlanError:
            if moved == MOVED[-1]:
                raise
        else:
            break
    return moved, memories, function, store


def _memories(spec: KernelSpec, sources: list[Source], size: int, rows: int, wide: int, tall: int,
              moved: int) -> list[Memory]:
    ub, l1, l0a, l0b, l0c = (Memory(s, spec.title) for s in ("UB", "L1", "L0A", "L0B", "L0C"))
    q = stored(spec.operands[spec.get("q")].type).name
    ub.new("q_raw", moved * wide * (2 if q == "bf16" else 4) + 256)
    ub.new("q_wide", moved * wide * size)
    pitch = max(max(s.keys.pitch, s.values.pitch if s.values else 0) for s in sources)
    ub.new("raw", MINE * pitch + 512)
    part = MINE // 2 if size == 2 else MINE  # keys that are decoded at once; f32 ones stay where they are decoded
    fetched = [x for s in sources for x in (s.keys, s.values) if x]
    if any(slot.part.dtype.is_block for x in fetched for slot in x.slots):
        ub.new("scales", part * 256 + 256)
    ub.new("keys", part * wide * 4 + 512)
    if any(s.values for s in sources):
        ub.new("values", part * padded(tall, 64) * 4 + 512)
    if size == 2:
        ub.new("narrow", MINE * wide * 2)
    ub.new("turned", padded(tall, 64) * MINE * size + 512)
    ub.new("scores", rows // 2 * KEYS * 4)
    ub.new("weights", rows // 2 * KEYS * size)
    ub.new("picks", KEYS * 4 + 256)
    for name in ("top", "below", "sinks"):
        ub.new(name, 512)
    ub.new("acc", rows // 2 * tall * 4 + 256)
    l1.new("queries", rows * wide * size)
    l1.new("l1_keys", KEYS * wide * size)
    l1.new("l1_values", tall * KEYS * size)
    l1.new("l1_weights", rows * KEYS * size)
    l0a.new("left", rows * 256, 2)
    l0b.new("right", max(KEYS * 256, 128 * KEYS * size), 2)
    l0c.new("s", rows * KEYS * 4)
    l0c.new("o", rows * tall * 4)
    return [ub, l1, l0a, l0b, l0c]


def _epilogue(spec: KernelSpec, signature: Signature, ub: Memory, tall: int,
              moved: int) -> tuple[Function, dict[str, Any]]:
    """Stores of rows of ``acc`` [heads of a vector core, features], ``moved`` from head ``h`` on."""
    program, heads, vd = spec.slot("epilogue"), spec.get("heads"), spec.get("value_dim")
    assert program is not None
    ops = cleaned(program, spec.operands)
    stores = [o for o in ops if o.op == "store"]
    if len(stores) != 1 or any(o.op in ("load", "store_record", "reduce") for o in ops):
        raise InternalError("an epilogue of attention on Ascend is arithmetic on its result and one store")

    def leaf(f: Function, i: int, index: Index) -> str | None:
        if ops[i].op == "acc":
            first = f.argument(f"h * {tall // 16}", "uint32_t")
            f.space.extents[first] = heads
            return f.read(Array(ub.buffers["acc"]), Ix.var(LANE) + Ix.var("r") * tall + Ix.var(first) * 16)
        return None

    (o,) = stores
    element = signature.element(o.get("operand"))
    out = ub.new("out", moved * padded(vd, 16) * BYTES[element] + 256)
    f = Function(f"{spec.symbol}_e", ops, leaf)
    f.space.extents |= {"r": heads, LANE: vd}
    flat = {2: (Ix.var("r"), Ix.var(LANE)), 1: (Ix.var("r") * vd + Ix.var(LANE),)}
    source = ops[o.args[0]]
    if len(source.dims) not in flat:
        raise InternalError(f"results of dims {list(source.dims)}")
    value = f.value(o.args[0], flat[len(source.dims)])
    kind = "float" if element == "*f32" else "uint16_t"
    f.write(Array(out, kind), Ix.var(LANE) + Ix.var("r") * padded(vd, 16), value)
    rows = f.argument("some", "uint32_t")
    f.lines = [f"for (uint16_t r = 0; r < {rows}; ++r) {{", f"    uint32_t left = {vd};",
               f"    for (uint16_t c = 0; c < {-(-vd // 64)}; ++c) {{",
               "        vector_bool m = asc_update_mask_b32(left);", *("        " + x for x in f.lines), "    }", "}"]
    return f, {"pointer": signature.value(o.get("operand")), "bytes": BYTES[element], "kind": C_TYPES[element]}
