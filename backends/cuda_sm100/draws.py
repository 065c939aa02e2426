# mypy: ignore-errors
"""Functions of draws on the device: noise, cuts, and the largest of a row with noise added.

Meant is what runtime/sampling.py says and backends/cpu/include/di_draw.h does. Noise is the same bit for bit. Weights
exp(z - top) are f32 here, summed in f64 in another order: a token may differ where a cut falls within their rounding.
"""

import triton
import triton.language as tl

from deepinfer.backends.cuda_sm100.device import di_rank


@triton.jit
def di_mix64(z):
    """The mixing function of runtime/noise.py (u64)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def di_above(logits, t, above, cut, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """How many tokens rank above ``cut``, and the sum of their weights."""
    count = tl.zeros([PIECE], tl.int32)
    total = tl.zeros([PIECE], tl.float64)
    for first in range(0, SIZE, PIECE):
        i = first + tl.arange(0, PIECE)
        x = tl.load(logits + i, mask=i < SIZE, other=float("-inf")).to(tl.float32)
        taken = di_rank(x, i) > cut
        w = tl.exp((x.to(tl.float64) / t - above).to(tl.float32))
        count += taken.to(tl.int32)
        total += tl.where(taken, w, 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit
def di_cut(logits, t, above, top, cut, most, share, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """The rank that the first tokens lie above, of those above ``cut``: the fewest that are ``most`` and have the part
    ``share`` of the weight. Ranks are halved until one token is between; no two are equal."""
    low = cut
    high = top
    count, whole = di_above(logits, t, above, cut, SIZE, PIECE)
    wanted = share * whole
    over, _ = di_above(logits, t, above, top, SIZE, PIECE)
    if count < most:
        over = count - 1
    while count - over > 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        n, mass = di_above(logits, t, above, middle, SIZE, PIECE)
        reached = (n >= most) & (mass >= wanted)
        low = tl.where(reached, middle, low)
        count = tl.where(reached, n, count)
        high = tl.where(reached, high, middle)
        over = tl.where(reached, over, n)
    return low


@triton.jit
def di_drawn(logits, t, above, cut, min_p, key, token, SIZE: tl.constexpr, PIECE: tl.constexpr):
    """The token with the largest z + Gumbel of those above ``cut`` with at least ``min_p`` of the largest weight; ties
    go to the lower id. Pieces that cannot hold it, by a bound that is near where noise is large, are passed over."""
    best = tl.full([], float("-inf"), tl.float64)
    for first in range(0, SIZE, PIECE):
        i = first + tl.arange(0, PIECE)
        x = tl.load(logits + i, mask=i < SIZE, other=float("-inf")).to(tl.float32)
        z = (x + 0.0).to(tl.float64) / t
        kept = (di_rank(x, i) > cut) & ((tl.exp((z - above).to(tl.float32)) >= min_p) | (z == above))
        noise = di_mix64(key + (i + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        # 1 - u in 24 bits: -log(-log u) <= -log(1 - u), and -log2 of 2^e (1 + f) is at most -(e + f)
        rest = ((noise ^ 0xFFFFFFFFFFFFFFFF) >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        bound = (127.0 - rest.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07) * 0.69314724
        near = z.to(tl.float32)
        bound = near + (bound + 1e-3 + 1e-6 * tl.minimum(tl.abs(near), 1e30))
        bound = tl.where(kept, bound, float("-inf"))
        if tl.max(bound, 0).to(tl.float64) >= best:
            u = ((noise >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
            score = tl.where(kept & (bound.to(tl.float64) >= best), z - tl.log(-tl.log(u)), float("-inf"))
            found = tl.max(score, 0)
            if found > best:
                best = found
                token = tl.min(tl.where(score == found, i, 0x7FFFFFFF), 0).to(tl.int64)
    return token
