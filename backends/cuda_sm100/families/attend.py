"""Attention: one softmax per head over keys from rings, paged entries and this step's rows.

What is rounded is a probability beside the largest score of its row, so scores come first. Where the number of keys has
a bound they are kept in the scratch: for few rows by programs that share the keys of a row, then the values are summed
by programs that share its features; for many rows by one program each, two of them on a processor, so that one decodes
while the other multiplies. Every program makes scores and adds values up in the same order: a row's result does not
depend on which of the two ran.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer.backends.cpu.tile.index import linear
from deepinfer.backends.cuda_sm100.families.reader import Reader, holds_bf16, in_words
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.source import CudaSource, Stage, Variant, render
from deepinfer.backends.cuda_sm100.tile.axes import Axes, power_of_two
from deepinfer.backends.cuda_sm100.tile.printer import Block, Index, Printer
from deepinfer.backends.cuda_sm100.tile.program import cleaned
from deepinfer.backends.grid import Grid
from deepinfer.codegen.kernels.spec import KernelSpec, TileOp
from deepinfer.errors import InternalError

HEADS, EXACT_HEADS = 64, 16  # heads of one program: they share the decoded keys
KEYS, INEXACT_KEYS, UNBOUNDED_KEYS = 64, 32, 16  # keys of a step of a loop; sums of probabilities are made by lane
DECODED = 128  # features of keys that are decoded at a time
FEATURES = 256  # features that a program sums at a time
_PIECE = 32  # and that its epilogue goes through at a time
SHARED = ((16, 32, 32), (128, 64, 128))  # rows that share programs -> keys of a program, features of a program
_HALF = 112 << 10  # shared memory of one of two programs of a processor
_ALIGNED = 64  # columns of scores that a source begins at
_ABSENT = -1 << 62  # the place of a key that is not there
_PERSISTENT = 264  # programs that fill a device, one row after the other


@dataclass
class Source:
    """Where the keys of a source are. ``most``: keys at most, 0 without a bound; ``setup``: statements before its
    loops, with the number of keys ``count``; ``find``: those that make records (or rows) and validity of keys ``j``;
    ``key``, ``value``: those that make a block [KEYS, features] of that name; ``first``: its first column of
    scores; ``steps``: steps of keys in flight while scores are made; ``places``: name, base and bytes of the records
    that ``find`` makes."""

    most: int
    count: str
    setup: list[str] = field(default_factory=list)
    find: list[str] = field(default_factory=list)
    key: list[str] = field(default_factory=list)
    value: list[str] = field(default_factory=list)
    first: int = 0
    steps: int = 2
    places: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def span(self) -> int:
        """A power of two that holds its keys."""
        return power_of_two(max(1, self.columns))

    @property
    def columns(self) -> int:
        """Columns of scores."""
        return -(-self.most // _ALIGNED) * _ALIGNED


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
        out.key = self.reader.block("key", "record", op, self.d, self.kv, span="C", first="c0", d="c")
        out.places.append(("record", self.signature.state(keys, "base"), op.get("record_bytes")))
        other = "record"
        if values >= 0:
            other, op = "other", self.signature.operand(values)
            out.find.append(f"other = ({find(values)})[:, None]")
            out.places.append(("other", self.signature.state(values, "base"), op.get("record_bytes")))
        out.value = self.reader.block("value", other, op, self.vd, self.kv, span="F", first="f0")
        return out

    def _records(self, n: int, kind: str, width: int, picked: int) -> tuple[Source, Any]:
        s, low = self.signature, f"low{n}"
        if kind in ("window", "context"):
            stop = "pos + 1" if kind == "window" else f"tl.load({s.seq('c')} + seq)"
            handle = int(self.spec.get("sources")[n][2])
            first = s.operand(handle).get("first_position", 0)
            valid = f"tl.maximum(tl.load({s.state(handle, 'valid')} + seq), {first})"
            setup = [f"{low} = tl.maximum({valid}, {stop} - {width})"]
            return Source(width, f"{stop} - {low}", setup), lambda i: self.reader.view(i, low)
        if kind == "dense":
            return Source(0, f"(pos + 1) // {width}"), lambda i: self.reader.entry(
                i, "tl.where(j_in, j, 0)", "j_in")
        if kind == "selected":
            op = s.operand(picked)
            row = f"{s.value(picked)} + ({s.row_of(op.rows)}) * {op.size}"
            find = [f"e = tl.load({row} + j, mask=j_in, other=-1).to(tl.int64)",
                    f"e_ok = (e >= 0) & (e < (pos + 1) // {width})", "j_ok = e_ok[:, None]",
                    "e = tl.where(e_ok, e, 0)"]
            return Source(op.size, f"{op.size}", [], find), lambda i: self.reader.entry(i, "e", "e_ok")
        raise InternalError(f"attend has no sources of kind {kind}")

    def _rows(self, n: int, keys: int, values: int) -> Source:
        rows = self.signature.operand(keys).rows
        first = self.signature.axis_of(rows, "first")

        def read(name: str, i: int, width: int, d: str) -> list[str]:
            size = self.signature.operand(i).size
            base = f"{self.signature.value(i)} + (start{n} + j)[:, None] * {size} + kv * {size // self.kv}"
            mask = f"j_ok & {d}_ok" if width != power_of_two(width) else "j_ok"
            return [f"{name} = tl.load({base} + {d}, mask={mask}, other=0).to({self.reader.element})"]

        setup = [f"start{n} = tl.load({first} + seq).to(tl.int64)"]
        return Source(0, f"tl.load({first} + seq + 1) - start{n}", setup, [], read("key", keys, self.d, "c"),
                      read("value", values if values >= 0 else keys, self.vd, "d"))


def emit(spec: KernelSpec) -> CudaSource:
    signature, program = Signature(spec), spec.slot("epilogue")
    if program is None:
        raise InternalError(f"{spec.title}: an attend has an epilogue")
    if spec.get("rounds") not in ("", "bf16"):
        raise InternalError(f"probabilities are held in bf16 or f32, not {spec.get('rounds')}")
    heads, kv, d, vd = (spec.get(x) for x in ("heads", "kv_heads", "head_dim", "value_dim"))
    q, sink, rounds = spec.operands[spec.get("q")], spec.get("sink"), bool(spec.get("rounds"))
    cached = [spec.operands[i] for s in spec.get("sources") for i in s[2:4] if i >= 0]
    exact = holds_bf16(q) and all(map(holds_bf16, cached)) and spec.get("rounds") == "bf16"
    share = heads // kv
    group = next(g for g in range(min(share, HEADS if exact else EXACT_HEADS), 0, -1) if share % g == 0)
    signature.axis("seq"), signature.axis("pos"), signature.scratch()
    element = "tl.bfloat16" if exact else "tl.float32"
    words = exact and kv == 1 and d == vd and all(
        kind != "block" and values < 0 and in_words(spec.operands[keys], d)
        for kind, _, keys, values, _ in spec.get("sources"))
    reader = Reader(signature, element, words)
    printer = Sources(spec, signature, reader)
    if power_of_two(d) != power_of_two(vd):
        raise InternalError("keys and values of very different widths")
    sources = [printer.text(n, s) for n, s in enumerate(spec.get("sources"))]
    columns = 0
    for s in sources:
        s.first, columns = columns, columns + s.columns
    plan = _Plan(spec.symbol, heads // group, max(16, power_of_two(group)), max(16, power_of_two(d)), columns, exact,
                 all(s.most for s in sources))
    for s in sources:
        s.steps = plan.steps(sum(size for *_, size in s.places[:1]))
    return render(spec, signature, plan.variants(), scratch=(plan.scratch(), 0), sources=sources,
                  lines=_epilogue(spec, signature, heads, vd), heads=heads, group=group, groups=plan.groups,
                  share=share, d=d, vd=vd, q=signature.value(spec.get("q")), q_at=signature.row_of(q.rows),
                  bounded=plan.bounded, sink=signature.param(sink) if sink >= 0 else "", element=element,
                  columns=columns, room=plan.room(), places=plan.places(), absent=_ABSENT, chunks=plan.chunks,
                  persistent=_PERSISTENT, scale=repr(float(spec.get("scale")) * reader.up), up=repr(reader.up),
                  words=words, piece=_PIECE, per=2 if rounds else 1, held="tl.bfloat16" if rounds else "tl.float32",
                  rounds=rounds, kv=kv, precision="" if exact else ', input_precision="tf32x3"')


@dataclass(frozen=True)
class _Plan:
    """How a kernel is launched. ``groups``: programs that share the heads of a row; ``columns``: of its scores."""

    symbol: str
    groups: int
    h: int
    d: int
    columns: int
    exact: bool
    bounded: bool

    @property
    def keys(self) -> int:
        return UNBOUNDED_KEYS if not self.bounded else KEYS if self.exact else INEXACT_KEYS

    @property
    def chunks(self) -> int:
        """Steps of the features of a key."""
        return -(-self.d // DECODED)

    def steps(self, record: int) -> int:
        """Steps of keys in flight, 3 at most, beside the queries and a step's decoded features."""
        left = _HALF - 2 * self.h * self.d - 2 * self.keys * DECODED
        return max(1, min(2, left // (self.keys * max(1, record)))) + 1

    def room(self) -> int:
        """f32 of a row and group: scores, the largest of each tile, and where keys and values lie."""
        return self.places() + 4 * self.columns

    def places(self) -> int:
        """The first f32 of the places."""
        return self.h * (self.columns + self.columns // min(self.keys, SHARED[0][1]))

    def scratch(self) -> int:
        return 4 * self.room() * self.groups * max(SHARED[-1][0], _PERSISTENT) if self.bounded else 0

    def variants(self) -> list[Variant]:
        matrix, f = self.exact and self.h >= 64, min(self.d, FEATURES)
        sizes = (("H", self.h), ("C", min(self.d, DECODED)), ("KEYS", self.keys))
        if not self.bounded:
            f = min(self.d, 128)
            stage = Stage(self.symbol, Grid(times=self.groups * (self.d // f)), 8 if self.h * self.d >= 64 * 256 else 4,
                          (*sizes, ("F", f)), 2, True, matrix, ((("pipeline", 1),),))
            return [Variant(0, (stage,))]
        few = self._shared(min(SHARED[0][1], self.keys), SHARED[0][2], matrix)
        shared = [Variant(rows, self._shared(min(keys, self.keys), features, matrix), Variant(rows, few))
                  for rows, keys, features in SHARED]
        whole = Stage(self.symbol, Grid(fixed=_PERSISTENT * self.groups), 4, (*sizes, ("F", f)), 2, True, matrix,
                      tuple((("warps", w), ("F", x), ("pipeline", p)) for w in (4, 8) for x in (128, 64) for p in (2, 1)
                            if x < f))
        return [*shared, Variant(0, (whole,))]

    def _shared(self, keys: int, features: int, matrix: bool) -> tuple[Stage, Stage]:
        """Scores by programs that share keys, values by programs that share features."""
        tiles, f = self.columns // keys, min(features, self.d)
        scores = Stage(f"{self.symbol}_scores", Grid(times=self.groups * tiles), 4,
                       (("H", self.h), ("C", min(self.d, DECODED)), ("KEYS", keys)), 1, True, matrix, (8, 16))
        values = Stage(f"{self.symbol}_values", Grid(times=self.groups * (self.d // f)), 4,
                       (("H", self.h), ("F", f), ("KEYS", self.keys), ("TILES", tiles)), 3, True, matrix,
                       (8, (("pipeline", 1),), (("warps", 8), ("pipeline", 1))))
        return scores, values


def _epilogue(spec: KernelSpec, signature: Signature, heads: int, vd: int) -> list[str]:
    """Stores of the tile ``acc0`` [heads of the program, features]."""
    program = spec.slot("epilogue")
    assert program is not None
    ops = cleaned(program, spec.operands)
    both = frozenset((0, 1))

    def acc(o: TileOp, index: Index) -> Block:
        return Block("acc0", both)

    p = Printer(ops, signature, Axes([0, 0], fixed=True), acc=acc, tile=("H", "F"), along=1, prefix="e")
    flat = p.named("head", heads, frozenset((0,)), ("h_ok",)) * vd + p.named("d", vd, frozenset((1,)), ("d_ok",))
    for o in ops:
        if o.op == "store":
            index = tuple(p.space.split(flat, o.dims))
            p.write(o.get("operand"), linear(o.dims, index), p.value(o.args[0], index))
        elif o.op == "store_record":
            raise InternalError("an epilogue of attention writes no records")
    return [*p.heads, *p.lines]
