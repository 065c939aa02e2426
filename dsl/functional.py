"""What specs are written with: ops on values, and the field's own building blocks made of them.

Every function takes and returns Graph values (``Node``); scalars become constants. Shapes are given for one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer.dsl.build import current, tracing
from deepinfer.dsl.graph import Attr, Node
from deepinfer.dsl.types import STEP, DType, Type, bf16, f32, i64
from deepinfer.errors import SpecError

Value = Node | float | int


def const(values: Sequence[float] | Sequence[int] | float | int, dtype: DType = f32,
          dims: Sequence[int] | None = None) -> Node:
    """Literal numbers, row-major in ``dims``."""
    flat = tuple(values) if isinstance(values, Sequence) else (values,)
    shape = tuple(dims) if dims is not None else (() if not isinstance(values, Sequence) else (len(flat),))
    if math.prod(shape) != len(flat):
        raise SpecError("a constant does not fill its dims", found=f"{len(flat)} values", allowed=str(shape))
    return current().add("const", type=str(Type(None, shape, dtype)), values=flat)


def hadamard_matrix(n: int) -> Node:
    """Sylvester's n x n matrix (entries +1, -1; n a power of two), f32."""
    return current().add("const", type=str(Type(None, (n, n), f32)), make="hadamard")


def _node(x: Value, like: Node | None = None) -> Node:
    if isinstance(x, Node):
        return x
    integer = like is not None and like.type.dtype.is_int
    return const(int(x), i64) if integer else const(float(x))


def _un(op: str) -> Callable[[Node], Node]:
    return lambda x: current().add(op, (x,))


def _bin(op: str) -> Callable[[Value, Value], Node]:
    def f(a: Value, b: Value) -> Node:
        like = a if isinstance(a, Node) else b if isinstance(b, Node) else None
        return current().add(op, (_node(a, like), _node(b, like)))
    return f


absolute, exp, log, sqrt, rsqrt, recip = _un("abs"), _un("exp"), _un("log"), _un("sqrt"), _un("rsqrt"), _un("recip")
sigmoid, softplus, cos, sin, neg, to_float = (
    _un("sigmoid"), _un("softplus"), _un("cos"), _un("sin"), _un("neg"), _un("to_float"))
add, sub, mul, div = _bin("add"), _bin("sub"), _bin("mul"), _bin("div")
maximum, minimum, copysign = _bin("max"), _bin("min"), _bin("copysign")
iadd, isub, imul, ixor, imod = _bin("iadd"), _bin("isub"), _bin("imul"), _bin("ixor"), _bin("imod")
lt, le, eq = _bin("lt"), _bin("le"), _bin("eq")


def where(c: Node, a: Value, b: Value) -> Node:
    like = a if isinstance(a, Node) else b if isinstance(b, Node) else None
    return current().add("where", (c, _node(a, like), _node(b, like)))


def rounded(x: Node, dtype: DType | None = bf16) -> Node:
    """The value held in ``dtype`` at this point (a rounding point of the reference); None keeps it."""
    return x if dtype is None else current().add("round", (x,), dtype=str(dtype))


def encode(x: Node, dtype: DType) -> Node:
    """Quantise the last dim into a storage format."""
    return current().add("encode", (x,), dtype=str(dtype))


def reduce(x: Node, how: str, dims: Sequence[int]) -> Node:
    n = len(x.type.dims)
    return current().add("reduce", (x,), how=how, dims=tuple(sorted(d % n for d in dims)))


def total(x: Node, *dims: int) -> Node:
    """Sum over dims (kept with size 1)."""
    return reduce(x, "sum", dims or (-1,))


def reshape(x: Node, *dims: int) -> Node:
    return x if x.type.dims == dims else current().add("reshape", (x,), dims=tuple(dims))


def flatten(x: Node) -> Node:
    return reshape(x, x.type.size)


def slice_(x: Node, start: int, stop: int, dim: int = -1) -> Node:
    return current().add("slice", (x,), dim=dim % len(x.type.dims), start=start, stop=stop)


def concat(*xs: Node, dim: int = -1) -> Node:
    return current().add("concat", xs, dim=dim % len(xs[0].type.dims))


def expand(x: Node, *dims: int) -> Node:
    return current().add("expand", (x,), dims=tuple(dims))


def input_(name: str, dims: Sequence[int] = (), dtype: DType = i64) -> Node:
    """A per-row integer the runner makes: ``token_ids``, ``positions``, ``lookback`` [n]."""
    return current().add("input", name=name, type=str(Type(STEP, tuple(dims), dtype)))


def token_ids() -> Node:
    return input_("token_ids")


def positions() -> Node:
    return input_("positions")


def lookback(n: int) -> Node:
    """[n + 1] ids at positions i, i-1, .., i-n; -1 from the sequence start (or an image position) on."""
    return input_("lookback", (n + 1,))


def group_positions(ratio: int) -> Node:
    """First position of each group on T/ratio; for ratio 1 the rows' own positions."""
    return positions() if ratio == 1 else current().add("group_positions", (positions(),), ratio=ratio)


def by_sequence(x: Node, n: int) -> Node:
    return current().add("by_sequence", (x,), n=n)


def override_rows(x: Node, name: str) -> Node:
    return current().add("override_rows", (x,), name=name)


def output(name: str, x: Node) -> Node:
    """Publish a value of the entry under a name."""
    current().graph.outputs[name] = x
    return x


def gather(table: Node, index: Node) -> Node:
    return current().add("gather", (table, index))


def take(values: Node, index: Node) -> Node:
    return current().add("take", (values, index))


def top_k(x: Node, k: int, pin: str = "") -> Node:
    """Indices of the k largest, best first, ties to the lower index; ``pin`` names the selection."""
    return current().add("topk", (x,), k=k, pin=pin)


def argmax(x: Node) -> Node:
    return current().add("argmax", (x,))


def draw(logits: Node, ahead: int = 0) -> Node:
    """The token ``ahead`` + 1 positions behind each row, as the request wants it chosen: the largest logit, ties to the
    lower index, when nothing is drawn."""
    return current().add("draw", (logits,), ahead=ahead)


def contract(x: Node, w: Node, groups: int = 1) -> Node:
    """x [.., K] times w [N, K] -> [.., N]; with groups=G x [G, K], w [G*R, K] -> [G, R]."""
    return current().add("contract", (x, w), groups=groups)


def grouped_contract(x: Node, experts: Node, w: Node) -> Node:
    return current().add("grouped_contract", (x, experts, w))


def scan(init: Node, trips: int, body: Callable[..., Node], *captured: Node) -> Node:
    """Repeat ``carry = body(carry, *captured)`` ``trips`` times, inside one tile program."""
    with tracing("scan") as inner:
        def arg(name: str, n: Node) -> Node:
            dtype = n.type.dtype if n.type.dtype.is_int else f32
            return inner.add("carry", name=name, type=str(Type(n.type.rows, n.type.dims, dtype)))
        inner.graph.outputs["carry"] = body(arg("carry", init), *(arg(f"c{i}", c) for i, c in enumerate(captured)))
    return current().add("scan", (init, *captured), trips=trips, body=inner.graph)


# ---- building blocks -------------------------------------------------------------------------------------------
def rms_norm(x: Node, weight: Node | None, eps: float, rounds: DType | None = bf16) -> Node:
    """``w * x / sqrt(mean(x^2) + eps)`` over the last dim, f32 inside, one rounding at the end."""
    y = x * rsqrt(reduce(x * x, "mean", (-1,)) + eps)
    return rounded(y if weight is None else y * weight, rounds)


def silu(x: Node) -> Node:
    return x * sigmoid(x)


def softmax(x: Node, dim: int = -1) -> Node:
    e = exp(x - reduce(x, "max", (dim,)))
    return e / reduce(e, "sum", (dim,))


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency scaling (no magnitude factor)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original: int


def rope_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> tuple[float, ...]:
    """f32 values of ``theta^(-2i/dim)``, i < dim/2, each step rounded to f32 as the references build the table;
    with YaRN blended between f/factor and f by the ramp between the dims of beta_fast and beta_slow turns."""
    import numpy as np

    one = np.float32
    exponents = np.arange(0, dim, 2, dtype=one) / one(dim)
    # The power is the correctly rounded one: f32 power functions differ by machine, tables and hashes must not.
    f = one(1.0) / np.array([math.pow(theta, e) for e in exponents.tolist()], dtype=one)
    if yarn is not None:
        def dim_of(turns: float) -> float:
            return dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        lo = max(math.floor(dim_of(yarn.beta_fast)), 0)
        hi = min(math.ceil(dim_of(yarn.beta_slow)), dim - 1)
        span = one(hi - lo if hi > lo else 1e-3)
        ramp = np.clip((np.arange(dim // 2, dtype=one) - one(lo)) / span, one(0), one(1))
        f = f / one(yarn.factor) * ramp + f * (one(1) - ramp)
    return tuple(float(v) for v in f)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of adjacent pairs of the last ``2 * len(frequencies)`` features.

    The angle ``position * frequency`` is one f32 product (references round it there), its cosine exact.
    """

    frequencies: tuple[float, ...]

    def _turn(self, x: Node, at: Node | None, inverse: bool, rounds: DType | None) -> Node:
        angle = rounded(to_float(reshape(at if at is not None else positions(), 1)) * const(self.frequencies), f32)
        y = current().add("pair_rotate", (x, cos(angle), sin(angle)), inverse=inverse)
        return rounded(y, rounds)

    def __call__(self, x: Node, at: Node | None = None, rounds: DType | None = bf16) -> Node:
        return self._turn(x, at, False, rounds)

    def back(self, x: Node, at: Node | None = None, rounds: DType | None = bf16) -> Node:
        return self._turn(x, at, True, rounds)


# ---- attention -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Source:
    """Keys (= values unless ``values`` is given) that ``attend`` reads. Kinds:

    - ``window`` n: rows max(start, i-n+1) .. i of a window view (i: the query's position);
    - ``context`` n: rows max(start, a-n) .. a-1 of a window, a = first position of the sequence in this step;
    - ``selected`` ratio: the entries listed in ``picked`` [k] (-1: none);
    - ``dense`` ratio: every visible entry, j < (i+1)/ratio;
    - ``block``: all rows of the same sequence in this step, no mask; ``keys`` is a value [D] on T.
    """

    kind: str
    n: int
    keys: Node
    values: Node | None = None
    picked: Node | None = None


def attend(q: Node, sources: Sequence[Source], scale: float, sink: Node | None = None, rounds: DType | None = bf16,
           kv_heads: int = 1, value_dim: int | None = None) -> Node:
    """One softmax per head over all sources (q [H, D] -> [H, value_dim]).

    ``m = max(max_j s_j, -1e30)``; ``o = sum_j e^(s_j-m) v_j / (sum_j e^(s_j-m) + e^(sink-m))``; ``rounds``: the
    probabilities entering the value product are held in that dtype, the denominator stays f32. Encoded keys are
    read as their exact values. Head h reads kv head ``h // (H / kv_heads)``.
    """
    operands: list[Node] = [q] + ([sink] if sink is not None else [])
    described: list[tuple[Attr, ...]] = []
    for s in sources:
        described.append((s.kind, s.n, s.values is not None))
        operands.append(s.keys)
        operands += [x for x in (s.values, s.picked) if x is not None]
    return current().add("attend", operands, sources=tuple(described), sink=sink is not None, scale=float(scale),
                         rounds=str(rounds) if rounds else "", kv_heads=kv_heads,
                         value_dim=value_dim or q.type.static_dims[-1])


def index_score(q: Node, keys: Node, w: Node, ratio: int, rounds: DType | None = bf16) -> Node:
    """``sum_h relu(q_h . k_j) * w_h`` for visible entries j, -inf elsewhere; with ``rounds`` each dot, each product
    and the sum over heads is held in that dtype (the sum itself runs in f32, heads in order)."""
    return current().add("index_score", (q, keys, w), ratio=ratio, rounds=str(rounds) if rounds else "")


def block_max(scores: Node, block: int) -> Node:
    """Largest visible score of each block of ``block`` entries; the block of the newest visible entry is +inf."""
    return current().add("block_max", (scores,), block=block, newest=True)


def within_blocks(scores: Node, blocks: Node, block: int) -> Node:
    return current().add("within_blocks", (scores, blocks), block=block)
