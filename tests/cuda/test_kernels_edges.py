"""What a kernel does at the edges of a step: no rows, tails of tiles, entries and experts that do not exist, NaN."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from cpu.harness import Array, Param, Seq, State, Step, Writer, from_bf16, held, rows_step
from cpu.regions import encode_record
from cuda.arguments import arguments
from cuda.interpreted import run, run_arguments, source_of

from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.dsl.interpreter import formats
from deepinfer.dsl.interpreter.routing import top_k
from deepinfer.dsl.types import DType

RNG = np.random.default_rng(7)
ENCODINGS = ("mxfp8(1,32)", "mxfp8(1,128)", "mxfp4(1,32)", "fp4_e4m3(16)", "mxfp8(1,64)[128]+bf16[64]+f32[64]")


def store_acc(dims: tuple[int, ...], operand: int, dtype: str = "f32") -> tuple[tuple[str, TileProgram], ...]:
    ops = (TileOp("acc", (), dims, "f32", (("i", 0),)), TileOp("store", (0,), dims, dtype, (("operand", operand),)))
    return (("epilogue", TileProgram(ops)),)


def gemm(n: int, k: int, weight: str = "mxfp8(32,32)") -> KernelSpec:
    operands = (Operand("param", "-", (n, k), weight), Operand("value", "T", (k,), "bf16"),
                Operand("value", "T", (n,), "f32", True))
    attrs = (("results", ((n,),)), ("weights", ((0, 1),)), ("x", 1))
    return KernelSpec("gemm", "T", operands, attrs, store_acc((n,), 2), title="test")


def packed(n: int, k: int) -> Param:
    codes = RNG.integers(0, 256, (n, k), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x31
    return Param(codes, RNG.integers(120, 130, (-(-n // 32), k // 32), np.uint8))


def dense(p: Param) -> Array:
    assert isinstance(p.data, np.ndarray) and isinstance(p.scale, np.ndarray)
    w = formats.dequantised_weight(torch.from_numpy(p.data), torch.from_numpy(p.scale), DType.parse("mxfp8(32,32)"))
    return w.numpy()


@pytest.mark.parametrize("rows", [1, 15, 17, 70])
def test_a_product_writes_the_rows_of_a_partial_tile_and_no_others(rows: int) -> None:
    spec, p = gemm(80, 96), packed(80, 96)
    x = held(RNG.standard_normal((rows + 5, 96)).astype(np.float32), "bf16")
    made = arguments(spec, source_of(spec), rows_step(rows + 5), [p, x, None])
    stop = next(i for i, q in enumerate(source_of(spec).parameters) if q.where == ("launch", "row_stop"))
    made.values[stop], made.rows = rows, rows
    out = run_arguments(spec, made)[2]
    want = from_bf16(x[:rows]) @ dense(p).T
    assert np.abs(out[:rows] - want).max() <= 1e-5 * np.abs(want).max()
    assert (out[rows:] == 77).all()


@pytest.mark.parametrize("rows", [5, 40, 70, 9000])
def test_a_product_summed_in_parts_is_the_product(rows: int) -> None:
    spec, p = gemm(40, 1024), packed(40, 1024)
    assert [len(v.stages) for v in source_of(spec).variants] == [2, 2, 1]
    x = held(RNG.standard_normal((rows, 1024)).astype(np.float32), "bf16")
    out = run(spec, rows_step(rows), [p, x, None])[2]
    want = from_bf16(x) @ dense(p).T
    assert np.abs(out - want).max() <= 1e-5 * np.abs(want).max()


def test_a_launch_begins_at_the_first_row_of_its_tile() -> None:
    spec, p = gemm(32, 64), packed(32, 64)
    x = held(RNG.standard_normal((40, 64)).astype(np.float32), "bf16")
    made = arguments(spec, source_of(spec), rows_step(40), [p, x, None])
    for i, q in enumerate(source_of(spec).parameters):
        if q.where == ("launch", "row_first"):
            made.values[i] = 24
    made.rows = 16
    out = run_arguments(spec, made)[2]
    want = from_bf16(x[24:]) @ dense(p).T
    assert (out[:24] == 77).all()
    assert np.abs(out[24:] - want).max() <= 1e-5 * np.abs(want).max()


def test_a_step_without_rows_launches_nothing() -> None:
    source = source_of(gemm(32, 64))
    assert [s.grid.blocks(0) for v in source.variants for s in v.stages] == [0] * 3


def test_a_row_that_is_not_a_number_leaves_the_others_alone() -> None:
    spec, p = gemm(48, 64), packed(48, 64)
    x = RNG.standard_normal((9, 64)).astype(np.float32)
    clean = run(spec, rows_step(9), [p, held(x, "bf16"), None])[2]
    x[4, 3] = np.nan
    out = run(spec, rows_step(9), [p, held(x, "bf16"), None])[2]
    others = np.arange(9) != 4
    assert np.isnan(out[4]).all()
    assert np.array_equal(out[others], clean[others])


def test_pairs_of_a_row_and_an_expert_that_does_not_exist_use_the_last_one() -> None:
    operands = (Operand("value", "T", (64,), "bf16"), Operand("value", "T", (2,), "i32"),
                Operand("param", "-", (5, 32, 64), "mxfp4(1,32)", detail=(("stack", 5),)),
                Operand("value", "T", (2, 32), "f32", True))
    attrs = (("experts", 1), ("results", ((2, 32),)), ("weights", (2,)), ("x", 0))
    spec = KernelSpec("grouped_gemm", "T", operands, attrs, store_acc((2, 32), 3), title="test")
    codes = [RNG.integers(0, 256, (32, 32), np.uint8) for _ in range(5)]
    scales = [RNG.integers(120, 130, (32, 2), np.uint8) for _ in range(5)]
    x = held(RNG.standard_normal((21, 64)).astype(np.float32), "bf16")
    picks = RNG.integers(0, 5, (21, 2)).astype(np.int32)
    picks[3, 0], picks[7, 1] = -1, 99
    out = run(spec, rows_step(21), [x, picks, Param(codes, scales), None])[3].reshape(21, 2, 32)
    t = DType.parse("mxfp4(1,32)")
    w = [formats.dequantised_weight(torch.from_numpy(c), torch.from_numpy(s), t).numpy()
         for c, s in zip(codes, scales, strict=True)]
    known = np.where((picks < 0) | (picks > 4), 4, picks)
    want = np.array([[w[e] @ from_bf16(x[row]) for e in known[row]] for row in range(21)])
    assert np.abs(out - want).max() <= 1e-5 * np.abs(want).max()


def attend(picks: int, rounds: str = "") -> KernelSpec:
    state = (("first_position", 0), ("kind", "window"), ("record_bytes", 68), ("ring_rows", 9), ("window", 4))
    paged = (("kind", "paged"), ("ratio", 2), ("record_bytes", 36))
    operands = (Operand("value", "T", (4, 64), "bf16"), Operand("param", "-", (4,), "f32"),
                Operand("state", "T", (64,), "mxfp8(1,32)[64]", detail=state),
                Operand("state", "T", (64,), "fp4_e4m3(16)[64]", detail=paged),
                Operand("value", "T", (picks,), "i32"), Operand("value", "T", (4, 64), "f32", True))
    attrs = (("head_dim", 64), ("heads", 4), ("kv_heads", 1), ("q", 0), ("rounds", rounds), ("scale", 0.125),
             ("sink", 1), ("sources", (("window", 4, 2, -1, -1), ("selected", 2, 3, -1, 4))), ("value_dim", 64))
    return KernelSpec("attend", "T", operands, attrs, store_acc((4, 64), 5), title="test")


def test_attention_ignores_picks_that_name_no_visible_entry() -> None:
    ring = torch.from_numpy(RNG.standard_normal((9, 64)).astype(np.float32))
    entries = torch.from_numpy(RNG.standard_normal((8, 64)).astype(np.float32))
    raw = encode_record(entries, DType.parse("fp4_e4m3(16)[64]"))
    pages = np.full((3, 4, 36), 0xFF, np.uint8)
    pages[2], pages[0] = raw[:4], raw[4:]
    state = State(encode_record(ring, DType.parse("mxfp8(1,32)[64]"))[None], None)
    step = Step([Seq(1, 13, blocks=(2, 0))], block_tokens=8)
    q = held(RNG.standard_normal((1, 256)).astype(np.float32), "bf16")
    sink = Param(RNG.standard_normal(4).astype(np.float32))
    few = run(attend(3), step, [q, sink, state, State(pages, None, 0, 2), np.array([[1, 4, 6]], np.int32), None])[5]
    many = np.array([[-1, 1, 4, 7, 6, 99, -5]], np.int32)  # 7 is not complete at position 13
    outs = [run(attend(7), step, [q, sink, state, State(pages, None, 0, 2), many, None], variant=v)[5]
            for v in range(len(source_of(attend(7)).variants))]
    assert len(outs) == 3
    for out in outs:
        assert np.isfinite(out).all()
        assert np.abs(out - few).max() <= 1e-6 * np.abs(few).max()
        assert np.array_equal(out, outs[0])  # however many rows there are


@pytest.mark.parametrize("source", ["window", "picked"])
def test_a_key_that_is_not_a_number_makes_its_own_row_one(source: str) -> None:
    """Records that are decoded by words: an E4M3 code, or the scale of E2M1 codes, of the first sequence's keys."""
    spec, rows = attend(3, "bf16"), torch.from_numpy(RNG.standard_normal((2, 9, 64)).astype(np.float32))
    ring = encode_record(rows.reshape(18, 64), DType.parse("mxfp8(1,32)[64]")).reshape(2, 9, 68)
    pages = encode_record(rows[:, :8].reshape(16, 64), DType.parse("fp4_e4m3(16)[64]")).reshape(4, 4, 36)
    q = held(RNG.standard_normal((2, 256)).astype(np.float32), "bf16")
    sink, picks = Param(RNG.standard_normal(4).astype(np.float32)), np.array([[1, 4, 6]] * 2, np.int32)
    step = Step([Seq(1, 15, slot=s, blocks=(2 * s, 2 * s + 1)) for s in range(2)], block_tokens=8)

    def outs() -> list[Array]:
        state = State(ring.copy(), None)
        return [run(spec, step, [q, sink, state, State(pages.copy(), None, 0, 2), picks, None], variant=v)[5]
                for v in range(len(source_of(spec).variants))]

    clean = outs()
    if source == "window":
        ring[0, 14 % 9, 5] |= 0x7F
    else:
        pages[1, 0, 33] = 0x7F  # entry 4
    for out, good in zip(outs(), clean, strict=True):
        assert np.isfinite(good).all() and np.array_equal(good, clean[0])
        assert np.isnan(out[0]).all()
        assert np.array_equal(out[1], good[1])


# ---- formats and selections ----------------------------------------------------------------------------------------
def hard_rows(n: int) -> Array:
    """Rows that meet floors, ties, saturation and both zeros."""
    rows = [RNG.uniform(-3, 3, n) * 10.0**e for e in (-38, -20, -6, -3, 0, 3, 20, 37)]
    steps = np.arange(n) - n // 2
    rows += [steps / 16.0, steps * 0.25, steps * 2.0**-9, np.zeros(n), -np.zeros(n)]
    for peak in (5.0, 6.0, 447.9, 448.0, 464.0, 480.0):
        rows.append(np.concatenate(([peak], RNG.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 17.0, 19.0], n - 1))))
    return np.array(rows).astype(np.float32)


@pytest.mark.parametrize("dtype", ENCODINGS)
def test_encoding_gives_the_values_of_the_format(dtype: str) -> None:
    x = hard_rows(256)
    w = Writer()
    w.store(w.op("encode", w.load((256,)), dims=(256,), dtype=dtype))
    w.ops[1] = TileOp("encode", (0,), (256,), dtype, (("dtype", dtype),))
    got = run(w.spec(), rows_step(len(x)), [x, None])[1]
    want = formats.quantised(torch.from_numpy(x), DType.parse(dtype)).numpy()
    assert np.array_equal(from_bf16(got) if got.dtype == np.uint16 else got, want)


@pytest.mark.parametrize("dtype", ("mxfp8(1,32)[256]", "mxfp4(1,32)[256]", "fp4_e4m3(16)[256]", ENCODINGS[-1]))
def test_a_record_has_the_bytes_of_its_format(dtype: str) -> None:
    x, t = hard_rows(256), DType.parse(dtype)
    w = Writer()
    row = w.load((256,))
    w.op("store_record", row, dims=(256,), operand=w.operand("state", (256,), dtype, write=True, kind="window",
                                                             ring_rows=4, record_bytes=t.row_bytes(256)))
    fresh = np.zeros((len(x), t.row_bytes(256)), np.uint8)
    run(w.spec(), rows_step(len(x)), [x, State(np.zeros((1, 4, fresh.shape[1]), np.uint8), fresh)])
    assert np.array_equal(fresh, encode_record(torch.from_numpy(x), t))


def test_selections_are_best_first_with_ties_to_the_lower_index() -> None:
    x = RNG.integers(-3, 4, (6, 40)).astype(np.float32)
    x[2] = -np.inf
    x[3, 5], x[4] = np.nan, 1.0
    w = Writer()
    w.store(w.op("topk", w.load((40,)), dims=(7,), dtype="i32", k=7, pin=-1))
    got = run(w.spec(), rows_step(len(x)), [x, None])[1]
    rows = [0, 1, 2, 4, 5]  # the reference gives NaN no place of its own
    assert np.array_equal(got[rows], top_k(torch.from_numpy(x[rows]), 7).numpy())
    assert 5 not in got[3]


def chosen(entries: int, rounds: str, listed: bool = True) -> KernelSpec:
    """Selections of each kind: blocks of entries, entries, and entries within listed blocks."""
    paged = (("kind", "paged"), ("ratio", 1), ("record_bytes", 32))
    operands = (Operand("value", "T", (4, 16), "bf16"), Operand("state", "T", (16,), "bf16[16]", detail=paged),
                Operand("value", "T", (4,), "bf16"), Operand("value", "T", (6,), "i32"),
                *(Operand("value", "T", (k,), "i32", True) for k in (6, entries, 5)[: 3 if listed else 2]))
    kinds = [(("k", k), ("block", block), ("within", within), ("within_block", 4 if within >= 0 else 0), ("pin", -1),
              ("out", out)) for k, block, within, out in ((6, 4, -1, 4), (entries, 0, -1, 5), (5, 0, 3, 6))]
    attrs = (("head_dim", 16), ("heads", 4), ("keys", 1), ("q", 0), ("ratio", 1), ("rounds", rounds),
             ("selections", tuple(kinds[: 3 if listed else 2])), ("w", 2))
    return KernelSpec("score_select", "T", operands, attrs, (), title="test")


@pytest.mark.parametrize("rounds", ["", "bf16"])
def test_selections_among_many_entries_are_those_of_a_sorted_row(rounds: str) -> None:
    """Entries in a few classes, so that most scores are equal; one entry is not a number; one row sees few entries."""
    k, visible = 40, (90, 3)
    kinds = held(RNG.integers(-2, 3, (5, 16)).astype(np.float32), "bf16")
    keys = np.ascontiguousarray(kinds[RNG.integers(0, 5, 96)])
    keys[17] = 0x7FC0
    pages = keys.reshape(3, 32, 16).view(np.uint8).reshape(3, 32, 32)
    q = held(RNG.integers(-1, 2, (2, 64)).astype(np.float32), "bf16")
    w = held(RNG.integers(-1, 3, (2, 4)).astype(np.float32), "bf16")
    listed = np.array([[9, 4, 22, -1, 0, 15], [0, 7, -1, 3, 1, 5]], np.int32)
    step = Step([Seq(1, n - 1, blocks=(0, 1, 2)) for n in visible], block_tokens=32)
    spec = chosen(k, rounds)
    outs = [run(spec, step, [q, State(pages, None, 0, 1), w, listed, *(None,) * 3], variant=v) for v in range(3)]
    for row, n in enumerate(visible):
        scores = (np.maximum(from_bf16(q)[row].reshape(4, 16) @ from_bf16(keys[:n]).T, 0)
                  * from_bf16(w)[row][:, None]).sum(0)
        scores = np.where(np.isnan(scores), -np.inf, scores)
        blocks = np.array([scores[b: b + 4].max() for b in range(0, n, 4)])
        blocks[(n - 1) // 4] = np.inf
        inside = [e for b in listed[row] if b >= 0 for e in range(b * 4, b * 4 + 4) if e < n]
        wanted = {4: best(blocks, range(len(blocks)), 6), 5: best(scores, range(n), k), 6: best(scores, inside, 5)}
        for out in outs:
            assert {i: out[i][row].tolist() for i in wanted} == wanted


def test_programs_that_share_a_row_select_what_one_alone_does() -> None:
    """Several parts with entries, most of them equal; the last row sees fewer entries than it may take."""
    k, visible = 600, (2600, 500)
    kinds = held(RNG.integers(-2, 3, (5, 16)).astype(np.float32), "bf16")
    keys = np.ascontiguousarray(kinds[RNG.integers(0, 5, 2688)])
    keys[[17, 1030]] = 0x7FC0
    pages = keys.reshape(21, 128, 16).view(np.uint8).reshape(21, 128, 32)
    q = held(RNG.integers(-1, 2, (2, 64)).astype(np.float32), "bf16")
    w = held(RNG.integers(-1, 3, (2, 4)).astype(np.float32), "bf16")
    step = Step([Seq(1, n - 1, blocks=tuple(range(21))) for n in visible], block_tokens=128)
    spec = chosen(k, "bf16", listed=False)
    assert [len(v.stages) for v in source_of(spec).variants] == [5, 5, 1]
    for v in (1, 2):
        out = run(spec, step, [q, State(pages, None, 0, 1), w, np.zeros((2, 6), np.int32), None, None], variant=v)
        for row, n in enumerate(visible):
            scores = (np.maximum(from_bf16(q)[row].reshape(4, 16) @ from_bf16(keys[:n]).T, 0)
                      * from_bf16(w)[row][:, None]).sum(0)
            assert out[5][row].tolist() == best(np.where(np.isnan(scores), -np.inf, scores), range(n), k)


def best(scores: Array, among: Iterable[int], k: int) -> list[int]:
    """The k best, ties to the lower index, -1 where there are none."""
    order = sorted((i for i in among if scores[i] > -np.inf), key=lambda i: (-scores[i], i))
    return (order + [-1] * k)[:k]


@pytest.mark.parametrize("rows", [3, 17])
def test_a_row_made_in_parts_is_the_whole_row(rows: int) -> None:
    """Two streams of 128 features are added to, contracted with three rows of a weight, and normed."""
    w = Writer()
    old, new = w.load((2, 128), "bf16"), w.load((128,), "bf16")
    x = w.op("round", w.op("add", old, new, dims=(2, 128)), dims=(2, 128), dtype="bf16")
    w.ops[x] = TileOp("round", w.ops[x].args, (2, 128), "bf16", (("dtype", "bf16"),))
    w.store(x)
    flat = w.op("reshape", x, dims=(256,))
    w.ops[flat] = TileOp("reshape", (x,), (256,), "bf16")
    weight = w.operand("param", (3, 256), "f32")
    y = w.op("contract", flat, dims=(3,), operand=weight)
    mean = w.op("reduce", w.op("mul", flat, flat, dims=(256,)), dims=(1,))
    w.ops[mean] = TileOp("reduce", w.ops[mean].args, (1,), "f32", (("dims", (0,)), ("how", "mean")))
    w.store(w.op("mul", y, mean, dims=(3,)))
    first = w.op("slice", x, dims=(1, 128))
    w.ops[first] = TileOp("slice", (x,), (1, 128), "bf16", (("dim", 0), ("start", 1), ("stop", 2)))
    w.store(w.op("mul", first, mean, dims=(1, 128)))
    spec = w.spec()
    streams, added = (RNG.standard_normal((rows, n)).astype(np.float32) for n in (256, 128))
    streams[1, 5] = np.nan
    p = RNG.standard_normal((3, 256)).astype(np.float32)
    inputs = [held(streams, "bf16"), held(added, "bf16"), None, Param(p), None, None]
    outs = [run(spec, rows_step(rows), inputs, variant=v) for v in range(2)]
    whole = from_bf16(held(from_bf16(inputs[0]) + np.tile(from_bf16(inputs[1]), 2), "bf16"))
    scale = (whole**2).mean(1, keepdims=True)
    for out in outs:
        for got, want in zip((from_bf16(out[2]), out[4], out[5]), (whole, whole @ p.T * scale, whole[:, 128:] * scale),
                             strict=True):
            got = got.reshape(want.shape)
            assert np.array_equal(np.isnan(got), np.isnan(want))
            assert np.nanmax(np.abs(got - want)) <= 1e-5 * np.nanmax(np.abs(want), initial=1e-9)
        assert all(np.array_equal(out[i].view(np.uint8), outs[0][i].view(np.uint8)) for i in out)
