"""Region -> KernelSpec: node ids, parameter names and layer numbers go, slots and operand types stay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer.codegen.kernels.spec import Attrs, KernelSpec, Operand, TileOp, TileProgram
from deepinfer.codegen.passes.fuse import FREE, VIEWS, Region, owner
from deepinfer.dsl.graph import Graph, Node
from deepinfer.dsl.state import GroupTail, Paged, State, Window
from deepinfer.dsl.types import KEPT, STEP, WANTED, DType
from deepinfer.errors import InternalError

_SUFFIX_AXES = (str(KEPT), str(WANTED))


@dataclass(frozen=True)
class Bound:
    """What an operand is in the graph: ``kind`` value | param | state | input | pin, and its name or node id."""

    kind: str
    name: str | int
    node: Node | None = None


@dataclass(frozen=True)
class Specified:
    spec: KernelSpec
    bindings: tuple[Bound, ...]


@dataclass
class _Writer:
    """Collects operands and tile ops of one region."""

    graph: Graph
    region: Region
    operands: list[Operand] = field(default_factory=list)
    bindings: list[Bound] = field(default_factory=list)
    ops: list[TileOp] = field(default_factory=list)
    _known: dict[object, int] = field(default_factory=dict)
    _emitted: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inside = {n.id for n in self.region.nodes}
        self.anchor_index = {n.id: i for i, n in enumerate(self.region.anchors)}

    # ---- operands ----------------------------------------------------------------------------------------------
    def operand(self, op: Operand, bound: Bound) -> int:
        key = (op, bound.kind, bound.name)
        if key not in self._known:
            self._known[key] = len(self.operands)
            self.operands.append(op)
            self.bindings.append(bound)
        return self._known[key]

    def value(self, n: Node) -> int:
        """Operand for a value that another region made, seen through views."""
        src = owner(n)
        detail: Attrs = ()
        m: Node = n
        while m.op in VIEWS:
            if m.op == "by_sequence":
                detail = (("by_sequence", m.attrs["n"]),)
            m = m.inputs[0]
        rows = str(src.type.rows) if src.type.rows else "-"
        return self.operand(Operand("value", rows, n.dims, str(src.type.dtype), detail=detail),
                            Bound("value", src.id, src))

    def output(self, n: Node) -> int:
        return self.operand(Operand("value", str(n.type.rows), n.dims, str(n.type.dtype), write=True),
                            Bound("value", n.id, n))

    def param(self, n: Node) -> int:
        detail: Attrs = (("stack", n.attrs["stack"]),) if n.attrs["stack"] else ()
        return self.operand(Operand("param", "-", n.dims, str(n.type.dtype), detail=detail),
                            Bound("param", n.attrs["name"], n))

    def input(self, n: Node) -> int:
        base = owner(n)
        name = "positions" if base.op == "group_positions" else str(base.attrs["name"])
        rows = str(self.region.rows if name == "positions" else base.type.rows)  # every axis has its own positions
        return self.operand(Operand("input", rows, base.dims, "i64", detail=(("name", name),)), Bound("input", name))

    def state(self, name: str, write: bool) -> int:
        s = self.graph.states[name]
        return self.operand(Operand("state", str(self.region.rows), (s.record.features,), str(s.record), write,
                                    state_detail(s)), Bound("state", name))

    def handle(self, n: Node, write: bool = False) -> int:
        return self.state(str(n.attrs["name"] if n.op == "state" else n.attrs["state"]), write)

    def pin(self, n: Node) -> int:
        if not n.attrs.get("pin"):
            return -1
        return self.operand(Operand("pin", str(n.type.rows), n.dims, "i32"), Bound("pin", n.attrs["pin"]))

    # ---- tile ops ----------------------------------------------------------------------------------------------
    def add(self, op: str, args: tuple[int, ...], dims: tuple[int, ...], dtype: str, /, **attrs: Any) -> int:
        self.ops.append(TileOp(op, args, dims, dtype, tuple(sorted(attrs.items()))))
        return len(self.ops) - 1

    def emit(self, n: Node) -> int:
        if n.id not in self._emitted:
            self._emitted[n.id] = self._emit(n)
        return self._emitted[n.id]

    def _emit(self, n: Node) -> int:
        dims, dtype = n.dims, str(n.type.dtype)
        if n.id in self.anchor_index:
            return self.add("acc", (), dims, dtype, i=self.anchor_index[n.id])
        if n.op == "const":
            extra = {k: n.attrs[k] for k in ("values", "make") if k in n.attrs}
            return self.add("const", (), dims, dtype, **extra)
        if n.op == "param":
            return self.add("load", (), dims, dtype, operand=self.param(n))
        if n.op == "override_rows":
            return self.emit(n.inputs[0])
        src = owner(n)
        if src.op in ("input", "group_positions"):
            t = self.add("load", (), src.dims, "i64", operand=self.input(n))
            return t if src.dims == dims else self.add("reshape", (t,), dims, "i64")
        if n.type.rows is not None and src.id not in self.inside and not self._rowless(src):
            return self.add("load", (), dims, dtype, operand=self.value(n))
        if n.op in VIEWS:
            inner = self.emit(n.inputs[0])
            return inner if n.inputs[0].type.dims == n.type.dims else self.add("reshape", (inner,), dims, dtype)
        return self._compute(n, dims, dtype)

    @staticmethod
    def _rowless(n: Node) -> bool:
        return n.type.rows is None and n.op not in FREE

    def _compute(self, n: Node, dims: tuple[int, ...], dtype: str) -> int:
        attrs = {k: v for k, v in n.attrs.items() if k not in ("pin", "type", "state", "body")}
        if n.op == "gather" and n.inputs[0].op == "param":
            return self.add("gather", (self.emit(n.inputs[1]),), dims, dtype, operand=self.param(n.inputs[0]))
        if n.op == "contract":  # of few results, in a rowwise kernel
            return self.add("contract", (self.emit(n.inputs[0]),), dims, dtype, operand=self.param(n.inputs[1]))
        if n.op == "pool":
            return self.add("pool", (), dims, dtype, operand=self.handle(n.inputs[0]), **attrs)
        if n.op == "previous":
            at = self.emit(n.inputs[1])
            return self.add("previous", (at,), dims, dtype, operand=self.handle(n.inputs[0]), **attrs)
        if n.op == "topk":
            return self.add("topk", (self.emit(n.inputs[0]),), dims, dtype, k=n.attrs["k"], pin=self.pin(n))
        args = tuple(self.emit(i) for i in n.inputs)
        if n.op == "scan":
            return self.add("scan", args, dims, dtype, trips=n.attrs["trips"], body=_scan_body(n.attrs["body"]))
        return self.add(n.op, args, dims, dtype, **attrs)

    def store(self, n: Node) -> None:
        """Write what other regions, or the caller, read of a node of this region."""
        if n.op in ("extend", "append"):
            raw = n.inputs[1].inputs[0]  # the record is encoded once, from the value itself
            value = self.emit(raw)
            self.add("store_record", (value,), raw.dims, str(raw.type.dtype), operand=self.handle(n, write=True))
        elif n.op == "fetch":
            self.add("fetch", (self.emit(n.inputs[1]),), n.dims, str(n.type.dtype), operand=self.param(n.inputs[0]))
        else:
            value = self.emit(n)
            self.add("store", (value,), n.dims, str(n.type.dtype), operand=self.output(n))

    def program(self) -> TileProgram:
        return TileProgram(tuple(self.ops))


def state_detail(s: State) -> Attrs:
    """What a kernel must know of a state while it is compiled."""
    d: dict[str, Any] = {"kind": s.kind, "record_bytes": s.record_bytes}
    if isinstance(s, Window):
        d |= {"ring_rows": s.ring_rows, "window": s.rows, "first_position": s.first_position}
    elif isinstance(s, GroupTail):
        d |= {"ring_rows": s.ring_rows, "group": s.group}
    elif isinstance(s, Paged):
        d |= {"ratio": s.tokens_per_entry}
    return tuple(sorted(d.items()))


def _scan_body(body: Graph) -> TileProgram:
    ops: list[TileOp] = []
    at: dict[int, int] = {}
    for n in body.nodes:
        if n.op == "carry":
            name = str(n.attrs["name"])
            attrs: Attrs = (("name", name),)
            ops.append(TileOp("carry", (), n.dims, str(n.type.dtype), attrs))
        elif n.op == "const":
            kept = tuple(sorted((k, v) for k, v in n.attrs.items() if k in ("values", "make")))
            ops.append(TileOp("const", (), n.dims, str(n.type.dtype), kept))
        else:
            kept = tuple(sorted((k, v) for k, v in n.attrs.items()))
            ops.append(TileOp(n.op, tuple(at[i.id] for i in n.inputs), n.dims, str(n.type.dtype), kept))
        at[n.id] = len(ops) - 1
    out = at[body.outputs["carry"].id]
    if out != len(ops) - 1:
        ops.append(TileOp("reshape", (out,), body.outputs["carry"].dims, str(body.outputs["carry"].type.dtype)))
    return TileProgram(tuple(ops))


def results(region: Region, read_outside: set[int]) -> list[Node]:
    """Nodes of a region that have an effect: state writes, fetches, and values read elsewhere."""
    return [n for n in region.nodes if n.op in ("extend", "append", "fetch") or n.id in read_outside]


def specify(graph: Graph, region: Region, read_outside: set[int]) -> Specified:
    """KernelSpec of a region and what its operands are.

    ``read_outside``: ids of nodes whose value is read by another region or is an output of the graph.
    """
    w = _Writer(graph, region)
    make = {"rowwise": _rowwise, "gemm": _gemm, "grouped_gemm": _grouped, "attend": _attend,
            "score_select": _select, "draw": _draw}[region.family]
    attrs, slots = make(w, results(region, read_outside))
    rows, operands = _any_axis(str(region.rows), w.operands)
    spec = KernelSpec(region.family, rows, operands, tuple(sorted(attrs.items())), slots,
                      title=_title(region), region=tuple(region.nodes))
    return Specified(spec, tuple(w.bindings))


def _any_axis(rows: str, operands: list[Operand]) -> tuple[str, tuple[Operand, ...]]:
    """A kernel whose operands all lie on its own axis serves every suffix axis: the launch tells it which."""
    if rows in _SUFFIX_AXES and all(o.rows in (rows, "-") for o in operands):
        return str(STEP), tuple(replace(o, rows=str(STEP)) if o.rows == rows else o for o in operands)
    return rows, tuple(operands)


_Made = tuple[dict[str, Any], tuple[tuple[str, TileProgram], ...]]


def _rowwise(w: _Writer, out: list[Node]) -> _Made:
    for n in out:
        w.store(n)
    return {}, (("body", w.program()),)


def _gemm(w: _Writer, out: list[Node]) -> _Made:
    anchors = w.region.anchors
    x = anchors[0].inputs[0]
    if any(owner(a.inputs[0]).id != owner(x).id for a in anchors):
        raise InternalError(f"{anchors[0].scope}: a gemm region mixes inputs")  # mixed tiles: targets that have them
    weights = []
    for a in anchors:
        weight = a.inputs[1]
        op = w.param(weight) if weight.op == "param" else _literal(w, weight)
        weights.append((op, a.attrs.get("groups", 1)))
    attrs = {"x": w.value(x), "weights": tuple(weights)}
    return attrs | _made_weights(anchors), _epilogue(w, out)


def _literal(w: _Writer, weight: Node) -> int:
    if weight.op != "const":
        raise InternalError(f"a contraction has a computed weight ({weight.op})")
    return w.operand(Operand("const", "-", weight.dims, str(weight.type.dtype),
                             detail=tuple(sorted((k, v) for k, v in weight.attrs.items() if k in ("values", "make")))),
                     Bound("const", weight.id))


def _made_weights(anchors: list[Node]) -> dict[str, Any]:
    return {"results": tuple(a.dims for a in anchors)}


def _epilogue(w: _Writer, out: list[Node]) -> tuple[tuple[str, TileProgram], ...]:
    for n in out:
        w.store(n)
    return (("epilogue", w.program()),)


def _grouped(w: _Writer, out: list[Node]) -> _Made:
    anchors = w.region.anchors
    x, experts = anchors[0].inputs[0], anchors[0].inputs[1]
    attrs = {"x": w.value(x), "experts": w.value(experts), "weights": tuple(w.param(a.inputs[2]) for a in anchors)}
    return attrs | _made_weights(anchors), _epilogue(w, out)


def _attend(w: _Writer, out: list[Node]) -> _Made:
    (a,) = w.region.anchors
    rest = list(a.inputs)
    q = rest.pop(0)
    attrs = {k: a.attrs[k] for k in ("scale", "rounds", "kv_heads", "value_dim")}
    attrs |= {"heads": q.dims[0], "head_dim": q.dims[1], "q": w.value(q), "sink": w.param(rest.pop(0)) if
    a.attrs["sink"] else -1}
    sources = []
    for kind, n, split in a.attrs["sources"]:
        def take() -> int:
            node = rest.pop(0)
            return w.handle(node) if DType.parse("state") == node.type.dtype else w.value(node)
        keys = take()
        values = take() if split else -1
        picked = take() if kind == "selected" else -1
        sources.append((kind, n, keys, values, picked))
    return attrs | {"sources": tuple(sources)}, _epilogue(w, out)


def _select(w: _Writer, out: list[Node]) -> _Made:
    (score,) = w.region.anchors
    q, keys, weight = score.inputs
    attrs: dict[str, Any] = {"q": w.value(q), "keys": w.handle(keys), "w": w.value(weight),
                             "ratio": score.attrs["ratio"], "rounds": score.attrs["rounds"],
                             "heads": q.dims[0], "head_dim": q.dims[1]}
    selections = []
    for n in w.region.members:
        if n.op != "topk":
            continue
        block, within, within_block, x = 0, -1, 0, n.inputs[0]
        if x.op == "block_max":
            block, x = x.attrs["block"], x.inputs[0]
        if x.op == "within_blocks":
            within, within_block = w.value(x.inputs[1]), x.attrs["block"]
        selections.append((("k", n.attrs["k"]), ("block", block), ("within", within), ("within_block", within_block),
                           ("pin", w.pin(n)), ("out", w.output(n))))
    return attrs | {"selections": tuple(selections)}, ()


def _draw(w: _Writer, out: list[Node]) -> _Made:
    (n,) = w.region.anchors
    return {"logits": w.value(n.inputs[0]), "out": w.output(n), "ahead": n.attrs["ahead"]}, ()


def _title(region: Region) -> str:
    """A readable name made of sizes and formats only, so that equal kernels get equal names."""
    def shape(n: Node) -> str:
        return "x".join(map(str, n.dims))

    if region.family in ("gemm", "grouped_gemm"):
        weights = [a.inputs[-1] for a in region.anchors]
        kinds = "_".join(dict.fromkeys(f"{w.type.dtype.name}" for w in weights))
        return f"{region.family}_{'_'.join(shape(w) for w in weights[:2])}_{kinds}"
    if region.anchors:
        return f"{region.family}_{shape(region.anchors[0].inputs[0])}"
    widest = max(region.nodes, key=lambda n: n.type.size if n.type.rows else 0)
    return f"rowwise_{shape(widest) or 1}_{len(region.nodes)}"
