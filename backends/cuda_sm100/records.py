# mypy: ignore-errors
"""Functions that attention and selections call on the device: records of a cache become bf16, whole words of codes at a
time, in the order of their features.

As in expand.py a code is put where bf16 has its exponent and fraction, and one product with the scale gives the value
times a fixed power of two, exactly.
"""

import triton
import triton.language as tl

from deepinfer.backends.cuda_sm100.device import di_e4m3, di_power2
from deepinfer.backends.cuda_sm100.expand import _E4M3_WORD, di_scale_pairs, di_two_bf16

_E2M1_IN_ORDER: tl.constexpr = tl.constexpr("""{
.reg .b32 a, h;
shr.u32 h, $4, 4;
prmt.b32 a, $4, h, 0x0400;
and.b32 a, a, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
prmt.b32 a, $4, h, 0x0501;
and.b32 a, a, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $1, a, $5;
prmt.b32 a, $4, h, 0x0602;
and.b32 a, a, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $2, a, $5;
prmt.b32 a, $4, h, 0x0703;
and.b32 a, a, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $3, a, $5;
}""")


@triton.jit
def di_record_scales(b, UP: tl.constexpr, FORMAT: tl.constexpr):
    """Bytes of scales (E8M0, or E4M3 of fp4_e4m3) -> words of twice the bf16 scale times 2^UP; NaN stays NaN."""
    if FORMAT == "fp4_e4m3":
        s = (di_e4m3(b) * di_power2(tl.full([1, 1], 127 + UP, tl.int32))).to(tl.bfloat16)
        return (s.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x00010001
    else:
        return tl.where(b == 255, 0x7FC07FC0, di_scale_pairs(b, UP))


@triton.jit
def di_record_words(codes, scales, ROWS: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr):
    """Words of E4M3 (mxfp8) or E2M1 codes [ROWS, words] -> bf16 [ROWS, DEPTH] in their order, values times 2^-120 or
    2^-126 times the scale. A word with a NaN becomes NaN."""
    if FORMAT == "mxfp8":
        scales = tl.where((((codes & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80) != 0, 0x7FC07FC0, scales)
        p0, p1 = tl.inline_asm_elementwise(_E4M3_WORD, "=r,=r,r,r", [codes, scales], dtype=(tl.int32, tl.int32),
                                           is_pure=True, pack=1)
        pairs = tl.join(p0, p1)
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _E2M1_IN_ORDER, "=r,=r,=r,=r,r,r", [codes, scales], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True, pack=1)
        pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(di_two_bf16(tl.reshape(pairs, [ROWS, DEPTH // 2])), [ROWS, DEPTH])
