"""The closed op list: for each op its attributes and how the type of its result follows.

Inference doubles as verification: the builder calls it to type a new node, the verifier calls it again on a
finished graph. Every rule raises SpecError with the values found.

Conventions. ``dims`` broadcast as in numpy (right-aligned, 1 stretches); a value without a row axis (parameter,
constant) broadcasts over rows; values on different row axes never mix, except through ``keep``. Float
results are f32 ("compute dtype") unless ``round`` or ``encode`` says otherwise; ops read bf16 and encoded
values as their exact real values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer.dsl.graph import Attr, Node
from deepinfer.dsl.types import (
    KEPT,
    SEQ,
    STEP,
    WANTED,
    Dim,
    DType,
    Rows,
    Type,
    boolean,
    entries,
    f32,
    groups,
    i32,
    i64,
    state_handle,
)
from deepinfer.errors import SpecError

Infer = Callable[[Sequence[Node], dict[str, Attr]], Type]


@dataclass(frozen=True)
class Op:
    """``kind`` groups ops for the compiler: source, tile (row-local arithmetic), shape, contract, routing,
    attention, state, rows, draw."""

    name: str
    kind: str
    infer: Infer
    doc: str


OPS: dict[str, Op] = {}


def op(name: str, kind: str, doc: str) -> Callable[[Infer], Infer]:
    def add(infer: Infer) -> Infer:
        OPS[name] = Op(name, kind, infer, doc)
        return infer
    return add


def _fail(what: str, **kw: object) -> SpecError:
    return SpecError(what, **kw)  # type: ignore[arg-type]


def common_rows(inputs: Sequence[Node]) -> Rows | None:
    rows = {n.type.rows for n in inputs if n.type.rows is not None}
    if len(rows) > 1:
        raise _fail("values on different row axes meet", found=", ".join(sorted(map(str, rows))),
                    allowed="one row axis", next_step="insert a keep")
    return next(iter(rows), None)


def broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...]:
    out: list[Dim] = []
    for i in range(max(len(a), len(b))):
        x = a[len(a) - 1 - i] if i < len(a) else 1
        y = b[len(b) - 1 - i] if i < len(b) else 1
        if x != y and 1 not in (x, y):
            raise _fail("dims do not broadcast", found=f"{list(a)} and {list(b)}")
        out.append(y if x == 1 else x)
    return tuple(reversed(out))


def _dims_of(inputs: Sequence[Node]) -> tuple[Dim, ...]:
    out: tuple[Dim, ...] = ()
    for n in inputs:
        out = broadcast(out, n.type.dims)
    return out


def _need(n: Node, ok: bool, allowed: str) -> None:
    if not ok:
        raise _fail(f"input of op has the wrong type (from {n.op})", found=str(n.type), allowed=allowed)


# ---- sources -------------------------------------------------------------------------------------------------
def _declared(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type.parse(attrs["type"])


for _name, _doc in {
    "input": "name: per-row integers made by the runner: token_ids [], positions [], lookback [n]",
    "param": "name: checkpoint tensor(s); stack=E: E tensors, '{e}' in the name; derive: made at load time",
    "const": "values: literal numbers, row-major",
    "carry": "name: value carried into a scan body",
}.items():
    op(_name, "source", _doc)(_declared)


@op("state", "source", "name: initial handle of a declared state")
def _state(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(None, (), state_handle)


# ---- tile arithmetic -----------------------------------------------------------------------------------------
UNARY = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "recip", "sigmoid", "softplus", "cos", "sin")
BINARY = ("add", "sub", "mul", "div", "max", "min", "copysign")
COMPARE = ("lt", "le", "eq")
INTEGER = ("iadd", "isub", "imul", "ixor", "imod")


def _unary(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    _need(x, not x.type.dtype.is_int, "a float value")
    return Type(x.type.rows, x.type.dims, f32)


def _binary(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    for n in inputs:
        _need(n, not n.type.dtype.is_int, "a float value")
    return Type(common_rows(inputs), _dims_of(inputs), f32)


def _compare(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(common_rows(inputs), _dims_of(inputs), boolean)


def _integer(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    for n in inputs:
        _need(n, n.type.dtype.is_int, "an integer value")
    return Type(common_rows(inputs), _dims_of(inputs), i64)


for _u in UNARY:
    op(_u, "tile", "elementwise")(_unary)
for _b in BINARY:
    op(_b, "tile", "elementwise")(_binary)
for _c in COMPARE:
    op(_c, "tile", "elementwise, bool result")(_compare)
for _i in INTEGER:
    op(_i, "tile", "64-bit integers, wrapping; imod needs non-negative operands")(_integer)


@op("where", "tile", "(condition, a, b)")
def _where(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    c, a, b = inputs
    _need(c, c.type.dtype == boolean, "bool")
    if a.type.dtype.is_int != b.type.dtype.is_int:
        raise _fail("where mixes integers and floats", found=f"{a.type} and {b.type}")
    return Type(common_rows(inputs), _dims_of(inputs), i64 if a.type.dtype.is_int else f32)


@op("to_float", "tile", "integer -> f32")
def _to_float(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(inputs[0].type.rows, inputs[0].type.dims, f32)


@op("round", "tile", "dtype: round to nearest even at this point; the profile 'wide' drops those to bf16")
def _round(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    return Type(x.type.rows, x.type.dims, DType.parse(attrs["dtype"]))


@op("encode", "tile", "dtype: quantise the last dim into a storage format (numbers: dsl/interpreter/formats.py)")
def _encode(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    t = DType.parse(attrs["dtype"])
    last = x.type.dims[-1]
    width = t.features if t.is_record else t.block[1] if t.is_block else 1
    _need(x, isinstance(last, int) and (last == width if t.is_record else last % width == 0),
          f"a last dim that fits {t}")
    return Type(x.type.rows, x.type.dims, t)


@op("reduce", "tile", "how (sum|max|mean), dims: reduced dims of the row are kept with size 1")
def _reduce(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    if attrs["how"] not in ("sum", "max", "mean"):
        raise _fail("unknown reduction", found=attrs["how"], allowed="sum, max, mean")
    dims = tuple(1 if i in attrs["dims"] else d for i, d in enumerate(x.type.dims))
    return Type(x.type.rows, dims, f32)


@op("pair_rotate", "tile",
    "(x, cos, sin) inverse: turn adjacent pairs of the last 2n features of the last dim, n = last dim of "
    "cos")
def _pair_rotate(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    x, c, s = inputs
    _need(c, c.type.dims == s.type.dims and 2 * c.type.size <= x.type.static_dims[-1], "a table that fits")
    return Type(common_rows(inputs), x.type.dims, f32)


@op("scan", "tile", "(init, captured...) trips, body: repeat body; the body's carries are named carry, c0, c1, ...")
def _scan(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    body, x = attrs["body"], inputs[0]
    out = body.outputs["carry"]
    if out.type.dims != x.type.dims:
        raise _fail("a scan body changes the carried dims", found=str(out.type), allowed=str(x.type))
    return Type(common_rows(inputs), x.type.dims, f32)


# ---- shape ---------------------------------------------------------------------------------------------------
@op("reshape", "shape", "dims")
def _reshape(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    out = Type(x.type.rows, tuple(attrs["dims"]), x.type.dtype)
    _need(x, x.type.size == out.size, f"{out.size} elements")
    return out


@op("slice", "shape", "dim, start, stop")
def _slice(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    d, a, b = attrs["dim"], attrs["start"], attrs["stop"]
    dims = list(x.type.static_dims)
    if not 0 <= a < b <= dims[d]:
        raise _fail("slice out of range", found=f"{a}:{b} of {dims[d]}")
    dims[d] = b - a
    return Type(x.type.rows, tuple(dims), x.type.dtype)


@op("concat", "shape", "dim")
def _concat(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    d = attrs["dim"]
    dims = list(inputs[0].type.static_dims)
    dims[d] = sum(n.type.static_dims[d] for n in inputs)
    dtype = inputs[0].type.dtype if len({n.type.dtype for n in inputs}) == 1 else f32
    return Type(common_rows(inputs), tuple(dims), dtype)


@op("expand", "shape", "dims: broadcast to dims")
def _expand(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    if broadcast(x.type.dims, attrs["dims"]) != tuple(attrs["dims"]):
        raise _fail("expand cannot shrink", found=str(x.type), allowed=str(attrs["dims"]))
    return Type(x.type.rows, tuple(attrs["dims"]), x.type.dtype)


# ---- contractions --------------------------------------------------------------------------------------------
@op("contract", "contract",
    "(x [.., K], w [N, K]) -> [.., N]; groups=G: x [G, K], w [G*R, K] -> [G, R]; accumulates in f32")
def _contract(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    x, w = inputs
    g = attrs.get("groups", 1)
    n, k = w.type.static_dims
    xd = x.type.static_dims
    _need(x, xd[-1] == k and (g == 1 or (len(xd) == 2 and xd[0] == g and n % g == 0)), f"[.., {k}] with groups={g}")
    return Type(x.type.rows, (g, n // g) if g > 1 else (*xd[:-1], n), f32)


@op("grouped_contract", "routing",
    "(x [K] or [k, K], experts [k] i32, w stack [E, N, K]) -> [k, N]: row i of slot s times w[experts[s]]")
def _grouped(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    x, idx, w = inputs
    _, n, k = w.type.static_dims
    slots = idx.type.static_dims[-1]
    xd = x.type.static_dims
    _need(x, xd in ((k,), (slots, k)), f"[{k}] or [{slots}, {k}]")
    return Type(common_rows(inputs), (slots, n), f32)


@op("gather", "routing", "(table [V, ...], index [...]) -> index dims + table row dims; table is a param or const")
def _gather(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    table, idx = inputs
    _need(idx, idx.type.dtype.is_int, "integer indices")
    dtype = table.type.dtype if table.type.dtype.is_int or table.type.dtype.is_float else f32
    return Type(idx.type.rows, (*idx.type.dims, *table.type.dims[1:]), dtype)


@op("fetch", "routing", "(table, index) -> index: rows of a table that a later kernel looks up; changes no value")
def _fetch(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return inputs[1].type


@op("take", "routing", "(values [n], index [k] i32) -> [k]")
def _take(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    v, idx = inputs
    return Type(common_rows(inputs), idx.type.dims, v.type.dtype)


@op("topk", "routing", "k, pin: indices of the k largest of the last dim, best first, ties to the lower index; "
    "-1 where fewer than k are above -inf; pin names the selection for outside pinning")
def _topk(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    k, last = attrs["k"], x.type.dims[-1]
    if k < 1 or (isinstance(last, int) and k > last):
        raise _fail("top-k keeps more than there are", found=f"k={k} of {last}", allowed=f"1..{last}")
    return Type(x.type.rows, (*x.type.dims[:-1], k), i32)


@op("argmax", "routing", "index of the largest of the last dim, ties to the lower index")
def _argmax(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(inputs[0].type.rows, inputs[0].type.dims[:-1], i64)


# ---- attention -----------------------------------------------------------------------------------------------
@op("index_score", "attention",
    "(q [H, D], keys handle, w [H]) ratio, rounds: sum_h relu(q_h.k_j) w_h for visible j < (pos+1)/ratio, "
    "else -inf")
def _index_score(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    q, keys, w = inputs
    _need(keys, keys.type.dtype == state_handle, "a state handle")
    _need(w, w.type.dims == q.type.dims[:1], "one weight per head")
    return Type(common_rows(inputs), (entries(attrs["ratio"]),), f32)


@op("block_max", "attention",
    "(scores) block, newest: largest score of each block of entries; newest=True sets the block of the "
    "newest visible entry to +inf")
def _block_max(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    return Type(x.type.rows, (f"{x.type.dims[0]}/{attrs['block']}",), f32)


@op("within_blocks", "attention", "(scores, blocks [n] i32) block: scores outside the listed blocks become -inf")
def _within(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(common_rows(inputs), inputs[0].type.dims, f32)


@op("attend", "attention",
    "(q [H, D], sink [H] or none, source operands...) sources, scale, rounds, kv_heads: one softmax over "
    "all sources; see functional.attend")
def _attend(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    q = inputs[0]
    _need(q, len(q.type.dims) == 2, "[heads, head_dim]")
    return Type(q.type.rows, (*q.type.dims[:1], attrs["value_dim"]), f32)


# ---- state ---------------------------------------------------------------------------------------------------
@op("extend", "state",
    "(handle, rows) state: window or group tail := old rows followed by this step's rows; a view until "
    "the ring commits")
def _extend(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(None, (), state_handle)


@op("append", "state", "(handle, entries on T or T/r) state: write finished entries at or above the write floor")
def _append(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(None, (), state_handle)


@op("pool", "state",
    "(tail handle) state, ratio, overlap, dim: softmax-pool the raw rows [values | gates] of each "
    "completed group, see dsl/state.py")
def _pool(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(groups(attrs["ratio"]), (attrs["dim"],), f32)


@op("previous", "state",
    "(window handle, positions []) back, dim: the window's row `back` positions before each of the given "
    "ones, zeros where it holds none")
def _previous(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    window, at = inputs
    _need(window, window.type.dtype == state_handle, "a state handle")
    _need(at, at.type.dtype.is_int and at.type.dims == (), "one position per row")
    if attrs["back"] < 1:
        raise _fail("a previous row lies at least one position back", found=attrs["back"], allowed=">= 1")
    return Type(at.type.rows, (attrs["dim"],), f32)


# ---- rows ----------------------------------------------------------------------------------------------------
@op("keep", "rows", "rows: the rows of a narrower axis (T -> T_kept -> T_wanted); inserted by the compiler")
def _keep(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    to = Rows.parse(attrs["rows"])
    order = (STEP, KEPT, WANTED)
    if x.type.rows not in order or to not in order or order.index(to) <= order.index(x.type.rows):
        raise _fail("keep can only narrow rows", found=f"{x.type.rows} -> {to}", allowed="T -> T_kept -> T_wanted")
    return Type(to, x.type.dims, x.type.dtype)


@op("group_positions", "rows", "ratio: first position of each completed group, on T/ratio")
def _group_positions(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return Type(groups(attrs["ratio"]), (), i64)


@op("by_sequence", "rows", "n: each sequence brings exactly n rows; they become a leading dim on axis S")
def _by_sequence(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    _need(x, x.type.rows == STEP, "a value on T")
    return Type(SEQ, (attrs["n"], *x.type.dims), x.type.dtype)


@op("override_rows", "rows", "(x, name): rows given from outside (image embeddings) replace x where present")
def _override(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    return inputs[0].type


@op("draw", "draw", "(logits [.., V]) ahead: the token `ahead` + 1 positions behind each row, under the request's "
    "sampling options (runtime/sampling); ties to the lower index")
def _draw(inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    (x,) = inputs
    _need(x, x.type.dtype == f32, "f32 logits")
    _need(x, x.type.size == x.type.static_dims[-1], "one row of logits for each row")
    return Type(x.type.rows, x.type.dims[:-1], i64)


def infer(name: str, inputs: Sequence[Node], attrs: dict[str, Attr]) -> Type:
    """Type of a node of op ``name``; raises SpecError when the inputs do not fit."""
    if name not in OPS:
        raise _fail("unknown op", found=name, allowed="the closed list in dsl/ops.py")
    try:
        return OPS[name].infer(inputs, attrs)
    except KeyError as e:
        raise _fail(f"op {name} lacks attribute {e}") from None
