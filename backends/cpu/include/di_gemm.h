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
            int i = k;
            for (; i + 16 <= stop; i += 16) di_e2m1_16(codes + i / 2, s, out + i - k0);
            for (; i < stop; i += 2) {
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

// ---- any instruction set: weights decoded to f32 in strips ---------------------------------------------------------------
enum { DI_GEMM_ROWS = 64, DI_GEMM_COLUMNS = 4 };
#if defined(__AVX2__) && !defined(__AVX512F__)
enum { DI_STRIP_ROWS = 2 };
#else
enum { DI_STRIP_ROWS = 4 };
#endif

// acc[i][j] += x_i . w_j over n elements of a strip, for I rows and J columns. TAIL: n may be no multiple of the lanes.
#if defined(__AVX2__) && !defined(__AVX512F__)

DI_INLINE DiV8 di_load8(const float* p) {
    DiV8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

DI_INLINE DiV8 di_load8(const uint16_t* p) {
    typedef uint16_t DiH8 __attribute__((vector_size(16)));
    typedef uint32_t DiU8 __attribute__((vector_size(32)));
    DiH8 h;
    memcpy(&h, p, sizeof h);
    return di_bits<DiV8>(__builtin_convertvector(h, DiU8) << 16);
}

template <class T>
DI_INLINE DiV8 di_load8_some(const T* p, int n) {
    T t[8] = {};
    memcpy(t, p, (size_t)n * sizeof *p);
    return di_load8(t);
}

// Half of the lanes after the other: the compiler keeps no vector of 64 bytes in registers of 32.
template <int I, int J, bool TAIL, class X>
DI_INLINE void di_gemm_strip(const float* w, const X* const* x, int k, int n, DiV (*acc)[DI_GEMM_COLUMNS]) {
    for (int half = 0; half < DI_LANES; half += 8) {
        DiV8 a[I][J];
        for (int i = 0; i < I; ++i) {
            for (int j = 0; j < J; ++j) a[i][j] = di_load8((const float*)&acc[i][j] + half);
        }
        int t = half;
        for (; t - half + DI_LANES <= n; t += DI_LANES) {
            DiV8 b[J];
            for (int j = 0; j < J; ++j) b[j] = di_load8(w + j * DI_STRIP + t);
            for (int i = 0; i < I; ++i) {
                const DiV8 v = di_load8(x[i] + k + t);
                for (int j = 0; j < J; ++j) a[i][j] = __builtin_ia32_vfmaddps256(v, b[j], a[i][j]);
            }
        }
        if (TAIL && t < n) {
            const int some = n - t < 8 ? n - t : 8;
            for (int i = 0; i < I; ++i) {
                const DiV8 v = di_load8_some(x[i] + k + t, some);
                for (int j = 0; j < J; ++j) {
                    a[i][j] = __builtin_ia32_vfmaddps256(v, di_load8_some(w + j * DI_STRIP + t, some), a[i][j]);
                }
            }
        }
        for (int i = 0; i < I; ++i) {
            for (int j = 0; j < J; ++j) memcpy((float*)&acc[i][j] + half, &a[i][j], sizeof a[i][j]);
        }
    }
}

#else

template <int I, int J, bool TAIL, class X>
DI_INLINE void di_gemm_strip(const float* w, const X* const* x, int k, int n, DiV (*acc)[DI_GEMM_COLUMNS]) {
    DiV a[I][J];
    for (int i = 0; i < I; ++i) {
        for (int j = 0; j < J; ++j) a[i][j] = acc[i][j];
    }
    int t = 0;
    for (; t + DI_LANES <= n; t += DI_LANES) {
        DiV b[J];
        for (int j = 0; j < J; ++j) b[j] = di_load(w + j * DI_STRIP + t);
        for (int i = 0; i < I; ++i) {
            const DiV v = di_load(x[i] + k + t);
            for (int j = 0; j < J; ++j) a[i][j] = di_fma(v, b[j], a[i][j]);
        }
    }
    if (TAIL && t < n) {
        for (int i = 0; i < I; ++i) {
            const DiV v = di_load_some(x[i] + k + t, n - t);
            for (int j = 0; j < J; ++j) a[i][j] = di_fma(v, di_load_some(w + j * DI_STRIP + t, n - t), a[i][j]);
        }
    }
    for (int i = 0; i < I; ++i) {
        for (int j = 0; j < J; ++j) acc[i][j] = a[i][j];
    }
}

#endif

// J columns from n0 of m <= DI_GEMM_ROWS rows into out[i * ld + j]. A decoded strip of the weights serves all rows.
template <int K, int J, class W, class X>
static void di_gemm_decoded(const W& w, int64_t n0, const X* const* x, int m, float* out, int ld) {
    DiV acc[DI_GEMM_ROWS][DI_GEMM_COLUMNS];
    float strip[J * DI_STRIP];
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < J; ++j) acc[i][j] = DiV{};
    }
    for (int k = 0; k < K; k += DI_STRIP) {
        const int n = K - k < DI_STRIP ? K - k : DI_STRIP;
        for (int j = 0; j < J; ++j) w.decode(n0 + j, k, n, strip + j * DI_STRIP);
        int i = 0;
        for (; i + DI_STRIP_ROWS <= m; i += DI_STRIP_ROWS) {
            di_gemm_strip<DI_STRIP_ROWS, J, K % DI_LANES != 0>(strip, x + i, k, n, acc + i);
        }
        for (; i < m; ++i) di_gemm_strip<1, J, K % DI_LANES != 0>(strip, x + i, k, n, acc + i);
    }
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < J; ++j) out[i * ld + j] = di_sum(acc[i][j]);
    }
}

// Columns n0 .. n0 + n - 1 of m rows into out[i * ld + j].
template <int K, class W, class X>
static void di_gemm_columns(const W& w, int64_t n0, int n, const X* const* x, int m, float* out, int ld) {
    int j = 0;
    for (; j + DI_GEMM_COLUMNS <= n; j += DI_GEMM_COLUMNS) {
        di_gemm_decoded<K, DI_GEMM_COLUMNS>(w, n0 + j, x, m, out + j, ld);
    }
    for (; j < n; ++j) di_gemm_decoded<K, 1>(w, n0 + j, x, m, out + j, ld);
}

// ---- rows of a contraction ------------------------------------------------------------------------------------------------
// m rows of K features. `room`: for the packed forms of them that an instruction set may want, by order inside a chunk;
// `some_room`: for a few rows with scales. Null where no weight asks for it.
template <int K, class X>
struct DiRows {
    enum { PADDED = (K + 127) / 128 * 128 };
    const X* const* x;
    int m;
    uint16_t* room[2];
    uint16_t* some_room;
    bool ready[2];
    const void* next;  // weights that are read after the coming ones, or null

    // Other rows, or the same pointers with other contents.
    void take(const X* const* rows, int count) {
        x = rows;
        m = count;
        ready[0] = ready[1] = false;
    }
};

}  // namespace DI_ISA

#include "di_gemm_bf16.h"

namespace DI_ISA {

// All rows times columns n0 .. n0 + n - 1, into out[i * ld + j].
template <int K, class W, class X>
static void di_gemm(const W& w, int64_t n0, int n, DiRows<K, X>& rows, float* out, int ld) {
    if (di_gemm_dot(w, n0, n, rows, out, ld)) return;
    for (int i = 0; i < rows.m; i += DI_GEMM_ROWS) {
        const int m = rows.m - i < DI_GEMM_ROWS ? rows.m - i : DI_GEMM_ROWS;
        di_gemm_columns<K>(w, n0, n, rows.x + i, m, out + i * ld, ld);
    }
}

}  // namespace DI_ISA

#endif
