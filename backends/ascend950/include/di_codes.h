// Storage formats in vector registers: E4M3, E8M0 and E2M1 codes, scales of groups. Codes and bytes lie in 32-bit lanes.
#ifndef DI_CODES_H
#define DI_CODES_H

enum DiFormat { DI_MXFP8, DI_MXFP4, DI_FP4_E4M3 };

DI_V vector_float di_e4m3(vector_uint32_t c, vector_bool m) {
    vector_float y;
    asc_e4m32float(y, di_as<vector_fp8_e4m3fn_t>(c), m);
    return y;
}
// Nearest, ties to even, clamped to +-448.
DI_V vector_uint32_t di_to_e4m3(vector_float x, vector_bool m) {
    vector_fp8_e4m3fn_t c;
    vector_uint32_t low, y;
    asc_float2e4m3_rn_sat(c, x, m);
    asc_duplicate_scalar(low, (uint32_t)0xffu, m);
    asc_and(y, di_as<vector_uint32_t>(c), low, m);
    return y;
}
// 2^(e - 127), e from 1 to 254.
DI_V vector_float di_e8m0(vector_uint32_t e, vector_bool m) {
    vector_uint32_t y;
    asc_shiftleft_scalar(y, e, 23, m);
    return di_as<vector_float>(y);
}
// 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign bit.
DI_V vector_float di_e2m1(vector_uint32_t c, vector_bool m) {
    vector_uint32_t k, low, sign, bits;
    vector_float small, normal;
    vector_bool tiny;
    asc_duplicate_scalar(k, (uint32_t)7u, m);
    asc_and(low, c, k, m);
    asc_duplicate_scalar(k, (uint32_t)8u, m);
    asc_and(sign, c, k, m);
    asc_shiftleft_scalar(sign, sign, 28, m);
    asc_shiftleft_scalar(bits, low, 22, m);
    asc_add_scalar(bits, bits, (uint32_t)(126u << 23), m);
    normal = di_as<vector_float>(bits);
    asc_add_scalar(small, normal, -0.5f, m);  // .5 and .75 become 0 and .5
    asc_add(small, small, small, m);
    asc_lt_scalar(tiny, low, (uint32_t)2u, m);
    asc_select(normal, small, normal, tiny);
    asc_or(bits, di_as<vector_uint32_t>(normal), sign, m);
    return di_as<vector_float>(bits);
}
DI_V void di_count(vector_uint32_t& c, vector_float a, float bound, bool at, vector_bool m) {
    vector_bool over;
    vector_uint32_t more;
    if (at) asc_ge_scalar(over, a, bound, m);
    else asc_gt_scalar(over, a, bound, m);
    asc_add_scalar(more, c, (uint32_t)1u, m);
    asc_select(c, more, c, over);
}
// Nearest, ties to the even code, clamped to +-6; the sign of zero is kept.
DI_V vector_uint32_t di_to_e2m1(vector_float x, vector_bool m) {
    vector_float a;
    vector_uint32_t c, sign, k;
    asc_abs(a, x, m);
    asc_duplicate_scalar(c, (uint32_t)0u, m);
    di_count(c, a, 0.25f, false, m);
    di_count(c, a, 0.75f, true, m);
    di_count(c, a, 1.25f, false, m);
    di_count(c, a, 1.75f, true, m);
    di_count(c, a, 2.5f, false, m);
    di_count(c, a, 3.5f, true, m);
    di_count(c, a, 5.0f, false, m);
    asc_shiftright_scalar(sign, di_as<vector_uint32_t>(x), 28, m);
    asc_duplicate_scalar(k, (uint32_t)8u, m);
    asc_and(sign, sign, k, m);
    asc_or(c, c, sign, m);
    return c;
}
// Largest of each run of `group` lanes among the first `lanes`, in all lanes of the run.
DI_V vector_float di_group_max(vector_float a, uint32_t group, uint32_t lanes, vector_bool m) {
    vector_float out, top, all;
    vector_bool mine;
    asc_duplicate_scalar(out, 0.0f, m);
    for (uint16_t first = 0; first < 64 && first < lanes; first = first + group) {
        mine = di_lanes(first, group, m);
        asc_reduce_max(top, a, mine);
        asc_duplicate(all, top, m);
        asc_select(out, all, out, mine);
    }
    return out;
}
// The scale of groups whose largest magnitude is a: its byte and its value.
DI_V void di_scale(DiFormat f, vector_float a, vector_uint32_t& byte, vector_float& value, vector_bool m) {
    if (f == DI_FP4_E4M3) {
        vector_float six;
        asc_max_scalar(a, a, 0x6p-9f, m);
        asc_duplicate_scalar(six, 6.0f, m);
        asc_div(a, a, six, m);
        byte = di_to_e4m3(a, m);
        value = di_e4m3(byte, m);
        return;
    }
    vector_uint32_t bits, low, k;
    vector_bool above;
    asc_max_scalar(a, a, f == DI_MXFP8 ? 1e-4f : 0x6p-126f, m);
    asc_mul_scalar(a, a, f == DI_MXFP8 ? 1.0f / 448.0f : 1.0f / 6.0f, m);
    bits = di_as<vector_uint32_t>(a);
    asc_shiftright_scalar(byte, bits, 23, m);
    asc_duplicate_scalar(k, (uint32_t)0x7fffffu, m);
    asc_and(low, bits, k, m);
    asc_ne_scalar(above, low, (uint32_t)0u, m);
    asc_add_scalar(k, byte, (uint32_t)1u, m);
    asc_select(byte, k, byte, above);
    value = di_e8m0(byte, m);
}
DI_V vector_uint32_t di_code(DiFormat f, vector_float x, vector_bool m) {
    return f == DI_MXFP8 ? di_to_e4m3(x, m) : di_to_e2m1(x, m);
}
DI_V vector_float di_value(DiFormat f, vector_uint32_t c, vector_bool m) {
    return f == DI_MXFP8 ? di_e4m3(c, m) : di_e2m1(c, m);
}
DI_V vector_float di_scale_value(DiFormat f, vector_uint32_t byte, vector_bool m) {
    return f == DI_FP4_E4M3 ? di_e4m3(byte, m) : di_e8m0(byte, m);
}

// Pairs at p, p + 1, ..: whole vectors are interleaved, parts of one scattered.
DI_V void di_store_pairs(__ubuf__ float* p, vector_float even, vector_float odd, uint32_t pairs, vector_bool m) {
    if (pairs >= 64) {
        asc_storealign_intlv(p, even, odd);
        return;
    }
    di_store_steps(p, even, 0, 2, m);
    di_store_steps(p, odd, 1, 2, m);
}

// ---- whole arrays ----------------------------------------------------------------------------------------------------
// The values n elements have once they are stored in groups.
__simd_vf__ inline void di_quantise(DiFormat f, __ubuf__ float* x, __ubuf__ float* y, uint32_t n, uint32_t group) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float v, a, q, s;
        vector_uint32_t byte;
        asc_loadalign(v, x + c * 64);
        asc_abs(a, v, m);
        a = di_group_max(a, group, n - c * 64, m);
        di_scale(f, a, byte, s, m);
        asc_div(q, v, s, m);
        q = di_value(f, di_code(f, q, m), m);
        asc_mul(q, q, s, m);
        asc_storealign(y + c * 64, q, m);
    }
}
// One byte a group, a group in a lane: scales of groups whose bytes lie in lanes `group` apart.
DI_V void di_store_scales(__ubuf__ uint32_t* to, vector_uint32_t byte, uint32_t group, uint32_t first, vector_bool m) {
    vector_int32_t at, within, k, number;
    vector_bool head;
    asc_arange(at, 0);
    asc_duplicate_scalar(k, (int32_t)(group - 1), m);
    asc_and(within, at, k, m);
    asc_eq_scalar(head, within, (int32_t)0, m);
    const uint32_t shift = group == 8 ? 3 : group == 16 ? 4 : group == 32 ? 5 : 6;
    asc_shiftright_scalar(number, at, shift, m);
    asc_add_scalar(number, number, (int32_t)first, m);
    asc_scatter(to, byte, di_as<vector_uint32_t>(number), head);
}
// E4M3 codes of n elements, and the scale bytes of their groups in 32-bit words.
__simd_vf__ inline void di_encode8(DiFormat f, __ubuf__ float* x, __ubuf__ uint8_t* codes, __ubuf__ uint32_t* scales,
                                   uint32_t n, uint32_t group) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float v, a, q, s;
        vector_uint32_t byte;
        asc_loadalign(v, x + c * 64);
        asc_abs(a, v, m);
        a = di_group_max(a, group, n - c * 64, m);
        di_scale(f, a, byte, s, m);
        asc_div(q, v, s, m);
        asc_storealign_pack_quarter(codes + c * 64, di_code(f, q, m), m);
        di_store_scales(scales, byte, group, c * 64 / group, m);
    }
}
// E2M1 codes of n elements, the even one of a pair in the low half of its byte.
__simd_vf__ inline void di_encode4(DiFormat f, __ubuf__ float* x, __ubuf__ uint8_t* codes, __ubuf__ uint32_t* scales,
                                   uint32_t n, uint32_t group) {
    uint32_t left = n / 2;
    const uint16_t chunks = (n + 127) / 128;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float even, odd, a, b, q, s;
        vector_uint32_t byte, low, high;
        asc_loadalign_deintlv(even, odd, x + c * 128);
        asc_abs(a, even, m);
        asc_abs(b, odd, m);
        asc_max(a, a, b, m);
        a = di_group_max(a, group / 2, n / 2 - c * 64, m);
        di_scale(f, a, byte, s, m);
        asc_div(q, even, s, m);
        low = di_to_e2m1(q, m);
        asc_div(q, odd, s, m);
        high = di_to_e2m1(q, m);
        asc_shiftleft_scalar(high, high, 4, m);
        asc_or(low, low, high, m);
        asc_storealign_pack_quarter(codes + c * 64, low, m);
        di_store_scales(scales, byte, group / 2, c * 128 / group, m);
    }
}
// 32-bit words to bytes.
__simd_vf__ inline void di_pack_bytes(__ubuf__ uint32_t* x, __ubuf__ uint8_t* y, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_uint32_t v;
        asc_loadalign(v, x + c * 64);
        asc_storealign_pack_quarter(y + c * 64, v, m);
    }
}
// Scale bytes to values.
__simd_vf__ inline void di_decode_scales(DiFormat f, __ubuf__ uint8_t* bytes, __ubuf__ float* scales, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_uint32_t b;
        asc_loadalign_unpack4(b, bytes + c * 64);
        asc_storealign(scales + c * 64, di_scale_value(f, b, m), m);
    }
}
// Scales of elements 64 c + lane; `shift`: log2 of a group's lanes.
DI_V vector_float di_scales_of(__ubuf__ float* scales, uint32_t c, uint32_t shift, vector_bool m) {
    vector_int32_t at, number;
    vector_float s;
    asc_arange(at, (int32_t)(c * 64));
    asc_shiftright_scalar(number, at, shift, m);
    asc_gather(s, scales, di_as<vector_uint32_t>(number), m);
    return s;
}
__simd_vf__ inline void di_decode8(__ubuf__ uint8_t* codes, __ubuf__ float* scales, __ubuf__ float* y, uint32_t n,
                                   uint32_t shift) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_uint32_t b;
        vector_float v;
        asc_loadalign_unpack4(b, codes + c * 64);
        asc_mul(v, di_e4m3(b, m), di_scales_of(scales, c, shift, m), m);
        asc_storealign(y + c * 64, v, m);
    }
}
__simd_vf__ inline void di_decode4(__ubuf__ uint8_t* codes, __ubuf__ float* scales, __ubuf__ float* y, uint32_t n,
                                   uint32_t shift) {
    uint32_t left = n / 2;
    const uint16_t chunks = (n + 127) / 128;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_uint32_t b, low, high, k;
        vector_float s, even, odd;
        asc_loadalign_unpack4(b, codes + c * 64);
        asc_duplicate_scalar(k, (uint32_t)15u, m);
        asc_and(low, b, k, m);
        asc_shiftright_scalar(high, b, 4, m);
        s = di_scales_of(scales, c, shift - 1, m);
        asc_mul(even, di_e2m1(low, m), s, m);
        asc_mul(odd, di_e2m1(high, m), s, m);
        di_store_pairs(y + c * 128, even, odd, n / 2 - c * 64, m);
    }
}
// bf16 and f32 arrays.
__simd_vf__ inline void di_round_array(__ubuf__ float* x, __ubuf__ float* y, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float v;
        asc_loadalign(v, x + c * 64);
        asc_storealign(y + c * 64, di_round(v, m), m);
    }
}
__simd_vf__ inline void di_widen(__ubuf__ uint16_t* x, __ubuf__ float* y, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float v;
        di_load(v, x + c * 64);
        asc_storealign(y + c * 64, v, m);
    }
}
template <class T>
__simd_vf__ inline void di_narrow(__ubuf__ float* x, __ubuf__ T* y, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float v;
        asc_loadalign(v, x + c * 64);
        di_store(y + c * 64, v, m);
    }
}

// ---- rotations, selections -------------------------------------------------------------------------------------------
// Turns `heads` rows of `width`: pairs of the last 2 n features, sign -1 backwards.
__simd_vf__ inline void di_rotate(__ubuf__ float* x, __ubuf__ float* cosines, __ubuf__ float* sines, __ubuf__ float* y,
                                  uint32_t heads, uint32_t width, uint32_t n, float sign) {
    const uint32_t still = width - 2 * n;
    for (uint16_t h = 0; h < heads; ++h) {
        uint32_t left = still;
        for (uint16_t c = 0; c < (still + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float v;
            asc_loadalign(v, x + h * width + c * 64);
            asc_storealign(y + h * width + c * 64, v, m);
        }
        left = n;
        for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float even, odd, co, si, a, b, p, q;
            asc_loadalign_deintlv(even, odd, x + h * width + still + c * 128);
            asc_loadalign(co, cosines + c * 64);
            asc_loadalign(si, sines + c * 64);
            asc_mul_scalar(si, si, sign, m);
            asc_mul(a, even, co, m);
            asc_mul(b, odd, si, m);
            asc_sub(p, a, b, m);
            asc_mul(a, odd, co, m);
            asc_mul(b, even, si, m);
            asc_add(q, a, b, m);
            di_store_pairs(y + h * width + still + c * 128, p, q, n - c * 64, m);
        }
    }
}
// The same for widths that do not keep rows or pairs aligned.
__simd_vf__ inline void di_rotate_steps(__ubuf__ float* x, __ubuf__ float* cosines, __ubuf__ float* sines, __ubuf__ float* y,
                                        uint32_t heads, uint32_t width, uint32_t n, float sign) {
    const uint32_t still = width - 2 * n;
    for (uint16_t h = 0; h < heads; ++h) {
        uint32_t left = still;
        for (uint16_t c = 0; c < (still + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float v;
            di_load_steps(v, x, h * width + c * 64, 1, m);
            di_store_steps(y, v, h * width + c * 64, 1, m);
        }
        left = n;
        for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float even, odd, co, si, a, b, p, q;
            const uint32_t at = h * width + still + c * 128;
            di_load_steps(even, x, at, 2, m);
            di_load_steps(odd, x, at + 1, 2, m);
            asc_loadalign(co, cosines + c * 64);
            asc_loadalign(si, sines + c * 64);
            asc_mul_scalar(si, si, sign, m);
            asc_mul(a, even, co, m);
            asc_mul(b, odd, si, m);
            asc_sub(p, a, b, m);
            asc_mul(a, odd, co, m);
            asc_mul(b, even, si, m);
            asc_add(q, a, b, m);
            di_store_steps(y, p, at, 2, m);
            di_store_steps(y, q, at + 1, 2, m);
        }
    }
}
// Numbers of the k largest of n (in `work`, which is used up), best first, ties to the lower one; -1 where fewer are
// above -inf.
__simd_vf__ inline void di_topk(__ubuf__ float* work, __ubuf__ int32_t* out, uint32_t n, uint32_t k) {
    const uint16_t chunks = (n + 63) / 64;
    vector_bool all = di_all();
    for (uint16_t j = 0; j < k; ++j) {
        vector_float best, top, every, none;
        vector_int32_t at, first, missing;
        asc_duplicate_scalar(best, -INFINITY, all);
        asc_duplicate_scalar(none, -INFINITY, all);
        asc_duplicate_scalar(at, (int32_t)0x7fffffff, all);
        asc_duplicate_scalar(missing, (int32_t)0x7fffffff, all);
        uint32_t left = n;
        for (uint16_t c = 0; c < chunks; ++c) {
            vector_bool m = asc_update_mask_b32(left), over;
            vector_float v;
            vector_int32_t lane;
            asc_loadalign(v, work + c * 64);
            asc_arange(lane, (int32_t)(c * 64));
            asc_gt(over, v, best, m);
            asc_select(best, v, best, over);
            asc_select(at, lane, at, over);
        }
        asc_reduce_max(top, best, all);
        asc_duplicate(every, top, all);
        vector_bool equal, low;
        asc_eq(equal, best, every, all);
        asc_select(at, at, missing, equal);
        asc_reduce_min(first, at, all);
        asc_eq_scalar(low, first, (int32_t)0x7fffffff, all);
        vector_int32_t minus, chosen;
        asc_duplicate_scalar(minus, (int32_t)-1, all);
        asc_select(chosen, minus, first, low);
        asc_storealign_1st(out + j, chosen);
        vector_bool one = di_lanes(0, 1, all), found;
        asc_lt_scalar(found, first, (int32_t)0x7fffffff, one);
        asc_scatter(work, none, di_as<vector_uint32_t>(first), found);
        asc_mem_bar(VST_VLD);
    }
}
__simd_vf__ inline void di_copy(__ubuf__ float* x, __ubuf__ float* y, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float v;
        asc_loadalign(v, x + c * 64);
        asc_storealign(y + c * 64, v, m);
    }
}
// out[i] = values[at[i]]
__simd_vf__ inline void di_take(__ubuf__ float* values, __ubuf__ int32_t* at, __ubuf__ float* out, uint32_t k) {
    uint32_t left = k;
    const uint16_t chunks = (k + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_int32_t i;
        vector_float v;
        asc_loadalign(i, at + c * 64);
        asc_gather(v, values, di_as<vector_uint32_t>(i), m);
        asc_storealign(out + c * 64, v, m);
    }
}
// One row of a softmax pool: `first` starts the running largest gates, sums of weights and of weighted values.
__simd_vf__ inline void di_pool_top(__ubuf__ float* gates, __ubuf__ float* top, uint32_t n, int32_t first) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float g, t;
        asc_loadalign(g, gates + c * 64);
        if (!first) {
            asc_loadalign(t, top + c * 64);
            asc_max(g, g, t, m);
        }
        asc_storealign(top + c * 64, g, m);
    }
}
__simd_vf__ inline void di_pool_add(__ubuf__ float* values, __ubuf__ float* gates, __ubuf__ float* top,
                                    __ubuf__ float* below, __ubuf__ float* sum, uint32_t n, int32_t first) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float g, t, v, b, s, e;
        asc_loadalign(g, gates + c * 64);
        asc_loadalign(t, top + c * 64);
        asc_loadalign(v, values + c * 64);
        asc_sub(g, g, t, m);
        asc_exp(e, g, m);
        asc_mul(v, v, e, m);
        if (!first) {
            asc_loadalign(b, below + c * 64);
            asc_loadalign(s, sum + c * 64);
            asc_add(e, e, b, m);
            asc_add(v, v, s, m);
        }
        asc_storealign(below + c * 64, e, m);
        asc_storealign(sum + c * 64, v, m);
    }
}
__simd_vf__ inline void di_quotient(__ubuf__ float* a, __ubuf__ float* b, __ubuf__ float* y, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float v, d;
        asc_loadalign(v, a + c * 64);
        asc_loadalign(d, b + c * 64);
        asc_div(v, v, d, m);
        asc_storealign(y + c * 64, v, m);
    }
}
// di_fill_array: n copies of v.
__simd_vf__ inline void di_fill_array(__ubuf__ float* y, float v, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    vector_float x;
    asc_duplicate_scalar(x, v, di_all());
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        asc_storealign(y + c * 64, x, m);
    }
}

// The sum (times share) or the largest of 64 lanes.
__simd_vf__ inline void di_fold_sum(__ubuf__ float* x, __ubuf__ float* y, float share) {
    vector_bool all = di_all();
    vector_float v;
    asc_loadalign(v, x);
    asc_reduce_sum(v, v, all);
    asc_mul_scalar(v, v, share, all);
    asc_storealign_1st(y, v);
}
__simd_vf__ inline void di_fold_max(__ubuf__ float* x, __ubuf__ float* y, float) {
    vector_bool all = di_all();
    vector_float v;
    asc_loadalign(v, x);
    asc_reduce_max(v, v, all);
    asc_storealign_1st(y, v);
}
// The place of the largest of a long row: start, a piece of it, end. 0 where nothing is above -inf.
__simd_vf__ inline void di_best_start(__ubuf__ float* best, __ubuf__ int32_t* at) {
    vector_bool all = di_all();
    vector_float x;
    vector_int32_t i;
    asc_duplicate_scalar(x, -INFINITY, all);
    asc_duplicate_scalar(i, (int32_t)0x7fffffff, all);
    asc_storealign(best, x, all);
    asc_storealign(at, i, all);
}
__simd_vf__ inline void di_best_more(__ubuf__ float* x, __ubuf__ float* best, __ubuf__ int32_t* at, uint32_t n,
                                     int32_t first) {
    vector_bool all = di_all();
    vector_float top;
    vector_int32_t place;
    asc_loadalign(top, best);
    asc_loadalign(place, at);
    uint32_t left = n;
    for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
        vector_bool m = asc_update_mask_b32(left), over;
        vector_float v;
        vector_int32_t lane;
        asc_loadalign(v, x + c * 64);
        asc_arange(lane, first + (int32_t)(c * 64));
        asc_gt(over, v, top, m);
        asc_select(top, v, top, over);
        asc_select(place, lane, place, over);
    }
    asc_storealign(best, top, all);
    asc_storealign(at, place, all);
}
__simd_vf__ inline void di_best_end(__ubuf__ float* best, __ubuf__ int32_t* at) {
    vector_bool all = di_all(), equal, none;
    vector_float x, top, every;
    vector_int32_t place, missing, first, zero;
    asc_loadalign(x, best);
    asc_loadalign(place, at);
    asc_reduce_max(top, x, all);
    asc_duplicate(every, top, all);
    asc_eq(equal, x, every, all);
    asc_duplicate_scalar(missing, (int32_t)0x7fffffff, all);
    asc_select(place, place, missing, equal);
    asc_reduce_min(first, place, all);
    asc_eq(none, first, missing, all);
    asc_duplicate_scalar(zero, (int32_t)0, all);
    asc_select(first, zero, first, none);
    asc_storealign_1st(at, first);
}

#endif
