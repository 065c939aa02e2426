// The order of pairs of row and slot by expert.
#ifndef DI_GROUP_H
#define DI_GROUP_H
#include "di_kernel.h"

// The low words of 64-bit integers.
__simd_vf__ inline void di_low_words(__ubuf__ int32_t* x, __ubuf__ int32_t* y, uint32_t n) {
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left);
        vector_int32_t low, high;
        asc_loadalign_deintlv(low, high, x + c * 128);
        asc_storealign(y + c * 64, low, m);
    }
}
// counts[0] = picks of experts before `expert`.
__simd_vf__ inline void di_count_below(__ubuf__ int32_t* picks, __ubuf__ int32_t* counts, uint32_t n, int32_t expert) {
    vector_bool all = di_all();
    vector_int32_t total, one, sum;
    asc_duplicate_scalar(total, (int32_t)0, all);
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left), below;
        vector_int32_t e;
        asc_loadalign(e, picks + c * 64);
        asc_lt_scalar(below, e, expert, m);
        asc_duplicate_scalar(one, (int32_t)1, below);
        asc_add(total, total, one, all);
    }
    asc_reduce_sum(sum, total, all);
    asc_storealign_1st(counts, sum);
}
// mine = numbers (from `first`) of the picks of `expert`, counts[0] = how many.
__simd_vf__ inline void di_collect(__ubuf__ int32_t* picks, __ubuf__ int32_t* mine, __ubuf__ int32_t* counts, uint32_t n,
                                   int32_t expert, int32_t first) {
    vector_bool all = di_all();
    vector_int32_t at, one, sum, every;
    asc_duplicate_scalar(at, (int32_t)0, all);
    uint32_t left = n;
    const uint16_t chunks = (n + 63) / 64;
    for (uint16_t c = 0; c < chunks; ++c) {
        vector_bool m = asc_update_mask_b32(left), equal, front;
        vector_int32_t e, number, packed, lane, place;
        asc_loadalign(e, picks + c * 64);
        asc_eq_scalar(equal, e, expert, m);
        asc_arange(number, first + (int32_t)(c * 64));
        asc_squeeze(packed, number, equal);
        asc_duplicate_scalar(one, (int32_t)1, equal);
        asc_reduce_sum(sum, one, all);
        asc_duplicate(every, sum, all);
        asc_arange(lane, 0);
        asc_lt(front, lane, every, all);
        asc_add(place, at, lane, all);
        asc_scatter(mine, packed, di_as<vector_uint32_t>(place), front);
        asc_add(at, at, every, all);
    }
    asc_storealign_1st(counts, at);
}

#endif
