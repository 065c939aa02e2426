// Index scores and selections. Scores become ordered 32-bit keys, 0 for what is never chosen; keys and the numbers of
// their entries lie side by side, and what is empty has key 0 and the largest number.
#ifndef DI_SCORE_H
#define DI_SCORE_H
#include "di_contract.h"

const int32_t DI_NOTHING = 0x7fffffff;

DI_V vector_uint32_t di_rank(vector_float x, vector_bool m) {
    vector_float y;
    vector_uint32_t bits, top, down, up, zero, key;
    vector_bool negative, real;
    asc_add_scalar(y, x, 0.0f, m);  // -0 and +0 are equal
    bits = di_as<vector_uint32_t>(y);
    asc_duplicate_scalar(top, (uint32_t)0x80000000u, m);
    asc_duplicate_scalar(zero, (uint32_t)0u, m);
    asc_not(down, bits, m);
    asc_or(up, bits, top, m);
    asc_ge(negative, bits, top, m);
    asc_select(key, down, up, negative);
    asc_gt_scalar(real, y, -INFINITY, m);
    asc_select(key, key, zero, real);
    return key;
}

// Scale bytes of `rows` records, 32 bytes apart, as values, 64 apart.
__simd_vf__ inline void di_index_scales(DiFormat f, __ubuf__ uint8_t* bytes, __ubuf__ float* scales, uint32_t rows,
                                        uint32_t n) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = n;
        vector_bool m = asc_update_mask_b32(left);
        vector_uint32_t b;
        asc_loadalign_unpack4(b, bytes + r * 32);
        asc_storealign(scales + r * 64, di_scale_value(f, b, m), m);
    }
}

// [n][wide] to [d][64]: a key in a lane.
__simd_vf__ inline void di_turn(__ubuf__ float* keys, __ubuf__ float* turned, uint32_t d, uint32_t wide, uint32_t n) {
    uint32_t left = n;
    vector_bool m = asc_update_mask_b32(left);
    for (uint16_t i = 0; i < d; ++i) {
        vector_float x;
        di_load_steps(x, keys, i, wide, m);
        asc_storealign(turned + i * 64, x, di_all());
    }
}

// Keys of the scores of up to 64 entries: the sum over heads, in order, of relu(q . k) w. `rounds`: each dot, each product
// and the sum is held in bf16.
__simd_vf__ inline void di_index_scores(__ubuf__ float* turned, __ubuf__ float* q, __ubuf__ float* w,
                                        __ubuf__ uint32_t* keys, __ubuf__ int32_t* numbers, uint32_t heads, uint32_t d,
                                        uint32_t rounds, int32_t first, uint32_t n) {
    const vector_bool all = di_all();
    uint32_t left = n;
    const vector_bool m = asc_update_mask_b32(left);
    vector_float total;
    asc_duplicate_scalar(total, 0.0f, all);
    for (uint16_t h = 0; h < heads; ++h) {
        vector_float dot, x, y;
        asc_duplicate_scalar(dot, 0.0f, all);
        for (uint16_t i = 0; i < d; ++i) {
            asc_loadalign_brc_elem(x, q + h * d + i);
            asc_loadalign(y, turned + i * 64);
            asc_mul(x, x, y, all);
            asc_add(dot, dot, x, all);
        }
        if (rounds) dot = di_round(dot, all);
        asc_relu(dot, dot, all);
        asc_loadalign_brc_elem(x, w + h);
        asc_mul(dot, dot, x, all);
        if (rounds) dot = di_round(dot, all);
        asc_add(total, total, dot, all);
    }
    if (rounds) total = di_round(total, all);
    vector_int32_t number, nothing;
    asc_arange(number, first);
    asc_duplicate_scalar(nothing, DI_NOTHING, all);
    asc_select(number, number, nothing, m);
    asc_storealign(keys, di_rank(total, m), all);
    asc_storealign(numbers, number, all);
}

// ---- selections ------------------------------------------------------------------------------------------------------
__simd_vf__ inline void di_pick_clear(__ubuf__ uint32_t* keys, __ubuf__ int32_t* numbers, uint32_t chunks) {
    const vector_bool all = di_all();
    vector_uint32_t zero;
    vector_int32_t nothing;
    asc_duplicate_scalar(zero, (uint32_t)0u, all);
    asc_duplicate_scalar(nothing, DI_NOTHING, all);
    for (uint16_t c = 0; c < chunks; ++c) {
        asc_storealign(keys + c * 64, zero, all);
        asc_storealign(numbers + c * 64, nothing, all);
    }
}
__simd_vf__ inline void di_pick_copy(__ubuf__ uint32_t* keys, __ubuf__ int32_t* numbers, __ubuf__ uint32_t* to,
                                     __ubuf__ int32_t* to_numbers, uint32_t chunks) {
    const vector_bool all = di_all();
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_uint32_t k;
        vector_int32_t n;
        asc_loadalign(k, keys + c * 64);
        asc_loadalign(n, numbers + c * 64);
        asc_storealign(to + c * 64, k, all);
        asc_storealign(to_numbers + c * 64, n, all);
    }
}
// The largest key of each block of entries; block number `last` is always taken.
__simd_vf__ inline void di_pick_blocks(__ubuf__ uint32_t* keys, __ubuf__ uint32_t* to, __ubuf__ int32_t* to_numbers,
                                       uint32_t blocks, uint32_t size, int32_t first, int32_t last) {
    const vector_bool all = di_all();
    uint32_t left = blocks;
    for (uint16_t c = 0; c < (blocks + 63) / 64; ++c) {
        const vector_bool m = asc_update_mask_b32(left);
        vector_int32_t lane, at, number, nothing;
        vector_uint32_t best, k, always;
        vector_bool newest;
        asc_arange(lane, (int32_t)(c * 64));
        asc_mul_scalar(at, lane, (int32_t)size, m);
        asc_duplicate_scalar(best, (uint32_t)0u, all);
        for (uint16_t e = 0; e < size; ++e) {
            asc_gather(k, keys, di_as<vector_uint32_t>(at), m);
            asc_max(best, best, k, m);
            asc_add_scalar(at, at, (int32_t)1, m);
        }
        asc_add_scalar(number, lane, first, m);
        asc_eq_scalar(newest, number, last, m);
        asc_duplicate_scalar(always, (uint32_t)0xff800000u, all);
        asc_select(best, always, best, newest);
        asc_duplicate_scalar(nothing, DI_NOTHING, all);
        asc_select(number, number, nothing, m);
        asc_storealign(to + c * 64, best, all);
        asc_storealign(to_numbers + c * 64, number, all);
    }
}
DI_V vector_int32_t di_ones(vector_bool m) {
    vector_int32_t one, zero, y;
    asc_duplicate_scalar(one, (int32_t)1, di_all());
    asc_duplicate_scalar(zero, (int32_t)0, di_all());
    asc_select(y, one, zero, m);
    return y;
}
DI_V vector_int32_t di_everywhere(vector_int32_t parts) {
    vector_int32_t sum, y;
    asc_reduce_sum(sum, parts, di_all());
    asc_duplicate(y, sum, di_all());
    return y;
}
// The k-th largest key, and of the entries that have it the largest number that is still taken: bit by bit, the most that
// leaves enough. [64] each.
__simd_vf__ inline void di_pick_bounds(__ubuf__ uint32_t* keys, __ubuf__ int32_t* numbers, __ubuf__ uint32_t* least,
                                       __ubuf__ int32_t* most, uint32_t chunks, uint32_t k) {
    const vector_bool all = di_all();
    vector_uint32_t t, bit, tried, x;
    vector_int32_t count, n, v, above;
    vector_bool hit, same, more;
    asc_duplicate_scalar(t, (uint32_t)0u, all);
    for (int32_t b = 31; b >= 0; --b) {
        asc_duplicate_scalar(bit, (uint32_t)1u << b, all);
        asc_or(tried, t, bit, all);
        asc_duplicate_scalar(count, (int32_t)0, all);
        for (uint16_t c = 0; c < chunks; ++c) {
            asc_loadalign(x, keys + c * 64);
            asc_ge(hit, x, tried, all);
            asc_add(count, count, di_ones(hit), all);
        }
        asc_ge_scalar(more, di_everywhere(count), (int32_t)k, all);
        asc_select(t, tried, t, more);
    }
    asc_duplicate_scalar(above, (int32_t)0, all);
    for (uint16_t c = 0; c < chunks; ++c) {
        asc_loadalign(x, keys + c * 64);
        asc_gt(hit, x, t, all);
        asc_add(above, above, di_ones(hit), all);
    }
    above = di_everywhere(above);
    asc_duplicate_scalar(v, (int32_t)0, all);
    for (int32_t b = 30; b >= 0; --b) {
        vector_int32_t next, step;
        asc_duplicate_scalar(step, (int32_t)1 << b, all);
        asc_or(next, v, step, all);
        asc_duplicate_scalar(count, (int32_t)0, all);
        for (uint16_t c = 0; c < chunks; ++c) {
            asc_loadalign(x, keys + c * 64);
            asc_loadalign(n, numbers + c * 64);
            asc_eq(same, x, t, all);
            asc_lt(hit, n, next, same);
            asc_add(count, count, di_ones(hit), all);
        }
        count = di_everywhere(count);
        asc_add(count, count, above, all);
        asc_lt_scalar(more, count, (int32_t)k, all);
        asc_select(v, next, v, more);
    }
    asc_storealign(least, t, all);
    asc_storealign(most, v, all);
}
// What is within the bounds, to the front of cleared memory.
__simd_vf__ inline void di_pick_keep(__ubuf__ uint32_t* keys, __ubuf__ int32_t* numbers, __ubuf__ uint32_t* least,
                                     __ubuf__ int32_t* most, __ubuf__ uint32_t* to, __ubuf__ int32_t* to_numbers,
                                     uint32_t chunks) {
    const vector_bool all = di_all();
    vector_uint32_t t, x, front;
    vector_int32_t v, n, taken, some, lane, at, numbered;
    vector_bool over, same, low, real, here;
    asc_loadalign(t, least);
    asc_loadalign(v, most);
    asc_duplicate_scalar(taken, (int32_t)0, all);
    asc_arange(lane, 0);
    for (uint16_t c = 0; c < chunks; ++c) {
        asc_loadalign(x, keys + c * 64);
        asc_loadalign(n, numbers + c * 64);
        asc_gt(over, x, t, all);
        asc_eq(same, x, t, all);
        asc_le(low, n, v, same);
        asc_gt_scalar(real, x, (uint32_t)0u, all);
        asc_mask_or(low, low, over, all);
        asc_mask_and(low, low, real, all);
        some = di_everywhere(di_ones(low));
        asc_squeeze(front, x, low);
        asc_squeeze(numbered, n, low);
        asc_add(at, lane, taken, all);
        asc_lt(here, lane, some, all);
        asc_scatter(to, front, di_as<vector_uint32_t>(at), here);
        asc_scatter(to_numbers, numbered, di_as<vector_uint32_t>(at), here);
        asc_add(taken, taken, some, all);
    }
}
// Numbers of the kept ones, the largest key first, ties to the lower number; -1 behind them. Each one's place is how many
// come before it.
__simd_vf__ inline void di_pick_order(__ubuf__ uint32_t* keys, __ubuf__ int32_t* numbers, __ubuf__ int32_t* out,
                                      uint32_t k, uint32_t chunks) {
    const vector_bool all = di_all(), one = asc_create_mask_b32(PAT_VL1);
    vector_int32_t none;
    asc_duplicate_scalar(none, (int32_t)-1, all);
    for (uint16_t c = 0; c < chunks; ++c) asc_storealign(out + c * 64, none, all);
    asc_mem_bar(VST_VST);
    for (uint16_t i = 0; i < k; ++i) {
        vector_uint32_t mine, x;
        vector_int32_t number, n, before;
        vector_bool over, same, low, real;
        asc_loadalign_brc_elem(mine, keys + i);
        asc_loadalign_brc_elem(number, numbers + i);
        asc_duplicate_scalar(before, (int32_t)0, all);
        for (uint16_t c = 0; c < chunks; ++c) {
            asc_loadalign(x, keys + c * 64);
            asc_loadalign(n, numbers + c * 64);
            asc_gt(over, x, mine, all);
            asc_eq(same, x, mine, all);
            asc_lt(low, n, number, same);
            asc_mask_or(low, low, over, all);
            asc_add(before, before, di_ones(low), all);
        }
        before = di_everywhere(before);
        asc_gt_scalar(real, mine, (uint32_t)0u, one);
        asc_scatter(out, number, di_as<vector_uint32_t>(before), real);
    }
}

// `n` records' parts of `bytes` bytes, entries j .. of the sequence, `pitch` bytes apart in UB.
DI_INLINE void di_entries(__ubuf__ uint8_t* to, uint32_t pitch, __gm__ uint8_t* base, int64_t stride,
                          __gm__ int32_t* blocks, int32_t block_tokens, int32_t ratio, int32_t record, int32_t part,
                          uint32_t bytes, int64_t j, int64_t n) {
    const int64_t per_block = block_tokens / ratio;
    for (int64_t done = 0; done < n;) {
        const int64_t run = di_min64(n - done, per_block - (j + done) % per_block);
        asc_copy_gm2ub_align(to + done * pitch, di_entry(base, stride, blocks, block_tokens, ratio, record, j + done) + part,
                             (uint32_t)run, bytes, 0, 0, false, 0, (uint64_t)record, pitch);
        done += run;
    }
}

#endif
