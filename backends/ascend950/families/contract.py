"""What the contractions share: components of results, weights on their way to L1, epilogues on tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.backends.ascend950.cost import Question
from deepinfer.backends.ascend950.memory import Memory, padded
from deepinfer.backends.ascend950.signature import BYTES, C_TYPES, Signature
from deepinfer.backends.ascend950.source import Stage
from deepinfer.backends.ascend950.target import CAPACITY, CORES
from deepinfer.backends.ascend950.tile.function import LANE, Array, Function, Index
from deepinfer.backends.ascend950.tile.printer import Constants, Printer
from deepinfer.backends.cpu.storage import stored
from deepinfer.backends.cpu.tile.index import Ix, Space, linear
from deepinfer.backends.cpu.tile.program import cleaned
from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.errors import InternalError

ROWS = 64  # inputs of a tile
DEPTH = 256  # bytes of K that a step takes
L1_ROOM = 32 << 10  # bytes of a weight tile in L1


@dataclass(frozen=True)
class Component:
    """Results that the epilogue reads together: ``anchors`` of equal dims, and the stores made of them."""

    anchors: tuple[int, ...]
    stores: tuple[int, ...]


def components(ops: list[TileOp], count: int) -> list[Component]:
    """Anchors joined by the stores that need them, in order."""
    def anchors(i: int) -> set[int]:
        o = ops[i]
        return {int(o.get("i"))} if o.op == "acc" else set().union(*(anchors(x) for x in o.args))

    needs = {s: sorted(anchors(s)) for s, o in enumerate(ops) if o.op == "store"}
    group = list(range(count))
    for xs in needs.values():
        for x in xs[1:]:
            old, new = group[x], group[xs[0]]
            group = [new if g == old else g for g in group]
    out = []
    for g in dict.fromkeys(group):
        members = tuple(i for i in range(count) if group[i] == g)
        out.append(Component(members, tuple(s for s, xs in needs.items() if xs and group[xs[0]] == g)))
    return out


@dataclass(frozen=True)
class Weight:
    """How a weight gets to L1. ``expand``: "" where the cube core copies it, else the format that a vector core
    expands; ``data``, ``scale``: expressions of pointers; ``block``: rows and columns that share a scale."""

    data: str
    expand: str = ""
    scale: str = ""
    scaled: bool = False  # the cube core multiplies codes; a vector core lays their scales out
    block: tuple[int, int] = (0, 0)
    k: int = 0
    rows: int = 0

    @property
    def down(self) -> int:
        return self.block[0].bit_length() - 1

    @property
    def across(self) -> int:
        return self.block[1].bit_length() - 1

    @property
    def per_byte(self) -> int:
        return 2 if self.expand == "mxfp4" else 1

    @property
    def element(self) -> int:
        """Bytes of a stored element where it is not a code."""
        return {"bf16": 2, "f32": 4}.get(self.expand, 1)


CODES = "fp8_e4m3fn_t"


def multiplies_codes(x: Operand, weights: Sequence[Operand]) -> bool:
    """Whether both sides are codes with scales of 32 features, which the cube core multiplies as they are. E2M1 codes
    are E4M3 codes once they are widened."""
    return x.type.name == "mxfp8" and x.type.block == (1, 32) and x.dims[-1] % 64 == 0 and all(
        w.role == "param" and w.type.name in ("mxfp8", "mxfp4") and w.type.block[1] % 32 == 0 for w in weights)


def element_of(x: Operand, weights: Sequence[Operand]) -> str:
    """Element of the products: E4M3 with scales, else bf16 where it holds both sides exactly, else f32."""
    if multiplies_codes(x, weights):
        return CODES
    both = stored(x.type).name == "bf16" and all(w.role == "const" or w.type.name != "f32" for w in weights)
    return "bfloat16_t" if both else "float"


def weight_of(signature: Signature, i: int, element: str, constants: Constants) -> Weight:
    op = signature.operand(i)
    n, k = op.dims[-2:]
    t = op.type
    if op.role == "const":
        at = constants.place(_literal(op, element))
        return Weight(f"((__gm__ {element}*)({signature.constants()} + {at}))", k=k, rows=n)
    if t.is_block and t.name in ("mxfp8", "mxfp4"):
        r, c = t.block
        if r & (r - 1) or c & (c - 1):
            raise InternalError(f"blocks of weights have powers of two, not {t}")
        codes = element == CODES
        return Weight(signature.param(i), "" if codes and t.name == "mxfp8" else t.name, signature.param(i, "scale"),
                      codes, (r, c), k, n)
    if t.name in ("f32", "bf16"):
        same = (t.name == "bf16") == (element == "bfloat16_t")
        return Weight(signature.param(i), "" if same else t.name, k=k, rows=n)
    raise InternalError(f"the Ascend backend has no contraction with weights of {t}")


def _literal(op: Operand, element: str) -> bytes:
    """The elements of a literal matrix."""
    if op.get("make") == "hadamard":
        n = op.dims[0]
        bits = np.bitwise_and(np.arange(n)[:, None], np.arange(n)[None, :])
        odd = np.array([bin(int(v)).count("1") & 1 for v in bits.reshape(-1)]).reshape(n, n)
        x = np.where(odd, -1.0, 1.0).astype(np.float32)
    else:
        x = np.array(op.get("values"), np.float32).reshape(op.dims)
    if element == "float":
        return x.tobytes()
    u = x.view(np.uint32)
    if (u & 0xFFFF).any():
        raise InternalError("bf16 does not hold a literal weight")
    return (u >> 16).astype(np.uint16).tobytes()


def columns_of(n: int, wide: int) -> int:
    """Columns of a tile: halves for two vector cores, each a multiple of 16."""
    return max(32, min(wide, 1 << (n - 1).bit_length()))


@dataclass
class Room:
    """An operand of an epilogue on a tile: rows in UB.

    ``how``: ``full`` (columns of each input), ``row`` (columns that the inputs of a row share), ``input`` (one element
    each), ``column`` (columns that all share).
    """

    name: str
    kind: str
    pointer: str
    elements: int
    how: str
    bytes: int


@dataclass
class Epilogue:
    """Prints the stores of a component on a tile: rows are inputs, lanes are columns of this vector core."""

    program: TileProgram
    signature: Signature
    memory: Memory
    half: int  # columns of a tile that a vector core has
    lead: Sequence[int]
    groups: int
    functions: list[str] = field(default_factory=list)
    rooms: dict[str, Room] = field(default_factory=dict)
    outs: list[Room] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ops = cleaned(self.program, self.signature.spec.operands)
        if any(o.op == "store_record" for o in self.ops):
            raise InternalError("an epilogue of a contraction writes no records")

    def text(self, number: int, c: Component, accs: dict[int, str]) -> str:
        """Adds the function of a component, and returns its call; ``accs``: names of the buffers of results."""
        self.rooms, self.outs = {}, []
        dims = self.ops[c.stores[0]].dims
        f = Function(f"{self.signature.spec.symbol}_e{number}", self.ops, self._leaf)
        f.piece = "v"
        columns = math.prod(dims[len(self.lead):])
        space = Space({"lead": math.prod(self.lead), "group": self.groups, "j": columns // self.groups, "r": ROWS})
        f.space = space
        index = self._index(dims, space)
        self.accs = accs
        values = [(self.ops[s], f.value(self.ops[s].args[0], index)) for s in c.stores]
        for o, value in values:
            if o.dims != dims:
                raise InternalError("stores of one epilogue differ in dims")
            room = self._out(number, o)
            kind = "uint16_t" if room.kind == "bfloat16_t" else room.kind
            if kind not in ("float", "uint16_t"):
                raise InternalError(f"an epilogue stores {room.kind}")
            f.write(Array(self.memory.buffers[room.name], kind), Ix.var(LANE) + Ix.var("r") * self.half, value)
        rows, count = f.argument("valid", "uint32_t"), f.argument("width", "uint32_t")
        f.lines = [f"for (uint16_t r = 0; r < {rows}; ++r) {{", f"    uint32_t left = {count};",
                   f"    for (uint16_t v = 0; v < {-(-self.half // 64)}; ++v) {{",
                   "        vector_bool m = asc_update_mask_b32(left);", *("        " + x for x in f.lines), "    }",
                   "}"]
        self.functions.append("\n".join(f.text()))
        return f.call()

    def _index(self, dims: Sequence[int], space: Space) -> Index:
        """Index of the results: symbolic input, group and column; ``j`` counts columns of the group."""
        lead: tuple[Ix, ...] = ()
        if self.lead:
            big = [n for n in self.lead if n > 1]
            if len(big) > 1:
                raise InternalError(f"inputs of dims {list(self.lead)}")
            lead = tuple(Ix.var("lead") if n > 1 else Ix() for n in self.lead)
        rest = dims[len(self.lead):]
        if self.groups > 1:
            return (*lead, Ix.var("group"), Ix.var("j"))
        if len(rest) > 1 and math.prod(rest) != rest[-1]:
            raise InternalError(f"results of dims {list(dims)}")
        return (*lead, *(Ix() for _ in rest[:-1]), Ix.var("j"))

    def _leaf(self, f: Function, i: int, index: Index) -> str | None:
        o = self.ops[i]
        here = Ix.var(LANE) + Ix.var("r") * self.half
        if o.op == "acc":
            return f.read(Array(self.memory.buffers[self.accs[int(o.get("i"))]]), here)
        if o.op == "const" and f.scalar(i, index) is None:
            raise InternalError("an epilogue reads a table")
        if o.op == "encode":
            raise InternalError("an epilogue of single elements encodes nothing")
        if o.op != "load":
            return None
        room = self._room(o, dict(linear(o.dims, index).terms))
        kind = "uint16_t" if room.kind == "bfloat16_t" else room.kind
        array = Array(self.memory.buffers[room.name], kind)
        if room.how == "column":
            return f.read(array, Ix.var(LANE))
        if room.how == "input":
            return f.read(array, Ix.var("r") * (32 // (2 if kind == "uint16_t" else 4)))
        return f.read(array, here)

    def _room(self, o: TileOp, terms: dict[str, int]) -> Room:
        s, operand = self.signature, o.get("operand")
        op, element = s.operand(operand), s.element(operand)
        if element not in ("*f32", "*bf16"):
            raise InternalError(f"an epilogue reads {op.dtype}")
        kind, leads = C_TYPES[element], math.prod(self.lead)
        per_input = op.size // leads if op.role == "value" else op.size
        if op.role == "param" and terms.get("lead", 0) == 0 and terms.get("j", 1) == 1:
            how = "column"
        elif op.role == "value" and terms.get("j", 0) == 0 and per_input == 1:
            how = "input"
        elif op.role == "value" and terms.get("j", 0) == 1 and (leads == 1 or terms.get("lead", 0) == per_input):
            how = "full"
        elif op.role == "value" and terms.get("j", 0) == 1 and terms.get("lead", 0) == 0:
            how, per_input = "row", op.size  # the inputs of a row share it
        else:
            raise InternalError(f"an epilogue reads operand {operand} of {list(op.dims)} unevenly")
        if op.role == "value" and op.rows != s.spec.rows:
            raise InternalError(f"an epilogue reads rows of {op.rows}")
        name = f"in{operand}_{how}"
        if name not in self.rooms:
            if name not in self.memory.buffers:
                size = {"column": self.half * 4, "input": ROWS * 32}.get(how, ROWS * self.half * BYTES[element])
                self.memory.new(name, size + 256)
            pointer = s.param(operand) if op.role == "param" else s.value(operand)
            self.rooms[name] = Room(name, kind, pointer, per_input, how, BYTES[element])
        return self.rooms[name]

    def _out(self, number: int, o: TileOp) -> Room:
        s, operand = self.signature, o.get("operand")
        element = s.element(operand)
        name = f"out{operand}"
        if name not in self.memory.buffers:
            self.memory.new(name, ROWS * self.half * BYTES[element] + 256)
        leads = math.prod(self.lead)
        if s.operand(operand).rows != s.spec.rows:
            raise InternalError("an epilogue writes rows of another axis")
        room = Room(name, C_TYPES[element], s.value(operand), s.operand(operand).size // leads, "full", BYTES[element])
        self.outs.append(room)
        return room


def resolved(lines: Sequence[str], memory: Memory) -> list[str]:
    """Addresses of placed buffers."""
    resolver = Printer.__new__(Printer)
    resolver.memory = memory
    return [resolver.resolve(x) for x in lines]


def places(memory: Memory) -> dict[str, Any]:
    """Offsets of buffers by name; of the second copy under ``name__1``."""
    out: dict[str, Any] = {}
    for b in memory.buffers.values():
        out[b.name], out[b.name + "_step"] = b.offset, b.stride if b.copies > 1 else 0
    return out


@dataclass
class Plan:
    """Tiles and memories of a contraction. ``widest``: columns of its widest result."""

    spec: KernelSpec
    signature: Signature
    constants: Constants
    element: str
    k: int
    lead: Sequence[int]
    groups: int
    widest: int
    functions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        title = self.spec.title
        self.ub, self.l1, self.l0a, self.l0b, self.l0c = (Memory(s, title) for s in ("UB", "L1", "L0A", "L0B", "L0C"))
        self.size = {CODES: 1, "bfloat16_t": 2}.get(self.element, 4)
        self.depth = DEPTH // self.size
        self.columns = columns_of(self.widest, 128)
        self.half = self.columns // 2
        self.memories = (self.ub, self.l1, self.l0a, self.l0b, self.l0c)

    @property
    def steps(self) -> int:
        return -(-self.k // self.depth)

    def stays(self) -> bool:
        """Whether the codes of a tile's rows stay in L1 for all of its columns: blocks take items in a row then, and
        encode rows once for each run of them."""
        rows = self.steps * (ROWS * DEPTH + padded(ROWS * self.depth // 32))
        rest = 4 * self.columns * DEPTH + 2 * padded(self.columns * self.depth // 32)
        return self.element == CODES and self.groups == 1 and rows + rest <= CAPACITY["L1"]

    def widens_x(self) -> bool:
        """Whether the vector cores make the rows' elements."""
        x = self.spec.operands[self.spec.get("x")]
        return self.element == CODES or (stored(x.type).name == "bf16") != (self.element == "bfloat16_t")


def component_tiles(plan: Plan, program: TileProgram, operands: Sequence[int],
                    widths: Sequence[int]) -> list[dict[str, Any]]:
    """What the skeleton needs to know of each component, in order of its column tiles."""
    weights = [weight_of(plan.signature, i, plan.element, plan.constants) for i in operands]
    epilogue = Epilogue(program, plan.signature, plan.ub, plan.half, plan.lead, plan.groups)
    found = components(epilogue.ops, len(operands))
    most = max(len(c.anchors) for c in found)
    for n in range(most):
        plan.ub.new(f"acc{n}", ROWS * plan.half * 4 + 256)
    tiles, first = [], 0
    for number, c in enumerate(found):
        n = widths[c.anchors[0]]
        accs = {a: f"acc{k}" for k, a in enumerate(c.anchors)}
        call = epilogue.text(number, c, accs)
        across = -(-n // plan.columns)
        tiles.append({"first": first, "tiles": across * plan.groups, "n": n, "across": across,
                      "anchors": [weights[a] for a in c.anchors], "call": call, "rooms": list(epilogue.rooms.values()),
                      "outs": list(epilogue.outs)})
        first += across * plan.groups
    _rooms(plan, weights, most)
    for t in tiles:
        t["call"] = resolved([str(t["call"])], plan.ub)[0]
    plan.functions = resolved(epilogue.functions, plan.ub)
    return tiles


def _rooms(plan: Plan, weights: Sequence[Weight], most: int) -> None:
    """Lays out all memories."""
    expands = [w for w in weights if w.expand]
    scaled = [w for w in weights if w.scaled]
    if scaled:
        plan.ub.new("scale_bytes", plan.half * 32 + 256, 2)
        plan.ub.new("scales", plan.half * 256 + 256, 1)
        plan.ub.new("laid", plan.half * plan.depth // 32 * 4)
        plan.ub.new("packed", plan.half * plan.depth // 32, 2)
        plan.ub.new("x_laid", ROWS // 2 * plan.depth // 32 * 4)
        plan.ub.new("x_packed", ROWS // 2 * plan.depth // 32, 2)
        plan.l1.new("row_scales", ROWS * plan.depth // 32, plan.steps if plan.stays() else 2)
        plan.l1.new("weight_scales", plan.columns * plan.depth // 32, 2)
    if expands:
        raw = max(w.element * plan.depth // w.per_byte for w in expands)
        plan.ub.new("codes", plan.half * raw + 512, 2)
        plan.ub.new("expanded", plan.half * plan.depth * plan.size, 2)
        blocks = max((-(-plan.half // w.block[0]) + 1 for w in expands if w.block[0]), default=0)
        if blocks and not scaled:
            plan.ub.new("scale_bytes", blocks * 32 + 256, 2)
            plan.ub.new("scales", blocks * 256 + 256, 1)
    if plan.widens_x():
        plan.ub.new("x_raw", ROWS // 2 * plan.depth * 4 + 256, 2)
        plan.ub.new("x_wide", ROWS // 2 * plan.depth * plan.size, 2)
    plan.l1.new("weights", plan.columns * DEPTH, 2)  # from the vector cores
    plan.l1.new("direct", plan.columns * DEPTH, 2)
    plan.l1.new("rows", ROWS * DEPTH, plan.steps if plan.stays() else 2)
    plan.l0a.new("left", ROWS * DEPTH, 2)
    plan.l0b.new("right", plan.columns * DEPTH, 2)
    plan.l0c.new("sums", most * ROWS * plan.columns * 4, 2 if 2 * most * ROWS * plan.columns * 4 <= 262144 else 1)
    for m in plan.memories:
        m.place()


def question_of(plan: Plan, tiles: list[dict[str, Any]], stage: Stage, launches: int = 1) -> Question:
    """How the kernel is asked for its work."""
    across = sum(t["tiles"] for t in tiles)
    run = min(across, -(-math.prod(plan.lead) * across // CORES)) if plan.stays() else 1
    kinds = tuple((t["tiles"] / across, (("ct", t["first"]),)) for t in tiles)
    return Question(stage.function, stage.kind, stage.grid, launches, kinds, True, run, known=(("expert", 0),))


def planned(plan: Plan, tiles: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments of the skeleton."""
    at: dict[str, Any] = {}
    for m in plan.memories:
        at |= places(m)
    return {"tiles": tiles, "at": at, "element": plan.element, "size": plan.size, "depth": plan.depth, "k": plan.k,
            "columns": plan.columns, "half": plan.half, "rows": ROWS, "leads": math.prod(plan.lead),
            "groups": plan.groups, "widens_x": plan.widens_x(), "functions": plan.functions,
            "grain": 32 // plan.size, "ub_buffers": plan.ub.declared(),
            "cube_buffers": [x for m in plan.memories[1:] for x in m.declared()],
            "l1_buffers": plan.l1.declared(), "scaled": plan.size == 1,
            "stays": plan.stays(), "row_copies": plan.steps if plan.stays() else 2,
            "ub_element": {1: "uint8_t", 2: "uint16_t"}.get(plan.size, "float"),
            "most": max(len(t["anchors"]) for t in tiles)}
