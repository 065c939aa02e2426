# mypy: ignore-errors
"""Functions that generated kernels call on the device: formats, elementary functions, places of records.

They are compiled into every kernel that uses them. The numbers are those of dsl/interpreter/formats.py.
"""

import triton
import triton.language as tl


# ---- elementary functions ------------------------------------------------------------------------------------------
@triton.jit
def di_log(x):
    """log(x) = k log 2 + log(m), sqrt(1/2) <= m < sqrt(2): the hardware's fast logarithm loses small results."""
    low = x < 1.17549435e-38
    u = tl.where(low, x * 8388608.0, x).to(tl.int32, bitcast=True)
    shifted = u - 0x3F3504F3
    k = (shifted >> 23).to(tl.float32) - tl.where(low, 23.0, 0.0)
    m = ((shifted & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    p = m * 7.0376836292e-2 - 1.1514610310e-1
    p = p * m + 1.1676998740e-1
    p = p * m - 1.2420140846e-1
    p = p * m + 1.4249322787e-1
    p = p * m - 1.6668057665e-1
    p = p * m + 2.0000714765e-1
    p = p * m - 2.4999993993e-1
    p = p * m + 3.3333331174e-1
    z = m * m
    y = p * m * z + k * -2.12194440e-4
    y = (m + (y - 0.5 * z)) + k * 0.693359375
    y = tl.where(x > 3.4028235e38, x, y)
    y = tl.where(x == 0.0, float("-inf"), y)
    return tl.where((x < 0.0) | (x != x), float("nan"), y)


@triton.jit
def di_softplus(x):
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    return tl.maximum(x, 0.0) + (di_log(w) + tl.div_rn(u - (w - 1.0), w))


@triton.jit
def di_sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0.0, 1.0, e), 1.0 + e)


@triton.jit
def di_copysign(x, s):
    bits = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (s.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def di_round(x):
    """f32 held in bf16."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def di_pairs(x, H: tl.constexpr, N: tl.constexpr):
    """Sums [H, 1] of [H, N], N a power of two, added up in pairs: the order does not depend on who holds what."""
    n: tl.constexpr = N // 2
    if N > 1:
        a, b = tl.split(tl.reshape(x, [H, n, 2]))
        return di_pairs(a + b, H, n)
    else:
        return x


@triton.jit
def di_swap(x, N: tl.constexpr, M: tl.constexpr, AXIS: tl.constexpr):
    """Neighbours 2 i and 2 i + 1 along an axis of a block [N, M] change places."""
    if AXIS == 0:
        return tl.trans(di_swap(tl.trans(x), M, N, 1))
    else:
        a, b = tl.split(tl.reshape(x, [N, M // 2, 2]))
        return tl.reshape(tl.join(b, a), [N, M])


@triton.jit
def di_halves(x, H: tl.constexpr, N: tl.constexpr):
    """The first and the second half of the columns of [H, N]."""
    return tl.split(tl.permute(tl.reshape(x, [H, 2, N // 2]), (0, 2, 1)))


@triton.jit
def di_narrow(x, w, N: tl.constexpr, ACROSS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
              PART: tl.constexpr, EXACT: tl.constexpr):
    """Products [ROWS, ACROSS] of x [ROWS, PART] with N rows of a weight [.., K] f32 that begins at ``w``; EXACT: bf16
    holds x, so a weight is three bf16, each product of which is exact."""
    n = tl.arange(0, ACROSS)[None, :]
    weight = tl.load(w + n * K + tl.arange(0, PART)[:, None], mask=n < N, other=0.0)
    if ROWS < TILE:
        x = tl.where(tl.arange(0, TILE)[:, None] == 0, tl.broadcast_to(x, [TILE, PART]), 0.0)
    if EXACT:
        first = weight.to(tl.bfloat16)
        rest = weight - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        x = x.to(tl.bfloat16)
        y = tl.dot(x, first, tl.dot(x, second, tl.dot(x, third)))
    else:
        y = tl.dot(x, weight, input_precision="tf32x3")
    if ROWS < TILE:
        y = tl.sum(tl.where(tl.arange(0, TILE)[:, None] == 0, y, 0.0), 0, keep_dims=True)
    return y


# ---- formats -------------------------------------------------------------------------------------------------------
@triton.jit
def di_e4m3(c):
    """f32 of E4M3 codes (u8)."""
    return c.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def di_to_e4m3(x):
    """E4M3 codes (u8) of f32, clamped to +-448."""
    held = tl.minimum(tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL), 448.0,
                      propagate_nan=tl.PropagateNan.ALL)
    return held.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def di_e8m0(b):
    """f32 of E8M0 bytes: 2^(b - 127); 0 is a denormal, 255 NaN."""
    e = b.to(tl.int32)
    u = tl.where(e == 0, 0x00400000, e << 23)
    return tl.where(e == 255, 0x7FC00000, u).to(tl.float32, bitcast=True)


@triton.jit
def di_e8m0_bf16(b):
    """bf16 of E8M0 bytes."""
    e = b.to(tl.int16)
    u = tl.where(e == 0, 0x0040, e << 7)
    return tl.where(e == 255, 0x7FC0, u).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def di_e2m1(c):
    """f32 of E2M1 codes 0..15."""
    n = c.to(tl.int32)
    m = n & 7
    u = tl.where(m < 2, m * 0x3F000000, (m << 22) + 0x3F000000)
    return (u | ((n & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def di_e2m1_bf16(c):
    """bf16 of E2M1 codes 0..15."""
    n = c.to(tl.int16)
    m = n & 7
    u = tl.where(m < 2, m * 0x3F00, (m << 6) + 0x3F00)
    return (u | ((n & 8) << 12)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def di_to_e2m1(x):
    """E2M1 codes (i32): nearest, ties to the even code, clamped to +-6, the sign of zero kept."""
    a = tl.abs(x)
    c = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    c += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return c | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def di_power2_above(x):
    """E8M0 byte (i32) of the smallest power of two >= x, positive and normal."""
    u = x.to(tl.int32, bitcast=True)
    return (u >> 23) + ((u & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def di_power2(e):
    """2^(e - 127), 1 <= e <= 254."""
    return (e << 23).to(tl.float32, bitcast=True)


@triton.jit
def di_scale(top, FORMAT: tl.constexpr):
    """(scale byte i32, scale f32) of groups with largest magnitudes ``top``."""
    if FORMAT == "mxfp8":
        b = di_power2_above(tl.maximum(top, 1e-4) * 0.002232142857142857)
        return b, di_power2(b)
    elif FORMAT == "mxfp4":
        b = di_power2_above(tl.maximum(top, 7.052966104933725e-38) * 0.16666666666666666)
        return b, di_power2(b)
    else:
        c = di_to_e4m3(tl.div_rn(tl.maximum(top, 0.01171875), 6.0))
        return c.to(tl.int32), di_e4m3(c)


@triton.jit
def di_code(x, s, FORMAT: tl.constexpr):
    """Codes (i32) of x / s."""
    if FORMAT == "mxfp8":
        return di_to_e4m3(tl.div_rn(x, s)).to(tl.int32)
    else:
        return di_to_e2m1(tl.div_rn(x, s))


@triton.jit
def di_value(c, FORMAT: tl.constexpr):
    if FORMAT == "mxfp8":
        return di_e4m3(c.to(tl.uint8))
    else:
        return di_e2m1(c)


@triton.jit
def di_quantise(x, FORMAT: tl.constexpr, AXIS: tl.constexpr):
    """The values x has once its groups, whole along AXIS, are stored in FORMAT."""
    _, s = di_scale(tl.max(tl.abs(x), AXIS, keep_dims=True), FORMAT)
    s = tl.broadcast_to(s, x.shape)
    return di_value(di_code(x, s, FORMAT), FORMAT) * s


# ---- places --------------------------------------------------------------------------------------------------------
@triton.jit
def di_view(base, stride, fresh, has_fresh, first, start, slot, RING: tl.constexpr, RECORD: tl.constexpr, p):
    """Record of position p in the view [old ring | this step's rows from ``start`` on, the first of them at row
    ``first`` of the axis]."""
    new = (has_fresh != 0) & (p >= start)
    old_at = slot.to(tl.int64) * stride + (p.to(tl.int32) % RING).to(tl.int64) * RECORD
    new_at = (first + (p - start)) * RECORD
    return tl.where(new, fresh + tl.where(new, new_at, 0), base + tl.where(new, 0, old_at))


@triton.jit
def di_entry(base, stride, blocks, block_tokens, RATIO: tl.constexpr, RECORD: tl.constexpr, j, ok):
    """Paged entry j of the sequence whose block table ``blocks`` points to; ``ok``: the entries to look up."""
    at = (j * RATIO).to(tl.int32)  # positions: divisions of 32 bits are far cheaper
    block = tl.load(blocks + at // block_tokens, mask=ok, other=0).to(tl.int64)
    return base + block * stride + ((at % block_tokens) // RATIO * RECORD).to(tl.int64)


@triton.jit
def di_rank(score, i):
    """Ordered key (i64, higher is better, ties to the lower index) of index i < 2^31; the least one for what is never
    chosen: -inf and NaN."""
    u = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(u < 0, u ^ 0x7FFFFFFF, u).to(tl.int64)
    key = (ordered << 32) | (0x7FFFFFFF - i.to(tl.int64))
    return tl.where(score > float("-inf"), key, -0x7FFFFFFFFFFFFFFF)


@triton.jit
def di_ranked(key):
    """Index of a key, -1 for the least one."""
    return tl.where(key == -0x7FFFFFFFFFFFFFFF, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)
