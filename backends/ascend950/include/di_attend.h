// Attention: keys decoded and turned for the cube cores, softmax on the vector cores.
#ifndef DI_ATTEND_H
#define DI_ATTEND_H
#include "di_contract.h"

// Scale bytes of `rows` records as values, 64 to a row.
__simd_vf__ inline void di_decode_scale_rows(DiFormat f, __ubuf__ uint8_t* bytes, __ubuf__ float* scales, uint32_t rows,
                                             uint32_t n, uint32_t pitch) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = n;
        vector_bool m = asc_update_mask_b32(left);
        vector_uint32_t b;
        asc_loadalign_unpack4(b, bytes + r * pitch);
        asc_storealign(scales + r * 64, di_scale_value(f, b, m), m);
    }
}
// Codes of `rows` records to f32 rows of `wide`.
__simd_vf__ inline void di_decode8_rows(__ubuf__ uint8_t* codes, __ubuf__ float* scales, __ubuf__ float* y, uint32_t rows,
                                        uint32_t n, uint32_t shift, uint32_t pitch, uint32_t wide) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = n;
        for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_uint32_t b;
            vector_float v;
            asc_loadalign_unpack4(b, codes + r * pitch + c * 64);
            asc_mul(v, di_e4m3(b, m), di_scales_of(scales + r * 64, c, shift, m), m);
            asc_storealign(y + r * wide + c * 64, v, m);
        }
    }
}
__simd_vf__ inline void di_decode4_rows(__ubuf__ uint8_t* codes, __ubuf__ float* scales, __ubuf__ float* y, uint32_t rows,
                                        uint32_t n, uint32_t shift, uint32_t pitch, uint32_t wide) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = n / 2;
        for (uint16_t c = 0; c < (n + 127) / 128; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_uint32_t b, low, high, k;
            vector_float s, even, odd;
            asc_loadalign_unpack4(b, codes + r * pitch + c * 64);
            asc_duplicate_scalar(k, (uint32_t)15u, m);
            asc_and(low, b, k, m);
            asc_shiftright_scalar(high, b, 4, m);
            s = di_scales_of(scales + r * 64, c, shift - 1, m);
            asc_mul(even, di_e2m1(low, m), s, m);
            asc_mul(odd, di_e2m1(high, m), s, m);
            di_store_pairs(y + r * wide + c * 128, even, odd, n / 2 - c * 64, m);
        }
    }
}
// Plain parts of `rows` records, `pitch` elements apart.
template <class S>
__simd_vf__ inline void di_widen_rows(__ubuf__ S* x, __ubuf__ float* y, uint32_t rows, uint32_t n, uint32_t pitch,
                                      uint32_t wide) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = n;
        for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float v;
            di_load(v, x + r * pitch + c * 64);
            di_store_steps(y + r * wide, v, c * 64, 1, m);
        }
    }
}
// Columns of `rows` rows become rows of 32: [n][32].
__simd_vf__ inline void di_turned_rows(__ubuf__ float* x, __ubuf__ float* y, uint32_t n, uint32_t wide, uint32_t rows) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = n;
        for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float v;
            asc_loadalign(v, x + r * wide + c * 64);
            di_store_steps(y, v, c * 64 * 32 + r, 32, m);
        }
    }
}
// The same as bf16: two rows of x are the halves of a word.
__simd_vf__ inline void di_turned_words(__ubuf__ float* x, __ubuf__ uint16_t* y, uint32_t n, uint32_t wide,
                                        uint32_t rows) {
    for (uint16_t r = 0; r < rows / 2; ++r) {
        uint32_t left = n;
        for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float a, b;
            vector_uint32_t high, word;
            asc_loadalign(a, x + (2 * r) * wide + c * 64);
            asc_loadalign(b, x + (2 * r + 1) * wide + c * 64);
            asc_shiftleft_scalar(high, di_bf16_bits(b, m), 16, m);
            asc_or(word, di_bf16_bits(a, m), high, m);
            di_store_steps((__ubuf__ float*)y, di_as<vector_float>(word), c * 64 * 16 + r, 16, m);
        }
    }
}
// Lanes of keys that count: the first `count`; of a selection those whose pick lies in 0 .. limit - 1.
DI_V vector_bool di_keys(uint32_t count, __ubuf__ int32_t* picks, int32_t limit, int32_t selected) {
    uint32_t left = count;
    vector_bool m = asc_update_mask_b32(left);
    if (selected) {
        vector_int32_t e;
        vector_bool low, high;
        asc_loadalign(e, picks);
        asc_ge_scalar(low, e, (int32_t)0, m);
        asc_lt_scalar(high, e, limit, m);
        asc_mask_and(m, low, high, m);
    }
    return m;
}
// top[h] = largest score so far.
__simd_vf__ inline void di_scores_top(__ubuf__ float* scores, __ubuf__ float* top, uint32_t heads, float scale,
                                      uint32_t count, __ubuf__ int32_t* picks, int32_t limit, int32_t selected) {
    vector_bool all = di_all(), m = di_keys(count, picks, limit, selected);
    for (uint16_t h = 0; h < heads; ++h) {
        vector_float x, low, t, most;
        asc_loadalign(x, scores + h * 64);
        asc_mul_scalar(x, x, scale, m);
        asc_duplicate_scalar(low, -1e30f, all);
        asc_select(x, x, low, m);
        asc_loadalign_brc_elem(t, top + h);
        asc_max(x, x, t, all);
        asc_reduce_max(most, x, all);
        asc_storealign_1st(top + h, most);
    }
}
// Weights exp(score - top) of 64 keys, and their sums.
template <class T>
__simd_vf__ inline void di_scores_weigh(__ubuf__ float* scores, __ubuf__ float* top, __ubuf__ float* below,
                                        __ubuf__ T* weights, uint32_t heads, float scale, uint32_t count,
                                        __ubuf__ int32_t* picks, int32_t limit, int32_t selected) {
    vector_bool all = di_all(), m = di_keys(count, picks, limit, selected);
    for (uint16_t h = 0; h < heads; ++h) {
        vector_float x, t, e, sum, old;
        asc_loadalign(x, scores + h * 64);
        asc_loadalign_brc_elem(t, top + h);
        asc_mul_scalar(x, x, scale, m);
        asc_sub(x, x, t, m);
        asc_exp(e, x, m);
        asc_reduce_sum(sum, e, all);
        asc_loadalign_brc_elem(old, below + h);
        asc_add(sum, sum, old, all);
        asc_storealign_1st(below + h, sum);
        di_place(weights + h * 64, e, m);
    }
}
// x rounded to bf16 where weights are f32 but rounded.
__simd_vf__ inline void di_start_softmax(__ubuf__ float* top, __ubuf__ float* below) {
    vector_float x;
    vector_bool all = di_all();
    asc_duplicate_scalar(x, -1e30f, all);
    asc_storealign(top, x, all);
    asc_duplicate_scalar(x, 0.0f, all);
    asc_storealign(below, x, all);
}
// Rows of results over the sums of their weights; sink: a score without a value.
__simd_vf__ inline void di_finish_softmax(__ubuf__ float* x, __ubuf__ float* top, __ubuf__ float* below,
                                          __ubuf__ float* sink, uint32_t heads, uint32_t wide, int32_t has_sink) {
    uint32_t left = heads;
    vector_bool some = asc_update_mask_b32(left);
    vector_float b, t, s;
    asc_loadalign(b, below);
    if (has_sink) {
        asc_loadalign(t, top);
        asc_loadalign(s, sink);
        asc_sub(s, s, t, some);
        asc_exp(s, s, some);
        asc_add(b, b, s, some);
    }
    b = di_recip(b, some);
    asc_storealign(below, b, some);
    asc_mem_bar(VST_VLD);
    for (uint16_t h = 0; h < heads; ++h) {
        vector_float share;
        asc_loadalign_brc_elem(share, below + h);
        left = wide;
        for (uint16_t c = 0; c < (wide + 63) / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float v;
            di_load_steps(v, x + h * wide, c * 64, 1, m);
            asc_mul(v, v, share, m);
            di_store_steps(x + h * wide, v, c * 64, 1, m);
        }
    }
}

#endif
