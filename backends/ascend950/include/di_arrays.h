// Whole arrays of a row: formats, widths, rotations.
#ifndef DI_ARRAYS_H
#define DI_ARRAYS_H

// ---- whole arrays ----------------------------------------------------------------------------------------------------
// The largest magnitude of each element's group among n elements, for register c of them. Groups of more than 64 elements
// are made of whole registers.
DI_V vector_float di_magnitudes(__ubuf__ float* x, uint32_t c, uint32_t n, uint32_t group) {
    const uint32_t span = group > 64 ? group / 64 : 1, first = c / span * span;
    vector_bool all = di_all();
    vector_float a, v;
    asc_duplicate_scalar(a, 0.0f, all);
    uint32_t left = n - first * 64;
    for (uint16_t r = 0; r < span && r * 64 < n - first * 64; ++r) {
        vector_bool m = asc_update_mask_b32(left);
        asc_loadalign(v, x + (first + r) * 64);
        asc_abs(v, v, m);
        asc_max(a, a, v, all);
    }
    return di_group_max(a, group, n - first * 64, all);
}
// The values n elements have once they are stored in groups.
__simd_vf__ inline void di_quantise(DiFormat f, __ubuf__ float* x, __ubuf__ float* y, uint32_t n, uint32_t group) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_float v, a, q, s;
        vector_uint32_t byte;
        asc_loadalign(v, x + c * 64);
        a = di_magnitudes(x, c, n, group);
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
        a = di_magnitudes(x, c, n, group);
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
