"""A tile program made ready to print: which ops get a loop of their own, which melt into their readers' loops.

Every op is one of

- *inline*: elementwise arithmetic and views; computed inside the loop of whoever reads it;
- *root*: has a loop (or a library call) of its own and, if anyone reads it later, a buffer in scratch. Reductions,
  encodings, lookups and selections are roots; so is an inline op that several loops read, or that a wider loop would
  compute again and again;
- *absorbed*: a root whose elements are finished inside the loop of the root it reads (a store of a rotated vector).

Which of these an op becomes follows from the program alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deepinfer.backends.cpu.tile.scalar import ELEMENTWISE, cost
from deepinfer.codegen.kernels.spec import Operand, TileOp, TileProgram
from deepinfer.errors import InternalError

VIEWS = ("reshape", "slice", "expand")
MEMORY = ("load", "const", "carry")
EFFECTS = ("store", "store_record", "fetch")  # what a program is printed for
ROOTS = ("reduce", "encode", "pair_rotate", "concat", "gather", "take", "topk", "argmax", "scan", "pool", "previous",
         *EFFECTS)
STREAMS = ("pair_rotate", "concat", "encode", "gather")  # roots that make element by element, so can absorb readers
_REPEAT = 5  # arithmetic up to this cost is repeated rather than kept in memory
_SHORT = 8  # a reduction over so few elements is written out


def size(o: TileOp) -> int:
    n = 1
    for d in o.dims:
        n *= d
    return n


def is_short_reduction(o: TileOp, source: TileOp) -> bool:
    """Reduces so few elements that the terms are written out, in order."""
    return size(source) // size(o) <= _SHORT


@dataclass
class Analysis:
    """The cleaned ops and the role of each. ``emit_at``: op at whose place in the program the op is printed;
    ``absorbed``: root -> readers finished inside its loop; ``kept``: ops that need a buffer."""

    ops: list[TileOp]
    operands: Sequence[Operand]
    keeps: bool = True
    inline: set[int] = field(default_factory=set)
    roots: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    absorbed: dict[int, list[int]] = field(default_factory=dict)
    emit_at: dict[int, int] = field(default_factory=dict)
    readers: list[list[int]] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)


def cleaned(program: TileProgram, operands: Sequence[Operand]) -> list[TileOp]:
    """The ops without roundings that change nothing, and with input rows seen at the size that is read of them."""
    ops: list[TileOp] = []
    at: list[int] = []
    for o in program.ops:
        o = replace(o, args=tuple(at[a] for a in o.args))
        if o.op == "round" and (o.get("dtype") == "f32" or ops[o.args[0]].dtype == o.get("dtype")):
            at.append(o.args[0])
            continue
        if o.op == "reshape" and ops[o.args[0]].op == "load" and size(ops[o.args[0]]) != size(o):
            o = replace(ops[o.args[0]], dims=o.dims)  # per-row integers of all rows of a sequence
        ops.append(o)
        at.append(len(ops) - 1)
    return ops


def analyse(program: TileProgram, operands: Sequence[Operand], *, last: bool = False,
            keeps: bool = True) -> Analysis:
    """Roles of all ops. ``last``: the last op is wanted in a buffer (the carry of a scan); ``keeps=False``: nothing may
    be kept in memory, all arithmetic is inline (epilogues)."""
    a = Analysis(cleaned(program, operands), operands, keeps)
    wanted = {len(a.ops) - 1} if last else set[int]()
    a.readers = [[] for _ in a.ops]
    for i, o in enumerate(a.ops):
        for x in dict.fromkeys(o.args):
            a.readers[x].append(i)
    _mark_alive(a, wanted)
    readers_roots: dict[int, set[int]] = {}
    costs: dict[int, int] = {}
    for i in range(len(a.ops)):
        costs[i] = _inline_cost(a, i, costs)
    for i in reversed(range(len(a.ops))):
        if i in a.alive:
            _assign(a, i, readers_roots, costs, wanted)
    a.kept = {i for i in a.roots if a.ops[i].op not in EFFECTS and (a.readers[i] or i in wanted)}
    a.emit_at = {i: i for i in a.roots}
    if keeps:
        _absorb(a, readers_roots, wanted)
    return a


def _mark_alive(a: Analysis, wanted: set[int]) -> None:
    for i in reversed(range(len(a.ops))):
        if a.ops[i].op in EFFECTS or i in wanted or any(r in a.alive for r in a.readers[i]):
            a.alive.add(i)
    a.readers = [[r for r in rs if r in a.alive] for rs in a.readers]


def _inline_cost(a: Analysis, i: int, costs: dict[int, int]) -> int:
    """Cost of one element when the op is repeated in a reader; 0 for views of memory."""
    o = a.ops[i]
    below = sum(costs[x] for x in o.args)
    if o.op in ELEMENTWISE:
        return below + cost(o)
    if o.op in VIEWS:
        return below
    if o.op == "reduce" and is_short_reduction(o, a.ops[o.args[0]]):
        n = size(a.ops[o.args[0]]) // size(o)
        return n * (below + 1)
    return 0


def _assign(a: Analysis, i: int, reached: dict[int, set[int]], costs: dict[int, int], wanted: set[int]) -> None:
    o = a.ops[i]
    reached[i] = set()
    for r in a.readers[i]:
        reached[i] |= {r} if r in a.roots else reached[r]
    short = o.op == "reduce" and is_short_reduction(o, a.ops[o.args[0]])
    if o.op in ROOTS and not short:
        a.roots.add(i)
        return
    if o.op in MEMORY or o.op == "acc":
        a.inline.add(i)
        return
    if o.op not in ELEMENTWISE and o.op not in VIEWS and not short:
        raise InternalError(f"the CPU printer knows no op {o.op}")
    if not a.keeps:
        a.inline.add(i)
        return
    whole = any(_reads_whole(a, r, i) for r in a.readers[i])
    wider = costs[i] > 0 and size(o) > 0 and any(_widens(a, i, r) for r in a.readers[i])
    many = len(reached[i]) > 1 and costs[i] > _REPEAT
    if i in wanted or whole or wider or many:
        a.roots.add(i)
    else:
        a.inline.add(i)


def _reads_whole(a: Analysis, reader: int, i: int) -> bool:
    """Whether the reader takes the value as an array in memory."""
    o = a.ops[reader]
    if o.op == "take":
        return o.args[0] == i
    return o.op == "scan" and i in o.args[1:]


def _widens(a: Analysis, i: int, reader: int) -> bool:
    """Whether the reader's loop is larger than the op."""
    o, r = a.ops[i], a.ops[reader]
    if r.op in ("reduce", "slice", *EFFECTS, "concat", "encode", "gather", "argmax", "topk"):
        return False
    return size(r) > size(o)


# ---- absorbing readers ---------------------------------------------------------------------------------------------
def _absorb(a: Analysis, reached: dict[int, set[int]], wanted: set[int]) -> None:
    for i in sorted(a.roots):
        o = a.ops[i]
        if o.op not in STREAMS and o.op not in ELEMENTWISE:
            continue
        taken = [r for r in sorted(reached[i]) if a.emit_at[r] == r and _can_absorb(a, i, r)]
        if taken:
            a.absorbed[i] = taken
            for r in taken:
                a.emit_at[r] = a.emit_at[i]
            if set(taken) == reached[i] and i not in wanted:
                a.kept.discard(i)


def _can_absorb(a: Analysis, i: int, reader: int) -> bool:
    r = a.ops[reader]
    if size(r) != size(a.ops[i]) or reader in a.absorbed:
        return False
    if r.op == "store":
        return _same_elements(a, r.args[0], i) and _ready(a, r.args[0], i)
    if r.op in ELEMENTWISE:
        return _path(a, reader, i) and all(_ready(a, x, i) for x in r.args)
    return False


def _path(a: Analysis, op: int, i: int) -> bool:
    """Whether ``op`` reads ``i`` only through elementwise ops and reshapes of equal size."""
    o = a.ops[op]
    for x in o.args:
        if _depends(a, x, i) and (size(a.ops[x]) != size(o) or not _same_elements(a, x, i)):
            return False
        if _depends(a, x, i) and o.op in ELEMENTWISE and a.ops[x].dims != o.dims:
            return False
    return True


def _same_elements(a: Analysis, op: int, i: int) -> bool:
    if op == i:
        return True
    if op not in a.inline:
        return False
    o = a.ops[op]
    if o.op != "reshape" and o.op not in ELEMENTWISE:
        return False
    return _path(a, op, i)


def _depends(a: Analysis, op: int, i: int) -> bool:
    if op == i:
        return True
    return op in a.inline and any(_depends(a, x, i) for x in a.ops[op].args)


def _ready(a: Analysis, op: int, i: int) -> bool:
    """Everything that ``op`` needs besides ``i`` is in memory before ``i`` is printed."""
    if op == i:
        return True
    if op in a.roots:
        return a.emit_at[op] < a.emit_at[i] and op in a.kept
    return all(_ready(a, x, i) for x in a.ops[op].args)
