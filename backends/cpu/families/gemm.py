"""Contractions of the same rows with one or more weights, and the epilogue on their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.backends.base import Source
from deepinfer.backends.cpu.operands import Operands, row_of
from deepinfer.backends.cpu.source import render
from deepinfer.backends.cpu.storage import c_type
from deepinfer.backends.cpu.tile.body import Body, Env, Index
from deepinfer.backends.cpu.tile.index import Ix, Space, linear
from deepinfer.backends.cpu.tile.printer import IVDEP, Printer, indented
from deepinfer.backends.cpu.tile.program import Analysis, analyse
from deepinfer.backends.cpu.tile.scalar import literal
from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError

MICRO_ROWS = 64  # DI_GEMM_ROWS: rows that share a decoded piece of the weights
COLUMNS = 64
ITEMS_WANTED = 16  # column tiles of a kernel, as far as there are columns: work for the threads of a step of one row
TOGETHER = 128  # columns of tiles that are taken together: they share packed rows
FEW_ROWS = 8  # DI_FEW


def weight_type(op: Operand, k: int) -> str:
    """Header type that reads a weight."""
    if op.role == "const":
        if op.get("make") == "hadamard":
            return f"DiWeightHadamard<{k}>"
        return f"DiWeightF32<{k}>"
    t: DType = op.type
    if t.name in ("f32", "bf16"):
        return {"f32": "DiWeightF32", "bf16": "DiWeightBf16"}[t.name] + f"<{k}>"
    names = {"mxfp8": "DiWeightMxfp8", "mxfp4": "DiWeightMxfp4"}
    if t.name not in names:
        raise InternalError(f"the CPU has no contraction with weights of {t}")
    return f"{names[t.name]}<{k}, {t.block[0]}, {t.block[1]}>"


class Rows:
    """Scratch of the forms of a kernel's rows that its weights may ask for: the initialiser of a DiRows.

    ``weights``: types of the weights; ``micro``: rows; ``k``: features; ``at``: first free byte of the scratch.
    """

    def __init__(self, x: Operand, weights: Sequence[Operand], micro: int, k: int, at: int) -> None:
        words = c_type(x.type) == "uint16_t" and k % 64 == 0
        names = {w.type.name for w in weights if words and w.role != "const"}
        padded = -(-k // 128) * 128 * 2
        self.at = -(-at // 64) * 64
        natural = self._room(micro * padded if names & {"bf16", "mxfp8"} else 0)
        planes = self._room(micro * padded if "mxfp4" in names else 0)
        some = self._room(FEW_ROWS * padded if "mxfp8" in names else 0)
        self.text = f"{{nullptr, 0, {{{natural}, {planes}}}, {some}, {{false, false}}, nullptr}}"

    def _room(self, nbytes: int) -> str:
        at, self.at = self.at, self.at + nbytes
        return f"(uint16_t*)(args->scratch + {at})" if nbytes else "nullptr"


@dataclass(frozen=True)
class Component:
    """Results that the epilogue reads together: ``anchors`` of equal dims, and the stores made of them."""

    anchors: tuple[int, ...]
    stores: tuple[int, ...]


def components(a: Analysis, count: int) -> list[Component]:
    """Anchors joined by the stores that need them, in order."""
    group = list(range(count))

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    needs = {}
    for s, o in enumerate(a.ops):
        if o.op == "store":
            needs[s] = sorted(_anchors(a, s))
            for x in needs[s][1:]:
                group[root(x)] = root(needs[s][0])
        elif o.op == "store_record":
            raise InternalError("an epilogue of the CPU writes no records")
    out = []
    for i in range(count):
        if root(i) == i:
            members = tuple(x for x in range(count) if root(x) == i)
            stores = tuple(s for s, xs in needs.items() if xs and root(xs[0]) == i)
            out.append(Component(members, stores))
    return out


def _anchors(a: Analysis, op: int) -> set[int]:
    o = a.ops[op]
    if o.op == "acc":
        return {o.get("i")}
    return set().union(*(_anchors(a, x) for x in o.args))


def column_tile(n: int, group: int) -> int:
    """Columns of one item: a divisor of the group where there are groups."""
    tile = COLUMNS
    while tile > 4 and n // tile < ITEMS_WANTED:
        tile //= 2
    return math.gcd(tile, group) if group != n else tile


@dataclass
class Epilogue:
    """Prints the stores of a component for one row: a loop over the columns n0 .. n1 - 1."""

    analysis: Analysis
    operands: Operands
    statics: list[str]

    def __post_init__(self) -> None:
        self.printer = Printer(self.analysis, self.operands.place, statics=self.statics, prefix="e")

    def lines(self, c: Component, lead: Sequence[int], lead_var: str, groups: int = 1) -> list[str]:
        """``lead``: dims before the columns, their position in C variable ``lead_var``. With ``groups`` the columns of
        all groups are numbered through. ``acc<i>`` points to the tile row of result i."""
        dims = self.analysis.ops[c.stores[0]].dims
        columns = math.prod(dims[len(lead):])
        space = Space({"n": columns})
        if lead:
            space.extents[lead_var] = math.prod(lead)
        index = (*space.split(Ix.var(lead_var), lead), *self._columns(space, dims[len(lead):], groups)) if lead else (
            tuple(self._columns(space, dims, groups)))
        body = Body(Env(self.analysis, self.printer.memory, self._acc, prefix="e"), space)
        for s in c.stores:
            o = self.analysis.ops[s]
            if o.dims != dims:
                raise InternalError("stores of one epilogue differ in dims")
            body.write(self.operands.place(o.get("operand")), linear(dims, index), body.value(o.args[0], index),
                       o.args[0])
        return [IVDEP, "for (int n = n0; n < n1; ++n) {", *indented(body.text(body.lines)), "}"]

    @staticmethod
    def _columns(space: Space, dims: Sequence[int], groups: int) -> list[Ix]:
        return space.split(Ix.var("n"), dims) if groups == 1 else _grouped(space, dims)

    @staticmethod
    def _acc(o: TileOp, index: Index) -> str:
        return f"acc{o.get('i')}[n - n0]"


def _grouped(space: Space, dims: Sequence[int]) -> list[Ix]:
    """(group, column in it): the group is a C variable, so that the loop over columns divides nothing."""
    g, r = dims
    space.extents |= {"group": g, "(n - group_start)": r}
    return [Ix.var("group"), Ix.var("(n - group_start)")]


def follow(anchor: dict[str, Any], weight: Operand, operands: Operands, i: int, k: int) -> None:
    """Tells an anchor which weight is read after it, so that it is fetched ahead."""
    if weight.role == "const":
        anchor["next"] = ""
        return
    anchor["next"], anchor["next_bytes"] = operands.param(i), weight.type.data_bytes(k)


def emit(spec: KernelSpec) -> Source:
    operands, statics = Operands(spec), list[str]()
    program = spec.slot("epilogue")
    if program is None or spec.slot("prologue") is not None or spec.get("x") < 0:
        raise InternalError(f"{spec.title}: a CPU gemm has an epilogue and no prologue")
    x = spec.operands[spec.get("x")]
    weights: tuple[tuple[int, int], ...] = spec.get("weights")
    k, groups = x.dims[-1], weights[0][1]
    lead = x.dims[:-1] if groups == 1 else ()
    analysis = analyse(program, spec.operands, keeps=False)
    epilogue = Epilogue(analysis, operands, statics)
    tiles, item = [], 0
    rows = max(1, MICRO_ROWS // math.prod(lead))
    micro = rows * math.prod(lead)
    width = 0
    for c in components(analysis, len(weights)):
        results = [spec.get("results")[i] for i in c.anchors]
        n = math.prod(results[0][len(lead):])
        tile = column_tile(n, n // groups)
        lines = epilogue.lines(c, lead, "lead", groups)
        together = max(1, TOGETHER // tile)
        stop = item + -(-n // tile)
        anchors = [{"i": i, "type": weight_type(spec.operands[weights[i][0]], k),
                    "param": _weight(operands, weights[i][0], statics)} for i in c.anchors]
        for a, i in zip(anchors, [*c.anchors[1:], c.anchors[0]], strict=True):
            follow(a, spec.operands[weights[i][0]], operands, weights[i][0], k)
            a["next_column"] = "n1" if i == c.anchors[0] else "n0"
        tiles.append({"first": item, "stop": stop, "columns": tile, "together": together, "n": n,
                      "group_columns": n // groups, "lines": lines, "anchors": anchors})
        item = stop
        width = max(width, tile * together * len(c.anchors))
    packed = Rows(x, [spec.operands[i] for i, _ in weights], micro, k, micro * width * 4)
    source_rows = operands.base(spec.get("x"))
    parts = {"k": k, "x": source_rows, "x_kind": c_type(x.type), "x_row": operands.elements(spec.get("x")),
             "groups": groups, "lead": math.prod(lead), "micro": micro, "tiles": tiles, "rows": packed.text}
    return render(spec, rows_per_item=rows, items_per_tile=item, scratch_bytes=packed.at, statics=statics,
                  call_lines=operands.call_lines(), row_lines=operands.row_lines(),
                  x_at=row_of(spec.rows, x.rows), **parts)


def _weight(operands: Operands, i: int, statics: list[str]) -> str:
    """C argument that a weight type is made from."""
    op = operands[i]
    if op.role != "const":
        return operands.param(i)
    if op.get("make") == "hadamard":
        return "nullptr"
    statics.append(f"static const float m{i}[] = {{{', '.join(literal(v, False) for v in op.get('values'))}}};")
    return f"m{i}"
