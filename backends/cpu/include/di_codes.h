// Stored codes as words of bf16, for the bf16 dot instruction: what the formats of di_formats.h give as f32, wherever bf16
// holds it.
#ifndef DI_CODES_H
#define DI_CODES_H
#include "di_formats.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#define DI_DOT 1
#define DI_WORDS true
#define DI_ALWAYS __attribute__((always_inline))

namespace DI_ISA {

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

struct DiE4m3Tables {
    __m512i high0, high1, low0, low1, order;
    DiE4m3Tables() {
        high0 = _mm512_loadu_si512(di_e4m3_bytes.high);
        high1 = _mm512_loadu_si512(di_e4m3_bytes.high + 64);
        low0 = _mm512_loadu_si512(di_e4m3_bytes.low);
        low1 = _mm512_loadu_si512(di_e4m3_bytes.low + 64);
        order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpacking works within 16 bytes
    }
    // Words of 64 codes.
    DI_ALWAYS void words(__m512i codes, __m512i& a, __m512i& b) const {
        const __m512i c = _mm512_permutexvar_epi64(order, codes);
        __m512i high = _mm512_permutex2var_epi8(high0, c, high1);
        const __m512i low = _mm512_permutex2var_epi8(low0, c, low1);
        high = _mm512_ternarylogic_epi32(high, c, _mm512_set1_epi8((char)0x80), 0xf8);  // high | (c & 0x80)
        a = _mm512_unpacklo_epi8(low, high);
        b = _mm512_unpackhi_epi8(low, high);
    }
};

// What a scale of 2^(s - 127) adds to the exponents of two words.
DI_INLINE int32_t di_exponents(uint8_t s) {
    const uint32_t e = ((uint32_t)s - 127u) * 128u & 0xffffu;
    return (int32_t)(e | e << 16);
}

// Words times a power of two; zeros stay zeros.
DI_INLINE __m512i di_scaled(__m512i words, int32_t exponents) {
    const __mmask32 nonzero = _mm512_test_epi16_mask(words, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_add_epi16(words, nonzero, words, _mm512_set1_epi32(exponents));
}

// Words of the 16 codes of 4 bits for each scale that is an E4M3 code; all products fit.
struct DiScaledE2m1 {
    uint16_t words[256][16];
    constexpr DiScaledE2m1() : words() {
        constexpr float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        for (int s = 0; s < 256; ++s) {
            const int m = s & 127, exponent = m < 8 ? 1 : m >> 3;
            float scale = (float)(m < 8 ? m : 8 + (m & 7)) * 0.001953125f;  // 2^-9
            for (int i = 1; i < exponent; ++i) scale *= 2.0f;
            for (int c = 0; c < 16; ++c) {
                const unsigned word = __builtin_bit_cast(uint32_t, values[c & 7] * scale) >> 16;
                words[s][c] = (uint16_t)(m == 127 ? 0x7fc0u : word | ((unsigned)(s >> 7) ^ (unsigned)(c >> 3)) << 15);
            }
        }
    }
};
alignas(64) static constexpr DiScaledE2m1 di_scaled_e2m1{};

// Two codes of 4 bits from each of 16 bytes, the even element in the low half.
DI_INLINE __m512i di_nibbles(const uint8_t* codes) {
    const __m512i d = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    // (d | d << 12) & 0x000f000f
    return _mm512_ternarylogic_epi32(d, _mm512_slli_epi32(d, 12), _mm512_set1_epi32(0x000f000f), 0xa8);
}

// Two times 16 values that bf16 holds.
DI_INLINE __m512i di_both_words(const float* x) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
}

// n elements in groups of G, like the form that gives f32; out is a multiple of 32 elements long.
template <class F, int G>
DI_INLINE void di_decode(const uint8_t* codes, const uint8_t* scales, int n, uint16_t* out) {
    int i = 0;
    if constexpr (F::BITS == 8 && G % 32 == 0) {
        const DiE4m3Tables tables;
        for (; i + 64 <= n; i += 64) {
            const uint8_t s = scales[i / G], t = scales[(i + 32) / G];
            if ((uint8_t)(s - 10) > 236 || (uint8_t)(t - 10) > 236) break;  // leaves the normal numbers of bf16
            __m512i a, b;
            tables.words(_mm512_loadu_si512(codes + i), a, b);
            _mm512_storeu_si512(out + i, di_scaled(a, di_exponents(s)));
            _mm512_storeu_si512(out + i + 32, di_scaled(b, di_exponents(t)));
        }
    } else if constexpr (F::BITS == 4 && F::SCALE_E4M3 && G % 16 == 0) {
        const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
        for (; i + 32 <= n; i += 32) {
            const uint16_t* const low = di_scaled_e2m1.words[scales[i / G]];
            const uint16_t* const high = di_scaled_e2m1.words[scales[(i + 16) / G]];
            __m512i table = _mm512_zextsi256_si512(_mm256_load_si256((const __m256i*)low));
            table = _mm512_inserti64x4(table, _mm256_load_si256((const __m256i*)high), 1);
            const __m512i at = _mm512_or_si512(di_nibbles(codes + i / 2), upper);
            _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(at, table));
        }
    } else if constexpr (F::BITS == 4 && !F::SCALE_E4M3 && G % 32 == 0) {
        const __m256i one = _mm256_load_si256((const __m256i*)di_scaled_e2m1.words[0x38]);  // the code of 1
        const __m512i table = _mm512_broadcast_i64x4(one);
        for (; i + 32 <= n; i += 32) {
            const uint8_t s = scales[i / G];
            if ((uint8_t)(s - 2) > 250) break;
            const __m512i words = _mm512_permutexvar_epi16(di_nibbles(codes + i / 2), table);
            _mm512_storeu_si512(out + i, di_scaled(words, di_exponents(s)));
        }
    }
    for (; i < n; i += G) {
        float x[G];
        di_decode<F, G>(codes + i * F::BITS / 8, scales + i / G, G, x);
        for (int e = 0; e < G; ++e) out[i + e] = di_bf_exact(x[e]);
    }
}

DI_INLINE void di_decode_plain(const uint16_t* x, int n, uint16_t* out) { memcpy(out, x, (size_t)n * sizeof *x); }

// Sums of the lanes of four vectors, in the order of di_sum; the first n are stored.
DI_INLINE void di_sum4(__m512 a, __m512 b, __m512 c, __m512 d, int n, float* out) {
    const __m512 p = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_mask_storeu_ps(out, (__mmask8)((1 << n) - 1), _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, s)));
}

}  // namespace DI_ISA
#else
#define DI_WORDS false
#endif

#endif
