// Rows of logits in registers of the instruction set's own width: the largest, sums above a bound, ids between bounds.
// Lanes are the same sixteen (f32) or eight (f64) in every width, so sums have one order everywhere.
#ifndef DI_DRAW_VECTOR_H
#define DI_DRAW_VECTOR_H
#include "di_base.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace DI_ISA {

#if defined(__AVX512F__)
enum { DI_REGISTER = 64 };
#elif defined(__AVX2__)
enum { DI_REGISTER = 32 };
#else
enum { DI_REGISTER = 16 };
#endif
enum { DI_PARTS = 64 / DI_REGISTER, DI_DOUBLES = DI_REGISTER / 8, DI_FLOATS = DI_REGISTER / 4 };

typedef float DiRf __attribute__((vector_size(DI_REGISTER)));
typedef int32_t DiRi __attribute__((vector_size(DI_REGISTER)));
typedef double DiRd __attribute__((vector_size(DI_REGISTER)));
typedef int64_t DiRl __attribute__((vector_size(DI_REGISTER)));
typedef uint64_t DiRu __attribute__((vector_size(DI_REGISTER)));
typedef int32_t DiHalf __attribute__((vector_size(DI_REGISTER / 2)));  // as many as a register has 64-bit lanes

template <class V, class T>
DI_INLINE V di_part(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

// The largest of n values, n a multiple of DI_LANES; `wrong` gets bits where one is no number.
DI_INLINE float di_block_largest(const float* l, int64_t n, DiRi* wrong) {
    DiRf m[DI_PARTS];
    for (int p = 0; p < DI_PARTS; ++p) m[p] = DiRf{} - HUGE_VALF;
    for (int64_t i = 0; i < n; i += DI_LANES) {
        for (int p = 0; p < DI_PARTS; ++p) {
            const DiRf v = di_part<DiRf>(l + i + p * DI_FLOATS);
            *wrong |= v != v;
            m[p] = v > m[p] ? v : m[p];
        }
    }
    float best = m[0][0];
    for (int p = 0; p < DI_PARTS; ++p) {
        for (int k = 0; k < DI_FLOATS; ++k) best = m[p][k] > best ? m[p][k] : best;
    }
    return best;
}

// The largest of n values, n a multiple of 8.
DI_INLINE double di_lanes_greatest(const double* z, int64_t n) {
    DiRd m[DI_PARTS];
    for (int p = 0; p < DI_PARTS; ++p) m[p] = DiRd{} - HUGE_VAL;
    for (int64_t i = 0; i < n; i += 8) {
        for (int p = 0; p < DI_PARTS; ++p) {
            const DiRd v = di_part<DiRd>(z + i + p * DI_DOUBLES);
            m[p] = v > m[p] ? v : m[p];
        }
    }
    double best = m[0][0];
    for (int p = 0; p < DI_PARTS; ++p) {
        for (int k = 0; k < DI_DOUBLES; ++k) best = m[p][k] > best ? m[p][k] : best;
    }
    return best;
}

struct DiSum {
    int64_t count;
    double sum;
};

// Tokens with z > bound, and the sum of their weights.
static inline DiSum di_above(const double* z, const double* w, int64_t n, double bound) {
    DiRd total[DI_PARTS] = {};
    DiRl count[DI_PARTS] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int p = 0; p < DI_PARTS; ++p) {
            const DiRl in = di_part<DiRd>(z + i + p * DI_DOUBLES) > bound;
            total[p] += in ? di_part<DiRd>(w + i + p * DI_DOUBLES) : DiRd{};
            count[p] -= in;
        }
    }
    DiSum out{0, 0.0};
    for (int p = 0; p < DI_PARTS; ++p) {
        for (int k = 0; k < DI_DOUBLES; ++k) {
            out.count += count[p][k];
            out.sum += total[p][k];
        }
    }
    for (; i < n; ++i) {
        out.count += z[i] > bound;
        out.sum += z[i] > bound ? w[i] : 0.0;
    }
    return out;
}

// Ids of the tokens with lo < z <= hi, in rising order, into room for all n; returns how many.
static inline int64_t di_between(const double* z, int64_t n, double lo, double hi, int32_t* ids) {
    int64_t found = 0, i = 0;
#if defined(__AVX512F__)
    const __m256i step = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512d low = _mm512_set1_pd(lo), high = _mm512_set1_pd(hi);
    for (; i + 8 <= n; i += 8) {
        const __m512d v = _mm512_loadu_pd(z + i);
        const __mmask8 in = _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(v, low, _CMP_GT_OQ), v, high, _CMP_LE_OQ);
        const __m256i at = _mm256_add_epi32(step, _mm256_set1_epi32((int32_t)i));
        _mm256_storeu_si256((__m256i*)(ids + found), _mm256_maskz_compress_epi32(in, at));  // found <= i
        found += __builtin_popcount(in);
    }
#elif defined(__AVX2__)
    const __m256d low = _mm256_set1_pd(lo), high = _mm256_set1_pd(hi);
    for (; i + 4 <= n; i += 4) {
        const __m256d v = _mm256_loadu_pd(z + i);
        const __m256d in = _mm256_and_pd(_mm256_cmp_pd(v, low, _CMP_GT_OQ), _mm256_cmp_pd(v, high, _CMP_LE_OQ));
        for (int bits = _mm256_movemask_pd(in); bits; bits &= bits - 1) ids[found++] = (int32_t)i + __builtin_ctz(bits);
    }
#endif
    for (; i < n; ++i) {
        ids[found] = (int32_t)i;
        found += z[i] > lo && z[i] <= hi;
    }
    return found;
}

}  // namespace DI_ISA

#endif
