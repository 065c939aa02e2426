// Contractions: out[i][j] = sum_k x[i][k] * w[j][k], f32 sums. One tree for every number of rows: element k of a row
// belongs to lane k % 16, lanes add up in order of k and then pairwise, so a row is bit-equal alone and in a batch.
#ifndef DI_GEMM_H
#define DI_GEMM_H
#include "di_formats.h"

namespace DI_ISA {

// ---- weights as they lie in memory -----------------------------------------------------------------------------------
// decode(row, k0, n, out): n elements of a row from k0 (a multiple of DI_STRIP) as f32.
template <int K>
struct DiWeightF32 {
    const float* data;
    explicit DiWeightF32(const DiParam* p) : data((const float*)p->data) {}
    explicit DiWeightF32(const float* p) : data(p) {}
    DI_INLINE void copy(const float* x, int n, float* out) { memcpy(out, x, (size_t)n * sizeof *x); }
    void decode(int64_t row, int k0, int n, float* out) const { copy(data + row * K + k0, n, out); }
};

template <int K>
struct DiWeightBf16 {
    const uint16_t* data;
    explicit DiWeightBf16(const DiParam* p) : data((const uint16_t*)p->data) {}
    void decode(int64_t row, int k0, int n, float* out) const { di_decode_plain(data + row * K + k0, n, out); }
};

// E4M3 codes, one power of two per R x C block.
template <int K, int R, int C>
struct DiWeightMxfp8 {
    enum { BLOCKS = (K + C - 1) / C };
    const uint8_t* data;
    const uint8_t* scale;
    explicit DiWeightMxfp8(const DiParam* p) : data((const uint8_t*)p->data), scale((const uint8_t*)p->scale) {}
    void decode(int64_t row, int k0, int n, float* out) const {
        const uint8_t* const codes = data + row * K;
        const uint8_t* const scales = scale + row / R * BLOCKS;
        for (int k = k0; k < k0 + n;) {
            const int stop = k / C * C + C < k0 + n ? k / C * C + C : k0 + n;
            const float s = di_e8m0(scales[k / C]);
            for (int i = k; i < stop; ++i) out[i - k0] = di_e4m3(codes[i]) * s;
            k = stop;
        }
    }
};

// E2M1 codes, two per byte, one power of two per R x C block; C is even.
template <int K, int R, int C>
struct DiWeightMxfp4 {
    enum { BLOCKS = (K + C - 1) / C };
    const uint8_t* data;
    const uint8_t* scale;
    explicit DiWeightMxfp4(const DiParam* p) : data((const uint8_t*)p->data), scale((const uint8_t*)p->scale) {}
    void decode(int64_t row, int k0, int n, float* out) const {
        const uint8_t* const codes = data + row * (K / 2);
        const uint8_t* const scales = scale + row / R * BLOCKS;
        for (int k = k0; k < k0 + n;) {
            const int stop = k / C * C + C < k0 + n ? k / C * C + C : k0 + n;
            const float s = di_e8m0(scales[k / C]);
            for (int i = k; i < stop; i += 2) {
                const uint8_t b = codes[i / 2];
                out[i - k0] = di_e2m1(b & 15u) * s;
                out[i - k0 + 1] = di_e2m1(b >> 4) * s;
            }
            k = stop;
        }
    }
};

// Sylvester's matrix: the sign of (i, j) is the parity of the common bits of i and j.
template <int K>
struct DiWeightHadamard {
    explicit DiWeightHadamard(const void*) {}
    void decode(int64_t row, int k0, int n, float* out) const {
        for (int i = 0; i < n; ++i) out[i] = __builtin_parityll((uint64_t)row & (uint64_t)(k0 + i)) ? -1.0f : 1.0f;
    }
};

// ---- the portable form ---------------------------------------------------------------------------------------------------
enum { DI_GEMM_ROWS = 64 };

template <class X>
DI_INLINE DiV di_dot_strip(DiV acc, const float* w, const X* x, int n) {
    int k = 0;
    for (; k + DI_LANES <= n; k += DI_LANES) acc += di_load(w + k) * di_load(x + k);
    if (k < n) acc += di_load_some(w + k, n - k) * di_load_some(x + k, n - k);
    return acc;
}

// Columns n0 .. n0 + n - 1 of m <= DI_GEMM_ROWS rows into out[i * ld + j]. Decoded strips of a weight row serve all rows.
template <int K, class W, class X>
static void di_gemm_portable(const W& w, int64_t n0, int n, const X* const* x, int m, float* out, int ld) {
    DiV acc[DI_GEMM_ROWS];
    float strip[DI_STRIP];
    for (int j = 0; j < n; ++j) {
        for (int i = 0; i < m; ++i) acc[i] = DiV{};
        for (int k = 0; k < K; k += DI_STRIP) {
            const int c = K - k < DI_STRIP ? K - k : DI_STRIP;
            w.decode(n0 + j, k, c, strip);
            for (int i = 0; i < m; ++i) acc[i] = di_dot_strip(acc[i], strip, x[i] + k, c);
        }
        for (int i = 0; i < m; ++i) out[i * ld + j] = di_sum(acc[i]);
    }
}

template <int K, class W, class X>
static void di_gemm(const W& w, int64_t n0, int n, const X* const* x, int m, float* out, int ld) {
    di_gemm_portable<K>(w, n0, n, x, m, out, ld);
}

}  // namespace DI_ISA

#endif
