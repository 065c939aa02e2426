// Arithmetic of tile programs on vector registers of 64 lanes, for use inside vector functions.
#ifndef DI_VECTOR_H
#define DI_VECTOR_H

#define DI_V __simd_callee__ inline
#define DI_MOST 3.402823466e38f

DI_V vector_bool di_all() { return asc_create_mask_b32(PAT_ALL); }

// Lanes first .. first + count - 1 under m.
DI_V vector_bool di_lanes(uint32_t first, uint32_t count, vector_bool m) {
    vector_int32_t at;
    vector_bool low, high, out;
    asc_arange(at, 0);
    asc_ge_scalar(low, at, (int32_t)first, m);
    asc_lt_scalar(high, at, (int32_t)(first + count), m);
    asc_mask_and(out, low, high, m);
    return out;
}

// ---- memory ----------------------------------------------------------------------------------------------------------
DI_V void di_load(vector_float& x, __ubuf__ float* p) { asc_loadalign(x, p); }
DI_V void di_load(vector_float& x, __ubuf__ uint16_t* p) {
    vector_uint32_t u, s;
    asc_loadalign_unpack(u, p);
    asc_shiftleft_scalar(s, u, 16, di_all());
    x = di_as<vector_float>(s);
}
DI_V void di_load_one(vector_float& x, __ubuf__ float* p) { asc_loadalign_brc_elem(x, p); }
DI_V void di_load_one(vector_float& x, __ubuf__ uint16_t* p) {
    vector_uint16_t h;
    vector_uint32_t s;
    asc_loadalign_brc_elem(h, p);
    asc_shiftleft_scalar(s, di_as<vector_uint32_t>(h), 16, di_all());
    x = di_as<vector_float>(s);
}
// Elements at base + first + step * lane.
DI_V void di_load_steps(vector_float& x, __ubuf__ float* base, uint32_t first, uint32_t step, vector_bool m) {
    vector_int32_t lane, scaled, at;
    asc_arange(lane, 0);
    asc_mul_scalar(scaled, lane, (int32_t)step, m);
    asc_add_scalar(at, scaled, (int32_t)first, m);
    asc_gather(x, base, di_as<vector_uint32_t>(at), m);
}
DI_V void di_store_steps(__ubuf__ float* base, vector_float x, uint32_t first, uint32_t step, vector_bool m) {
    vector_int32_t lane, scaled, at;
    asc_arange(lane, 0);
    asc_mul_scalar(scaled, lane, (int32_t)step, m);
    asc_add_scalar(at, scaled, (int32_t)first, m);
    asc_scatter(base, x, di_as<vector_uint32_t>(at), m);
}
DI_V vector_uint32_t di_bf16_bits(vector_float x, vector_bool m) {
    vector_bfloat16_t h;
    asc_float2bfloat16_rn(h, x, m);
    return di_as<vector_uint32_t>(h);
}
DI_V void di_store(__ubuf__ float* p, vector_float x, vector_bool m) { asc_storealign(p, x, m); }
DI_V void di_store(__ubuf__ uint16_t* p, vector_float x, vector_bool m) {
    asc_storealign_pack(p, di_bf16_bits(x, m), m);
}
DI_V void di_fill(vector_float& x, float v, vector_bool m) { asc_duplicate_scalar(x, v, m); }

// ---- functions -------------------------------------------------------------------------------------------------------
DI_V vector_float di_round(vector_float x, vector_bool m) {
    vector_uint32_t s;
    asc_shiftleft_scalar(s, di_bf16_bits(x, m), 16, m);
    return di_as<vector_float>(s);
}
DI_V vector_float di_recip(vector_float x, vector_bool m) {
    vector_float one, y;
    asc_duplicate_scalar(one, 1.0f, m);
    asc_div(y, one, x, m);
    return y;
}
DI_V vector_float di_rsqrt(vector_float x, vector_bool m) {
    vector_float r;
    asc_sqrt(r, x, m);
    return di_recip(r, m);
}
DI_V vector_float di_sigmoid(vector_float x, vector_bool m) {
    vector_float n, e, s;
    asc_neg(n, x, m);
    asc_exp(e, n, m);
    asc_add_scalar(s, e, 1.0f, m);
    return di_recip(s, m);
}
// max(x, 0) + log(1 + e), e = exp(-|x|); the logarithm keeps the digits that 1 + e loses.
DI_V vector_float di_softplus(vector_float x, vector_bool m) {
    vector_float a, n, e, u, l, d, q, top, y, one;
    vector_bool same;
    asc_abs(a, x, m);
    asc_neg(n, a, m);
    asc_exp(e, n, m);
    asc_add_scalar(u, e, 1.0f, m);
    asc_ln(l, u, m);
    asc_add_scalar(d, u, -1.0f, m);
    asc_eq_scalar(same, d, 0.0f, m);
    asc_duplicate_scalar(one, 1.0f, m);
    asc_select(d, one, d, same);
    asc_div(q, e, d, m);
    asc_mul(l, l, q, m);
    asc_select(l, e, l, same);
    asc_max_scalar(top, x, 0.0f, m);
    asc_add(y, top, l, m);
    return y;
}
DI_V vector_float di_copysign(vector_float x, vector_float s, vector_bool m) {
    vector_uint32_t a, b, y;
    vector_uint32_t low, high;
    asc_duplicate_scalar(low, (uint32_t)0x7fffffffu, m);
    asc_duplicate_scalar(high, (uint32_t)0x80000000u, m);
    asc_and(a, di_as<vector_uint32_t>(x), low, m);
    asc_and(b, di_as<vector_uint32_t>(s), high, m);
    asc_or(y, a, b, m);
    return di_as<vector_float>(y);
}
DI_V void di_take_away(vector_float& r, vector_float high, vector_float low, float part, vector_bool m) {
    vector_float t;
    asc_mul_scalar(t, high, part, m);
    asc_sub(r, r, t, m);
    asc_mul_scalar(t, low, part, m);
    asc_sub(r, r, t, m);
}
// y = y * x + c
DI_V void di_horner(vector_float& y, vector_float x, float c, vector_bool m) {
    asc_mul(y, y, x, m);
    asc_add_scalar(y, y, c, m);
}
// x - k pi / 2 and k modulo 4. k is split into halves of 10 bits and pi / 2 into parts of 13 bits, so that the first
// products are exact: good to 1e-7 up to angles of a million.
DI_V void di_quadrant(vector_float x, vector_float& r, vector_int32_t& quarter, vector_bool m) {
    vector_float t, k, h, high, low;
    vector_int32_t n, c;
    asc_mul_scalar(t, x, 0.636619772367581f, m);
    asc_float2int32_rn(n, t, m);
    asc_int322float_rn(k, n, m);
    asc_mul_scalar(h, k, 0.0009765625f, m);
    asc_float2int32_rn(c, h, m);
    asc_int322float_rn(h, c, m);
    asc_mul_scalar(high, h, 1024.0f, m);
    asc_sub(low, k, high, m);
    r = x;
    di_take_away(r, high, low, 1.57080078125f, m);
    di_take_away(r, high, low, -4.454515874385834e-06f, m);
    di_take_away(r, high, low, 6.07710062827671e-11f, m);
    asc_duplicate_scalar(c, (int32_t)3, m);
    asc_and(quarter, n, c, m);
}
DI_V vector_float di_turned(vector_float x, int32_t turn, vector_bool m) {
    vector_float r, r2, s, c, t, y, minus;
    vector_int32_t q, two, bit, one;
    vector_bool odd, negative;
    di_quadrant(x, r, q, m);
    asc_mul(r2, r, r, m);
    asc_duplicate_scalar(s, 2.7557319e-6f, m);
    di_horner(s, r2, -1.9841270e-4f, m);
    di_horner(s, r2, 8.3333333e-3f, m);
    di_horner(s, r2, -1.6666667e-1f, m);
    asc_mul(t, r, r2, m);
    asc_mul(s, s, t, m);
    asc_add(s, s, r, m);
    asc_duplicate_scalar(c, -2.7557319e-7f, m);
    di_horner(c, r2, 2.4801587e-5f, m);
    di_horner(c, r2, -1.3888889e-3f, m);
    di_horner(c, r2, 4.1666667e-2f, m);
    di_horner(c, r2, -0.5f, m);
    di_horner(c, r2, 1.0f, m);
    asc_add_scalar(q, q, turn, m);
    asc_duplicate_scalar(one, (int32_t)1, m);
    asc_duplicate_scalar(two, (int32_t)2, m);
    asc_and(bit, q, one, m);
    asc_eq_scalar(odd, bit, (int32_t)1, m);
    asc_select(y, c, s, odd);
    asc_and(bit, q, two, m);
    asc_eq_scalar(negative, bit, (int32_t)2, m);
    asc_neg(minus, y, m);
    asc_select(y, minus, y, negative);
    return y;
}
DI_V vector_float di_sin(vector_float x, vector_bool m) { return di_turned(x, 0, m); }
DI_V vector_float di_cos(vector_float x, vector_bool m) { return di_turned(x, 1, m); }

#include "di_codes.h"
#include "di_arrays.h"
#endif
