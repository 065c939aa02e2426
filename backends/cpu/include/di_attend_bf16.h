// Attention of one row with the bf16 dot instruction: queries, keys, values and probabilities are all held in bf16. The
// same passes as DiAttention; keys of bounded sources are decoded once and kept for the second pass.
#ifndef DI_ATTEND_BF16_H
#define DI_ATTEND_BF16_H
#include "di_attend.h"
#include "di_codes.h"

namespace DI_ISA {

#ifndef DI_DOT

template <int HEADS, int D, int DP, int VD, int VP, bool ROUND>
using DiAttentionBf16 = DiAttention<HEADS, D, DP, VD, VP, ROUND>;

#else

// s[h * DI_KEYS + j] = q_h . k_j, j < n rounded up to a multiple of 4; rows of q are DP wide, keys lie STRIDE apart.
template <int HEADS, int DP, int STRIDE>
DI_INLINE void di_dots(const uint16_t* q, const uint16_t* keys, int n, float* s) {
    enum { H = HEADS % 4 == 0 ? 4 : HEADS % 2 == 0 ? 2 : 1 };
    for (int j = 0; j < n; j += 4) {
        for (int h = 0; h < HEADS; h += H) {
            __m512 acc[H][4];
#pragma GCC unroll 4
            for (int a = 0; a < H; ++a) {
#pragma GCC unroll 4
                for (int b = 0; b < 4; ++b) acc[a][b] = _mm512_setzero_ps();
            }
            for (int d = 0; d < DP; d += 32) {
                __m512bh k[4];
#pragma GCC unroll 4
                for (int b = 0; b < 4; ++b) k[b] = (__m512bh)_mm512_loadu_si512(keys + (j + b) * STRIDE + d);
#pragma GCC unroll 4
                for (int a = 0; a < H; ++a) {
                    const __m512bh x = (__m512bh)_mm512_loadu_si512(q + (h + a) * DP + d);
#pragma GCC unroll 4
                    for (int b = 0; b < 4; ++b) acc[a][b] = _mm512_dpbf16_ps(acc[a][b], x, k[b]);
                }
            }
#pragma GCC unroll 4
            for (int a = 0; a < H; ++a) {
                di_sum4(acc[a][0], acc[a][1], acc[a][2], acc[a][3], 4, s + (h + a) * DI_KEYS + j);
            }
        }
    }
}

// out_h += sum_j p[h][j] * v_j, two values at a time. The features of 32 lie in out as unpacking leaves them.
template <int HEADS, int STRIDE, int VP>
DI_INLINE void di_mix(const uint16_t* p, const uint16_t* values, int n, float* out) {
    enum { H = HEADS % 8 == 0 ? 8 : HEADS % 4 == 0 ? 4 : HEADS % 2 == 0 ? 2 : 1 };
    for (int d = 0; d < VP; d += 32) {
        for (int h = 0; h < HEADS; h += H) {
            __m512 low[H], high[H];
#pragma GCC unroll 8
            for (int a = 0; a < H; ++a) {
                low[a] = _mm512_loadu_ps(out + (h + a) * VP + d);
                high[a] = _mm512_loadu_ps(out + (h + a) * VP + d + 16);
            }
            for (int j = 0; j < n; j += 2) {
                const __m512i u = _mm512_loadu_si512(values + j * STRIDE + d);
                const __m512i v = _mm512_loadu_si512(values + (j + 1) * STRIDE + d);
                const __m512bh x = (__m512bh)_mm512_unpacklo_epi16(u, v), y = (__m512bh)_mm512_unpackhi_epi16(u, v);
#pragma GCC unroll 8
                for (int a = 0; a < H; ++a) {
                    int32_t both;
                    memcpy(&both, p + (h + a) * DI_KEYS + j, sizeof both);
                    const __m512bh w = (__m512bh)_mm512_set1_epi32(both);
                    low[a] = _mm512_dpbf16_ps(low[a], x, w);
                    high[a] = _mm512_dpbf16_ps(high[a], y, w);
                }
            }
#pragma GCC unroll 8
            for (int a = 0; a < H; ++a) {
                _mm512_storeu_ps(out + (h + a) * VP + d, low[a]);
                _mm512_storeu_ps(out + (h + a) * VP + d + 16, high[a]);
            }
        }
    }
}

template <int HEADS, int D, int DP, int VD, int VP, bool ROUND>
struct DiAttentionBf16 {
    uint16_t* q;      // [HEADS][DP]
    uint16_t* rows;   // [DI_KEYS][WIDE] decoded keys or values
    uint16_t* words;  // [HEADS][DI_KEYS] probabilities
    float* dots;      // [HEADS][DI_KEYS]
    float* out;       // [HEADS][VP]
    float scale;
    float top[HEADS], below[HEADS];

    enum { WIDE = DP > VP ? DP : VP };
    static_assert(ROUND && DP % 32 == 0 && VP % 32 == 0, "rows are whole vectors of words");

    template <class X>
    void begin(float* scratch, const X* query, float factor) {
        out = scratch;
        dots = out + HEADS * VP;
        q = (uint16_t*)(dots + HEADS * DI_KEYS);
        rows = q + HEADS * DP;
        words = rows + DI_KEYS * WIDE;
        scale = factor;
        if (D != DP) memset(q, 0, sizeof *q * HEADS * DP);
        if (D != WIDE) memset(rows, 0, sizeof *rows * DI_KEYS * WIDE);
        memset(out, 0, sizeof *out * HEADS * VP);
        for (int h = 0; h < HEADS; ++h) {
            memcpy(q + h * DP, query + h * D, sizeof *q * D);
            top[h] = -1e30f;
            below[h] = 0.0f;
        }
    }

    // Decoded keys j .. j + n - 1, an even number of rows: a lone last one gets company of zeros.
    template <class Keys>
    DI_ALWAYS void fetch(const Keys& key, int64_t j, int n, uint16_t* to) const {
        for (int i = 0; i < n; ++i) key(j + i, to + i * WIDE);
        if (n % 2) memset(to + n * WIDE, 0, sizeof *to * WIDE);
    }

    DI_ALWAYS void score(const uint16_t* keys, int n, float* s) const {
        di_dots<HEADS, DP, WIDE>(q, keys, n, s);
        for (int i = 0; i < HEADS * DI_KEYS; ++i) s[i] *= scale;
    }

    // First pass. `kept`, `decoded`: room for scores and keys, or null to make them again in the second pass.
    template <class Keys>
    void look(int64_t count, const Keys& key, float* kept, void* decoded) {
        for (int64_t j = 0; j < count; j += DI_KEYS) {
            const int n = (int)di_min64(count - j, DI_KEYS);
            float* const s = kept ? kept + j * HEADS : dots;
            uint16_t* const to = decoded ? (uint16_t*)decoded + j * WIDE : rows;
            if (D != WIDE && decoded) memset(to, 0, sizeof *to * DI_KEYS * WIDE);
            fetch(key, j, n, to);
            score(to, n, s);
            const uint32_t some = n < DI_KEYS ? (1u << n) - 1 : ~0u;
            const __m512 least = _mm512_set1_ps(-1e30f);
            for (int h = 0; h < HEADS; ++h) {
                const __m512 a = _mm512_mask_loadu_ps(least, (__mmask16)some, s + h * DI_KEYS);
                const __m512 b = _mm512_mask_loadu_ps(least, (__mmask16)(some >> 16), s + h * DI_KEYS + 16);
                const float best = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
                top[h] = top[h] > best ? top[h] : best;
            }
        }
    }

    // Second pass; SAME: the keys are the values.
    template <bool SAME, class Keys, class Values>
    void add(int64_t count, const Keys& key, const Values& value, const float* kept, const void* decoded) {
        for (int64_t j = 0; j < count; j += DI_KEYS) {
            const int n = (int)di_min64(count - j, DI_KEYS);
            const float* const s = kept ? kept + j * HEADS : dots;
            const uint16_t* from = rows;
            if (!kept) {
                fetch(key, j, n, rows);
                score(rows, n, dots);
            }
            if (SAME && decoded) {
                from = (const uint16_t*)decoded + j * WIDE;
            } else if (kept || !SAME) {
                fetch(value, j, n, rows);
            }
            for (int h = 0; h < HEADS; ++h) {
                float* const p = dots + h * DI_KEYS;
                for (int i = 0; i < DI_KEYS; ++i) p[i] = i < n ? di_exp(s[h * DI_KEYS + i] - top[h]) : 0.0f;
                below[h] += di_sum(di_add_lanes(di_splat(0.0f), p, DI_KEYS));
                _mm512_storeu_si512(words + h * DI_KEYS, di_both_words(p));
            }
            di_mix<HEADS, WIDE, VP>(words, from, n, out);
        }
    }

    // Divides and puts the features in order; `sink` (or null) joins the denominator only.
    void end(const float* sink) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int h = 0; h < HEADS; ++h) {
            const __m512 d = _mm512_set1_ps(sink ? below[h] + di_exp(sink[h] - top[h]) : below[h]);
            for (int i = 0; i < VP; i += 32) {
                float* const o = out + h * VP + i;
                const __m512 low = _mm512_loadu_ps(o), high = _mm512_loadu_ps(o + 16);
                _mm512_storeu_ps(o, _mm512_div_ps(_mm512_permutex2var_ps(low, first, high), d));
                _mm512_storeu_ps(o + 16, _mm512_div_ps(_mm512_permutex2var_ps(low, second, high), d));
            }
        }
    }
};

#endif

}  // namespace DI_ISA

#endif
