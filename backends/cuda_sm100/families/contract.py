"""What the contractions share: components of results, weight tiles, epilogues on tiles of columns x rows.

Weights are the side of a product with 64 or 128 rows, tokens the other one, whatever their number: so every variant
adds the products of an output element up in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def exact_in_bf16(x: Operand, weights: Sequence[Weight]) -> bool:
    """Whether both sides of the products are held by bf16, so that tensor cores multiply them exactly."""
    return stored(x.type).name == "bf16" and all(w.format != "f32" for w in weights)


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
        p = Printer(self.ops, self.signature, axes, "row", "t_ok", ROWS, self._acc, prefix="e")
        dims = self.ops[c.stores[0]].dims
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
            if o.dims != dims:
                raise InternalError("stores of one epilogue differ in dims")
            at = linear(dims, index)
            if not COLUMNS <= p.spans_of(at):
                at = at + columns  # one column: 0 where it is written, and the block gets its shape
            p.write(o.get("operand"), at, p.value(o.args[0], index))
        return [*p.heads, *p.lines]

    @staticmethod
    def _acc(o: TileOp, index: Index) -> Block:
        return Block(f"acc{o.get('i')}", BOTH)


def columns_of(n: int, wide: int) -> int:
    """Columns of a tile: a power of two, no wider than needed."""
    return max(16, min(wide, 1 << (n - 1).bit_length()))


_COSTLY = ("exp", "log", "softplus", "sigmoid", "cos", "sin")


def fits_wide_tile(anchors: int, ops: Sequence[TileOp]) -> bool:
    """Whether the registers hold a tile of 128 x 128 sums and what the epilogue makes of them."""
    return anchors == 1 and not any(o.op in _COSTLY for o in ops)


def depth(k: int, weights: Sequence[Weight], bf16: bool, most: int = 64) -> int:
    """Elements of K that a step of the loop takes: whole blocks of scales, and no less than 64 for the sake of more."""
    if not bf16:
        return 32 if k >= 32 else 16
    least = max([16, *(w.block[1] for w in weights)])
    usual = max(least, min(64, 1 << (k - 1).bit_length()))
    while usual < most and k % (2 * usual) == 0:
        usual *= 2
    return usual
