"""The numbers behind every storage format: encode, decode and the exact real value of a code.

These functions define the formats for all targets; a kernel that disagrees with them is wrong. Encoders read the
f32 image of their input, whatever dtype it has, because a format's rounding is defined on f32 (scale, quotient
and clamp are f32 operations). Codes come back as ``uint8``, one element per code; ``pack_nibbles`` makes the stored
bytes of 4-bit codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.dsl.types import DType
from deepinfer.errors import InternalError, SpecError

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Smallest group maximum a scale is made from: every group, also one of zeros, has a usable scale.
MXFP8_FLOOR = 1e-4
MXFP4_FLOOR = 6.0 * 2.0**-126
FP4_E4M3_FLOOR = 6.0 * 2.0**-9

# Below this magnitude the code above is not reached; ties go to the even code, so every second bound is open.
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True)
class Encoded:
    """Codes [.., n] uint8, one per element, and scale bytes [.., n / group] uint8."""

    codes: Tensor
    scales: Tensor


# ---- element formats ---------------------------------------------------------------------------------------
def e4m3_encode(x: Tensor) -> Tensor:
    """Codes (1 sign, 4 exponent, 3 mantissa bits, no infinity) of f32 values, clamped to +-448; ties to even."""
    clamped = x.float().clamp(-E4M3_MAX, E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """f32 values of E4M3 codes; 0x7f and 0xff are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def e8m0_decode(scales: Tensor) -> Tensor:
    """f32 values ``2^(byte - 127)`` of E8M0 scale bytes; 255 is NaN, there is no zero and no sign."""
    return scales.view(torch.float8_e8m0fnu).float()


def e2m1_encode(x: Tensor) -> Tensor:
    """4-bit codes of f32 values clamped to +-6: bits 0-2 index 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 is the sign (kept on
    zero); nearest, ties to the even code."""
    x = x.float()
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for step, bound in enumerate(_E2M1_BOUNDS):
        # The tie between codes c and c + 1 belongs to the even one: to c + 1 when c is odd.
        above = magnitude >= bound if step % 2 else magnitude > bound
        code += above.to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """f32 values of 4-bit E2M1 codes (bits 4-7 must be clear)."""
    table = torch.tensor((*E2M1_VALUES, *(-v for v in E2M1_VALUES)), dtype=torch.float32)
    return table.index_select(0, codes.flatten().long()).reshape(codes.shape)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[.., 2n] 4-bit codes -> [.., n] bytes, even feature in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[.., n] bytes -> [.., 2n] 4-bit codes."""
    data = packed.view(torch.uint8)
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


# ---- scales ------------------------------------------------------------------------------------------------
def power_of_two_above(x: Tensor) -> Tensor:
    """E8M0 bytes of the smallest power of two >= x, for positive normal f32 x: the exponent, plus one when the
    mantissa is not zero."""
    bits = x.float().view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()).to(torch.uint8)


def _grouped(x: Tensor, group: int) -> Tensor:
    if x.shape[-1] % group:
        raise InternalError(f"{x.shape[-1]} features do not divide into groups of {group}")
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _maximum(groups: Tensor, floor: float) -> Tensor:
    largest: Tensor = groups.abs().amax(-1, keepdim=True)
    return largest.clamp_min(floor)


def _reciprocal(x: float) -> Tensor:
    """fl32(1/x)."""
    return torch.tensor(1.0, dtype=torch.float32) / torch.tensor(x, dtype=torch.float32)


# ---- block formats -----------------------------------------------------------------------------------------
def mxfp8_encode(x: Tensor, group: int) -> Encoded:
    """Per group ``a = max(max|x|, 1e-4)``, ``s = 2^ceil(log2(a * fl32(1/448)))``, codes ``E4M3(clamp(x/s, +-448))``."""
    groups = _grouped(x, group)
    scales = power_of_two_above(_maximum(groups, MXFP8_FLOOR) * _reciprocal(E4M3_MAX))
    return Encoded(e4m3_encode(groups / e8m0_decode(scales)).flatten(-2), scales.squeeze(-1))


def mxfp8_decode(e: Encoded, group: int) -> Tensor:
    return (_grouped(e4m3_decode(e.codes), group) * e8m0_decode(e.scales).unsqueeze(-1)).flatten(-2)


def mxfp4_encode(x: Tensor, group: int) -> Encoded:
    """Per group ``a = max(max|x|, 6*2^-126)``, ``s = 2^ceil(log2(a * fl32(1/6)))``, codes ``E2M1(clamp(x/s, +-6))``."""
    groups = _grouped(x, group)
    scales = power_of_two_above(_maximum(groups, MXFP4_FLOOR) * _reciprocal(E2M1_MAX))
    return Encoded(e2m1_encode(groups / e8m0_decode(scales)).flatten(-2), scales.squeeze(-1))


def mxfp4_decode(e: Encoded, group: int) -> Tensor:
    return (_grouped(e2m1_decode(e.codes), group) * e8m0_decode(e.scales).unsqueeze(-1)).flatten(-2)


def fp4_e4m3_encode(x: Tensor, group: int) -> Encoded:
    """Per group ``s = E4M3(max(max|x|, 6 * 2^-9) / 6)``, codes ``E2M1(clamp(x/s, +-6))``; no global scale."""
    groups = _grouped(x, group)
    scales = e4m3_encode(_maximum(groups, FP4_E4M3_FLOOR) / E2M1_MAX)
    return Encoded(e2m1_encode(groups / e4m3_decode(scales)).flatten(-2), scales.squeeze(-1))


def fp4_e4m3_decode(e: Encoded, group: int) -> Tensor:
    return (_grouped(e2m1_decode(e.codes), group) * e4m3_decode(e.scales).unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class BlockFormat:
    """Encoder and decoder of one block family along the last dim; ``(x, group)``."""

    encode: Callable[[Tensor, int], Encoded]
    decode: Callable[[Encoded, int], Tensor]


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "mxfp8": BlockFormat(mxfp8_encode, mxfp8_decode),
    "mxfp4": BlockFormat(mxfp4_encode, mxfp4_decode),
    "fp4_e4m3": BlockFormat(fp4_e4m3_encode, fp4_e4m3_decode),
}


# ---- any storage dtype -------------------------------------------------------------------------------------
def encode(x: Tensor, dtype: DType) -> Encoded:
    """Codes and scales of [.., n] values in a block format with 1 x group blocks."""
    rows, group = dtype.block
    if dtype.name not in BLOCK_FORMATS or rows != 1:
        raise SpecError("values of a step cannot be encoded in this dtype", found=str(dtype),
                        allowed="a block format with blocks of one row")
    return BLOCK_FORMATS[dtype.name].encode(x, group)


def decode(e: Encoded, dtype: DType) -> Tensor:
    """f32 values [.., n]; exact for every format."""
    return BLOCK_FORMATS[dtype.name].decode(e, dtype.block[1])


def quantised(x: Tensor, dtype: DType) -> Tensor:
    """The real values that ``x`` has once it is stored in ``dtype`` (block format, record or plain float), in the dtype
    of ``x``."""
    if dtype.is_record:
        pieces = x.split([n for _, n in dtype.parts], dim=-1)
        return torch.cat([quantised(p, t) for p, (t, _) in zip(pieces, dtype.parts, strict=True)], dim=-1)
    if dtype.is_block:
        return decode(encode(x, dtype), dtype).to(x.dtype)
    return rounded(x, dtype)


_TORCH_FLOATS = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}


def rounded(x: Tensor, dtype: DType) -> Tensor:
    """``x`` rounded to nearest even in a plain float dtype, in the dtype of ``x``. bf16 rounds the f32 image."""
    if dtype.name not in _TORCH_FLOATS:
        raise SpecError("values cannot be rounded to this dtype", found=str(dtype), allowed=", ".join(_TORCH_FLOATS))
    return (x.float() if dtype.name == "bf16" else x).to(_TORCH_FLOATS[dtype.name]).to(x.dtype)


def dequantised_weight(codes: Tensor, scales: Tensor, dtype: DType) -> Tensor:
    """f32 values of a stored weight matrix or table [o, i]: each element times the scale of its r x c block. A 4-bit
    matrix is stored as [o, i / 2] bytes."""
    data = codes.view(torch.uint8)
    values = e2m1_decode(unpack_nibbles(data)) if dtype.name == "mxfp4" else e4m3_decode(data)
    r, c = dtype.block
    grid = e8m0_decode(scales.view(torch.uint8))
    expected = (-(-values.shape[0] // r), -(-values.shape[1] // c))
    if tuple(grid.shape) != expected:
        raise SpecError("a scale tensor does not fit its codes", found=tuple(grid.shape), allowed=expected)
    spread = grid.repeat_interleave(r, 0)[: values.shape[0]].repeat_interleave(c, 1)[:, : values.shape[1]]
    return values * spread
