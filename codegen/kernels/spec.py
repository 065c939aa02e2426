"""What a kernel is before any target has seen it: family, operands, slots, and the graph region it covers.

A KernelSpec holds no node ids, parameter names or layer numbers: two layers of one kind give equal specs, hence one
compiled kernel, and differ only in the arguments of their launches.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from deepinfer.dsl.graph import Node
from deepinfer.dsl.types import DType

Attrs = tuple[tuple[str, Any], ...]

FAMILIES = ("rowwise", "gemm", "grouped_gemm", "attend", "score_select", "draw")


@dataclass(frozen=True)
class Operand:
    """One argument of a kernel.

    ``role``: ``value`` (a buffer of rows), ``param``, ``state``, ``input`` (per-row integers of the step:
    ``token_ids``, ``positions``, ``lookback``; positions on ``T/r`` are first positions of groups), ``pin`` (a
    selection
    given from outside, may be absent), ``const`` (a literal matrix; its pointer is null, the kernel holds it).
    ``rows``: the row axis as printed (``T``, ``T_kept``, ``T/2``, ``S``, ``-``); a ``value`` on a wider axis than the
    kernel's is read through the suffix map of the ABI (a ``keep`` costs nothing).
    Rows of a kernel whose operands all share one suffix axis are written ``T``: its launch names the axis.
    ``detail``: param: stack; input: name; value: by_sequence n (rows of T seen as [n, ...] by a kernel on S); const:
    values or make; state: kind (window|paged|grouptail), record_bytes, ring_rows, window, first_position, group,
    ratio.
    """

    role: str
    rows: str
    dims: tuple[int, ...]
    dtype: str
    write: bool = False
    detail: Attrs = ()

    def get(self, key: str, default: Any = None) -> Any:
        return dict(self.detail).get(key, default)

    @property
    def type(self) -> DType:
        return DType.parse(self.dtype)

    @property
    def size(self) -> int:
        n = 1
        for d in self.dims:
            n *= d
        return n


@dataclass(frozen=True)
class TileOp:
    """One SSA op of a tile program: the vocabulary of dsl/ops.py (kinds tile, shape and the row-local routing ops), and

    - ``load`` operand=i: this row of operand i (params: the whole tensor, or the row named by an index in ``gather``);
    - ``store`` operand=i (value): write this row;
    - ``fetch`` operand=i (a param): the rows that the argument names will be looked up by a later kernel;
    - ``acc`` i: result i of the family's anchor for this row (gemm: columns of this block only);
    - ``const`` values | make; ``carry`` name (inside a scan body);
    - ``store_record`` operand=state (value): encode into the state's record and write it (extend: to ``fresh``;
      append: to the paged entry, if it is at or above the floor);
    - ``contract`` operand=i (a param [N, K]): few products of a whole row with the rows of a weight (rowwise kernels
      only);
    - ``pool`` operand=state, ratio, overlap: pooled entry of this group;
    - ``previous`` operand=state, back (position): the window's row ``back`` positions earlier, zeros where it holds
      none.

    ``args`` index earlier ops. ``scan`` has attr ``body``: a TileProgram whose last op is the carry.
    """

    op: str
    args: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: str
    attrs: Attrs = ()

    def get(self, key: str, default: Any = None) -> Any:
        return dict(self.attrs).get(key, default)


@dataclass(frozen=True)
class TileProgram:
    """Straight-line code over one row."""

    ops: tuple[TileOp, ...]

    def __len__(self) -> int:
        return len(self.ops)

    def __str__(self) -> str:
        lines = []
        for i, o in enumerate(self.ops):
            attrs = " ".join(f"{k}={v if not isinstance(v, TileProgram) else '{' + str(v) + '}'}" for k, v in o.attrs)
            args = ", ".join(f"t{a}" for a in o.args)
            lines.append(f"t{i} = {o.op}({args}) {list(o.dims)} {o.dtype} {attrs}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class KernelSpec:
    """A kernel for any target.

    ``rows``: axis whose rows the kernel runs over. ``attrs`` by family:

    - rowwise: none; slot ``body``.
    - gemm: ``x`` (operand), ``weights`` (tuple of (operand, groups)), ``results`` (dims of each): contract of the
      same x
      rows with each weight, x dims [.., K] (leading dims are further rows); slot ``epilogue`` (reads ``acc`` i, ends in
      stores), optional slot ``prologue`` (makes x; then ``x`` = -1).
    - grouped_gemm: ``x`` ([K] or [k, K]), ``experts`` (operand, i32 [k]), ``weights`` (operands, stacks), ``results``
      ([k, N] each); slot ``epilogue``.
    - attend: ``q``, ``sink`` (operand or -1), ``sources`` ((kind, n, keys operand, values operand or -1, picked
      operand or -1), ...), ``scale``, ``rounds``, ``kv_heads``, ``value_dim``, ``heads``, ``head_dim``; slot
      ``epilogue`` (``acc`` 0 is [heads, value_dim]; just a store where the target takes no more).
    - score_select: ``q``, ``keys``, ``w``, ``ratio``, ``rounds``; ``selections``: tuple of dicts as tuples: (``k``,
      ``block`` 0 or size, ``within`` operand or -1, ``within_block``, ``pin`` operand or -1, ``out`` operand).
    - draw: ``logits``, ``out``, ``ahead`` (positions between a row and its token, less 1).

    ``schedule`` comes from the target's tuning database and never changes a result.
    """

    family: str
    rows: str
    operands: tuple[Operand, ...]
    attrs: Attrs = ()
    slots: tuple[tuple[str, TileProgram], ...] = ()
    schedule: Attrs = ()
    title: str = field(default="", compare=False)
    region: tuple[Node, ...] = field(default=(), compare=False, repr=False)

    def get(self, key: str, default: Any = None) -> Any:
        return dict(self.attrs).get(key, default)

    def slot(self, name: str) -> TileProgram | None:
        return dict(self.slots).get(name)

    def digest(self) -> str:
        """Hash of everything that computes (not of title and region)."""
        text = json.dumps([self.family, self.rows, _plain(self.operands), _plain(self.attrs), _plain(self.slots),
                           _plain(self.schedule)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def symbol(self) -> str:
        """C symbol of the compiled kernel: readable, and unique by hash."""
        word = "".join(c if c.isalnum() else "_" for c in self.title) or self.family
        return f"di_{word}_{self.digest()[:10]}"


def _plain(v: Any) -> Any:
    if isinstance(v, Operand):
        return [v.role, v.rows, list(v.dims), v.dtype, v.write, _plain(v.detail)]
    if isinstance(v, TileOp):
        return [v.op, list(v.args), list(v.dims), v.dtype, _plain(v.attrs)]
    if isinstance(v, TileProgram):
        return [_plain(o) for o in v.ops]
    if isinstance(v, tuple | list):
        return [_plain(x) for x in v]
    if isinstance(v, float):
        return v.hex()
    return v
