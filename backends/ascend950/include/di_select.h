// Scores of entries and the best k of them. A key orders like its score as an unsigned number, 0 is no entry; with 16
// bits for scores that bf16 holds.
#ifndef DI_SELECT_H
#define DI_SELECT_H
#include "di_attend.h"

DI_V vector_uint32_t di_key(vector_float x, uint32_t shift, vector_bool m) {
    vector_float y;
    vector_uint32_t bits, flipped, high, sign;
    vector_bool negative;
    asc_add_scalar(y, x, 0.0f, m);  // -0 becomes 0
    bits = di_as<vector_uint32_t>(y);
    asc_shiftright_scalar(sign, bits, 31, m);
    asc_eq_scalar(negative, sign, (uint32_t)1u, m);
    asc_not(flipped, bits, m);
    asc_duplicate_scalar(high, (uint32_t)0x80000000u, m);
    asc_or(bits, bits, high, m);
    asc_select(bits, flipped, bits, negative);
    asc_shiftright_scalar(bits, bits, (int16_t)shift, m);
    vector_float low;
    vector_bool none;
    asc_duplicate_scalar(low, -INFINITY, m);
    asc_eq(none, x, low, m);
    asc_duplicate_scalar(sign, (uint32_t)0u, m);
    asc_select(bits, sign, bits, none);
    return bits;
}
// Numbers of 64 entries: first + lane, or lane (first + lane) % within of a listed block. Valid: listed, below visible.
DI_V vector_bool di_numbers(vector_int32_t& number, int32_t first, uint32_t count, int32_t visible,
                            __ubuf__ int32_t* listed, uint32_t shift, int32_t has_list) {
    uint32_t left = count;
    vector_bool m = asc_update_mask_b32(left), ok, low;
    asc_arange(number, first);
    if (has_list) {
        vector_int32_t block, within, k, base;
        asc_shiftright_scalar(block, number, (int16_t)shift, m);
        asc_duplicate_scalar(k, (int32_t)((1u << shift) - 1), m);
        asc_and(within, number, k, m);
        asc_gather(base, listed, di_as<vector_uint32_t>(block), m);
        asc_ge_scalar(low, base, (int32_t)0, m);
        asc_shiftleft_scalar(base, base, (int16_t)shift, m);
        asc_add(number, base, within, m);
        asc_mask_and(m, m, low, di_all());
    }
    asc_lt_scalar(ok, number, visible, m);
    return ok;
}
// scores[0 .. 63] of a tile: sum over heads of relu(product) x weight.
__simd_vf__ inline void di_score(__ubuf__ float* products, __ubuf__ float* weights, __ubuf__ float* scores,
                                 __ubuf__ int32_t* numbers, uint32_t heads, uint32_t pitch, int32_t rounds, int32_t first,
                                 uint32_t count, int32_t visible, __ubuf__ int32_t* listed, uint32_t shift,
                                 int32_t has_list) {
    vector_bool all = di_all();
    vector_int32_t number;
    vector_bool ok = di_numbers(number, first, count, visible, listed, shift, has_list);
    vector_float total, none;
    asc_duplicate_scalar(total, 0.0f, all);
    asc_duplicate_scalar(none, -INFINITY, all);
    for (uint16_t h = 0; h < heads; ++h) {
        vector_float x, w;
        asc_loadalign(x, products + h * pitch);
        asc_loadalign_brc_elem(w, weights + h);
        if (rounds) x = di_round(x, all);
        asc_relu(x, x, all);
        asc_mul(x, x, w, all);
        if (rounds) x = di_round(x, all);
        asc_add(total, total, x, all);
    }
    if (rounds) total = di_round(total, all);
    asc_select(total, total, none, ok);
    asc_storealign(scores, total, all);
    asc_storealign(numbers, number, all);
}
// Keys and numbers of `n` entries (a multiple of 64 lies there) behind the best so far.
__simd_vf__ inline void di_enter(__ubuf__ float* scores, __ubuf__ int32_t* numbers, __ubuf__ uint32_t* keys,
                                 __ubuf__ int32_t* places, uint32_t n, uint32_t shift) {
    vector_bool all = di_all();
    for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
        vector_float x;
        vector_int32_t at;
        asc_loadalign(x, scores + c * 64);
        asc_loadalign(at, numbers + c * 64);
        asc_storealign(keys + c * 64, di_key(x, shift, all), all);
        asc_storealign(places + c * 64, at, all);
    }
}
// The same for the largest scores of blocks of `block` entries from block `first` on; the newest block comes first.
__simd_vf__ inline void di_enter_blocks(__ubuf__ float* scores, __ubuf__ uint32_t* keys, __ubuf__ int32_t* places,
                                        uint32_t n, uint32_t block, int32_t first, int32_t newest, uint32_t shift) {
    vector_bool all = di_all();
    uint32_t left = n;
    for (uint16_t c = 0; c < (n + 63) / 64; ++c) {
        vector_bool m = asc_update_mask_b32(left), last;
        vector_float most, x;
        vector_int32_t at;
        asc_duplicate_scalar(most, -INFINITY, all);
        for (uint16_t b = 0; b < block; ++b) {
            di_load_steps(x, scores, c * 64 * block + b, block, m);
            asc_max(x, x, most, m);
            asc_select(most, x, most, m);
        }
        asc_arange(at, first + (int32_t)(c * 64));
        asc_eq_scalar(last, at, newest, m);
        asc_duplicate_scalar(x, INFINITY, all);
        asc_select(most, x, most, last);
        asc_storealign(keys + c * 64, di_key(most, shift, all), all);
        asc_storealign(places + c * 64, at, all);
    }
}
DI_V vector_int32_t di_sum_everywhere(vector_int32_t x) {
    vector_int32_t sum, every;
    asc_reduce_sum(sum, x, di_all());
    asc_duplicate(every, sum, di_all());
    return every;
}
// The `need`-th largest of n numbers of `bits` bits, a byte at a time from the top: how often each value of the byte
// comes among those that agree so far, then the value with which the counts reach `need`, which falls to the rank among
// its equals. The numbers are the keys, or with `among` ~place of the entries whose key is `same`.
DI_V vector_uint32_t di_kth(__ubuf__ uint32_t* keys, __ubuf__ int32_t* places, vector_uint32_t same, int32_t among,
                            __ubuf__ uint16_t* bins, uint32_t n, vector_int32_t& need, uint32_t bits) {
    vector_bool all = di_all(), firsts, m, counted;
    vector_uint32_t found, prefix, k, value, key, byte;
    vector_int32_t v, bit, candidate, lane, counts, total, none;
    asc_duplicate_scalar(k, (uint32_t)1u, all);
    asc_eq_scalar(firsts, di_as<vector_uint8_t>(k), (uint8_t)1, asc_create_mask_b8(PAT_ALL));  // low bytes of the lanes
    asc_duplicate_scalar(k, (uint32_t)255u, all);
    asc_duplicate_scalar(found, (uint32_t)0u, all);
    asc_duplicate_scalar(none, (int32_t)0, all);
    for (uint16_t b = 0; b < bits / 8; ++b) {
        const int16_t shift = (int16_t)(bits - 8 - b * 8);
        vector_uint16_t low, high;
        asc_duplicate_scalar(low, (uint16_t)0, asc_create_mask_b16(PAT_ALL));
        asc_duplicate_scalar(high, (uint16_t)0, asc_create_mask_b16(PAT_ALL));
        asc_shiftright_scalar(prefix, found, shift, all);
        for (uint16_t c = 0; c < n / 64; ++c) {
            asc_loadalign(key, keys + c * 64);
            value = key;
            m = all;
            if (among) {
                asc_loadalign(lane, places + c * 64);
                asc_not(value, di_as<vector_uint32_t>(lane), all);
                asc_eq(m, key, same, all);
            }
            asc_shiftright_scalar(value, value, shift, all);
            asc_and(byte, value, k, all);
            asc_xor(value, value, byte, all);
            asc_eq(counted, value, prefix, m);
            asc_mask_and(counted, counted, firsts, asc_create_mask_b8(PAT_ALL));
            asc_frequency_histogram_bin0(low, di_as<vector_uint8_t>(byte), counted);
            asc_frequency_histogram_bin1(high, di_as<vector_uint8_t>(byte), counted);
        }
        asc_storealign(bins, low, asc_create_mask_b16(PAT_ALL));
        asc_storealign(bins + 128, high, asc_create_mask_b16(PAT_ALL));
        asc_mem_bar(VST_VLD);
        v = none;
        for (uint16_t step = 0; step <= 8; ++step) {  // the last one: how many are above
            asc_duplicate_scalar(bit, (int32_t)(step < 8 ? 128 >> step : 1), all);
            if (step < 8) {
                asc_or(candidate, v, bit, all);
            } else {
                asc_add(candidate, v, bit, all);
            }
            total = none;
            for (uint16_t q = 0; q < 4; ++q) {
                asc_loadalign_unpack(byte, bins + q * 64);
                asc_arange(lane, (int32_t)(q * 64));
                asc_ge(m, lane, candidate, all);
                asc_select(counts, di_as<vector_int32_t>(byte), none, m);
                asc_add(total, total, counts, all);
            }
            total = di_sum_everywhere(total);
            if (step < 8) {
                asc_ge(m, total, need, all);
                asc_select(v, candidate, v, m);
            }
        }
        asc_sub(need, need, total, all);
        asc_shiftleft_scalar(byte, di_as<vector_uint32_t>(v), shift, all);
        asc_or(found, found, byte, all);
        asc_mem_bar(VLD_VST);
    }
    return found;
}
// The k-th largest of n keys, and the number up to which entries of that key are among the best k.
__simd_vf__ inline void di_threshold(__ubuf__ uint32_t* keys, __ubuf__ int32_t* places, __ubuf__ uint32_t* threshold,
                                     __ubuf__ uint16_t* bins, uint32_t n, uint32_t k, uint32_t bits) {
    vector_bool all = di_all();
    vector_uint32_t t, upto;
    vector_int32_t need;
    asc_duplicate_scalar(t, (uint32_t)0u, all);
    asc_duplicate_scalar(need, (int32_t)k, all);
    t = di_kth(keys, places, t, 0, bins, n, need, bits);
    upto = di_kth(keys, places, t, 1, bins, n, need, 32);
    asc_not(upto, upto, all);
    asc_storealign(threshold, t, all);
    asc_storealign(threshold + 64, upto, all);
}
// Those beyond the threshold move to the front of the room behind; what is left of `kept` there becomes no entry.
__simd_vf__ inline void di_shrink(__ubuf__ uint32_t* keys, __ubuf__ int32_t* places, __ubuf__ uint32_t* threshold,
                                  __ubuf__ uint32_t* best, __ubuf__ int32_t* best_places, uint32_t n, uint32_t kept) {
    vector_bool all = di_all();
    vector_uint32_t t, key, zero;
    vector_int32_t upto, at, position, one, every, lane;
    asc_duplicate_scalar(zero, (uint32_t)0u, all);
    asc_duplicate_scalar(position, (int32_t)0, all);
    for (uint16_t c = 0; c < kept / 64; ++c) {
        asc_storealign(best + c * 64, zero, all);
        asc_storealign(best_places + c * 64, di_as<vector_int32_t>(zero), all);
    }
    asc_mem_bar(VST_VST);
    asc_loadalign(t, threshold);
    vector_uint32_t bits;
    asc_loadalign(bits, threshold + 64);
    upto = di_as<vector_int32_t>(bits);
    for (uint16_t c = 0; c < n / 64; ++c) {
        vector_bool over, same, low, real, take, front;
        vector_uint32_t packed_key, place;
        vector_int32_t packed_at;
        asc_loadalign(key, keys + c * 64);
        asc_loadalign(at, places + c * 64);
        asc_gt(over, key, t, all);
        asc_eq(same, key, t, all);
        asc_le(low, at, upto, same);
        asc_ne_scalar(real, key, (uint32_t)0u, low);
        asc_mask_or(take, over, real, all);
        asc_squeeze(packed_key, key, take);
        asc_squeeze(packed_at, at, take);
        asc_duplicate_scalar(one, (int32_t)1, take);
        every = di_sum_everywhere(one);
        asc_arange(lane, 0);
        asc_lt(front, lane, every, all);
        asc_add(lane, lane, position, all);
        place = di_as<vector_uint32_t>(lane);
        asc_scatter(best, packed_key, place, front);
        asc_scatter(best_places, packed_at, place, front);
        asc_add(position, position, every, all);
    }
}
__simd_vf__ inline void di_keep(__ubuf__ uint32_t* from, __ubuf__ int32_t* places, __ubuf__ uint32_t* to,
                                __ubuf__ int32_t* to_places, uint32_t n) {
    vector_bool all = di_all();
    for (uint16_t c = 0; c < n / 64; ++c) {
        vector_uint32_t key;
        vector_int32_t at;
        asc_loadalign(key, from + c * 64);
        asc_loadalign(at, places + c * 64);
        asc_storealign(to + c * 64, key, all);
        asc_storealign(to_places + c * 64, at, all);
    }
}
// out = numbers of the best, the largest key first, ties to the lower number; -1 behind them.
__simd_vf__ inline void di_order(__ubuf__ uint32_t* keys, __ubuf__ int32_t* places, __ubuf__ int32_t* out, uint32_t n) {
    vector_bool all = di_all(), first = di_lanes(0, 1, all);
    vector_int32_t minus, zero;
    asc_duplicate_scalar(minus, (int32_t)-1, all);
    asc_duplicate_scalar(zero, (int32_t)0, all);
    for (uint16_t c = 0; c < n / 64; ++c) asc_storealign(out + c * 64, minus, all);
    asc_mem_bar(VST_VST);
    for (uint16_t i = 0; i < n; ++i) {
        vector_uint32_t mine, key;
        vector_int32_t number, at, rank, one;
        vector_bool over, same, lower, before, real;
        asc_loadalign_brc_elem(mine, keys + i);
        asc_loadalign_brc_elem(number, places + i);
        rank = zero;
        for (uint16_t c = 0; c < n / 64; ++c) {
            asc_loadalign(key, keys + c * 64);
            asc_loadalign(at, places + c * 64);
            asc_gt(over, key, mine, all);
            asc_eq(same, key, mine, all);
            asc_lt(lower, at, number, same);
            asc_mask_or(before, over, lower, all);
            asc_duplicate_scalar(one, (int32_t)1, before);
            asc_add(rank, rank, one, all);
        }
        rank = di_sum_everywhere(rank);
        asc_ne_scalar(real, mine, (uint32_t)0u, first);
        asc_scatter(out, number, di_as<vector_uint32_t>(rank), real);
    }
}

#endif
