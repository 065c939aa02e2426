// Contractions of bf16 rows with the bf16 dot instruction: weights become bf16 words in registers, scales included, which
// is exact, for a scale is a power of two and a code has few bits. One accumulator per row and column takes the
// elements in order, whatever the number of rows.
#ifndef DI_GEMM_BF16_H
#define DI_GEMM_BF16_H
#include "di_base.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

namespace DI_ISA {

// Nothing here fits: the caller takes the general form.
template <int K, class W, class X>
DI_INLINE bool di_gemm_dot(const W&, int64_t, int, const X* const*, int, float*, int) {
    return false;
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

enum { DI_AHEAD = 4 };  // rows of weights that are fetched ahead: the next tile of columns

// Scales of a row as what is added to the exponents of two bf16 words: a load that needs no shuffle.
template <int BLOCKS>
struct DiScaleWords {
    enum { ROOM = (BLOCKS + 15) / 16 * 16 };
    alignas(64) int32_t words[ROOM];
    void fill(const uint8_t* s) {
        for (int i = 0; i < BLOCKS; ++i) {
            const uint32_t e = ((uint32_t)s[i] - 127u) * 128u & 0xffffu;
            words[i] = (int32_t)(e | e << 16);
        }
    }
    __attribute__((always_inline)) __m512i at(int block) const { return _mm512_set1_epi32(words[block]); }
};
struct DiNoScales {
    void fill(const uint8_t*) {}
};

// Whether all of n scale bytes lie in low .. high. Outside, a scaled code would leave the normal numbers of bf16.
DI_INLINE bool di_scales_within(const uint8_t* s, int n, uint8_t low, uint8_t high) {
    unsigned bad = 0;
    for (int i = 0; i < n; ++i) bad |= (unsigned)(s[i] < low) | (unsigned)(s[i] > high);
    return !bad;
}

// ---- weights as bf16 words: words(k, a, b) gives elements k .. k + 31 and k + 32 .. k + 63 of a row -----------------------
template <class W>
struct DiWords;

template <int K>
struct DiWords<DiWeightBf16<K>> {
    enum { FITS = K % 64 == 0, SHARED = 1 };
    using Scales = DiNoScales;
    struct Tables {};
    const uint16_t* row;
    static const uint8_t* scales_of(const DiWeightBf16<K>&, int64_t) { return nullptr; }
    DiWords(const DiWeightBf16<K>& w, int64_t n, const Scales&) : row(w.data + n * K) {}
    static bool fits(const DiWeightBf16<K>&, int64_t, int) { return true; }
    DI_INLINE void load(const uint16_t* p, int k, __m512i& a, __m512i& b) {
        a = _mm512_loadu_si512(p + k);
        b = _mm512_loadu_si512(p + k + 32);
    }
    __attribute__((always_inline)) void words(const Tables&, int k, __m512i& a, __m512i& b) const {
        __builtin_prefetch(row + k + DI_AHEAD * K);
        __builtin_prefetch(row + k + 32 + DI_AHEAD * K);
        load(row, k, a, b);
    }
};

// High and low bytes of the bf16 images of the codes 0 .. 127.
struct DiE4m3Bytes {
    uint8_t high[128], low[128];
    constexpr DiE4m3Bytes() : high(), low() {
        for (int c = 0; c < 128; ++c) {
            unsigned word = ((unsigned)c << 4) + (120u << 7);
            if (c < 8) {  // m * 2^-9
                int e = c >= 4 ? 2 : c >= 2 ? 1 : 0;
                word = c ? ((unsigned)(118 + e) << 7) | (((unsigned)c << (7 - e)) & 0x7fu) : 0u;
            }
            high[c] = (uint8_t)(word >> 8);
            low[c] = (uint8_t)word;
        }
    }
};
static constexpr DiE4m3Bytes di_e4m3_bytes{};

template <int K, int R, int C>
struct DiWords<DiWeightMxfp8<K, R, C>> {
    // SHARED: rows in a line, from a multiple of it, that have one row of scales
    enum { FITS = K % 64 == 0 && C % 32 == 0, BLOCKS = DiWeightMxfp8<K, R, C>::BLOCKS, SHARED = R % 4 == 0 ? 4 : 1 };
    using Scales = DiScaleWords<BLOCKS>;
    struct Tables {
        __m512i high0, high1, low0, low1, order;
        Tables() {
            high0 = _mm512_loadu_si512(di_e4m3_bytes.high);
            high1 = _mm512_loadu_si512(di_e4m3_bytes.high + 64);
            low0 = _mm512_loadu_si512(di_e4m3_bytes.low);
            low1 = _mm512_loadu_si512(di_e4m3_bytes.low + 64);
            order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpacking works within 16 bytes
        }
    };
    const uint8_t* row;
    const Scales& scales;
    static const uint8_t* scales_of(const DiWeightMxfp8<K, R, C>& w, int64_t n) { return w.scale + n / R * BLOCKS; }
    DiWords(const DiWeightMxfp8<K, R, C>& w, int64_t n, const Scales& s) : row(w.data + n * K), scales(s) {}
    static bool fits(const DiWeightMxfp8<K, R, C>& w, int64_t n0, int n) {
        return di_scales_within(w.scale + n0 / R * BLOCKS, (int)((n0 + n - 1) / R - n0 / R + 1) * BLOCKS, 10, 246);
    }
    __attribute__((always_inline)) __m512i scaled(__m512i words, int k) const {
        const __mmask32 nonzero = _mm512_test_epi16_mask(words, _mm512_set1_epi16(0x7fff));
        return _mm512_mask_add_epi16(words, nonzero, words, scales.at(k / C));
    }
    __attribute__((always_inline)) void words(const Tables& t, int k, __m512i& a, __m512i& b) const {
        __builtin_prefetch(row + k + DI_AHEAD * K);
        const __m512i c = _mm512_permutexvar_epi64(t.order, _mm512_loadu_si512(row + k));
        __m512i high = _mm512_permutex2var_epi8(t.high0, c, t.high1);
        const __m512i low = _mm512_permutex2var_epi8(t.low0, c, t.low1);
        high = _mm512_ternarylogic_epi32(high, c, _mm512_set1_epi8((char)0x80), 0xf8);  // high | (c & 0x80)
        a = scaled(_mm512_unpacklo_epi8(low, high), k);
        b = scaled(_mm512_unpackhi_epi8(low, high), k + 32);
    }
};

template <int K, int R, int C>
struct DiWords<DiWeightMxfp4<K, R, C>> {
    enum { FITS = K % 64 == 0 && C % 32 == 0, BLOCKS = DiWeightMxfp4<K, R, C>::BLOCKS, SHARED = R % 4 == 0 ? 4 : 1 };
    using Scales = DiScaleWords<BLOCKS>;
    struct Tables {
        __m512i values;
        Tables() {
            const __m256i t = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000,
                                                (short)0xbf00, (short)0xbf80, (short)0xbfc0, (short)0xc000,
                                                (short)0xc040, (short)0xc080, (short)0xc0c0);
            values = _mm512_broadcast_i64x4(t);
        }
    };
    const uint8_t* row;
    const Scales& scales;
    static const uint8_t* scales_of(const DiWeightMxfp4<K, R, C>& w, int64_t n) { return w.scale + n / R * BLOCKS; }
    DiWords(const DiWeightMxfp4<K, R, C>& w, int64_t n, const Scales& s) : row(w.data + n * (K / 2)), scales(s) {}
    static bool fits(const DiWeightMxfp4<K, R, C>& w, int64_t n0, int n) {
        return di_scales_within(w.scale + n0 / R * BLOCKS, (int)((n0 + n - 1) / R - n0 / R + 1) * BLOCKS, 2, 252);
    }
    __attribute__((always_inline)) __m512i half(const Tables& t, int k) const {
        const __m512i d = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(row + k / 2)));
        // (d | d << 12) & 0x000f000f: the low nibble is the even element
        const __m512i at = _mm512_ternarylogic_epi32(d, _mm512_slli_epi32(d, 12), _mm512_set1_epi32(0x000f000f), 0xa8);
        const __m512i scaled = _mm512_mask_add_epi16(t.values, 0xfefefefe, t.values, scales.at(k / C));
        return _mm512_permutexvar_epi16(at, scaled);
    }
    __attribute__((always_inline)) void words(const Tables& t, int k, __m512i& a, __m512i& b) const {
        __builtin_prefetch(row + (k + DI_AHEAD * K) / 2);
        a = half(t, k);
        b = half(t, k + 32);
    }
};

// ---- register tiles ---------------------------------------------------------------------------------------------------------
DI_INLINE __m512 di_dot(__m512 acc, __m512i w, const uint16_t* x) {
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_loadu_si512(x));
}

// I rows times J columns, weights expanded on the way.
template <int K, int I, int J, class W>
static void di_dot_direct(const W& w, int64_t n0, const uint16_t* const* x, float* out, int ld) {
    enum { EACH = DiWords<W>::SHARED % J == 0 ? J : 1 };  // columns of the tile that share their scales
    typename DiWords<W>::Scales scales[J / EACH];
    for (int j = 0; j < J / EACH; ++j) scales[j].fill(DiWords<W>::scales_of(w, n0 + j * EACH));
    const auto column = [&](int j) { return DiWords<W>(w, n0 + j, scales[j / EACH]); };
    const DiWords<W> words[4] = {column(0), column(J > 1 ? 1 : 0), column(J > 2 ? 2 : 0), column(J > 3 ? 3 : 0)};
    const typename DiWords<W>::Tables tables;
    __m512 acc[I][J];
    for (int i = 0; i < I; ++i) {
        for (int j = 0; j < J; ++j) acc[i][j] = _mm512_setzero_ps();
    }
    for (int k = 0; k < K; k += 64) {
        for (int j = 0; j < J; ++j) {
            __m512i a, b;
            words[j].words(tables, k, a, b);
            for (int i = 0; i < I; ++i) acc[i][j] = di_dot(di_dot(acc[i][j], a, x[i] + k), b, x[i] + k + 32);
        }
    }
    for (int i = 0; i < I; ++i) {
        for (int j = 0; j < J; ++j) out[i * ld + j] = di_sum((DiV)acc[i][j]);
    }
}

enum { DI_PANEL = 1024 };  // elements of a column that are expanded at a time

template <int I, int J>
DI_INLINE void di_dot_panel(const uint16_t* panel, const uint16_t* const* x, int k, int n, __m512 (*acc)[4]) {
    __m512 a[I][J];
    for (int i = 0; i < I; ++i) {
        for (int j = 0; j < J; ++j) a[i][j] = acc[i][j];
    }
    for (int t = 0; t < n; t += 32) {
        __m512i b[J];
        for (int j = 0; j < J; ++j) b[j] = _mm512_loadu_si512(panel + j * DI_PANEL + t);
        for (int i = 0; i < I; ++i) {
            const __m512bh v = (__m512bh)_mm512_loadu_si512(x[i] + k + t);
            for (int j = 0; j < J; ++j) a[i][j] = _mm512_dpbf16_ps(a[i][j], (__m512bh)b[j], v);
        }
    }
    for (int i = 0; i < I; ++i) {
        for (int j = 0; j < J; ++j) acc[i][j] = a[i][j];
    }
}

// m <= DI_GEMM_ROWS rows times J columns; a piece of the columns is expanded once for all rows.
template <int K, int J, class W>
static void di_dot_blocked(const W& w, int64_t n0, const uint16_t* const* x, int m, float* out, int ld) {
    const typename DiWords<W>::Tables tables;
    alignas(64) uint16_t panel[J * DI_PANEL];
    __m512 acc[DI_GEMM_ROWS][4];
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < J; ++j) acc[i][j] = _mm512_setzero_ps();
    }
    typename DiWords<W>::Scales scales[J];
    for (int j = 0; j < J; ++j) scales[j].fill(DiWords<W>::scales_of(w, n0 + j));
    for (int k = 0; k < K; k += DI_PANEL) {
        const int n = K - k < DI_PANEL ? K - k : DI_PANEL;
        for (int j = 0; j < J; ++j) {
            const DiWords<W> words(w, n0 + j, scales[j]);
            for (int t = 0; t < n; t += 64) {
                __m512i a, b;
                words.words(tables, k + t, a, b);
                _mm512_store_si512(panel + j * DI_PANEL + t, a);
                _mm512_store_si512(panel + j * DI_PANEL + t + 32, b);
            }
        }
        int i = 0;
        for (; i + 6 <= m; i += 6) di_dot_panel<6, J>(panel, x + i, k, n, acc + i);
        for (; i + 2 <= m; i += 2) di_dot_panel<2, J>(panel, x + i, k, n, acc + i);
        for (; i < m; ++i) di_dot_panel<1, J>(panel, x + i, k, n, acc + i);
    }
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < J; ++j) out[i * ld + j] = di_sum((DiV)acc[i][j]);
    }
}

// Four columns of m rows: few rows take the weights straight from memory, many share an expanded piece of them.
template <int K, class W>
static void di_dot_columns(const W& w, int64_t n0, const uint16_t* const* x, int m, float* out, int ld) {
    switch (m) {
        case 1: di_dot_direct<K, 1, 4>(w, n0, x, out, ld); break;
        case 2: di_dot_direct<K, 2, 4>(w, n0, x, out, ld); break;
        case 3: di_dot_direct<K, 3, 4>(w, n0, x, out, ld); break;
        case 4: di_dot_direct<K, 4, 4>(w, n0, x, out, ld); break;
        case 5: di_dot_direct<K, 5, 4>(w, n0, x, out, ld); break;
        case 6:
        case 7:
        case 8:
            for (int j = 0; j < 4; j += 2) {
                if (m == 6) di_dot_direct<K, 6, 2>(w, n0 + j, x, out + j, ld);
                if (m == 7) di_dot_direct<K, 7, 2>(w, n0 + j, x, out + j, ld);
                if (m == 8) di_dot_direct<K, 8, 2>(w, n0 + j, x, out + j, ld);
            }
            break;
        default: di_dot_blocked<K, 4>(w, n0, x, m, out, ld);
    }
}

template <int K, class W>
static bool di_gemm_words(const W& w, int64_t n0, int n, const uint16_t* const* x, int m, float* out, int ld) {
    if constexpr (DiWords<W>::FITS) {
        if (!DiWords<W>::fits(w, n0, n)) return false;
        int j = 0;
        for (; j + 4 <= n; j += 4) di_dot_columns<K>(w, n0 + j, x, m, out + j, ld);
        for (; j < n; ++j) {
            for (int i = 0; i < m; ++i) di_dot_direct<K, 1, 1>(w, n0 + j, x + i, out + i * ld + j, ld);
        }
        return true;
    }
    return false;
}

template <int K>
DI_INLINE bool di_gemm_dot(const DiWeightBf16<K>& w, int64_t n0, int n, const uint16_t* const* x, int m, float* out, int ld) {
    return di_gemm_words<K>(w, n0, n, x, m, out, ld);
}
template <int K, int R, int C>
DI_INLINE bool di_gemm_dot(const DiWeightMxfp8<K, R, C>& w, int64_t n0, int n, const uint16_t* const* x, int m, float* out, int ld) {
    return di_gemm_words<K>(w, n0, n, x, m, out, ld);
}
template <int K, int R, int C>
DI_INLINE bool di_gemm_dot(const DiWeightMxfp4<K, R, C>& w, int64_t n0, int n, const uint16_t* const* x, int m, float* out, int ld) {
    return di_gemm_words<K>(w, n0, n, x, m, out, ld);
}

#endif

}  // namespace DI_ISA

#endif
