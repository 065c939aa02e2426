"""Contractions: every weight format against its dequantised values, and the fixed summation tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cpu.harness import Array, Param, available_isas, floats, from_bf16, held, rounded, rows_step, run

from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.dsl.interpreter import formats
from deepinfer.dsl.types import DType

RNG = np.random.default_rng(5)
FORMATS = ("f32", "bf16", "mxfp8(32,32)", "mxfp8(128,128)", "mxfp8(1,64)", "mxfp4(1,32)")


def values(n: int, k: int) -> Array:
    return RNG.standard_normal((n, k)).astype(np.float32)


def weight(n: int, k: int, dtype: str) -> tuple[Param, Array]:
    """A random weight as it is stored, and its exact values in f64."""
    t = DType.parse(dtype)
    if t.name == "f32":
        w = values(n, k)
        return Param(w), w.astype(np.float64)
    if t.name == "bf16":
        h = held(values(n, k), "bf16")
        return Param(h), from_bf16(h).astype(np.float64)
    r, c = t.block
    scale = RNG.integers(118, 130, (-(-n // r), -(-k // c)), dtype=np.uint8)
    if t.name == "mxfp4":
        codes = RNG.integers(0, 256, (n, k // 2), dtype=np.uint8)
    else:
        codes = RNG.integers(0, 256, (n, k), dtype=np.uint8)
        codes[codes & 0x7F == 0x7F] = 0
    exact = formats.dequantised_weight(torch.from_numpy(codes), torch.from_numpy(scale), t).double().numpy()
    return Param(codes, scale), exact


def stores(*results: tuple[int, ...], dtype: str, first: int) -> TileProgram:
    ops: list[TileOp] = []
    for i, dims in enumerate(results):
        ops.append(TileOp("acc", (), dims, "f32", (("i", i),)))
        if dtype == "bf16":
            ops.append(TileOp("round", (len(ops) - 1,), dims, "bf16", (("dtype", "bf16"),)))
        ops.append(TileOp("store", (len(ops) - 1,), dims, dtype, (("operand", first + i),)))
    return TileProgram(tuple(ops))


def gemm(weights: list[tuple[int, str]], k: int, x_dtype: str = "bf16", lead: tuple[int, ...] = (), groups: int = 1,
         out: str = "f32") -> KernelSpec:
    """x [lead, k] times weights (columns, format); groups: x [groups, k]."""
    x_dims = (groups, k) if groups > 1 else (*lead, k)
    params = [Operand("param", "-", (n, k), t) for n, t in weights]
    results = [(groups, n // groups) if groups > 1 else (*lead, n) for n, _ in weights]
    operands = [*params, Operand("value", "T", x_dims, x_dtype),
                *(Operand("value", "T", d, out, write=True) for d in results)]
    attrs: dict[str, Any] = {"x": len(params), "weights": tuple((i, groups) for i in range(len(params))),
                             "results": tuple(results)}
    program = stores(*results, dtype=out, first=len(params) + 1)
    slots = (("epilogue", program),)
    return KernelSpec("gemm", "T", tuple(operands), tuple(sorted(attrs.items())), slots, title="test")


def close(got: Array, x: Array, w: Array) -> None:
    """Within the error bound of an f32 sum of k products."""
    want = x.astype(np.float64) @ w.T
    bound = np.abs(x).astype(np.float64) @ np.abs(w).T * (x.shape[-1] / 16 + 8) * 2.0**-24
    assert np.all(np.abs(floats(got) - want) <= bound)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("x_dtype", ["bf16", "f32"])
def test_every_weight_format_equals_its_dequantised_values_within_f32_summation(dtype: str, x_dtype: str) -> None:
    n, k, m = 72, 1088, 11
    spec = gemm([(n, dtype)], k, x_dtype)
    p, w = weight(n, k, dtype)
    x = values(m, k) if x_dtype == "f32" else rounded(values(m, k))
    for isa in available_isas(spec):
        got = run(spec, rows_step(m), [p, held(x, x_dtype), None], isa=isa)[2]
        close(got, x, w)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_in_a_batch_is_bit_equal_to_the_row_alone(dtype: str) -> None:
    n, k = 36, 640
    spec = gemm([(n, dtype)], k)
    p, _ = weight(n, k, dtype)
    x = held(values(131, k), "bf16")
    for isa in available_isas(spec):
        whole = run(spec, rows_step(131), [p, x, None], isa=isa)[2]
        for m in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33):
            for a in (0, 130 - m):
                part = run(spec, rows_step(m), [p, x[a: a + m], None], isa=isa)[2]
                assert np.array_equal(part, whole[a: a + m]), (isa, m)


def test_two_threads_give_the_bits_of_one() -> None:
    spec = gemm([(200, "mxfp8(32,32)")], 512)
    p, _ = weight(200, 512, "mxfp8(32,32)")
    x = held(values(70, 512), "bf16")
    one, two = (run(spec, rows_step(70), [p, x, None], threads=n)[2] for n in (1, 2))
    assert np.array_equal(one, two)


@pytest.mark.parametrize("dtype", ["mxfp8(32,32)", "mxfp8(1,32)", "mxfp4(1,32)"])
def test_every_code_and_every_scale_is_read_as_its_value(dtype: str) -> None:
    t = DType.parse(dtype)
    k = 32
    rows = 256 * 8
    codes = np.zeros((rows, k if t.name == "mxfp8" else k // 2), np.uint8)
    codes[np.arange(rows), 0] = np.arange(rows) % 256
    if t.name == "mxfp8":
        codes[codes & 0x7F == 0x7F] = 0
    scale = np.zeros((rows // t.block[0], 1), np.uint8)
    scale[:, 0] = np.arange(rows // t.block[0]) % 252  # 6 * 2^(251 - 127) is finite
    spec = gemm([(rows, dtype)], k, "f32")
    exact = formats.dequantised_weight(torch.from_numpy(codes), torch.from_numpy(scale), t).numpy()
    x = np.zeros((1, k), np.float32)
    x[0, 0] = 1.0
    for isa in available_isas(spec):
        got = run(spec, rows_step(1), [Param(codes, scale), x, None], isa=isa)[2]
        assert np.array_equal(got[0], exact[:, 0] + 0.0), isa


def test_columns_and_features_that_fill_no_vector() -> None:
    for n, k in ((1, 5376), (3, 24), (24, 100), (5, 17)):
        spec = gemm([(n, "f32")], k, "f32")
        p, w = weight(n, k, "f32")
        x = values(3, k)
        for isa in available_isas(spec):
            close(run(spec, rows_step(3), [p, x, None], isa=isa)[2], x, w)


def test_groups_and_leading_dims_are_further_rows() -> None:
    spec = gemm([(64, "bf16")], 96, groups=4)
    p, w = weight(64, 96, "bf16")
    x = rounded(values(6, 4 * 96))
    got = run(spec, rows_step(6), [p, held(x, "bf16"), None])[2]
    for g in range(4):
        close(got[:, g * 16: (g + 1) * 16], x[:, g * 96: (g + 1) * 96], w[g * 16: (g + 1) * 16])
    spec = gemm([(40, "bf16")], 96, lead=(3, 5))
    p, w = weight(40, 96, "bf16")
    x = rounded(values(7 * 15, 96))
    got = run(spec, rows_step(7), [p, held(x.reshape(7, -1), "bf16"), None])[2]
    close(got.reshape(-1, 40), x, w)


def test_weights_that_share_rows_and_a_literal_matrix() -> None:
    spec = gemm([(64, "bf16"), (24, "bf16")], 80, out="bf16")
    (p, v), (q, w) = weight(64, 80, "bf16"), weight(24, 80, "bf16")
    x = rounded(values(5, 80))
    got = run(spec, rows_step(5), [p, q, held(x, "bf16"), None, None])
    assert np.abs(floats(got[3]) - x @ v.T).max() < 0.1 and np.abs(floats(got[4]) - x @ w.T).max() < 0.1
    like = gemm([(128, "f32")], 128)
    literal = Operand("const", "-", (128, 128), "f32", detail=(("make", "hadamard"),))
    spec = KernelSpec("gemm", "T", (literal, *like.operands[1:]), like.attrs, like.slots, title="turn")
    x = rounded(values(2, 128))
    sign = np.array([[(-1) ** bin(i & j).count("1") for j in range(128)] for i in range(128)], np.float64)
    close(run(spec, rows_step(2), [None, held(x, "bf16"), None])[2], x, sign)
