"""What the contractions share: components of results, weight tiles, epilogues on tiles of columns x rows.

Weights are the side of a product with 64 or 128 rows, tokens the other one, whatever their number: so every variant
adds the products of an output element up in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.backends.cpu.storage import stored
from deepinfer.backends.cpu.tile.index import linear
from deepinfer.backends.cuda_sm100.signature import Signature
from deepinfer.backends.cuda_sm100.tile.axes import Axes
from deepinfer.backends.cuda_sm100.tile.printer import Block, Index, Printer
from deepinfer.backends.cuda_sm100.tile.program import cleaned
from deepinfer.codegen.kernels.spec import Operand, TileOp, TileProgram
from deepinfer.errors import InternalError

COLUMNS, ROWS = frozenset((0,)), frozenset((1,))
BOTH = COLUMNS | ROWS


@dataclass(frozen=True)
class Component:
    """Results that the epilogue reads together: ``anchors`` of equal dims, and the stores made of them."""

    anchors: tuple[int, ...]
    stores: tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """How a tile of weights is read: ``codes`` elements of K in one element of memory; ``block`` rows and columns that
    share a scale, (0, 0) without scales."""

    format: str
    block: tuple[int, int] = (0, 0)

    @property
    def codes(self) -> int:
        return 2 if self.format == "mxfp4" else 1


def weight_of(op: Operand) -> Weight:
    t = op.type
    if op.role == "const":
        if op.get("make") != "hadamard":
            raise InternalError("a literal weight of a contraction is a Hadamard matrix")
        return Weight("hadamard")
    if t.name in ("f32", "bf16"):
        return Weight(t.name)
    if t.name in ("mxfp8", "mxfp4"):
        return Weight(t.name, t.block)
    raise InternalError(f"the CUDA backend has no contraction with weights of {t}")


@dataclass(frozen=True)
class Kinds:
    """How products are made. ``element``: what both sides become; ``thirds``: f32 weights as three bf16 each, since
    bf16 holds the other side; ``precision``: of a product that tensor cores do not make exactly."""

    element: str
    thirds: bool = False
    precision: str = ""

    @property
    def exact(self) -> bool:
        """Whether tensor cores multiply bf16 exactly."""
        return self.element == "tl.bfloat16"


def kinds_of(x: Operand, weights: Sequence[Weight]) -> Kinds:
    if stored(x.type).name == "bf16":
        return Kinds("tl.bfloat16", any(w.format == "f32" for w in weights))
    return Kinds("tl.float32", precision=', input_precision="tf32x3"')


# Packed weights are made as bf16 too small by a power of two (expand.py): its exponent, and that of their scales' part
# in the other direction. The sums are raised by their difference from the format's own.
RAISED = {"mxfp8": (60, 60), "mxfp4": (63, 63)}


def anchor(signature: Signature, operand: int, w: Weight, i: int, k: int, kinds: Kinds) -> dict[str, Any]:
    """What the skeletons know of a weight. ``up``: factor of its sums."""
    made = {"i": i, "format": w.format, "block": w.block, "codes": w.codes, "k": k, "data": "", "scale": "", "base": "",
            "raised": w.format in RAISED and kinds.exact and k % 2 == 0 and w.block[1] % 2 == 0}
    if made["raised"]:
        power, made["raised_scale"] = RAISED[w.format]
        made["up"] = repr(2.0**power)
    if w.format != "hadamard":
        made["data"] = signature.param(operand)
    if w.block[0]:
        made["scale"] = signature.param(operand, "scale")
    return made


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


class Epilogue:
    """Prints the stores of a component on a tile: columns ``n`` (valid ``n_ok``) along axis 0, rows along axis 1."""

    def __init__(self, program: TileProgram, signature: Signature) -> None:
        self.signature = signature
        self.ops = cleaned(program, signature.spec.operands)
        if any(o.op == "store_record" for o in self.ops):
            raise InternalError("an epilogue of a contraction writes no records")

    def lines(self, c: Component, lead: Sequence[int], groups: int) -> list[str]:
        """``lead``: dims before the columns, whose position is the block ``lead``."""
        axes = Axes([0, 0], fixed=True)
        p = Printer(self.ops, self.signature, axes, "row", "t_ok", ROWS, self._acc, tile=("BN", "BT"), prefix="e")
        dims = next(o.dims for o in self.ops if o.op == "acc" and o.get("i") == c.anchors[0])
        columns = p.named("n", math.prod(dims[len(lead):]), COLUMNS, ("n_ok",))
        index: Index
        if lead:
            at = p.named("lead", math.prod(lead), ROWS)
            index = (*p.space.split(at, lead), *p.space.split(columns, dims[len(lead):]))
        elif groups > 1:
            index = (p.named("group", groups, frozenset()), p.named("column", dims[1], COLUMNS, ("n_ok",)))
        else:
            index = tuple(p.space.split(columns, dims))
        for s in c.stores:
            o = self.ops[s]
            if math.prod(o.dims) != math.prod(dims):
                raise InternalError("stores of one epilogue differ in size")
            at = linear(dims, index)
            there = index if o.dims == dims else tuple(p.space.split(at, o.dims))
            if not COLUMNS <= p.spans_of(at):
                at = at + columns  # one column: 0 where it is written, and the block gets its shape
            p.write(o.get("operand"), at, p.value(o.args[0], there))
        return [*p.heads, *p.lines]

    @staticmethod
    def _acc(o: TileOp, index: Index) -> Block:
        return Block(f"acc{o.get('i')}", BOTH)


def columns_of(n: int, wide: int, kinds: Kinds) -> int:
    """Columns of a tile: a power of two, no wider than needed; 64 is what the tensor cores take at least."""
    return max(64 if kinds.exact else 16, min(wide, 1 << (n - 1).bit_length()))


_COSTLY = ("exp", "log", "softplus", "sigmoid", "cos", "sin")


def fits_wide_tile(anchors: int, ops: Sequence[TileOp]) -> bool:
    """Whether the registers hold a tile of 128 x 128 sums and what the epilogue makes of them."""
    return anchors == 1 and not any(o.op in _COSTLY for o in ops)


def depth(k: int, weights: Sequence[Weight], kinds: Kinds, most: int = 64) -> int:
    """Elements of K that a step of the loop takes: whole blocks of scales, and no less than 64 for the sake of more.
    Where a step makes several products, one for all schedules: sums would depend on it."""
    if not kinds.exact:
        return max([32 if k >= 32 else 16, *(w.block[1] for w in weights)])
    least = max([16, *(w.block[1] for w in weights)])
    usual = max(least, min(64, 1 << (k - 1).bit_length()))
    while usual < most and not kinds.thirds and k % (2 * usual) == 0:
        usual *= 2
    return usual
