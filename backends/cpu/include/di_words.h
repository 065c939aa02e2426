// Weights and rows as words of bf16 for the bf16 dot instruction. Both are cut into chunks of 128 features; inside a chunk
// each format has an order of its own, in which its codes become words with the fewest instructions, and the rows of a
// contraction are packed in that order.
#ifndef DI_WORDS_H
#define DI_WORDS_H
#include "di_codes.h"

#ifdef DI_DOT

namespace DI_ISA {

enum { DI_CHUNK = 128 };
enum { DI_AHEAD = 8192 };  // bytes of weights that are fetched ahead, into the second cache: the first one has too few misses
enum { DI_NATURAL = 0, DI_PLANES = 1 };  // orders inside a chunk

DI_INLINE void di_ahead(const void* p, int64_t by) { _mm_prefetch((const char*)p + by, _MM_HINT_T1); }

// ---- rows -------------------------------------------------------------------------------------------------------------
// 128 features; plane j holds the features 4 i + j: the order in which 16 bits of 4-bit codes are shifted out.
DI_INLINE void di_pack_planes(const uint16_t* x, uint16_t* out) {
    const __m512i turn = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2, 29, 25, 21, 17, 13, 9,
                                          5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    __m512i y[4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) y[q] = _mm512_permutexvar_epi16(turn, _mm512_loadu_si512(x + 32 * q));
    const __m512i a = _mm512_shuffle_i64x2(y[0], y[1], 0x44), b = _mm512_shuffle_i64x2(y[0], y[1], 0xee);
    const __m512i c = _mm512_shuffle_i64x2(y[2], y[3], 0x44), d = _mm512_shuffle_i64x2(y[2], y[3], 0xee);
    _mm512_store_si512(out, _mm512_shuffle_i64x2(a, c, 0x88));
    _mm512_store_si512(out + 32, _mm512_shuffle_i64x2(a, c, 0xdd));
    _mm512_store_si512(out + 64, _mm512_shuffle_i64x2(b, d, 0x88));
    _mm512_store_si512(out + 96, _mm512_shuffle_i64x2(b, d, 0xdd));
}

// m rows of K features into out: blocks of `width` rows, each [chunk][row][128]; features behind the last are 0. The rows of
// a block follow each other so that a register tile reads memory in order.
template <int K, int ORDER>
static void di_pack_rows(const uint16_t* const* x, int m, int width, uint16_t* out) {
    for (int first = 0; first < m; first += width) {
        const int rows = m - first < width ? m - first : width;
        for (int k = 0; k < K; k += DI_CHUNK) {
            for (int i = first; i < first + rows; ++i, out += DI_CHUNK) {
                alignas(64) uint16_t last[DI_CHUNK];
                const uint16_t* from = x[i] + k;
                if (k + DI_CHUNK > K) {
                    memset(last, 0, sizeof last);
                    memcpy(last, from, (K - k) * sizeof *last);
                    from = last;
                }
                if (ORDER == DI_PLANES) {
                    di_pack_planes(from, out);
                } else {
#pragma GCC unroll 4
                    for (int q = 0; q < 4; ++q) _mm512_store_si512(out + 32 * q, _mm512_loadu_si512(from + 32 * q));
                }
            }
        }
    }
}

// ---- scales: powers of two, added to the exponents of words ---------------------------------------------------------------
// Whether all of n scale bytes lie in low .. high. Outside, a scaled code would leave the normal numbers of bf16.
DI_INLINE bool di_scales_within(const uint8_t* s, int64_t n, uint8_t low, uint8_t high) {
    const __m512i most = _mm512_set1_epi8((char)(high - low)), from = _mm512_set1_epi8((char)low);
    __mmask64 bad = 0;
    for (int64_t i = 0; i < n; i += 64) {
        const __mmask64 some = n - i < 64 ? ((__mmask64)1 << (n - i)) - 1 : ~(__mmask64)0;
        const __m512i v = _mm512_sub_epi8(_mm512_maskz_loadu_epi8(some, s + i), from);
        bad |= _mm512_mask_cmpgt_epu8_mask(some, v, most);
    }
    return !bad;
}

// Scale bytes of a row of weights as what is added to the exponents of two words.
template <int BLOCKS>
struct DiScaleWords {
    alignas(64) int32_t words[(BLOCKS + 15) / 16 * 16];
    void fill(const uint8_t* s) {
        for (int i = 0; i < BLOCKS; ++i) words[i] = di_exponents(s[i]);
    }
};

// Rows of activations times powers of two: `n` packed rows of a chunk with 4 groups of 32 features, each with its own power.
// Adds to `bad` what leaves the normal numbers.
DI_INLINE void di_scale_chunk(const uint16_t* x, int n, const int32_t* exponents, uint16_t* out, __mmask32& bad) {
    const __m512i sign = _mm512_set1_epi16((short)0x8000), least = _mm512_set1_epi16(0x80);
    for (int i = 0; i < n; ++i, x += DI_CHUNK, out += DI_CHUNK) {
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) {
            const __m512i v = _mm512_load_si512(x + 32 * q), size = _mm512_andnot_si512(sign, v);
            const __mmask32 normal = _mm512_cmpge_epu16_mask(size, least);
            const __m512i y = _mm512_maskz_adds_epi16(normal, size, _mm512_set1_epi32(exponents[q]));
            bad |= _mm512_mask_cmpgt_epu16_mask(normal, _mm512_sub_epi16(y, least), _mm512_set1_epi16(0x7eff));
            _mm512_store_si512(out + 32 * q, _mm512_ternarylogic_epi32(y, v, sign, 0xf8));  // y | (v & sign)
        }
    }
}

// ---- weights ----------------------------------------------------------------------------------------------------------
// One column (a row of the stored matrix) of BYTES bytes; `ahead`: how far ahead of what is used memory is fetched. chunk(): adds the products of a chunk with M packed rows to acc: a dot of the
// chunk from zero, times its scales, plus what was there. words(): the chunk with its scales (after take_scales), in the
// same order.
// SHARED: columns with the same scales, if they are so many that scaling the rows instead of them pays, else 0.
template <class W>
struct DiWords {
    enum { FITS = 0 };
};

DI_INLINE __m512 di_dot(__m512 acc, __m512i w, const uint16_t* x) {
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_load_si512(x));
}

template <int K>
struct DiWords<DiWeightBf16<K>> {
    enum { FITS = K % 64 == 0, ORDER = DI_NATURAL, SHARED = 0, BYTES = 2 * K };
    struct Tables {};
    const uint16_t* row;
    int64_t ahead;
    DiWords(const DiWeightBf16<K>& w, int64_t n, int64_t by) : row(w.data + n * K), ahead(by) {}
    void take_scales(const DiWeightBf16<K>&, int64_t) {}
    static bool fits(const DiWeightBf16<K>&, int64_t, int) { return true; }

    template <int M, int N>
    DI_ALWAYS void chunk(const Tables&, int k, const uint16_t* x, __m512* acc) const {
        __m512 part[M];
#pragma GCC unroll 4
        for (int q = 0; q < N; q += 32) {
            di_ahead(row + k + q, ahead);
            const __m512i w = _mm512_loadu_si512(row + k + q);
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) part[i] = di_dot(q ? part[i] : _mm512_setzero_ps(), w, x + i * DI_CHUNK + q);
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) acc[i] = _mm512_add_ps(acc[i], part[i]);
    }
    template <int N>
    DI_ALWAYS void words(const Tables&, int k, uint16_t* out) const {
#pragma GCC unroll 4
        for (int q = 0; q < DI_CHUNK; q += 32) {
            di_ahead(row + k + q, ahead);
            _mm512_store_si512(out + q, q < N ? _mm512_loadu_si512(row + k + q) : _mm512_setzero_si512());
        }
    }
};

template <int K, int R, int C>
struct DiWords<DiWeightMxfp8<K, R, C>> {
    enum { BLOCKS = DiWeightMxfp8<K, R, C>::BLOCKS };
    enum { FITS = K % 64 == 0 && C % 32 == 0, ORDER = DI_NATURAL, SHARED = R >= 16 ? R : 0, COLUMNS = C, BYTES = K };
    using Tables = DiE4m3Tables;
    const uint8_t* row;
    int64_t ahead;
    DiScaleWords<BLOCKS> scales;
    static const uint8_t* scales_of(const DiWeightMxfp8<K, R, C>& w, int64_t n) { return w.scale + n / R * BLOCKS; }
    DiWords(const DiWeightMxfp8<K, R, C>& w, int64_t n, int64_t by) : row(w.data + n * K), ahead(by) {
        if (SHARED == 0) take_scales(w, n);
    }
    void take_scales(const DiWeightMxfp8<K, R, C>& w, int64_t n) { scales.fill(scales_of(w, n)); }
    static bool fits(const DiWeightMxfp8<K, R, C>& w, int64_t n0, int n) {
        return di_scales_within(scales_of(w, n0), ((n0 + n - 1) / R - n0 / R + 1) * BLOCKS, 10, 246);
    }
    // Features k .. k + 31 and k + 32 .. k + 63 without their scales.
    DI_ALWAYS void load(const Tables& t, int k, __m512i& a, __m512i& b) const {
        di_ahead(row + k, ahead);
        t.words(_mm512_loadu_si512(row + k), a, b);
    }
    // With SHARED the rows carry the scales.
    template <int M, int N>
    DI_ALWAYS void chunk(const Tables& t, int k, const uint16_t* x, __m512* acc) const {
        __m512 part[M];
#pragma GCC unroll 2
        for (int q = 0; q < N; q += 64) {
            __m512i a, b;
            load(t, k + q, a, b);
            if (SHARED == 0) {
                a = di_scaled(a, scales.words[(k + q) / C]);
                b = di_scaled(b, scales.words[(k + q + 32) / C]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) {
                part[i] = di_dot(q ? part[i] : _mm512_setzero_ps(), a, x + i * DI_CHUNK + q);
                part[i] = di_dot(part[i], b, x + i * DI_CHUNK + q + 32);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) acc[i] = _mm512_add_ps(acc[i], part[i]);
    }
    template <int N>
    DI_ALWAYS void words(const Tables& t, int k, uint16_t* out) const {
#pragma GCC unroll 2
        for (int q = 0; q < DI_CHUNK; q += 64) {
            __m512i a = _mm512_setzero_si512(), b = a;
            if (q < N) {
                load(t, k + q, a, b);
                a = di_scaled(a, scales.words[(k + q) / C]);
                b = di_scaled(b, scales.words[(k + q + 32) / C]);
            }
            _mm512_store_si512(out + q, a);
            _mm512_store_si512(out + q + 32, b);
        }
    }
};

template <int K, int R, int C>
struct DiWords<DiWeightMxfp4<K, R, C>> {
    enum { BLOCKS = DiWeightMxfp4<K, R, C>::BLOCKS };
    enum { FITS = K % 64 == 0 && C == 32, ORDER = DI_PLANES, SHARED = 0, BYTES = K / 2 };
    struct Tables {
        __m512i values, spread;
        Tables() {
            const __m256i t = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000,
                                                (short)0xbf00, (short)0xbf80, (short)0xbfc0, (short)0xc000,
                                                (short)0xc040, (short)0xc080, (short)0xc0c0);
            values = _mm512_broadcast_i64x4(t);
            // Byte g of four into the highest byte of the four lanes of 128-bit part g.
            const __m128i one = _mm_set1_epi32(0x00808080);
            spread = _mm512_castsi128_si512(one);
            spread = _mm512_inserti32x4(spread, _mm_or_si128(one, _mm_set1_epi32(1 << 24)), 1);
            spread = _mm512_inserti32x4(spread, _mm_or_si128(one, _mm_set1_epi32(2 << 24)), 2);
            spread = _mm512_inserti32x4(spread, _mm_or_si128(one, _mm_set1_epi32(3 << 24)), 3);
        }
    };
    const uint8_t *row, *scale;
    int64_t ahead;
    DiWords(const DiWeightMxfp4<K, R, C>& w, int64_t n, int64_t by)
        : row(w.data + n * (K / 2)), scale(w.scale + n / R * BLOCKS), ahead(by) {}
    void take_scales(const DiWeightMxfp4<K, R, C>&, int64_t) {}
    static bool fits(const DiWeightMxfp4<K, R, C>& w, int64_t n0, int n) {
        return di_scales_within(w.scale + n0 / R * BLOCKS, ((n0 + n - 1) / R - n0 / R + 1) * BLOCKS, 2, 252);
    }
    template <int N>
    DI_ALWAYS __m512i codes(int k) const {
        return N == DI_CHUNK ? _mm512_loadu_si512(row + k / 2)
                             : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(row + k / 2)));
    }
    // Scale bytes of a chunk in the order of the groups.
    template <int N>
    DI_ALWAYS int32_t bytes(int k) const {
        int32_t b = 0;
        memcpy(&b, scale + k / 32, N / 32);
        return b;
    }
    // Plane j of the values: a permutation reads the low 5 bits of each word, and the table repeats after 16.
    DI_ALWAYS static __m512i plane(const Tables& t, __m512i c, int j) {
        return _mm512_permutexvar_epi16(j ? _mm512_srli_epi16(c, 4 * j) : c, t.values);
    }
    template <int M, int N>
    DI_ALWAYS void chunk(const Tables& t, int k, const uint16_t* x, __m512* acc) const {
        di_ahead(row + k / 2, ahead);
        const __m512i c = codes<N>(k);
        const __m512i s = _mm512_srli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(bytes<N>(k)), t.spread), 1);
        __m512 part[M];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512i w = plane(t, c, j);
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) part[i] = di_dot(j ? part[i] : _mm512_setzero_ps(), w, x + i * DI_CHUNK + 32 * j);
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) acc[i] = _mm512_fmadd_ps(part[i], (__m512)s, acc[i]);
    }
    template <int N>
    DI_ALWAYS void words(const Tables& t, int k, uint16_t* out) const {
        di_ahead(row + k / 2, ahead);
        const __m512i c = codes<N>(k);
        // (s - 127) << 7 in both halves of each lane: groups lie in the same lanes of every plane
        const __m512i s = _mm512_srli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(bytes<N>(k)), t.spread), 1);
        const __m512i e = _mm512_sub_epi16(_mm512_or_si512(s, _mm512_srli_epi32(s, 16)), _mm512_set1_epi16(127 << 7));
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512i w = plane(t, c, j);
            const __mmask32 nonzero = _mm512_test_epi16_mask(w, _mm512_set1_epi16(0x7fff));
            _mm512_store_si512(out + 32 * j, _mm512_mask_add_epi16(w, nonzero, w, e));
        }
    }
};

}  // namespace DI_ISA
#endif

#endif
