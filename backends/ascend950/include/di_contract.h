// Contractions: weights and activations on their way into L1, expanded to the element of the product where they are
// stored as codes, and results on their way out of L0C.
#ifndef DI_CONTRACT_H
#define DI_CONTRACT_H
#include "di_kernel.h"

DI_V void di_place(__ubuf__ uint16_t* p, vector_float x, vector_bool m) {
    asc_storealign_pack(p, di_bf16_bits(x, m), di_all());
}
DI_V void di_place(__ubuf__ float* p, vector_float x, vector_bool m) { asc_storealign(p, x, di_all()); }
// Pairs in order: two bf16 make a word.
DI_V void di_place_pairs(__ubuf__ uint16_t* p, vector_float even, vector_float odd, uint32_t, vector_bool m) {
    vector_uint32_t high, word;
    asc_shiftleft_scalar(high, di_bf16_bits(odd, m), 16, m);
    asc_or(word, di_bf16_bits(even, m), high, m);
    asc_storealign((__ubuf__ uint32_t*)p, word, di_all());
}
DI_V void di_place_pairs(__ubuf__ float* p, vector_float even, vector_float odd, uint32_t pairs, vector_bool m) {
    di_store_pairs(p, even, odd, pairs, m);
}

// Rows of `wide` elements, of which `take` are there; the others become 0. Scales: [blocks of 2^down rows][64], a
// scale for 2^across elements; the first row is number `within` of its block.
template <class T>
__simd_vf__ inline void di_expand8(__ubuf__ uint8_t* codes, __ubuf__ float* scales, __ubuf__ T* out, uint32_t rows,
                                   uint32_t take, uint32_t wide, uint32_t within, uint32_t down, uint32_t across) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = take;
        __ubuf__ float* mine = scales + ((within + r) >> down) * 64;
        for (uint16_t c = 0; c < wide / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_uint32_t b;
            vector_float v;
            asc_loadalign_unpack4(b, codes + r * wide + c * 64);
            asc_mul(v, di_e4m3(b, m), di_scales_of(mine, c, across, m), m);
            di_place(out + r * wide + c * 64, v, m);
        }
    }
}
template <class T>
__simd_vf__ inline void di_expand4(__ubuf__ uint8_t* codes, __ubuf__ float* scales, __ubuf__ T* out, uint32_t rows,
                                   uint32_t take, uint32_t wide, uint32_t within, uint32_t down, uint32_t across) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = take / 2;
        __ubuf__ float* mine = scales + ((within + r) >> down) * 64;
        for (uint16_t c = 0; c < (wide + 127) / 128; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_uint32_t b, low, high, k;
            vector_float s, even, odd;
            asc_loadalign_unpack4(b, codes + r * (wide / 2) + c * 64);
            asc_duplicate_scalar(k, (uint32_t)15u, m);
            asc_and(low, b, k, m);
            asc_shiftright_scalar(high, b, 4, m);
            s = di_scales_of(mine, c, across - 1, m);
            asc_mul(even, di_e2m1(low, m), s, m);
            asc_mul(odd, di_e2m1(high, m), s, m);
            di_place_pairs(out + r * wide + c * 128, even, odd, take / 2 - c * 64, m);
        }
    }
}
// Pairs of E2M1 codes, a byte in each 16-bit lane, as E4M3 codes side by side in it. The bits of a magnitude, moved to
// the same place of the wider exponent and fraction, mean 2^-6 of it, subnormal ones too: scales make up for that.
enum { DI_WIDENED = 6 };
DI_V vector_uint16_t di_wide_codes(vector_uint16_t x, vector_bool m) {
    vector_uint16_t k, t, c, sign;
    asc_shiftleft_scalar(t, x, 4, m);
    asc_or(t, t, x, m);
    asc_duplicate_scalar(k, (uint16_t)0x0808, m);
    asc_and(sign, t, k, m);
    asc_shiftleft_scalar(sign, sign, 4, m);
    asc_duplicate_scalar(k, (uint16_t)0x0707, m);
    asc_and(c, t, k, m);
    asc_shiftleft_scalar(c, c, 2, m);
    asc_or(c, c, sign, m);
    return c;
}
// Whole rows of 256 codes two at a time: the codes in the low halves of the bytes, and those in the high halves.
__simd_vf__ inline void di_widen_codes(__ubuf__ uint8_t* codes, __ubuf__ uint8_t* out, uint32_t rows, uint32_t take,
                                       uint32_t wide) {
    vector_bool all = asc_create_mask_b16(PAT_ALL);
    vector_uint16_t low, high, low_sign, high_sign;
    asc_duplicate_scalar(low, (uint16_t)0x0707, all);
    asc_duplicate_scalar(high, (uint16_t)0x7070, all);
    asc_duplicate_scalar(low_sign, (uint16_t)0x0808, all);
    asc_duplicate_scalar(high_sign, (uint16_t)0x8080, all);
    const uint16_t pairs = take == 256 && wide == 256 ? (uint16_t)(rows / 2) : 0;
    for (uint16_t p = 0; p < pairs; ++p) {
        vector_uint16_t x, even, odd, sign;
        asc_loadalign(x, (__ubuf__ uint16_t*)(codes + p * 256));
        asc_and(even, x, low, all);
        asc_shiftleft_scalar(even, even, 2, all);
        asc_and(sign, x, low_sign, all);
        asc_shiftleft_scalar(sign, sign, 4, all);
        asc_or(even, even, sign, all);
        asc_and(odd, x, high, all);
        asc_shiftright_scalar(odd, odd, 2, all);
        asc_and(sign, x, high_sign, all);
        asc_or(odd, odd, sign, all);
        asc_storealign_intlv(out + p * 512, di_as<vector_uint8_t>(even), di_as<vector_uint8_t>(odd));
    }
    for (uint16_t r = pairs * 2; r < rows; ++r) {
        uint32_t left = take / 2;
        for (uint16_t c = 0; c < wide / 256; ++c) {
            vector_bool m = asc_update_mask_b16(left);
            vector_uint16_t x;
            asc_loadalign_unpack(x, codes + r * (wide / 2) + c * 128);
            asc_storealign((__ubuf__ uint16_t*)(out + r * wide + c * 256), di_wide_codes(x, m), all);
        }
    }
}
// Rows of bf16 as E4M3 codes, and the bytes of their scales laid out as the cube core takes them: 32 words for each
// 16 rows and 64 features, two a row.
__simd_vf__ inline void di_encode_rows(__ubuf__ uint16_t* x, __ubuf__ uint8_t* codes, __ubuf__ uint32_t* laid,
                                       uint32_t rows, uint32_t take, uint32_t wide) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = take;
        for (uint16_t c = 0; c < wide / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float v, a, s, q;
            vector_uint32_t byte;
            di_load(v, x + r * wide + c * 64);
            asc_abs(a, v, m);
            if (take > c * 64) a = di_group_max(a, 32, take - c * 64, m);
            di_scale(DI_MXFP8, a, byte, s, m);
            asc_div(q, v, s, m);
            asc_storealign_pack_quarter(codes + r * wide + c * 64, di_to_e4m3(q, m), di_all());
            di_store_scales(laid + ((r >> 4) * (wide / 64) + c) * 32 + (r & 15) * 2, byte, 32, 0, m);
        }
    }
}
// Scale bytes of rows of blocks, 32 bytes apart, as words; two rows at a time.
__simd_vf__ inline void di_words_of(__ubuf__ uint8_t* bytes, __ubuf__ uint32_t* words, uint32_t rows, uint32_t n) {
    const vector_bool all = di_all();
    vector_int32_t lane, k, at;
    vector_bool known, m;
    asc_arange(lane, 0);
    asc_duplicate_scalar(k, (int32_t)31, all);
    asc_and(at, lane, k, all);
    asc_lt_scalar(known, at, (int32_t)n, all);
    for (uint16_t r = 0; r < rows; r += 2) {
        vector_uint32_t b;
        asc_lt_scalar(m, lane, (int32_t)(32 * (rows - r)), known);
        asc_loadalign_unpack4(b, bytes + r * 32);
        asc_storealign(words + r * 32, b, m);
    }
}
// The same layout as above for the scales of weights, times 2^more; no numbers where no byte says that much.
__simd_vf__ inline void di_lay_scales(__ubuf__ uint32_t* words, __ubuf__ uint32_t* laid, uint32_t rows, uint32_t groups,
                                      uint32_t pairs, uint32_t within, uint32_t down, uint32_t across, uint32_t more) {
    // Eight rows of eight groups at a time: lane 8 r + g.
    const vector_bool all = di_all();
    vector_int32_t lane, g, mine, at, from, to, part, k;
    vector_bool m, inside;
    asc_arange(lane, 0);
    asc_duplicate_scalar(k, (int32_t)7, all);
    asc_and(g, lane, k, all);
    asc_shiftright_scalar(mine, lane, 3, all);
    asc_lt_scalar(inside, g, (int32_t)groups, all);
    asc_shiftright_scalar(from, g, (int16_t)(across - 5), all);
    asc_shiftright_scalar(to, g, 1, all);
    asc_shiftleft_scalar(to, to, 5, all);
    asc_duplicate_scalar(k, (int32_t)1, all);
    asc_and(part, g, k, all);
    asc_add(to, to, part, all);
    asc_duplicate_scalar(k, (int32_t)15, all);
    for (uint16_t r = 0; r < rows; r += 8) {
        vector_int32_t place;
        vector_uint32_t byte;
        asc_add_scalar(at, mine, (int32_t)r, all);
        asc_lt_scalar(m, at, (int32_t)rows, inside);
        asc_add_scalar(place, at, (int32_t)within, all);
        asc_shiftright_scalar(place, place, (int16_t)down, all);
        asc_shiftleft_scalar(place, place, 5, all);
        asc_add(place, place, from, all);
        asc_gather(byte, words, di_as<vector_uint32_t>(place), m);
        asc_add_scalar(byte, byte, more, m);
        asc_min_scalar(byte, byte, (uint32_t)255u, m);
        asc_and(place, at, k, all);
        asc_shiftleft_scalar(place, place, 1, all);
        asc_add(place, place, to, all);
        asc_add_scalar(place, place, (int32_t)((r >> 4) * pairs * 32), all);
        asc_scatter(laid, byte, di_as<vector_uint32_t>(place), m);
    }
}
// Elements as they lie, widened.
template <class S, class T>
__simd_vf__ inline void di_expand(__ubuf__ S* x, __ubuf__ T* out, uint32_t rows, uint32_t take, uint32_t wide) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = take;
        for (uint16_t c = 0; c < wide / 64; ++c) {
            vector_bool m = asc_update_mask_b32(left);
            vector_float v;
            di_load(v, x + r * wide + c * 64);
            asc_mul_scalar(v, v, 1.0f, m);  // lanes beyond the row become 0
            di_place(out + r * wide + c * 64, v, m);
        }
    }
}
// Scale bytes of `rows` blocks, 32 bytes apart, as values.
__simd_vf__ inline void di_expand_scales(__ubuf__ uint8_t* bytes, __ubuf__ float* scales, uint32_t rows, uint32_t n) {
    for (uint16_t r = 0; r < rows; ++r) {
        uint32_t left = n;
        vector_bool m = asc_update_mask_b32(left);
        vector_uint32_t b;
        asc_loadalign_unpack4(b, bytes + r * 32);
        asc_storealign(scales + r * 64, di_e8m0(b, m), m);
    }
}

// `rows` rows of `bytes` bytes from rows `pitch` bytes apart to rows `wide` bytes apart (a multiple of 32).
DI_INLINE void di_in_rows(__ubuf__ uint8_t* to, __gm__ uint8_t* from, uint32_t rows, uint32_t bytes, uint64_t pitch,
                          uint32_t wide) {
    asc_copy_gm2ub_align(to, from, rows, bytes, 0, 0, false, 0, pitch, wide);
}
DI_INLINE void di_out_rows(__gm__ uint8_t* to, __ubuf__ uint8_t* from, uint32_t rows, uint32_t bytes, uint64_t pitch,
                           uint32_t wide) {
    asc_copy_ub2gm_align(to, from, rows, bytes, 0, pitch, wide);
}
// Rows `first` .. first + rows - 1 of a matrix in L1 of `all` rows: from UB, row-major, `wide` bytes a row.
template <class T>
DI_INLINE void di_to_l1(__cbuf__ T* to, __ubuf__ T* from, uint32_t first, uint32_t rows, uint32_t all, uint32_t wide) {
    for (uint32_t c = 0; c < wide / 32; ++c) {
        asc_copy_ub2l1(to + (c * all + first) * (32 / sizeof(T)), from + c * (32 / sizeof(T)), rows, 1, wide / 32 - 1, 0);
    }
}
// Rows first .. of a matrix in L1 of `all` rows, from memory.
template <class T>
DI_INLINE void di_rows_to_l1(__cbuf__ T* to, __gm__ T* from, uint64_t pitch, uint32_t first, uint32_t rows, uint32_t all,
                             uint32_t columns) {
    asc_set_gm2l1_nz_para(1ull | 1ull << 16 | (uint64_t)all << 32);
    asc_copy_gm2l1_nd2nz(to + first * (32 / sizeof(T)), from, pitch, 0, rows, columns, 0, false);
}
template <class T>
DI_INLINE void di_zero_l1(__cbuf__ T* to, uint32_t bytes) {
    asc_fill_l1(to, (uint32_t)0, asc_fill_value_config{1, (uint16_t)(bytes / 32), 0});
}
// [m, n] of L0C with `padded` rows to UB: columns halved over both vector cores, `wide` elements to a row.
DI_INLINE void di_results(__ubuf__ float* to, __cc__ float* from, uint32_t n, uint32_t m, uint32_t wide, uint32_t padded) {
    asc_copy_l0c2ub(to, from, n, m, wide, padded, 2, false, 0, 0, NoQuant, 0, false, true, 0, 0, false, 0, false, false,
                    false, false);
}
// The same whole, to one of them.
DI_INLINE void di_result(__ubuf__ float* to, __cc__ float* from, uint32_t n, uint32_t m, uint32_t wide, uint32_t padded,
                         bool second) {
    asc_copy_l0c2ub(to, from, n, m, wide, padded, 0, second, 0, 0, NoQuant, 0, false, true, 0, 0, false, 0, false, false,
                    false, false);
}
// The same with rows halved over both.
DI_INLINE void di_result_rows(__ubuf__ float* to, __cc__ float* from, uint32_t n, uint32_t m, uint32_t wide,
                              uint32_t padded) {
    asc_copy_l0c2ub(to, from, n, m, wide, padded, 1, false, 0, 0, NoQuant, 0, false, true, 0, 0, false, 0, false, false,
                    false, false);
}
// Signals to both vector cores, and from both.
DI_INLINE void di_tell_vectors(pipe_t pipe, int id) {
    asc_sync_intra_arrive(pipe, id);
    asc_sync_intra_arrive(pipe, id + 16);
}
DI_INLINE void di_hear_vectors(pipe_t pipe, int id) {
    asc_sync_intra_wait(pipe, id);
    asc_sync_intra_wait(pipe, id + 16);
}

#endif
