"""Numbers of the storage formats, against definitions written out in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.dsl.interpreter import formats
from deepinfer.dsl.interpreter.formats import Encoded
from deepinfer.dsl.types import DType, bf16, f32, fp4_e4m3, mxfp4, mxfp8
from deepinfer.errors import SpecError

E2M1 = [Fraction(v) for v in (0, "1/2", 1, "3/2", 2, 3, 4, 6)]


def e4m3_value(code: int) -> Fraction:
    """Sign, four exponent bits with bias 7, three mantissa bits; exponent 0 is subnormal."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 8) / 64
    return -magnitude if code & 0x80 else magnitude


E4M3 = [e4m3_value(c) for c in range(127)]  # 127 is NaN


def nearest(x: Fraction, values: list[Fraction]) -> int:
    """Code of the value nearest to |x|, ties to the even code, the largest for anything above."""
    return min(range(len(values)), key=lambda c: (abs(abs(x) - values[c]), c % 2))


def boundaries(values: list[Fraction]) -> torch.Tensor:
    """Every value, every midpoint, and the f32 numbers next to each, with both signs."""
    exact = values + [(a + b) / 2 for a, b in pairwise(values)]
    around: list[float] = []
    for v in exact:
        x = np.float32(float(v))
        assert Fraction(float(x)) == v
        around += [float(x), float(np.nextafter(x, np.float32(np.inf))), float(np.nextafter(x, np.float32(-np.inf)))]
    return torch.tensor(around + [-a for a in around], dtype=torch.float32)


# ---- elements ---------------------------------------------------------------------------------------------------
def test_all_256_e4m3_codes_decode_to_their_definition() -> None:
    values = formats.e4m3_decode(torch.arange(256, dtype=torch.uint8))
    for code, value in enumerate(values.tolist()):
        if code & 0x7F == 0x7F:
            assert value != value
        else:
            assert Fraction(value) == e4m3_value(code)
    assert torch.signbit(values[0x80]) and values[0x80] == 0


def test_every_finite_e4m3_value_encodes_to_its_own_code() -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(formats.e4m3_encode(formats.e4m3_decode(codes)), codes)


def test_e4m3_rounds_to_nearest_with_ties_to_the_even_code() -> None:
    x = boundaries(E4M3)
    for value, code in zip(x.tolist(), formats.e4m3_encode(x).tolist(), strict=True):
        assert code & 0x7F == nearest(Fraction(value), E4M3), value


@pytest.mark.parametrize(("x", "value"), [(448.0, 448.0), (464.0, 448.0), (1e9, 448.0), (-1e9, -448.0), (2.0**-10, 0.0),
                                          (2.0**-10 * 1.0001, 2.0**-9), (-(2.0**-11), -0.0), (3 * 2.0**-10, 2.0**-8)])
def test_e4m3_clamps_and_keeps_subnormals(x: float, value: float) -> None:
    found = formats.e4m3_decode(formats.e4m3_encode(torch.tensor([x])))
    assert found.item() == value and torch.signbit(found).item() == (x < 0)


def test_all_256_e8m0_bytes_are_bare_powers_of_two() -> None:
    values = formats.e8m0_decode(torch.arange(256, dtype=torch.uint8)).tolist()
    assert values[255] != values[255]
    assert [Fraction(v) for v in values[:255]] == [Fraction(2) ** (b - 127) for b in range(255)]


def test_all_16_e2m1_codes_decode_to_their_definition() -> None:
    values = formats.e2m1_decode(torch.arange(16, dtype=torch.uint8))
    assert [Fraction(v) for v in values[:8].tolist()] == E2M1
    assert torch.equal(values[8:], -values[:8]) and torch.signbit(values[8:]).all()


def test_e2m1_rounds_to_nearest_with_ties_to_the_even_code_and_keeps_the_sign_of_zero() -> None:
    x = torch.cat((boundaries(E2M1), torch.tensor([7.0, -1e30, 0.0, -0.0, 1e-40, -1e-40])))
    for value, code in zip(x.tolist(), formats.e2m1_encode(x).tolist(), strict=True):
        assert code & 7 == nearest(Fraction(value), E2M1), value
    assert torch.equal(formats.e2m1_encode(x) >> 3, torch.signbit(x).to(torch.uint8))


@pytest.mark.parametrize(("x", "value"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0),
                                          (5.0, 4.0)])
def test_e2m1_ties(x: float, value: float) -> None:
    assert formats.e2m1_decode(formats.e2m1_encode(torch.tensor([x, -x]))).tolist() == [value, -value]


def test_nibbles_pack_the_even_feature_low_and_unpack_to_themselves() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    packed = formats.pack_nibbles(codes)
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(formats.unpack_nibbles(packed), codes)
    assert torch.equal(formats.unpack_nibbles(packed.view(torch.int8)), codes)


# ---- scales -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("exponent", [-126, -30, -1, 0, 1, 60, 127])
def test_power_of_two_above_is_exact_at_powers_and_one_more_above_them(exponent: int) -> None:
    x = np.float32(2.0**exponent)
    above, below = np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))
    bytes_ = formats.power_of_two_above(torch.tensor([float(x), float(above)]))
    assert bytes_.tolist() == [exponent + 127, exponent + 128]
    if exponent > -126:
        assert formats.power_of_two_above(torch.tensor([float(below)])).item() == exponent + 127


def scale_of(largest: np.float32, name: str) -> Fraction:
    """The scale of a group by its definition, every step an f32 operation."""
    one = np.float32
    if name == "fp4_e4m3":
        a = max(largest, one(6 * 2.0**-9))
        return E4M3[nearest(Fraction(float(a / one(6))), E4M3)]
    floor, top = {"mxfp8": (1e-4, 448), "mxfp4": (6 * 2.0**-126, 6)}[name]
    want = Fraction(float(max(largest, one(floor)) * (one(1) / one(top))))
    power = Fraction(1)
    while power < want:
        power *= 2
    while power / 2 >= want:
        power /= 2
    return power


def element_value(x: Fraction, name: str) -> Fraction:
    values = E4M3 if name == "mxfp8" else E2M1
    magnitude = values[nearest(x, values)]
    return -magnitude if x < 0 else magnitude


BLOCKS = [mxfp8(1, 32), mxfp8(1, 64), mxfp8(1, 128), mxfp4(1, 32), fp4_e4m3(16)]
groups = st.integers(0, 2**32 - 1).flatmap(lambda seed: st.sampled_from([1e-9, 1e-4, 0.02, 1.0, 37.0, 3e4]).map(
    lambda size: (seed, size)))


@pytest.mark.parametrize("dtype", BLOCKS, ids=str)
@settings(max_examples=25)
@given(drawn=groups)
def test_a_group_is_stored_as_its_definition_says(dtype: DType, drawn: tuple[int, float]) -> None:
    seed, size = drawn
    group = dtype.block[1]
    x = (np.random.default_rng(seed).standard_normal(group) * size).astype(np.float32)
    x[seed % group] = np.float32(x[seed % group] * 2 ** (seed % 3))
    scale = scale_of(np.abs(x).max(), dtype.name)
    stored = formats.quantised(torch.from_numpy(x), dtype).tolist()
    for value, found in zip(x, stored, strict=True):
        quotient = Fraction(float(value / np.float32(float(scale))))
        assert Fraction(found) == element_value(quotient, dtype.name) * scale


@pytest.mark.parametrize("dtype", BLOCKS, ids=str)
def test_zeros_and_tiny_groups_have_the_floor_scale(dtype: DType) -> None:
    group = dtype.block[1]
    x = torch.stack((torch.zeros(group), torch.full((group,), 1e-30 if dtype.name != "mxfp4" else 2.0**-140)))
    e = formats.encode(x, dtype)
    floor = {"mxfp8": 2.0**-22, "mxfp4": 2.0**-126, "fp4_e4m3": 2.0**-9}[dtype.name]
    decode = formats.e4m3_decode if dtype.name == "fp4_e4m3" else formats.e8m0_decode
    assert decode(e.scales).flatten().tolist() == [floor, floor]
    assert not formats.decode(e, dtype).any()


@pytest.mark.parametrize("dtype", BLOCKS, ids=str)
def test_groups_do_not_see_each_other_and_stored_values_are_fixed_points(dtype: DType) -> None:
    group = dtype.block[1]
    x = torch.randn(3, 4 * group, generator=torch.Generator().manual_seed(5)) * torch.tensor([[1e-3], [1.0], [50.0]])
    stored = formats.quantised(x, dtype)
    parts = [formats.quantised(p, dtype) for p in x.split(group, dim=-1)]
    assert torch.equal(stored, torch.cat(parts, dim=-1))
    if dtype.name != "fp4_e4m3":  # its scale follows the largest code, which may be below 6
        assert torch.equal(formats.quantised(stored, dtype), stored)


def test_encoders_read_the_f32_image() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for dtype in (mxfp8(1, 32), mxfp4(1, 32), fp4_e4m3(16)):
        wide = formats.quantised(x, dtype)
        assert wide.dtype == torch.float64
        assert torch.equal(wide, formats.quantised(x.float(), dtype).double())
    tie = torch.tensor([1.0 + 2.0**-8 + 2.0**-40], dtype=torch.float64)  # above the tie in f64, on it in f32
    assert formats.rounded(tie, bf16).item() == 1.0


# ---- records and weights ----------------------------------------------------------------------------------------
def test_a_record_stores_each_part_in_its_own_format() -> None:
    record = mxfp8(1, 64)[64] + bf16[16] + f32[8]
    x = torch.randn(5, 88, generator=torch.Generator().manual_seed(2))
    stored = formats.quantised(x, record)
    assert torch.equal(stored[:, :64], formats.quantised(x[:, :64], mxfp8(1, 64)))
    assert torch.equal(stored[:, 64:80], x[:, 64:80].bfloat16().float())
    assert torch.equal(stored[:, 80:], x[:, 80:])


def test_weight_scales_cover_blocks_and_partial_blocks_at_the_edges() -> None:
    codes = torch.full((70, 40), 0x38, dtype=torch.uint8)  # 1.0
    scales = torch.tensor([[127, 128], [129, 130], [131, 132]], dtype=torch.uint8)
    w = formats.dequantised_weight(codes, scales, mxfp8(32, 32))
    assert w[0, 0] == 1 and w[31, 39] == 2 and w[32, 31] == 4 and w[69, 32] == 32
    with pytest.raises(SpecError, match="scale"):
        formats.dequantised_weight(codes, scales[:2], mxfp8(32, 32))


def test_fp4_weights_have_one_scale_per_row_and_32_features() -> None:
    packed = torch.tensor([[0x21] * 32, [0x9F] * 32], dtype=torch.uint8)
    scales = torch.tensor([[127, 126], [128, 120]], dtype=torch.uint8)
    w = formats.dequantised_weight(packed.view(torch.int8), scales, mxfp4(1, 32))
    assert w.shape == (2, 64)
    assert w[0, :2].tolist() == [0.5, 1.0] and w[0, 32:34].tolist() == [0.25, 0.5]
    assert w[1, :2].tolist() == [-12.0, -1.0] and w[1, 63] == -0.5 * 2.0**-7


def test_what_no_row_can_be_encoded_in_is_refused() -> None:
    with pytest.raises(SpecError, match="mxfp8\\(32,32\\)"):
        formats.encode(torch.zeros(32, 32), mxfp8(32, 32))
    with pytest.raises(SpecError, match="i64"):
        formats.rounded(torch.zeros(2), DType("i64"))


def test_scales_and_codes_are_bytes_of_the_stored_form() -> None:
    e: Encoded = formats.encode(torch.randn(3, 64, generator=torch.Generator().manual_seed(4)), mxfp4(1, 32))
    assert e.codes.dtype == e.scales.dtype == torch.uint8
    assert e.codes.shape == (3, 64) and e.scales.shape == (3, 2)
    assert formats.pack_nibbles(e.codes).shape == (3, 32)
