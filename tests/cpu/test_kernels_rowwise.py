"""Tile programs: formats, elementary functions, reductions, selections, state rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cpu.harness import Array, Seq, State, Step, Writer, available_isas, floats, held, rounded, rows_step, run
from cpu.regions import decode_record, encode_record

from deepinfer.codegen.kernels.spec import KernelSpec, TileOp, TileProgram
from deepinfer.dsl.interpreter import formats
from deepinfer.dsl.interpreter.routing import top_k
from deepinfer.dsl.types import DType

RNG = np.random.default_rng(11)
ENCODINGS = ("mxfp8(1,32)", "mxfp8(1,128)", "mxfp4(1,32)", "fp4_e4m3(16)", "mxfp8(1,64)[128]+bf16[64]+f32[64]")


def unary(name: str, n: int) -> KernelSpec:
    w = Writer()
    w.store(w.op(name, w.load((n,)), dims=(n,)))
    return w.spec()


# ---- formats -------------------------------------------------------------------------------------------------------
def hard_rows(n: int) -> Array:
    """Rows that meet floors, ties, saturation, denormals and both zeros."""
    rows = [RNG.uniform(-3, 3, n) * 10.0**e for e in (-42, -38, -20, -6, -3, 0, 3, 20, 38)]
    steps = np.arange(n) - n // 2
    rows += [steps / 16.0, steps * 0.25, steps * 2.0**-9, steps * 2.0**-10 * 6, np.zeros(n), -np.zeros(n)]
    rows += [np.where(np.arange(n) % 2, 1e-4, -1e-5), np.full(n, 6 * 2.0**-127), np.full(n, 1e-45)]
    for peak in (5.0, 6.0, 447.9, 448.0, 464.0, 480.0):
        rows.append(np.concatenate(([peak], RNG.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 17.0, 19.0], n - 1))))
    return np.array(rows).astype(np.float32)


@pytest.mark.parametrize("dtype", ENCODINGS)
def test_encoding_gives_the_values_of_the_format(dtype: str) -> None:
    x = hard_rows(256)
    w = Writer()
    w.store(encode(w, dtype))
    want = formats.quantised(torch.from_numpy(x), DType.parse(dtype)).numpy()
    for isa in available_isas(w.spec()):
        got = run(w.spec(), rows_step(len(x)), [x, None], isa=isa)[1]
        assert np.array_equal(floats(got), want), isa


def encode(w: Writer, dtype: str) -> int:
    x = w.load((256,))
    w.ops.append(TileOp("encode", (x,), (256,), dtype, (("dtype", dtype),)))
    return len(w.ops) - 1


def record_writer(dtype: str, kind: str, rows: str = "T", ratio: int = 1) -> KernelSpec:
    n = DType.parse(dtype).features
    w = Writer(rows)
    x = w.load((n,))
    st = w.operand("state", (n,), dtype, write=True, kind=kind, ratio=ratio)
    w.op("store_record", x, dims=(n,), operand=st)
    return w.spec()


RECORDS = ("mxfp8(1,32)[256]", "mxfp4(1,32)[256]", "fp4_e4m3(16)[256]", "mxfp8(1,64)[128]+bf16[64]+f32[64]", "f32[256]")


@pytest.mark.parametrize("dtype", RECORDS)
def test_a_record_has_the_bytes_of_its_format(dtype: str) -> None:
    x, t = hard_rows(256), DType.parse(dtype)
    spec = record_writer(dtype, "window")
    want = encode_record(torch.from_numpy(x), t)
    for isa in available_isas(spec):
        fresh = np.zeros((len(x), t.row_bytes(256)), np.uint8)
        run(spec, rows_step(len(x)), [x, State(np.zeros((1, 4, fresh.shape[1]), np.uint8), fresh)], isa=isa)
        assert np.array_equal(fresh, want), isa


@pytest.mark.parametrize("dtype", RECORDS[:3])
def test_every_code_and_scale_of_a_record_decodes_to_its_value(dtype: str) -> None:
    t = DType.parse(dtype)
    size, codes = t.row_bytes(256), t.data_bytes(256)
    raw = np.zeros((256, size), np.uint8)
    raw[:, :codes] = np.arange(codes)[None] + np.arange(256)[:, None]
    raw[:, codes: codes + t.scale_bytes(256)] = np.arange(256)[:, None]
    w = Writer()
    at = w.load((), "i64", role="input", name="positions")
    st = w.operand("state", (256,), dtype, kind="window", first_position=0)
    w.store(w.op("previous", at, dims=(256,), operand=st, back=1, dim=256))
    spec = w.spec()
    for isa in available_isas(spec):
        got = run(spec, Step([Seq(256, 1)]), [None, State(raw[None]), None], isa=isa)[2]
        assert np.array_equal(got, decode_record(raw, t), equal_nan=True), isa


# ---- elementary functions ------------------------------------------------------------------------------------------
def ulps(got: Array, want: Array) -> Array:
    """Distance in units of the last place of the f32 nearest to the real value (denormal spacing at least)."""
    with np.errstate(invalid="ignore", over="ignore"):
        near = want.astype(np.float32)
        spacing = np.maximum(np.spacing(np.abs(near)).astype(np.float64), 2.0**-149)
        return np.where(np.isinf(near) & (got == near), 0, np.abs(got.astype(np.float64) - want) / spacing)


def wide(n: int) -> Array:
    x = np.concatenate((np.linspace(-110, 95, n // 2), RNG.standard_normal(n // 4), RNG.standard_normal(n // 4) * 1e-4))
    return x.astype(np.float32)[None]


FUNCTIONS = {
    "exp": lambda x: np.exp(x), "sigmoid": lambda x: np.where(x >= 0, 1, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x))),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), "cos": np.cos, "sin": np.sin,
    "neg": np.negative, "abs": np.abs,
}
POSITIVE = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "recip": lambda x: 1 / x}


@pytest.mark.parametrize("name", [*FUNCTIONS, *POSITIVE])
def test_functions_are_within_two_units_of_the_real_value(name: str) -> None:
    n = 16384
    x = wide(n)
    if name in ("cos", "sin"):
        x = x * np.float32(1e4)
    if name in POSITIVE:
        x = np.exp(np.linspace(-87, 88, n)).astype(np.float32)[None]
        x[0, : n // 4] = np.linspace(0.5, 2.0, n // 4)
    f = (FUNCTIONS | POSITIVE)[name]
    with np.errstate(over="ignore"):
        want = f(x.astype(np.float64))
    for isa in available_isas(unary(name, n)):
        got = run(unary(name, n), rows_step(1), [x, None], isa=isa)[1]
        assert ulps(got, want).max() <= 2, isa


def test_functions_at_the_ends() -> None:
    inf, nan = math.inf, math.nan
    cases = {"exp": [(inf, inf), (-inf, 0.0), (nan, nan), (-200.0, 0.0), (100.0, inf)],
             "log": [(0.0, -inf), (inf, inf), (-1.0, nan), (1.0, 0.0), (1e-45, math.log(2.0**-149))],
             "sigmoid": [(inf, 1.0), (-inf, 0.0), (0.0, 0.5)], "softplus": [(100.0, 100.0), (-200.0, 0.0)]}
    for name, pairs in cases.items():
        x = np.array([[a for a, _ in pairs]], np.float32)
        got = run(unary(name, len(pairs)), rows_step(1), [x, None])[1]
        assert np.allclose(got[0], np.array([b for _, b in pairs], np.float32), rtol=3e-7, atol=0, equal_nan=True), name


# ---- reductions ----------------------------------------------------------------------------------------------------
SHAPES = [((7,), (0,)), ((16,), (0,)), ((1300,), (0,)), ((4, 513), (0,)), ((4, 513), (1,)), ((4, 513), (0, 1)),
          ((20, 33), (0,)), ((3, 20, 40), (1,)), ((3, 20, 40), (0, 2)), ((6, 1, 50), (0,)), ((129, 1), (0,))]


@pytest.mark.parametrize("how", ["sum", "max", "mean"])
@pytest.mark.parametrize(("dims", "over"), SHAPES)
def test_reductions_over_any_dims(dims: tuple[int, ...], over: tuple[int, ...], how: str) -> None:
    w = Writer()
    x = w.load(dims)
    square = w.op("mul", x, x, dims=dims)
    out = tuple(1 if d in over else n for d, n in enumerate(dims))
    w.ops.append(TileOp("reduce", (square if how != "max" else x,), out, "f32", (("dims", over), ("how", how))))
    w.store(len(w.ops) - 1)
    data = RNG.standard_normal((3, *dims)).astype(np.float32)
    axes = tuple(d + 1 for d in over)
    f = {"sum": np.sum, "mean": np.mean, "max": np.max}[how]
    want = f(data.astype(np.float64) ** 2 if how != "max" else data, axis=axes).reshape(3, -1)
    got = run(w.spec(), rows_step(3), [data.reshape(3, -1), None])[1]
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


def test_a_flat_view_of_streams_reduces_without_losing_its_place() -> None:
    """The same op list is read as [4, 96], as [384] and through a broadcast: all index maps must agree."""
    w = Writer()
    x, m = w.load((4, 96)), w.load((4, 1))
    y = w.op("mul", x, m, dims=(4, 96))
    flat = w.op("reshape", y, dims=(384,))
    part = w.op("slice", flat, dims=(192,), dim=0, start=96, stop=288)
    w.store(part)
    square = w.op("mul", flat, flat, dims=(384,))
    w.ops.append(TileOp("reduce", (square,), (1,), "f32", (("dims", (0,)), ("how", "sum"))))
    w.store(len(w.ops) - 1)
    wide_ = w.op("reshape", part, dims=(2, 3, 32))
    w.ops.append(TileOp("expand", (wide_,), (5, 2, 3, 32), "f32", (("dims", (5, 2, 3, 32)),)))
    w.store(len(w.ops) - 1)
    a, b = RNG.standard_normal((2, 384)).astype(np.float32), RNG.standard_normal((2, 4)).astype(np.float32)
    y_ = (a.reshape(2, 4, 96) * b[..., None]).reshape(2, 384)
    out = [v for _, v in sorted(run(w.spec(), rows_step(2), [a, b, None, None, None]).items())]
    assert np.array_equal(out[0], y_[:, 96:288])
    assert np.allclose(out[1][:, 0], (y_.astype(np.float64) ** 2).sum(1), rtol=1e-6)
    assert np.array_equal(out[2], np.tile(y_[:, 96:288], 5))


def test_a_scan_repeats_its_body() -> None:
    body = TileProgram((
        TileOp("carry", (), (4, 4), "f32", (("name", "carry"),)), TileOp("carry", (), (1,), "f32", (("name", "c0"),)),
        TileOp("reduce", (0,), (4, 1), "f32", (("dims", (1,)), ("how", "sum"))), TileOp("div", (0, 2), (4, 4), "f32"),
        TileOp("reduce", (3,), (1, 4), "f32", (("dims", (0,)), ("how", "sum"))), TileOp("add", (4, 1), (1, 4), "f32"),
        TileOp("div", (3, 5), (4, 4), "f32")))
    w = Writer()
    x, e = w.load((4, 4)), w.load((1,))
    y = w.op("exp", x, dims=(4, 4))
    w.ops.append(TileOp("scan", (y, e), (4, 4), "f32", (("body", body), ("trips", 7))))
    w.store(len(w.ops) - 1)
    a, b = RNG.standard_normal((3, 16)).astype(np.float32), np.full((3, 1), 1e-3, np.float32)
    m = np.exp(a.astype(np.float64)).reshape(3, 4, 4)
    for _ in range(7):
        m = m / m.sum(2, keepdims=True)
        m = m / (m.sum(1, keepdims=True) + 1e-3)
    got = run(w.spec(), rows_step(3), [a, b, None])[2]
    assert np.abs(got.reshape(3, 4, 4) - m).max() < 1e-6


# ---- integers and selections ---------------------------------------------------------------------------------------
def test_integers_wrap_at_64_bits() -> None:
    w = Writer()
    a, b = w.load((4,), "i64"), w.load((4,), "i64")
    for name in ("iadd", "isub", "imul", "ixor"):
        w.store(w.op(name, a, b, dims=(4,), dtype="i64"))
    big = np.array([[2**63 - 1, -(2**63), 76632096046245, -5]], np.int64)
    small = np.array([[3, 1, 4839876093313, 7]], np.int64)
    out = [v for _, v in sorted(run(w.spec(), rows_step(1), [big, small, None, None, None, None]).items())]
    with np.errstate(over="ignore"):
        for got, want in zip(out, (big + small, big - small, big * small, big ^ small), strict=True):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("k", [1, 3, 6, 40, 64])
def test_topk_takes_the_lower_index_of_equals_and_fills_with_minus_one(k: int) -> None:
    w = Writer()
    w.store(w.op("topk", w.load((64,)), dims=(k,), dtype="i32", k=k, pin=-1))
    x = RNG.integers(-3, 4, (9, 64)).astype(np.float32)
    x[1] = 0.0
    x[2, ::2] = -0.0
    x[3, 5:] = -np.inf
    x[4] = -np.inf
    x[5, 7] = np.inf
    want = top_k(torch.from_numpy(x), k).numpy()
    got = run(w.spec(), rows_step(9), [x, None])[1]
    assert np.array_equal(got, want)


def test_a_pinned_selection_replaces_the_found_one() -> None:
    w = Writer()
    x = w.load((8,))
    pin = w.operand("pin", (2,), "i32")
    w.store(w.op("topk", x, dims=(2,), dtype="i32", k=2, pin=pin))
    data, given = np.arange(16, dtype=np.float32).reshape(2, 8), np.array([[3, 1], [0, 5]], np.int32)
    assert np.array_equal(run(w.spec(), rows_step(2), [data, given, None])[2], given)
    assert np.array_equal(run(w.spec(), rows_step(2), [data, None, None])[2], [[7, 6], [7, 6]])


def test_argmax_takes_the_first_of_equals() -> None:
    w = Writer()
    w.store(w.op("argmax", w.load((3, 50)), dims=(3,), dtype="i64"))
    x = RNG.integers(-2, 3, (4, 150)).astype(np.float32)
    got = run(w.spec(), rows_step(4), [x, None])[1]
    assert np.array_equal(got, x.reshape(4, 3, 50).argmax(-1))


def test_rounding_to_bf16_is_to_nearest_even_and_keeps_nan() -> None:
    w = Writer()
    w.ops.append(TileOp("round", (w.load((512,)),), (512,), "bf16", (("dtype", "bf16"),)))
    w.store(1)
    bits = (np.arange(512, dtype=np.uint32) << 14) + 0x3F800000
    x = bits.view(np.float32)[None].copy()
    x[0, :4] = [np.nan, np.inf, -np.inf, 3.4e38]
    got = run(w.spec(), rows_step(1), [x, None])[1]
    assert np.array_equal(floats(got), torch.from_numpy(x).bfloat16().float().numpy(), equal_nan=True)


# ---- state ---------------------------------------------------------------------------------------------------------
def test_nothing_below_the_write_floor_is_written() -> None:
    spec = record_writer("f32[8]", "paged", "T/2", ratio=2)
    step = Step([Seq(10, 6, floor=10, blocks=(4, 1, 3, 0))], ratios=(2,), block_tokens=4)
    x = RNG.standard_normal((step.rows("T/2"), 8)).astype(np.float32)
    base = np.full((5, 2, 32), 0xEE, np.uint8)
    run(spec, step, [x, State(base, ratio=2)])
    want = np.full((5, 2, 32), 0xEE, np.uint8)
    for row, entry in enumerate(range(3, 8)):
        if entry * 2 >= 10:
            want[(4, 1, 3, 0)[entry * 2 // 4], entry % 2] = x[row].view(np.uint8)
    assert np.array_equal(base, want)


def pooled(values: Array, gates: Array) -> Array:
    e = np.exp(gates.astype(np.float64) - gates.max(0))
    return (e * values).sum(0) / e.sum(0)


@pytest.mark.parametrize(("ratio", "overlap"), [(2, False), (4, True), (8, False)])
def test_pooling_crosses_chunk_borders_and_the_end_of_the_ring(ratio: int, overlap: bool) -> None:
    dim = 70
    width = 2 * dim if overlap else dim
    ring = (ratio if overlap else 0) + ratio - 1 + 3
    n = 5 * ratio + 1
    rows = RNG.standard_normal((n, 2 * width)).astype(np.float32)
    w = Writer(f"T/{ratio}")
    st = w.operand("state", (2 * width,), f"f32[{2 * width}]", kind="grouptail", group=ratio)
    w.store(w.op("pool", dims=(dim,), operand=st, ratio=ratio, overlap=overlap, dim=dim))
    spec = w.spec()
    found: dict[int, Array] = {}
    for c in range(0, n):
        base = np.zeros((2, ring, 8 * width), np.uint8)
        for p in range(max(0, c - ring), c):
            base[1, p % ring] = rows[p].view(np.uint8)
        step = Step([Seq(n - c, c, slot=1)], ratios=(ratio,))
        got = run(spec, step, [State(base, rows[c:].view(np.uint8)), None])[1]
        for i, j in enumerate(range(c // ratio, n // ratio)):
            assert np.array_equal(got[i], found.setdefault(j, got[i])), (c, j)
    for j, got in found.items():
        own = rows[j * ratio: (j + 1) * ratio]
        values, gates = own[:, :width], own[:, width:]
        if overlap:
            before = rows[max(0, (j - 1) * ratio): j * ratio]
            values = np.concatenate((before[:, :dim], values[:, dim:]))
            gates = np.concatenate((before[:, width: width + dim], gates[:, dim:]))
        assert np.abs(got - pooled(values, gates)).max() < 1e-5


def test_a_row_of_a_wider_axis_is_found_through_the_suffix_map() -> None:
    w = Writer("T_wanted")
    wide_, kept = w.load((3,), rows="T"), w.load((3,), rows="T_kept")
    w.store(w.op("add", wide_, kept, dims=(3,)))
    step = Step([Seq(5, kept=4, wanted=2), Seq(3, kept=0, wanted=0), Seq(4, kept=2, wanted=1)])
    a, b = np.arange(36, dtype=np.float32).reshape(12, 3), np.arange(18, dtype=np.float32).reshape(6, 3) * 100
    got = run(w.spec(), step, [a, b, None])[2]
    assert np.array_equal(got, a[[3, 4, 11]] + b[[2, 3, 5]])


def test_values_held_in_bf16_are_read_exactly() -> None:
    w = Writer()
    w.store(w.op("add", w.load((9,), "bf16"), w.load((9,), "f32"), dims=(9,)))
    a, b = rounded(RNG.standard_normal((2, 9)).astype(np.float32)), RNG.standard_normal((2, 9)).astype(np.float32)
    assert np.array_equal(run(w.spec(), rows_step(2), [held(a, "bf16"), b, None])[2], a + b)
