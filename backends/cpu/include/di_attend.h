// Attention of one row: a group of heads that share keys, over sources read key by key. Two passes: the largest score
// first, then the weighted sum, in blocks of keys counted from the first visible one. The order of every sum depends on
// the list of visible keys alone, so chunking never changes a bit.
#ifndef DI_ATTEND_H
#define DI_ATTEND_H
#include "di_formats.h"
#include "di_state.h"

namespace DI_ISA {

enum { DI_KEYS = 32 };  // keys decoded at a time

// dots[h * DI_KEYS + j] = q_h . k_j for j < n rounded up to a multiple of 4; rows of q are DP wide and zero-padded, rows of
// keys lie STRIDE apart.
template <int HEADS, int DP, int STRIDE>
DI_INLINE void di_dots(const float* q, const float* keys, int n, float* dots) {
    enum { H = HEADS % 4 == 0 ? 4 : HEADS % 2 == 0 ? 2 : 1, J = 4 };
    for (int h = 0; h < HEADS; h += H) {
        for (int j = 0; j < n; j += J) {
            DiV acc[H][J] = {};
            for (int d = 0; d < DP; d += DI_LANES) {
                DiV k[J];
                for (int b = 0; b < J; ++b) k[b] = di_load(keys + (j + b) * STRIDE + d);
                for (int a = 0; a < H; ++a) {
                    const DiV x = di_load(q + (h + a) * DP + d);
                    for (int b = 0; b < J; ++b) acc[a][b] = di_fma(x, k[b], acc[a][b]);
                }
            }
            for (int a = 0; a < H; ++a) {
                for (int b = 0; b < J; ++b) dots[(h + a) * DI_KEYS + j + b] = di_sum(acc[a][b]);
            }
        }
    }
}

// out_h += sum_j p[h][j] * v_j over n keys in order; rows of out are VP wide, values lie STRIDE apart.
template <int HEADS, int STRIDE, int VP>
DI_INLINE void di_mix(const float* p, const float* values, int n, float* out) {
    enum { H = HEADS % 4 == 0 ? 4 : HEADS % 2 == 0 ? 2 : 1, W = VP % 64 == 0 ? 4 : VP % 32 == 0 ? 2 : 1 };
    for (int h = 0; h < HEADS; h += H) {
        for (int d = 0; d < VP; d += W * DI_LANES) {
            DiV acc[H][W];
            for (int a = 0; a < H; ++a) {
                for (int b = 0; b < W; ++b) acc[a][b] = di_load(out + (h + a) * VP + d + b * DI_LANES);
            }
            for (int j = 0; j < n; ++j) {
                DiV v[W];
                for (int b = 0; b < W; ++b) v[b] = di_load(values + j * STRIDE + d + b * DI_LANES);
                for (int a = 0; a < H; ++a) {
                    const DiV x = di_splat(p[(h + a) * DI_KEYS + j]);
                    for (int b = 0; b < W; ++b) acc[a][b] = di_fma(x, v[b], acc[a][b]);
                }
            }
            for (int a = 0; a < H; ++a) {
                for (int b = 0; b < W; ++b) di_store(out + (h + a) * VP + d + b * DI_LANES, acc[a][b]);
            }
        }
    }
}

// HEADS heads with D features in rows of DP, values of VP; ROUND: probabilities enter the value sum as bf16.
template <int HEADS, int D, int DP, int VD, int VP, bool ROUND>
struct DiAttention {
    float* q;     // [HEADS][DP]
    float* keys;  // [DI_KEYS][WIDE] decoded keys or values
    float* dots;  // [HEADS][DI_KEYS]
    float* out;   // [HEADS][VP]
    float scale;
    float top[HEADS], below[HEADS];

    enum { WIDE = DP > VP ? DP : VP };

    template <class X>
    void begin(float* scratch, const X* query, float factor) {
        q = scratch;
        keys = q + HEADS * DP;
        dots = keys + DI_KEYS * WIDE;
        out = dots + HEADS * DI_KEYS;
        scale = factor;
        if (D != DP) memset(q, 0, sizeof *q * HEADS * DP);
        if (D != WIDE) memset(keys, 0, sizeof *keys * DI_KEYS * WIDE);
        memset(out, 0, sizeof *out * HEADS * VP);
        for (int h = 0; h < HEADS; ++h) {
            for (int d = 0; d < D; ++d) q[h * DP + d] = di_get(query, h * D + d);
            top[h] = -1e30f;
            below[h] = 0.0f;
        }
    }

    // Scores of keys j .. j + n - 1 into s[HEADS][DI_KEYS].
    template <class Keys>
    void block(const Keys& key, int64_t j, int n, float* s) {
        for (int i = 0; i < n; ++i) key(j + i, keys + i * WIDE);
        di_dots<HEADS, DP, WIDE>(q, keys, n, s);
        for (int i = 0; i < HEADS * DI_KEYS; ++i) s[i] *= scale;
    }

    // First pass over `count` keys. `kept`: room for the scores, or null to compute them again in the second pass.
    template <class Keys>
    void look(int64_t count, const Keys& key, float* kept, void*) {
        for (int64_t j = 0; j < count; j += DI_KEYS) {
            const int n = (int)di_min64(count - j, DI_KEYS);
            float* const s = kept ? kept + j * HEADS : dots;
            block(key, j, n, s);
            for (int h = 0; h < HEADS; ++h) {
                for (int i = 0; i < n; ++i) top[h] = top[h] > s[h * DI_KEYS + i] ? top[h] : s[h * DI_KEYS + i];
            }
        }
    }

    // Second pass; SAME: the keys are the values.
    template <bool SAME, class Keys, class Values>
    void add(int64_t count, const Keys& key, const Values& value, const float* kept, const void*) {
        for (int64_t j = 0; j < count; j += DI_KEYS) {
            const int n = (int)di_min64(count - j, DI_KEYS);
            if (!kept) block(key, j, n, dots);
            const float* const s = kept ? kept + j * HEADS : dots;
            if (kept || !SAME) {
                for (int i = 0; i < n; ++i) value(j + i, keys + i * WIDE);
            }
            for (int h = 0; h < HEADS; ++h) {
                float* const p = dots + h * DI_KEYS;
                for (int i = 0; i < DI_KEYS; ++i) p[i] = i < n ? di_exp(s[h * DI_KEYS + i] - top[h]) : 0.0f;
                below[h] += di_sum(di_add_lanes(di_splat(0.0f), p, DI_KEYS));
                if (ROUND) {
                    for (int i = 0; i < DI_KEYS; ++i) p[i] = di_round_bf16(p[i]);
                }
            }
            di_mix<HEADS, WIDE, VP>(dots, keys, n, out);
        }
    }

    // Divides; `sink` (or null) joins the denominator only.
    void end(const float* sink) {
        for (int h = 0; h < HEADS; ++h) {
            const float d = sink ? below[h] + di_exp(sink[h] - top[h]) : below[h];
            for (int i = 0; i < VD; ++i) out[h * VP + i] = out[h * VP + i] / d;
        }
    }
};

}  // namespace DI_ISA

#endif
