"""Expert contractions: rows that share an expert, alone and in company."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.harness import Array, Param, available_isas, floats, held, rounded, rows_step, run
from cpu.test_kernels_gemm import weight

from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram

RNG = np.random.default_rng(31)
EXPERTS, SLOTS, N, K = 9, 3, 40, 128


def gated(dtype: str, per_slot: bool = False) -> KernelSpec:
    """``bf16(g * sigmoid(g) * u * weight)`` of two stacks, g and u held in bf16."""
    x = Operand("value", "T", (SLOTS, K) if per_slot else (K,), "bf16")
    operands = (x, Operand("value", "T", (SLOTS,), "i32"),
                *(Operand("param", "-", (EXPERTS, N, K), dtype, detail=(("stack", EXPERTS),)) for _ in range(2)),
                Operand("value", "T", (SLOTS, 1), "f32"), Operand("value", "T", (SLOTS, N), "bf16", write=True))
    dims = (SLOTS, N)
    ops = (TileOp("acc", (), dims, "f32", (("i", 0),)), TileOp("round", (0,), dims, "bf16", (("dtype", "bf16"),)),
           TileOp("acc", (), dims, "f32", (("i", 1),)), TileOp("round", (2,), dims, "bf16", (("dtype", "bf16"),)),
           TileOp("sigmoid", (1,), dims, "f32"), TileOp("mul", (1, 4), dims, "f32"), TileOp("mul", (5, 3), dims, "f32"),
           TileOp("load", (), (SLOTS, 1), "f32", (("operand", 4),)), TileOp("mul", (6, 7), dims, "f32"),
           TileOp("round", (8,), dims, "bf16", (("dtype", "bf16"),)),
           TileOp("store", (9,), dims, "bf16", (("operand", 5),)))
    attrs = {"x": 0, "experts": 1, "weights": (2, 3), "results": (dims, dims)}
    return KernelSpec("grouped_gemm", "T", operands, tuple(sorted(attrs.items())), (("epilogue", TileProgram(ops)),),
                      title="t")


def stacks(dtype: str) -> tuple[Param, Array]:
    pairs = [weight(N, K, dtype) for _ in range(EXPERTS)]
    scales = [p.scale for p, _ in pairs]
    return Param([p.data for p, _ in pairs], scales if scales[0] is not None else None), np.stack([w for _, w in pairs])


class Rows:
    def __init__(self, n: int, per_slot: bool = False) -> None:
        self.x = held(RNG.standard_normal((n, (SLOTS if per_slot else 1) * K)).astype(np.float32) * 0.05, "bf16")
        self.picks = np.stack([RNG.permutation(EXPERTS - 2)[:SLOTS] for _ in range(n)]).astype(np.int32)
        self.weights = RNG.uniform(0.1, 1, (n, SLOTS)).astype(np.float32)

    def run(self, spec: KernelSpec, stacks_: list[Param], rows: slice, **how: object) -> Array:
        n = len(self.x[rows])
        return run(spec, rows_step(n), [self.x[rows], self.picks[rows], *stacks_, self.weights[rows], None], **how)[5]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["mxfp4(1,32)", "mxfp8(32,32)", "bf16", "f32"])
@pytest.mark.parametrize("per_slot", [False, True])
def test_each_slot_gets_its_own_expert(dtype: str, per_slot: bool) -> None:
    (a, v), (b, w) = stacks(dtype), stacks(dtype)
    rows, spec = Rows(70, per_slot), gated(dtype, per_slot)
    for isa in available_isas(spec):
        got = floats(rows.run(spec, [a, b], slice(None), isa=isa)).reshape(70, SLOTS, N)
        x = floats(rows.x).reshape(70, -1, K).astype(np.float64)
        for r in range(0, 70, 7):
            for s in range(SLOTS):
                e = rows.picks[r, s]
                g, u = (rounded((m[e] @ x[r, s if per_slot else 0]).astype(np.float32)) for m in (v, w))
                want = g / (1 + np.exp(-g.astype(np.float64))) * u * rows.weights[r, s]
                # Each of g, u and the result may round the other way: three half steps of bf16 on either side.
                assert np.abs(got[r, s] - want).max() <= 3 * 2.0**-8 * np.abs(want).max() + 1e-6, (isa, r, s)


@pytest.mark.parametrize("dtype", ["mxfp4(1,32)", "f32"])
def test_a_row_with_company_is_bit_equal_to_the_row_alone(dtype: str) -> None:
    (a, _), (b, _) = stacks(dtype), stacks(dtype)
    rows, spec = Rows(600), gated(dtype)
    for isa in available_isas(spec):
        whole = rows.run(spec, [a, b], slice(None), isa=isa)
        for part in (slice(0, 1), slice(599, 600), slice(5, 14), slice(100, 403)):
            assert np.array_equal(rows.run(spec, [a, b], part, isa=isa), whole[part]), (isa, part)
        assert np.array_equal(rows.run(spec, [a, b], slice(None), isa=isa, threads=2), whole)
