"""The twin itself: kernels written by hand are right on it, and each kind of mistake is told apart from the others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deepinfer.backends.ascend950.twin.build import LIBRARY, build_twin
from deepinfer.backends.ascend950.twin.run import Twin, TwinError

HERE = Path(__file__).parent
ADD = (HERE / "add_rows.asc").read_text()
PRODUCT = (HERE / "product.asc").read_text()


@cache
def twin_of(text: str, function: str, kind: str) -> Twin:
    return Twin(build_twin({function: text}, {function: [(function, kind)]}).files[LIBRARY])


def added(text: str, rows: int = 5, n: int = 100, blocks: int = 2, room: int = 0) -> NDArray[np.float32]:
    a = np.arange(rows * n, dtype=np.float32)
    b, c = a[::-1].copy(), np.zeros(rows * n - room, np.float32)
    values = [("*f32", a), ("*f32", b), ("*f32", c), ("i32", rows), ("i32", n)]
    twin_of(text, "add_rows", "vector").launch("add_rows", blocks, values)
    return c.reshape(rows, n)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_kernel_without_mistakes_is_right_for_any_number_of_blocks(blocks: int) -> None:
    assert (added(ADD, blocks=blocks) == 499).all()


LINE = "        {};\n".format
MISTAKES = {
    "a copy in that nothing orders": ((LINE("asc_lock(PIPE_V, 0)"), ""), (LINE("asc_unlock(PIPE_V, 0)"), ""),
                                      "V reads UB buffer 'a' .*MTE2 wrote at line"),
    "a copy out that nothing orders": ((LINE("asc_lock(PIPE_MTE3, 1)"), ""), (LINE("asc_unlock(PIPE_MTE3, 1)"), ""),
                                       "MTE3 reads UB buffer 'c' .*V wrote at line"),
    "a lock that is kept": ((LINE("asc_unlock(PIPE_MTE3, 1)"), ""), "lock 1 is taken by MTE3 already"),
    "an offset beside its buffer": (("UB(float, 1024), 1, n * 4", "UB(float, 1280), 1, n * 4"),
                                    "leaves UB buffer 'c' \\+ 256"),
    "an address that is not aligned": (("(UB(float, 512), b", "(UB(float, 520), b"), "no multiple of 32"),
    "a copy that is too short": (("UB(float, 512), b + row * n, 1, n * 4", "UB(float, 512), b + row * n, 1, n * 2"),
                                 "lane 50, which nothing has written"),
    "a row that is not there": (("c + row * n", "c + (row + 1) * n"), "outside of every tensor"),
    "rows that two blocks write": (("row = asc_get_block_idx()", "row = 0"), "block 0 (wrote|reads) at line"),
    "no barrier at the end": (("    asc_sync_pipe(PIPE_ALL);\n", ""), "does not end with"),
    "no begin": (("    asc_init();\n", ""), "does not begin with"),
    "a load of what this function stored": (
        (LINE("asc_storealign(c + i, x, m)"), LINE("asc_storealign(c + i, x, m)") + LINE("asc_loadalign(y, c + i)")
         + LINE("asc_storealign(c + i, y, m)")), "of the same vector function without asc_mem_bar"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_line(name: str) -> None:
    *edits, said = MISTAKES[name]
    text = ADD
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(TwinError, match=rf"^add_rows, line \d+, block \d, core AIV0: .*{said}"):
        added(text)


def test_a_tensor_that_is_too_small_is_named() -> None:
    with pytest.raises(TwinError, match="outside of every tensor; bytes beyond the end of the nearest: 4"):
        added(ADD, room=1)


def values_of(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Numbers of E4M3 codes."""
    e, m = (codes >> 3 & 15).astype(int), (codes & 7).astype(int)
    x = np.where(e > 0, (1 + m / 8) * 2.0 ** (e - 7), m * 2.0**-9)
    return np.where(codes & 128, -x, x)


def multiplied(text: str) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    rng = np.random.default_rng(3)
    codes = [rng.integers(0, 0x70, (r, 128)).astype(np.uint8) | (rng.integers(0, 2, (r, 128)) << 7).astype(np.uint8)
             for r in (32, 64)]
    scales = [rng.integers(120, 132, (r, 4)).astype(np.uint8) for r in (32, 64)]
    out = np.full((32, 64), np.nan, np.float32)
    twin_of(text, "product", "mix_1_2").launch("product", 1, [
        ("*u8", codes[0]), ("*u8", scales[0]), ("*u8", codes[1]), ("*u8", scales[1]), ("*f32", out)])
    a, b = (values_of(c) * np.repeat(2.0 ** (s.astype(int) - 127), 32, 1) for c, s in zip(codes, scales, strict=True))
    return out, a @ b.T + 1


def test_a_product_of_scaled_codes_on_cube_and_vector_cores_is_right() -> None:
    out, want = multiplied(PRODUCT)
    assert np.abs(out - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize(("old", "new", "said"), [
    ("asc_sync_intra_arrive(PIPE_FIX, 19);", "", "deadlock: waits for cross-core flag 3"),
    ("asc_sync_intra_wait(PIPE_V, 3);", "", "V reads UB offset 0 that AIC.FIX wrote"),
    ("asc_lock(PIPE_FIX, 0);", "asc_lock(PIPE_FIX, 1);", "not held by FIX"),
    ("K / 32, M / 16, M / 16);", "K / 32, M / 16, M / 8);", "asc_mmad_mx reads L0A offset .* nothing has written"),
    ("asc_lock(PIPE_MTE1, 0);", "asc_sync_pipe(PIPE_M);", "MTE1 reads L1 offset 0 that AIC.MTE2 wrote"),
])
def test_a_mistake_between_pipes_and_cores_is_named(old: str, new: str, said: str) -> None:
    assert old in PRODUCT
    with pytest.raises(TwinError, match=said):
        multiplied(PRODUCT.replace(old, new, 1))


CAST = """#include "di_asc.h"
#define UB(T, at) ((__ubuf__ T*)(uintptr_t)(at))
__simd_vf__ inline void cast(__ubuf__ float* x, __ubuf__ float* y, __ubuf__ uint32_t* codes) {
    const vector_bool m = asc_create_mask_b32(PAT_ALL);
    vector_float v, w;
    vector_fp8_e4m3fn_t c;
    asc_loadalign(v, x);
    asc_float2e4m3_rn_sat(c, v, m);
    asc_e4m32float(w, c, m);
    asc_storealign(codes, di_as<vector_uint32_t>(c), m);
    asc_storealign(y, w, m);
}
extern "C" __global__ __vector__ void cast_all(__gm__ float* x, __gm__ float* y, __gm__ uint32_t* codes, int32_t n) {
    asc_init();
    for (int32_t i = 0; i < n; i += 64) {
        asc_lock(PIPE_MTE2, 0);
        asc_copy_gm2ub_align(UB(float, 0), x + i, 1, 256, 0, 0, false, 0, 0, 0);
        asc_unlock(PIPE_MTE2, 0);
        asc_lock(PIPE_V, 0);
        asc_vf_call<cast>(UB(float, 0), UB(float, 256), UB(uint32_t, 512));
        asc_unlock(PIPE_V, 0);
        asc_lock(PIPE_MTE3, 0);
        asc_copy_ub2gm_align(y + i, UB(float, 256), 1, 256, 0, 0, 0);
        asc_copy_ub2gm_align(codes + i, UB(uint32_t, 512), 1, 256, 0, 0, 0);
        asc_unlock(PIPE_MTE3, 0);
    }
    asc_sync_pipe(PIPE_ALL);
}
"""


def test_casts_to_e4m3_are_those_of_torch() -> None:
    """Every code, what lies between two, zeros of both signs, what is too small and what is too large."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    held = codes[codes.isfinite()].sort().values
    between = (held[1:] + held[:-1]) / 2
    x = torch.cat((held, between, between * 1.0001, torch.tensor([0.0, -0.0, 1e-12, -1e-12, 500.0, -1e9])))
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).numpy()
    y, found = np.empty_like(x), np.empty(len(x), np.uint32)
    values = [("*f32", x), ("*f32", y), ("*u8", found), ("i32", len(x))]
    twin_of(CAST, "cast_all", "vector").launch("cast_all", 1, values)
    want = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(found, want.view(torch.uint8).numpy())
    assert np.array_equal(y, want.float().numpy())
