"""Rows in block formats: groups as long as a register, shorter, longer, and a last one that is not full."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ascend.on_twin import run
from cpu.harness import Seq, Step, from_bf16

from deepinfer.codegen.kernels.spec import KernelSpec, Operand, TileOp, TileProgram
from deepinfer.dsl.interpreter import formats
from deepinfer.dsl.types import DType

ROWS = 3


def wide_ranged(n: int) -> np.ndarray:
    """Rows whose magnitudes change by powers of ten from 32 elements to the next: a scale of other elements shows."""
    rng = np.random.default_rng(n)
    powers = np.repeat(10.0 ** rng.integers(-6, 5, (ROWS, -(-n // 32))), 32, axis=1)[:, :n]
    return (rng.standard_normal((ROWS, n)) * powers).astype(np.float32)


@pytest.mark.parametrize(("form", "n"), [("mxfp8(1,32)", 96), ("mxfp8(1,64)", 128), ("mxfp8(1,128)", 384),
                                         ("mxfp4(1,32)", 96)])
def test_a_group_has_the_scale_of_its_own_elements(form: str, n: int) -> None:
    operands = (Operand("value", "T", (n,), "f32"), Operand("value", "T", (n,), form, write=True))
    body = TileProgram((TileOp("load", (), (n,), "f32", (("operand", 0),)),
                        TileOp("encode", (0,), (n,), form, (("dtype", form),)),
                        TileOp("store", (1,), (n,), form, (("operand", 1),))))
    spec = KernelSpec("rowwise", "T", operands, (), (("body", body),), title=f"encode_{n}")
    x = wide_ranged(n)
    step = Step([Seq(ROWS)], [], 128, np.zeros(ROWS, np.int64), np.zeros((ROWS, 1)))
    got = from_bf16(run(spec, step, [x, None])[1]).reshape(ROWS, n)
    assert np.array_equal(got, formats.quantised(torch.from_numpy(x), DType.parse(form)).numpy())
