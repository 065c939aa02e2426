// Draws of tokens from a row of logits, a piece after the other. Meant is what runtime/sampling.py says: the token with
// the largest z + Gumbel of those that the cuts leave. There is no f64 here: z is (logit - largest) / temperature and
// noise is f32 from the same 64 bits, good to some 1e-6, and sums of weights have an order of their own.
#ifndef DI_DRAW_H
#define DI_DRAW_H
#include "di_select.h"

// ---- 64 bits in two words --------------------------------------------------------------------------------------------
struct DiWide {
    vector_uint32_t high, low;
};

DI_V vector_uint32_t di_word(uint32_t x) {
    vector_uint32_t v;
    asc_duplicate_scalar(v, x, di_all());
    return v;
}
DI_V vector_uint32_t di_high_product(vector_uint32_t a, uint32_t b) {
    const vector_bool m = di_all();
    vector_uint32_t low, high, part, cross, other, sum, mask = di_word(0xffffu);
    asc_and(low, a, mask, m);
    asc_shiftright_scalar(high, a, 16, m);
    asc_mul_scalar(sum, low, b & 0xffffu, m);
    asc_shiftright_scalar(sum, sum, 16, m);
    asc_mul_scalar(cross, low, b >> 16, m);
    asc_mul_scalar(other, high, b & 0xffffu, m);
    asc_and(part, cross, mask, m);
    asc_add(sum, sum, part, m);
    asc_and(part, other, mask, m);
    asc_add(sum, sum, part, m);
    asc_shiftright_scalar(sum, sum, 16, m);
    asc_mul_scalar(high, high, b >> 16, m);
    asc_add(sum, sum, high, m);
    asc_shiftright_scalar(cross, cross, 16, m);
    asc_add(sum, sum, cross, m);
    asc_shiftright_scalar(other, other, 16, m);
    asc_add(sum, sum, other, m);
    return sum;
}
DI_V DiWide di_times(DiWide x, uint32_t high, uint32_t low) {
    const vector_bool m = di_all();
    DiWide out;
    vector_uint32_t part;
    out.high = di_high_product(x.low, low);
    asc_mul_scalar(part, x.high, low, m);
    asc_add(out.high, out.high, part, m);
    asc_mul_scalar(part, x.low, high, m);
    asc_add(out.high, out.high, part, m);
    asc_mul_scalar(out.low, x.low, low, m);
    return out;
}
// x ^ (x >> n), n below 32.
DI_V DiWide di_folded(DiWide x, int16_t n) {
    const vector_bool m = di_all();
    DiWide out;
    vector_uint32_t part, over;
    asc_shiftright_scalar(part, x.high, n, m);
    asc_xor(out.high, x.high, part, m);
    asc_shiftright_scalar(part, x.low, n, m);
    asc_shiftleft_scalar(over, x.high, (int16_t)(32 - n), m);
    asc_or(part, part, over, m);
    asc_xor(out.low, x.low, part, m);
    return out;
}
// The noise of tokens first + lane: runtime/noise.py.
DI_V DiWide di_noise(uint32_t high, uint32_t low, int32_t first) {
    const vector_bool m = di_all();
    DiWide z;
    vector_int32_t at;
    vector_uint32_t one = di_word(1u), none = di_word(0u), carry, key = di_word(low);
    vector_bool over;
    asc_arange(at, first + 1);
    z.low = di_as<vector_uint32_t>(at);
    z.high = none;
    z = di_times(z, 0x9e3779b9u, 0x7f4a7c15u);
    asc_add(z.low, z.low, key, m);
    asc_lt(over, z.low, key, m);
    asc_select(carry, one, none, over);
    asc_add(z.high, z.high, carry, m);
    asc_add_scalar(z.high, z.high, high, m);
    z = di_times(di_folded(z, 30), 0xbf58476du, 0x1ce4e5b9u);
    z = di_times(di_folded(z, 27), 0x94d049bbu, 0x133111ebu);
    return di_folded(z, 31);
}

// ---- noise -----------------------------------------------------------------------------------------------------------
// (z >> 12, and a half) of 2^52 parts of 1.
DI_V vector_float di_part(DiWide z) {
    const vector_bool m = di_all();
    vector_uint32_t word, mask = di_word(0xffu);
    vector_float x, y;
    asc_shiftright_scalar(word, z.low, 12, m);
    asc_int322float_rn(x, di_as<vector_int32_t>(word), m);
    asc_add_scalar(x, x, 0.5f, m);
    asc_mul_scalar(x, x, 2.220446049250313e-16f, m);
    asc_and(word, z.high, mask, m);
    asc_int322float_rn(y, di_as<vector_int32_t>(word), m);
    asc_mul_scalar(y, y, 2.3283064365386963e-10f, m);
    asc_add(x, x, y, m);
    asc_shiftright_scalar(word, z.high, 8, m);
    asc_int322float_rn(y, di_as<vector_int32_t>(word), m);
    asc_mul_scalar(y, y, 5.9604644775390625e-08f, m);
    asc_add(x, x, y, m);
    return x;
}
// -log(-log u). Where u is near 1 what is left to it counts: log(1 - t) keeps its digits as log(w) t / (1 - w), w being
// what 1 - t is in f32.
DI_V vector_float di_gumbel(DiWide z) {
    const vector_bool m = di_all();
    DiWide rest;
    asc_not(rest.high, z.high, m);
    asc_not(rest.low, z.low, m);
    vector_float u = di_part(z), t = di_part(rest), w, d, y, near, one;
    vector_bool small, same;
    asc_duplicate_scalar(one, 1.0f, m);
    asc_sub(w, one, t, m);
    asc_sub(d, one, w, m);
    asc_eq_scalar(same, d, 0.0f, m);
    asc_select(d, one, d, same);
    asc_ln(near, w, m);
    asc_mul(near, near, t, m);
    asc_div(near, near, d, m);
    asc_neg(near, near, m);
    asc_select(near, t, near, same);
    asc_ln(y, u, m);
    asc_neg(y, y, m);
    asc_lt_scalar(small, t, 0.5f, m);
    asc_select(y, near, y, small);
    asc_ln(y, y, m);
    asc_neg(y, y, m);
    return y;
}

// ---- passes over a row -----------------------------------------------------------------------------------------------
// What a row has of lanes: best [64], where [64] or counts, sums [64]; answers [64] for the scalar unit.
__simd_vf__ inline void di_draw_start(__ubuf__ float* best, __ubuf__ int32_t* where, __ubuf__ int32_t* wrong, float low) {
    const vector_bool m = di_all();
    vector_float x;
    vector_int32_t zero;
    asc_duplicate_scalar(x, low, m);
    asc_duplicate_scalar(zero, (int32_t)0, m);
    asc_storealign(best, x, m);
    asc_storealign(where, zero, m);
    asc_storealign(wrong, zero, m);
}
// Each lane keeps the first of the largest numbers that it saw, and whether it saw what is none, or infinite.
template <class T>
__simd_vf__ inline void di_draw_look(__ubuf__ T* logits, __ubuf__ float* best, __ubuf__ int32_t* where,
                                     __ubuf__ int32_t* wrong, int32_t first, uint32_t count) {
    const vector_bool all = di_all();
    uint32_t left = count;
    vector_float most;
    vector_int32_t place, bad, one;
    asc_loadalign(most, best);
    asc_loadalign(place, where);
    asc_loadalign(bad, wrong);
    asc_duplicate_scalar(one, (int32_t)1, all);
    for (uint16_t c = 0; c < (count + 63) / 64; ++c) {
        const vector_bool m = asc_update_mask_b32(left);
        vector_float x;
        vector_int32_t at;
        vector_bool more, none;
        di_load(x, logits + c * 64);
        asc_arange(at, first + c * 64);
        asc_gt(more, x, most, m);
        asc_select(most, x, most, more);
        asc_select(place, at, place, more);
        asc_ne(none, x, x, m);
        asc_select(bad, one, bad, none);
        asc_eq_scalar(none, x, INFINITY, m);
        asc_select(bad, one, bad, none);
    }
    asc_storealign(best, most, all);
    asc_storealign(where, place, all);
    asc_storealign(wrong, bad, all);
}
// answers: [0] the token of the best, [64] the bits of its number, [128] 1 where a row holds what is no number, or
// nothing above -inf. The best is left in all lanes.
__simd_vf__ inline void di_draw_end(__ubuf__ float* best, __ubuf__ int32_t* where, __ubuf__ int32_t* wrong,
                                    __ubuf__ int32_t* answers) {
    const vector_bool m = di_all();
    vector_float x, top, tops;
    vector_int32_t at, none, least, bad, one, worst;
    vector_bool same, nothing;
    asc_loadalign(x, best);
    asc_loadalign(at, where);
    asc_loadalign(bad, wrong);
    asc_reduce_max(top, x, m);
    asc_duplicate(tops, top, m);
    asc_eq(same, x, tops, m);
    asc_duplicate_scalar(none, (int32_t)0x7fffffff, m);
    asc_select(at, at, none, same);
    asc_reduce_min(least, at, m);
    asc_duplicate(at, least, m);
    asc_duplicate_scalar(one, (int32_t)1, m);
    asc_eq_scalar(nothing, tops, -INFINITY, m);
    asc_select(bad, one, bad, nothing);
    asc_reduce_max(worst, bad, m);
    asc_duplicate(bad, worst, m);
    asc_storealign(answers, at, m);
    asc_storealign(answers + 64, di_as<vector_int32_t>(tops), m);
    asc_storealign(answers + 128, bad, m);
    asc_storealign(best, tops, m);
}
// Tokens that rank above (key, ~id): the order of falling logits, ties to the lower id.
DI_V vector_bool di_above(vector_float x, int32_t first, uint32_t key, uint32_t place, vector_bool m) {
    vector_int32_t at;
    vector_uint32_t k, bound = di_word(key), rest;
    vector_bool over, same;
    k = di_key(x, 0, m);
    asc_arange(at, first);
    asc_not(rest, di_as<vector_uint32_t>(at), m);
    asc_gt(over, k, bound, m);
    asc_eq(same, k, bound, m);
    asc_gt_scalar(same, rest, place, same);
    asc_mask_or(over, over, same, m);
    return over;
}
// (x - top) / t; top: all lanes of `tops`.
DI_V vector_float di_tempered(vector_float x, __ubuf__ float* tops, uint32_t temperature, vector_bool m) {
    vector_float top, t, z;
    asc_loadalign(top, tops);
    t = di_as<vector_float>(di_word(temperature));
    asc_sub(z, x, top, m);
    asc_div(z, z, t, m);
    return z;
}
// Adds to counts and sums how many tokens rank above (key, place), and their weights exp(z).
template <class T>
__simd_vf__ inline void di_draw_above(__ubuf__ T* logits, __ubuf__ float* tops, __ubuf__ float* sums,
                                      __ubuf__ int32_t* counts, int32_t first, uint32_t count, uint32_t temperature,
                                      uint32_t key, uint32_t place) {
    const vector_bool all = di_all();
    uint32_t left = count;
    vector_float total, none;
    vector_int32_t number, one, zero;
    asc_loadalign(total, sums);
    asc_loadalign(number, counts);
    asc_duplicate_scalar(none, 0.0f, all);
    asc_duplicate_scalar(zero, (int32_t)0, all);
    for (uint16_t c = 0; c < (count + 63) / 64; ++c) {
        const vector_bool m = asc_update_mask_b32(left);
        vector_float x, w;
        di_load(x, logits + c * 64);
        const vector_bool over = di_above(x, first + c * 64, key, place, m);
        w = di_tempered(x, tops, temperature, over);
        asc_exp(w, w, over);
        asc_select(w, w, none, over);
        asc_add(total, total, w, all);
        asc_duplicate_scalar(one, (int32_t)1, over);
        asc_add(number, number, one, all);
    }
    asc_storealign(sums, total, all);
    asc_storealign(counts, number, all);
}
// answers: [0] the count, [64] whether the weights reach the part `share` of `whole`, which a first pass sets.
__simd_vf__ inline void di_draw_sum(__ubuf__ float* sums, __ubuf__ int32_t* counts, __ubuf__ float* whole,
                                    __ubuf__ int32_t* answers, uint32_t share, int32_t first) {
    const vector_bool m = di_all();
    vector_float total, sum, wanted, part;
    vector_int32_t number, one, zero, yes;
    vector_bool reached;
    asc_loadalign(sum, sums);
    asc_loadalign(number, counts);
    asc_reduce_sum(total, sum, m);
    asc_duplicate(sum, total, m);
    if (first) {
        asc_storealign(whole, sum, m);
        wanted = sum;
    } else {
        asc_loadalign(wanted, whole);
    }
    part = di_as<vector_float>(di_word(share));
    asc_mul(wanted, wanted, part, m);
    asc_ge(reached, sum, wanted, m);
    asc_duplicate_scalar(one, (int32_t)1, m);
    asc_duplicate_scalar(zero, (int32_t)0, m);
    asc_select(yes, one, zero, reached);
    asc_storealign(answers, di_sum_everywhere(number), m);
    asc_storealign(answers + 64, yes, m);
}
// Each lane keeps the largest z + Gumbel of the tokens above the cut that have at least `least` of the largest weight.
template <class T>
__simd_vf__ inline void di_draw_noise(__ubuf__ T* logits, __ubuf__ float* tops, __ubuf__ float* best,
                                      __ubuf__ int32_t* where, int32_t first, uint32_t count, uint32_t temperature,
                                      uint32_t key, uint32_t place, uint32_t least, uint32_t high, uint32_t low) {
    const vector_bool all = di_all();
    uint32_t left = count;
    vector_float most;
    vector_int32_t token;
    asc_loadalign(most, best);
    asc_loadalign(token, where);
    for (uint16_t c = 0; c < (count + 63) / 64; ++c) {
        const vector_bool m = asc_update_mask_b32(left);
        vector_float x, w, z, top, g;
        vector_int32_t at;
        vector_bool over, heavy, equal, more;
        di_load(x, logits + c * 64);
        over = di_above(x, first + c * 64, key, place, m);
        z = di_tempered(x, tops, temperature, over);
        asc_exp(w, z, over);
        asc_ge(heavy, w, di_as<vector_float>(di_word(least)), over);
        asc_loadalign(top, tops);
        asc_eq(equal, x, top, over);
        asc_mask_or(over, heavy, equal, all);
        g = di_gumbel(di_noise(high, low, first + c * 64));
        asc_add(z, z, g, over);
        asc_arange(at, first + c * 64);
        asc_gt(more, z, most, over);
        asc_select(most, z, most, more);
        asc_select(token, at, token, more);
    }
    asc_storealign(best, most, all);
    asc_storealign(where, token, all);
}
__simd_vf__ inline void di_draw_token(__ubuf__ int32_t* answers, int32_t low, int32_t high) {
    const vector_bool m = di_all();
    vector_int32_t x, rest;
    vector_bool even;
    asc_duplicate_scalar(x, low, m);
    asc_duplicate_scalar(rest, high, m);
    even = di_lanes(0, 1, m);
    asc_select(x, x, rest, even);
    asc_storealign(answers, x, m);
}

// ---- scalars ---------------------------------------------------------------------------------------------------------
// Bits of the f32 nearest to the f64 of these bits; the smallest and the largest normal one beyond them.
DI_INLINE uint32_t di_narrowed(int64_t bits) {
    const int64_t exponent = (bits >> 52 & 0x7ff) - 1023 + 127, part = bits & 0xfffffffffffff;
    if (exponent < 1) return bits == 0 ? 0u : 0x00800000u;
    if (exponent > 254) return 0x7f7fffffu;
    const uint32_t out = (uint32_t)(exponent << 23 | part >> 29) + (uint32_t)(part >> 28 & 1);
    return out < 0x7f7fffffu ? out : 0x7f7fffffu;
}
DI_INLINE uint64_t di_mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
// di_key of bits of an f32.
DI_INLINE uint32_t di_key_of(uint32_t bits) {
    if (bits == 0x80000000u) bits = 0;
    return bits == 0xff800000u ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

#endif
