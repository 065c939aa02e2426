// Elementary functions: branch-free, so that loops over them vectorise; within 2 ulp of the real value.
#ifndef DI_MATH_H
#define DI_MATH_H
#include "di_base.h"

namespace DI_ISA {

DI_INLINE float di_abs(float x) { return di_bits<float>(di_bits<uint32_t>(x) & 0x7fffffffu); }
DI_INLINE float di_max(float a, float b) { return a > b || a != a ? a : b; }
DI_INLINE float di_min(float a, float b) { return a < b || a != a ? a : b; }
DI_INLINE float di_sqrt(float x) { return __builtin_sqrtf(x); }

DI_INLINE float di_copysign(float x, float s) {
    return di_bits<float>((di_bits<uint32_t>(x) & 0x7fffffffu) | (di_bits<uint32_t>(s) & 0x80000000u));
}

// To the nearest integer, ties to even, for |x| < 2^22.
DI_INLINE float di_nearest(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: its unit in the last place is 1
    return (x + magic) - magic;
}

// 2^n for -126 <= n <= 127.
DI_INLINE float di_power2(int32_t n) { return di_bits<float>((uint32_t)(n + 127) << 23); }

// e^x = 2^n e^r, |r| <= ln(2)/2, ln 2 in two parts; the power is applied in two factors, so that results reach the
// denormals and infinity as they should.
DI_INLINE float di_exp(float x) {
    float c = x < -104.0f ? -104.0f : x;
    c = c > 89.0f ? 89.0f : c;
    const float n = di_nearest(c * 1.44269504f);
    const float high = c - n * 0.693359375f, low = n * -2.12194440e-4f;
    const float r = high - low, lost = (high - r) - low;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + lost) + r + 1.0f;
    const int32_t k = (int32_t)n, half = k >> 1;
    const float y = p * di_power2(half) * di_power2(k - half);
    return x != x ? x : y;
}

// log(x) = k log 2 + log(m), sqrt(1/2) <= m < sqrt(2).
DI_INLINE float di_log(float x) {
    const float tiny = 1.17549435e-38f;
    const int32_t low = x < tiny;
    const uint32_t u = di_bits<uint32_t>(low ? x * 8388608.0f : x);
    const uint32_t shifted = u - 0x3f3504f3u;
    const float k = (float)((int32_t)shifted >> 23) - (low ? 23.0f : 0.0f);
    const float m = di_bits<float>((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const float z = m * m;
    float y = p * m * z + k * -2.12194440e-4f;
    y = (m + (y - 0.5f * z)) + k * 0.693359375f;
    y = x > 3.4028235e38f ? x : y;
    y = x == 0.0f ? -HUGE_VALF : y;
    return x < 0.0f || x != x ? NAN : y;
}

// log(1 + u) for 0 <= u <= 1: the rounding of 1 + u is put back.
DI_INLINE float di_log1p(float u) {
    const float w = 1.0f + u;
    return di_log(w) + (u - (w - 1.0f)) / w;
}

DI_INLINE float di_softplus(float x) { return (x > 0.0f ? x : 0.0f) + di_log1p(di_exp(-di_abs(x))); }

DI_INLINE float di_sigmoid(float x) {
    const float e = di_exp(-di_abs(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

// Angles are f32 products of large positions: only f64 reduces them without loss.
DI_INLINE float di_cos(float x) { return (float)cos((double)x); }
DI_INLINE float di_sin(float x) { return (float)sin((double)x); }

// ---- 64-bit integers that wrap -----------------------------------------------------------------------------------------
DI_INLINE int64_t di_iadd(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
DI_INLINE int64_t di_isub(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }
DI_INLINE int64_t di_imul(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }
DI_INLINE int64_t di_ixor(int64_t a, int64_t b) { return a ^ b; }
DI_INLINE int64_t di_imod(int64_t a, int64_t b) { return a % b; }

}  // namespace DI_ISA

#endif
