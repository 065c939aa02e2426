"""Schedules of contractions: whatever the tile, the number of rows or the batch, a row has the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.harness import Array, Param, held, rows_step
from cuda.interpreted import run, source_of
from cuda.test_kernels_edges import store_acc

from deepinfer.codegen.kernels.spec import KernelSpec, Operand

RNG = np.random.default_rng(11)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate((E2M1, -E2M1))


def dense(n: int, k: int, weight: str) -> KernelSpec:
    operands = (Operand("param", "-", (n, k), weight), Operand("value", "T", (k,), "bf16"),
                Operand("value", "T", (n,), "f32", True))
    attrs = (("results", ((n,),)), ("weights", ((0, 1),)), ("x", 1))
    return KernelSpec("gemm", "T", operands, attrs, store_acc((n,), 2), title="test")


def experts(count: int, n: int, k: int, weight: str = "mxfp4(1,32)", slots: int = 2) -> KernelSpec:
    operands = (Operand("value", "T", (k,), "bf16"), Operand("value", "T", (slots,), "i32"),
                Operand("param", "-", (count, n, k), weight, detail=(("stack", count),)),
                Operand("value", "T", (slots, n), "f32", True))
    attrs = (("experts", 1), ("results", ((slots, n),)), ("weights", (2,)), ("x", 0))
    return KernelSpec("grouped_gemm", "T", operands, attrs, store_acc((slots, n), 3), title="test")


def codes(n: int, k: int, weight: str) -> tuple[Param, Array]:
    """Random packed weights with scales far apart, and what they stand for in f64."""
    block = (1, 32) if weight.startswith("mxfp4") else (32, 32)
    scale = RNG.integers(127 - 40, 127 + 40, (-(-n // block[0]), -(-k // block[1])), np.uint8)
    if weight.startswith("mxfp4"):
        data = RNG.integers(0, 256, (n, k // 2), np.uint8)
        plain = np.stack((E2M1[data & 15], E2M1[data >> 4]), -1).reshape(n, k).astype(np.float64)
    else:
        data = RNG.integers(0, 256, (n, k), np.uint8)
        data[(data & 0x7F) == 0x7F] = 0x7E
        e, m = (data >> 3 & 15).astype(np.float64), (data & 7) / 8.0
        plain = np.where(e > 0, (1 + m) * 2.0 ** (e - 7), m * 2.0**-6) * np.where(data & 128, -1.0, 1.0)
    wide = np.repeat(np.repeat(2.0 ** (scale.astype(np.float64) - 127), block[0], 0)[:n], block[1], 1)[:, :k]
    return Param(data, scale), plain * wide


@pytest.mark.parametrize("weight", ["mxfp8(32,32)", "mxfp4(1,32)"])
def test_a_packed_weight_becomes_exactly_what_it_stands_for(weight: str) -> None:
    p, want = codes(72, 96, weight)
    out = run(dense(72, 96, weight), rows_step(96), [p, held(np.eye(96, dtype=np.float32), "bf16"), None])[2]
    assert np.array_equal(out.astype(np.float64), want.T)


@pytest.mark.parametrize("k", [32, 64, 256])
def test_words_of_codes_meet_the_inputs_that_were_spread_for_them(k: int) -> None:
    p, want = codes(72, k, "mxfp4(1,32)")
    spec = experts(1, 72, k, slots=1)
    assert "di_e2m1_words" in source_of(spec).text
    out = run(spec, rows_step(k), [held(np.eye(k, dtype=np.float32), "bf16"), np.zeros((k, 1), np.int32),
                                   Param([p.data], [p.scale]), None])[3]  # type: ignore[list-item]
    assert np.array_equal(out.reshape(k, 72).astype(np.float64), want.T)


def test_blocks_of_128_meet_inputs_in_f32() -> None:
    operands = (Operand("param", "-", (128, 256), "mxfp8(128,128)"), Operand("value", "T", (256,), "f32"),
                Operand("value", "T", (128,), "f32", True))
    attrs = (("results", ((128,),)), ("weights", ((0, 1),)), ("x", 1))
    spec = KernelSpec("gemm", "T", operands, attrs, store_acc((128,), 2), title="test")
    data = np.full((128, 256), 0x38, np.uint8)  # 1.0
    scale = np.array([[127, 129]], np.uint8)
    x = RNG.standard_normal((3, 256)).astype(np.float32)
    out = run(spec, rows_step(3), [Param(data, scale), x, None])[2]
    want = x[:, :128].sum(1, dtype=np.float64) + 4 * x[:, 128:].sum(1, dtype=np.float64)
    assert np.abs(out - want[:, None]).max() < 1e-4


def test_a_scale_that_is_no_number_makes_its_results_none_and_no_others() -> None:
    p, _ = codes(64, 64, "mxfp8(32,32)")
    x = held(RNG.uniform(0.5, 1, (3, 64)).astype(np.float32), "bf16")
    clean = run(dense(64, 64, "mxfp8(32,32)"), rows_step(3), [p, x, None])[2]
    assert isinstance(p.scale, np.ndarray)
    p.scale[1, 0] = 255
    out = run(dense(64, 64, "mxfp8(32,32)"), rows_step(3), [p, x, None])[2]
    assert not np.isfinite(out[:, 32:]).any()
    assert np.array_equal(out[:, :32], clean[:, :32])


@pytest.mark.parametrize(("n", "k", "weight"), [(24, 2048, "f32"), (96, 1536, "mxfp8(32,32)"), (72, 576, "bf16")])
def test_a_row_has_the_same_bits_in_every_variant_and_batch(n: int, k: int, weight: str) -> None:
    spec = dense(n, k, weight)
    if weight.startswith("mx"):
        p, want = codes(n, k, weight)
    else:
        plain = RNG.standard_normal((n, k)).astype(np.float32)
        p = Param(held(plain, weight))
        want = plain if weight == "f32" else (p.data.astype(np.uint32) << 16).view(np.float32)  # type: ignore[union-attr]
    x = RNG.standard_normal((60, k)).astype(np.float32)
    bits = held(x, "bf16")
    runs = [run(spec, rows_step(60), [p, bits, None], variant=v)[2] for v in range(len(source_of(spec).variants))
            if source_of(spec).variants[v].rows in (0, 64, 256, 8192)]
    alone = run(spec, rows_step(1), [p, bits[41:42], None])[2]
    for out in runs[1:]:
        assert np.array_equal(out, runs[0])
    assert np.array_equal(alone[0], runs[0][41])
    exact = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) @ want.astype(np.float64).T
    assert np.abs(runs[0] - exact).max() <= 1e-5 * np.abs(exact).max()


def test_a_pair_has_the_same_bits_whoever_else_picked_its_expert() -> None:
    spec = experts(3, 40, 160)
    made = [codes(40, 160, "mxfp4(1,32)")[0] for _ in range(3)]
    p = Param([m.data for m in made], [m.scale for m in made])  # type: ignore[misc]
    bits = held(RNG.standard_normal((20, 160)).astype(np.float32), "bf16")
    picks = np.stack([RNG.permutation(3)[:2] for _ in range(20)]).astype(np.int32)
    runs = [run(spec, rows_step(20), [bits, picks, p, None], variant=v)[3]
            for v in range(len(source_of(spec).variants))]
    alone = run(spec, rows_step(1), [bits[13:14], picks[13:14], p, None])[3]
    for out in runs[1:]:
        assert np.array_equal(out, runs[0])
    assert np.array_equal(alone[0], runs[0][13])
