"""Products of codes on the twin: several tiles of rows, columns and features, against the exact values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ascend.on_twin import run
from cpu.harness import Array, held, rows_step
from cpu.test_kernels_gemm import close, gemm, values, weight
from cpu.test_kernels_grouped import EXPERTS, SLOTS, K, Rows, gated, stacks

from deepinfer.backends.ascend950.families.gemm import emit
from deepinfer.dsl.interpreter import formats
from deepinfer.dsl.types import DType

ACTIVATIONS = "mxfp8(1,32)"
ROWS, COLUMNS, FEATURES = 70, 200, 640


def encoded(rows: int, k: int) -> Array:
    """Numbers that E4M3 codes with scales of 32 hold."""
    t = DType.parse(ACTIVATIONS)
    x: Array = formats.decode(formats.encode(torch.from_numpy(values(rows, k)), t), t).numpy()
    return x


@pytest.mark.parametrize("dtype", ["mxfp4(1,32)", "mxfp8(32,32)"])
def test_products_of_codes_are_exact_however_items_fall_to_blocks(dtype: str) -> None:
    spec = gemm([(COLUMNS, dtype)], FEATURES, ACTIVATIONS)
    assert "fresh" in emit(spec).text  # rows stay in L1
    p, w = weight(COLUMNS, FEATURES, dtype)
    x = encoded(ROWS, FEATURES)
    results = [run(spec, rows_step(ROWS), [p, held(x, "bf16"), None], blocks=blocks)[2] for blocks in (1, 3, 64)]
    close(results[0], x, w)
    assert all(np.array_equal(r, results[0]) for r in results[1:])


def test_rows_too_long_to_stay_give_the_same_products() -> None:
    k = 6144
    spec = gemm([(140, "mxfp4(1,32)")], k, ACTIVATIONS)
    assert "fresh" not in emit(spec).text
    p, w = weight(140, k, "mxfp4(1,32)")
    x = encoded(2, k)
    close(run(spec, rows_step(2), [p, held(x, "bf16"), None])[2], x, w)


def test_a_scale_that_widened_codes_leave_no_room_for_is_no_number_and_others_are_right() -> None:
    spec = gemm([(64, "mxfp4(1,32)")], 64, ACTIVATIONS)
    p, w = weight(64, 64, "mxfp4(1,32)")
    x = encoded(3, 64)
    p.scale[5, 1], p.scale[9, 0], p.scale[11, 0] = 249, 255, 1
    found = run(spec, rows_step(3), [p, held(x, "bf16"), None])[2]
    assert np.isnan(found[:, [5, 9]]).all()
    others = np.setdiff1d(np.arange(64), [5, 9, 11])
    close(found[:, others], x, w[others])


def test_experts_with_several_tiles_of_rows_give_each_row_what_it_gets_alone() -> None:
    spec = gated("mxfp4(1,32)")
    x, *others = spec.operands
    spec = replace(spec, operands=(replace(x, dtype=ACTIVATIONS), *others))
    rows, (a, _), (b, _) = Rows(150), stacks("mxfp4(1,32)"), stacks("mxfp4(1,32)")
    rows.x = held(encoded(150, K), "bf16")
    rows.picks[:] = np.arange(SLOTS) + np.arange(150)[:, None] % 2 * (EXPERTS - SLOTS)

    def of(part: slice) -> Array:
        n = len(rows.x[part])
        return run(spec, rows_step(n), [rows.x[part], rows.picks[part], a, b, rows.weights[part], None])[5]

    whole = of(slice(None))
    assert all(np.array_equal(of(slice(r, r + 1)), whole[r: r + 1]) for r in (0, 77, 149))
