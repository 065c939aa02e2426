"""Rows that do not fit into UB as a whole: worked on in pieces, which are copied in and out while others are computed.

What is short stays in UB; a long operand is read piece by piece by every function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deepinfer.backends.ascend950.memory import Buffer
from deepinfer.backends.ascend950.tile import spill
from deepinfer.backends.ascend950.tile.function import FORMATS, LANE, VIEWS, Array, Function, Index, c_float
from deepinfer.backends.cpu.tile.index import Ix, linear, refined
from deepinfer.backends.cpu.tile.program import size
from deepinfer.backends.cpu.tile.scalar import ELEMENTWISE, literal
from deepinfer.codegen.kernels.spec import TileOp, TileProgram
from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError, PlanError

if TYPE_CHECKING:
    from deepinfer.backends.ascend950.tile.printer import Printer
    from deepinfer.backends.ascend950.tile.spill import Far

PIECE = 1024  # elements that are worked on at once
LEAST = 2048  # elements from which a row is long
IN, OUT = 6, 8  # locks of the pieces, and of those behind them


def is_long(p: Printer, o: TileOp) -> bool:
    """Whether an op is the row of an operand that is read in pieces."""
    if not p.pieces or p.part or o.op != "load" or size(o) < LEAST:
        return False
    return p.signature.element(o.get("operand")) in ("*f32", "*bf16")


def needed(p: Printer, i: int) -> bool:
    """Whether the arithmetic below op i reads a long operand."""
    stack, seen = [i], set[int]()
    while stack and p.pieces:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if spill.is_far(p, x) and x != i:
            return True
        if x == i or x not in p.kept:
            stack += p.ops[x].args
    return False


class Rooms:
    """Where the pieces of one function's operands come to lie."""

    def __init__(self, p: Printer) -> None:
        self.p, self.copies, self.known = p, list[str](), dict[str, Array]()
        self.made = -1  # the op whose arithmetic this is: it is not read where it lies

    def leaf(self, f: Function, i: int, index: Index) -> str | None:
        p, o = self.p, self.p.ops[i]
        if o.op == "concat" and p.pieces and not p.spills and size(o) >= LEAST:
            return self._joined(f, o, index)
        if i == self.made or not spill.is_far(p, i):
            return p.leaf(f, i, index)
        far, at = spill.where(p, i), linear(o.dims, index)
        step, rest = f.split(at)
        if step != 1:
            raise InternalError(f"{p.signature.spec.title}: a long row is read at {at}")
        key = f"{far.pointer} {rest}"
        if key not in self.known:
            room = _room(p, f"in{len(self.known)}")
            self.copies.append(f"di_in({p.at(room, 'uint8_t')}, {far.pointer} + {rest}, count * {far.bytes});")
            self.known[key] = Array(room, far.in_ub)
        return f.read(self.known[key], Ix.var(LANE))

    def _joined(self, f: Function, o: TileOp, index: Index) -> str | None:
        d = o.get("dim")
        if index[d].terms:
            return self.p.leaf(f, next(n for n, x in enumerate(self.p.ops) if x is o), index)
        first = index[d].const
        for x in o.args:
            n = self.p.ops[x].dims[d]
            if first < n:
                return f.value(x, (*index[:d], Ix((), first), *index[d + 1:]))
            first -= n
        return None


def _room(p: Printer, name: str) -> Buffer:
    """A room of a piece, shared by all functions of a kernel."""
    if name not in p.memory.buffers:
        b = p.memory.new(name, 4 * PIECE + 512, 2)
        b.turn = "turn"
    return p.memory.buffers[name]


def _loops(p: Printer, outer: Sequence[tuple[str, int]], lanes: int, body: Sequence[str]) -> None:
    for name, n in outer:
        p.say(f"for (int32_t {name} = 0; {name} < {n}; ++{name}) {{")
    p.say(f"for (int64_t at = 0; at < {lanes}; at += {PIECE}) {{")
    p.say(f"    const uint32_t count = (uint32_t)di_min64({PIECE}, {lanes} - at);")
    for line in body:
        p.say("    " + line)
    p.say("    turn = 1 - turn;")
    p.say("}")
    for _ in outer:
        p.say("}")


def _function(p: Printer, extents: Sequence[int],
              dims: Sequence[int]) -> tuple[Function, Rooms, Index, list[tuple[str, int]]]:
    """A function over a piece, its rooms, the index of its elements, and the loops around it."""
    f, rooms = p.function(), Rooms(p)
    f.leaf, f.outer = rooms.leaf, True
    index = list(p.nest(f, extents, dims))
    f.space.extents["at"] = 1  # it goes with the lanes: together they stay below the extent
    index = [Ix((*ix.terms, ("at", dict(ix.terms)[LANE])), ix.const) if LANE in dict(ix.terms) else ix for ix in index]
    return f, rooms, tuple(index), [(f"i{n}", e) for n, e in enumerate(extents[:-1])]


def _called(p: Printer, f: Function, rooms: Rooms, before: Sequence[str] = ()) -> list[str]:
    """The function's text is done; returns the statements of a piece."""
    count = f.argument("count", "uint32_t")
    f.lines = [f"uint32_t left = {count};", *before, f"for (uint16_t c = 0; c < ({count} + 63) / 64; ++c) {{",
               "    vector_bool m = asc_update_mask_b32(left);", *("    " + x for x in f.lines), "}"]
    if not rooms.copies:
        return [f.call()]
    return [f"asc_lock(PIPE_MTE2, {IN} + turn);", *rooms.copies, f"asc_unlock(PIPE_MTE2, {IN} + turn);",
            f"asc_lock(PIPE_V, {IN} + turn);", f.call(), f"asc_unlock(PIPE_V, {IN} + turn);"]


def fill(p: Printer, i: int, dims: Sequence[int], out: Array, place: Callable[[Index], Ix]) -> None:
    """Writes all elements of op i to an array in UB."""
    extents = refined(dims, p.shapes_below(i)) or [1]
    f, rooms, index, outer = _function(p, extents, dims)
    being_made = i in p.kept and i not in p.arrays and i not in p.far
    if being_made:
        rooms.made = i
    value = p.computed(f, i, index) if being_made else f.value(i, index)
    f.write(out, place(index), value)
    body = _called(p, f, rooms)
    p.functions.append("\n".join(f.text()))
    _loops(p, outer, extents[-1], body)


def written(p: Printer, i: int, dims: Sequence[int], to: Far, form: DType | None = None) -> None:
    """Writes all elements of op i to memory; ``form``: the block format whose values they take."""
    extents = refined(dims, p.shapes_below(i)) or [1]
    f, rooms, index, outer = _function(p, extents, dims)
    out = Array(_room(p, "piece_out"), to.in_ub)
    step, rest = f.split(linear(dims, index))
    if step != 1:
        raise InternalError(f"{p.signature.spec.title}: a long row is written in steps of {step}")
    if form is not None and extents[-1] % form.block[1]:
        raise PlanError(f"{p.signature.spec.title}: groups of {form} lie across rows of {extents[-1]} elements")
    raw = out if form is None else Array(_room(p, "piece_raw"))
    if spill.is_made_here(p, i):
        rooms.made = i
        value = p.computed(f, i, index)
    else:
        value = f.value(i, index)
    f.write(raw, Ix.var(LANE), value)
    make = _called(p, f, rooms)
    if form is not None:
        x, coded = (p.at(b, "float") for b in (raw.buffer, _room(p, "piece_coded")))
        make += [f"asc_vf_call<di_quantise>({FORMATS[form.name]}, {x}, {coded}, count, {form.block[1]});",
                 f"asc_vf_call<di_narrow<{out.kind}>>({coded}, {p.at(out.buffer, out.kind)}, count);"]
    body = [f"asc_lock(PIPE_V, {OUT} + turn);", *make, f"asc_unlock(PIPE_V, {OUT} + turn);",
            f"asc_lock(PIPE_MTE3, {OUT} + turn);",
            f"di_out({to.pointer} + {rest}, {p.at(out.buffer, 'uint8_t')}, count * {to.bytes});",
            f"asc_unlock(PIPE_MTE3, {OUT} + turn);"]
    p.functions.append("\n".join(f.text()))
    _loops(p, outer, extents[-1], body)


def reduce(p: Printer, o: TileOp, reduced: Sequence[int], kept: Sequence[int], out: Array) -> Array:
    """A reduction along the lanes: lanes are added up piece by piece, then among each other."""
    source, how = p.ops[o.args[0]], o.get("how")
    if kept and max(reduced) < max(kept):
        raise InternalError(f"{p.signature.spec.title}: a long row is reduced across its features only")
    neutral = "-INFINITY" if how == "max" else "0.0f"
    total = Array(p.temporary("total", 256))
    here = p.at(total.buffer, "float")
    lead = [source.dims[d] for d in kept]
    rest = [source.dims[d] for d in reduced]
    if list(kept) != sorted(kept) or (kept and max(kept) > min(reduced)):
        raise InternalError(f"{p.signature.spec.title}: dims {reduced} of a long row are reduced")
    extents = [*lead, *rest] if kept else (refined(source.dims, p.shapes_below(o.args[0])) or [1])
    f, rooms, index, outer = _function(p, extents, source.dims)
    x = f.value(o.args[0], index)
    before = ["vector_bool all = di_all();", "vector_float total, none;",
              f"asc_duplicate_scalar(none, {neutral}, all);", f"asc_loadalign(total, {f.pointer(total)});"]
    fold = ["vector_float x;", f"asc_select(x, {x}, none, m);", "asc_max(total, total, x, all);"] if how == "max" else [
        f"asc_add(total, total, {x}, all);"]
    f.lines += fold
    body = _called(p, f, rooms, before)
    f.lines.append(f"asc_storealign({f.pointer(total)}, total, all);")
    p.functions.append("\n".join(f.text()))
    around, inside = outer[: len(lead)], outer[len(lead):]
    for name, n in around:
        p.say(f"for (int32_t {name} = 0; {name} < {n}; ++{name}) {{")
    p.say(f"asc_vf_call<di_fill_array>({here}, {neutral}, 64);")
    _loops(p, inside, extents[-1], body)
    count = 1
    for n in rest:
        count *= n
    share = c_float(literal(1.0 / count, False)) if how == "mean" else "1.0f"
    at = linear(o.dims, tuple(Ix() if d in reduced else ix for d, ix in enumerate(index)))
    call = "di_fold_max" if how == "max" else "di_fold_sum"
    p.say(f"asc_vf_call<{call}>({here}, {p.at(out.buffer, 'float', f'({at})')}, {share});")
    for _ in around:
        p.say("}")
    return out


def best(p: Printer, i: int, o: TileOp, k: int, lead: int) -> list[str]:
    """The place of the largest of a long row."""
    source = p.ops[o.args[0]]
    if k != 1 or lead != 1:
        raise InternalError(f"{p.signature.spec.title}: {k} of a long row are selected")
    top, where = (p.fixed(name, 256) for name in ("top", "where"))
    room = Array(p.temporary("piece", 4 * PIECE))
    p.say(f"asc_vf_call<di_best_start>({p.at(top, 'float')}, {p.at(where, 'int32_t')});")
    extents = refined(source.dims, p.shapes_below(o.args[0])) or [1]
    if len(extents) > 1:
        raise InternalError(f"{p.signature.spec.title}: a long row of dims {extents}")
    f, rooms, index, outer = _function(p, extents, source.dims)
    f.write(room, Ix.var(LANE), f.value(o.args[0], index))
    body = [*_called(p, f, rooms), f"asc_vf_call<di_best_more>({p.at(room.buffer, 'float')}, {p.at(top, 'float')}, "
            f"{p.at(where, 'int32_t')}, count, (int32_t)at);"]
    p.functions.append("\n".join(f.text()))
    _loops(p, outer, extents[-1], body)
    p.say(f"asc_vf_call<di_best_end>({p.at(top, 'float')}, {p.at(where, 'int32_t')});")
    p.say("di_vector_to_scalar();")
    name = f"{p.prefix}{i}_0"
    p.say(f"const int64_t {name} = di_ub_load({p.at(where, 'int32_t')});")
    p.say("di_scalar_to_vector();")
    return [name]


# ---- leading dims, a part after the other --------------------------------------------------------------------------
def _cone(p: Printer, o: TileOp) -> list[int]:
    """Ops below a store, in order."""
    seen, stack = set[int](), list(o.args)
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            stack += p.ops[x].args
    return sorted(seen)


def led(p: Printer, o: TileOp) -> dict[int, int] | None:
    """Ops below a store that fall into parts along its leading dim, with how many of their own leading rows belong to
    one of the store's; None where one of them does not fall apart like that."""
    lead, rows = o.dims[0], {o.args[0]: 1}
    for x in reversed(_cone(p, o)):
        q, times = p.ops[x], rows.get(x, 0)
        if q.op not in (*ELEMENTWISE, *VIEWS, "load", "const", "pair_rotate", "encode", "reduce") or p.integers.has(x):
            return None
        if not times:
            if (q.op == "load" and size(q) >= LEAST) or any(a in rows for a in q.args):
                return None
            continue
        whole = q.op in ("slice", "reduce") and (q.get("dim") == 0 or 0 in (q.get("dims") or ()))
        parted = q.op == "load" and p.signature.operand(q.get("operand")).dims[0] != q.dims[0]
        if len(q.dims) < 2 or q.dims[0] != lead * times or whole or parted or q.op == "const":
            return None
        for n, a in enumerate(q.args):
            below = p.ops[a].dims
            if q.op == "reshape":
                if len(below) < 2 or below[0] % lead:
                    return None
                share = below[0] // lead
            else:
                share = times if len(below) == len(q.dims) and below[0] == q.dims[0] else 0
            if share != rows.get(a, share) or (not share and n == 0 and q.op in ("pair_rotate", "encode", "reduce")):
                return None
            if share:
                rows[a] = share
    return rows


def splits(p: Printer, o: TileOp) -> dict[int, int] | None:
    """``led`` of a store where its parts are better made one after the other, else None."""
    if p.part or len(o.dims) < 2 or o.dims[0] < 2 or size(o) < LEAST:
        return None
    if p.spills and size(o) // o.dims[0] > 4 * PIECE:  # a part is too long itself
        return None
    cone = _cone(p, o)
    if not any(p.ops[x].op in ("pair_rotate", "encode") for x in cone) or any(
            x in p.arrays or x in p.far for x in cone):
        return None
    return led(p, o)


def split(p: Printer, o: TileOp, rows: Mapping[int, int]) -> None:
    """The part of a program below a store, in a loop over parts of its leading dim; ``rows``: its ``led``."""
    from deepinfer.backends.ascend950.tile.printer import Printer

    lead, cone = o.dims[0], _cone(p, o)
    row = size(o) // lead
    part = next(n for n in range(max(1, min(lead, 4 * PIECE // row)), 0, -1) if lead % n == 0)
    number = {x: n for n, x in enumerate(cone)}
    ops = []
    for x in cone:
        q = p.ops[x]
        dims = (part * rows[x], *q.dims[1:]) if x in rows else q.dims
        ops.append(replace(q, args=tuple(number[a] for a in q.args), dims=dims))
    ops.append(replace(o, args=tuple(number[a] for a in o.args), dims=(part, *o.dims[1:])))
    p.count += 1
    inner = Printer(TileProgram(tuple(ops)), p.signature, p.memory, f"{p.prefix}{p.count}_", p.acc)
    inner.functions, inner.heads, inner.constants = p.functions, p.heads, p.constants
    inner.part, inner.turn, inner.step, first = part, "turn", p.step, p.step
    for x in cone:
        if p.ops[x].op == "load":
            operand = p.ops[x].get("operand")
            if x in rows:
                inner.parts[operand] = part * rows[x]
            else:
                inner.operands[operand] = p.loaded(operand)
    inner.statements()
    p.step = inner.step + 1
    p.outlive(inner.lines, first)
    body = [f"asc_lock(PIPE_MTE2, {IN} + turn);", *inner.loads, f"asc_unlock(PIPE_MTE2, {IN} + turn);",
            f"asc_lock(PIPE_V, {IN} + turn);", f"asc_lock(PIPE_V, {OUT} + turn);", *inner.lines,
            f"asc_unlock(PIPE_V, {OUT} + turn);", f"asc_unlock(PIPE_V, {IN} + turn);",
            f"asc_lock(PIPE_MTE3, {OUT} + turn);", *inner.stores, f"asc_unlock(PIPE_MTE3, {OUT} + turn);",
            "turn = 1 - turn;"]
    p.lines += [f"for (int32_t part = 0; part < {lead // part}; ++part) {{", *("    " + x for x in body), "}"]
