# mypy: ignore-errors
"""Functions that contractions call on the device: packed weights become bf16, two at a time, in integer instructions.

A code is put where bf16 has its exponent and fraction, which is its value times a fixed power of two, denormals
included; one product with the scale then gives the weight, exactly. That power and half the range of scales are left
to the sum (``RAISED`` in families/contract.py): scales from 2^-64 to 2^64 are exact, larger ones and NaN give infinity
or NaN.
"""

import triton
import triton.language as tl

_E4M3: tl.constexpr = tl.constexpr("""{
.reg .b32 a, c;
prmt.b32 a, $1, 0, 0x1404;
shr.u32 c, a, 4;
and.b32 c, c, 0x07F007F0;
lop3.b32 a, a, 0x80008000, c, 0xEA;
mul.rn.bf16x2 $0, a, $2;
}""")
_E4M3_WORD: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07F007F0;
and.b32 d, d, 0x07F007F0;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
mul.rn.bf16x2 $0, a, $3;
mul.rn.bf16x2 $1, b, $3;
}""")
_E2M1: tl.constexpr = tl.constexpr("""{
.reg .b32 a;
mul.lo.u32 a, $1, 0x1001;
and.b32 a, a, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $0, a, $2;
}""")
_E2M1_WORD: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, h;
shr.u32 h, $4, 8;
and.b32 a, $4, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
and.b32 b, $4, 0x00F000F0;
mul.lo.u32 b, b, 0x104;
and.b32 b, b, 0x81C081C0;
mul.rn.bf16x2 $1, b, $5;
and.b32 a, h, 0x000F000F;
mul.lo.u32 a, a, 0x1040;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $2, a, $5;
and.b32 b, h, 0x00F000F0;
mul.lo.u32 b, b, 0x104;
and.b32 b, b, 0x81C081C0;
mul.rn.bf16x2 $3, b, $5;
}""")


@triton.jit
def di_scale_pairs(b, UP: tl.constexpr):
    """E8M0 bytes -> words of twice the bf16 2^(b - 127 + UP); infinity where that is too large."""
    return tl.minimum(b.to(tl.int32), 255 - UP) * 0x00800080 + UP * 0x00800080


@triton.jit
def di_two_bf16(words):
    """Words of two bf16 -> the two along a new last axis."""
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def di_e4m3_pairs(codes, scales):
    """Two E4M3 codes in an i16 -> a word of two bf16: values times 2^-120 times the scale."""
    return tl.inline_asm_elementwise(_E4M3, "=r,r,r", [codes.to(tl.int32) & 0xFFFF, scales], dtype=tl.int32,
                                     is_pure=True, pack=1)


@triton.jit
def di_e2m1_pairs(codes, scales):
    """Two E2M1 codes in a byte, low one first -> a word of two bf16: values times 2^-126 times the scale."""
    return tl.inline_asm_elementwise(_E2M1, "=r,r,r", [codes.to(tl.int32), scales], dtype=tl.int32, is_pure=True,
                                     pack=1)


@triton.jit
def di_e2m1_words(codes, scales, ROWS: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr):
    """Words of eight E2M1 codes [ROWS, DEPTH // 8] -> bf16 [ROWS, DEPTH], values times 2^-126 times the scale.

    The order of a row is that of ``di_spread``: a thread of a tensor-core fragment then holds whole words."""
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        _E2M1_WORD, "=r,=r,=r,=r,r,r", [codes, scales], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True,
        pack=1)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # [rows, words, pair / 2, pair % 2]: pairs 0 1 or 2 3 together
    pairs = tl.reshape(pairs, [ROWS, DEPTH // CHUNK, 4, CHUNK // 32, 2, 2])
    pairs = tl.reshape(tl.permute(pairs, (0, 1, 3, 4, 5, 2)), [ROWS, DEPTH // 2])
    return tl.reshape(di_two_bf16(pairs), [ROWS, DEPTH])


@triton.jit
def di_e4m3_words(codes, scales, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Words of four E4M3 codes [ROWS, DEPTH // 4] -> bf16 [ROWS, DEPTH], values times 2^-120 times the scale.

    A thread of a tensor-core fragment holds whole words: among 16, a place counts (pair, thread, half), a feature
    (thread, pair, half)."""
    p0, p1 = tl.inline_asm_elementwise(_E4M3_WORD, "=r,=r,r,r", [codes, scales], dtype=(tl.int32, tl.int32),
                                       is_pure=True, pack=1)
    pairs = tl.permute(tl.reshape(tl.join(p0, p1), [ROWS, DEPTH // 16, 4, 2]), (0, 1, 3, 2))
    return tl.reshape(di_two_bf16(tl.reshape(pairs, [ROWS, DEPTH // 2])), [ROWS, DEPTH])


@triton.jit
def di_spread(i, CHUNK: tl.constexpr):
    """Feature at place ``i`` of a row in the order of ``di_e2m1_words``.

    A place counts (chunk, word, pair / 2, pair % 2, thread, half), a feature (chunk, thread, word, half, pair)."""
    thread, pair, half = i // 2 % 4, i // 8 % 4, i % 2
    return i // CHUNK * CHUNK + thread * (CHUNK // 4) + i % CHUNK // 32 * 8 + half * 4 + pair
