// Storage formats: E4M3, E8M0 and E2M1 codes, block formats, records. All arithmetic on f32; no step ever makes a
// denormal out of a code, since some processors are slow on them.
#ifndef DI_FORMATS_H
#define DI_FORMATS_H
#include "di_math.h"

namespace DI_ISA {

// ---- elements ----------------------------------------------------------------------------------------------------------
// 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f is NaN, there is no infinity.
DI_INLINE float di_e4m3(uint8_t c) {
    const uint32_t m = c & 0x7fu;
    const float normal = di_bits<float>((m << 20) + (120u << 23));
    const float small = (float)(int32_t)m * 0.001953125f;  // 2^-9
    float y = m < 8u ? small : normal;
    y = m == 0x7fu ? NAN : y;
    return di_bits<float>(di_bits<uint32_t>(y) | ((uint32_t)(c & 0x80u) << 24));
}

// Nearest, ties to even, clamped to +-448.
DI_INLINE uint8_t di_to_e4m3(float x) {
    const uint32_t u = di_bits<uint32_t>(x);
    float a = di_abs(x);
    a = a > 448.0f ? 448.0f : a;
    const uint32_t v = di_bits<uint32_t>(a);
    const uint32_t normal = ((v + 0x7ffffu + ((v >> 20) & 1u)) >> 20) - (120u << 3);
    const uint32_t small = (uint32_t)(int32_t)di_nearest(a * 512.0f);
    uint32_t c = a < 0.015625f ? small : normal;  // 2^-6, the smallest normal
    c = x != x ? 0x7fu : c;
    return (uint8_t)(c | ((u >> 24) & 0x80u));
}

// 2^(e - 127); byte 0 is the denormal 2^-127, byte 255 NaN.
DI_INLINE float di_e8m0(uint8_t e) {
    uint32_t u = (uint32_t)e << 23;
    u = e == 0 ? 0x00400000u : u;
    u = e == 255 ? 0x7fc00000u : u;
    return di_bits<float>(u);
}

// 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign bit.
DI_INLINE float di_e2m1(uint32_t c) {
    const uint32_t m = c & 7u;
    const float y = m < 2u ? (float)(int32_t)m * 0.5f : di_bits<float>((m << 22) + (126u << 23));
    return di_bits<float>(di_bits<uint32_t>(y) | ((c & 8u) << 28));
}

// 16 elements from 8 bytes, even element in the low nibble, times a scale.
DI_INLINE void di_e2m1_16(const uint8_t* p, float scale, float* out) {
#ifdef __AVX512F__
    const DiV table = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    const DiU shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    uint32_t low, high;
    memcpy(&low, p, 4);
    memcpy(&high, p + 4, 4);
    const DiU both = {low, low, low, low, low, low, low, low, high, high, high, high, high, high, high, high};
    di_store(out, __builtin_shuffle(table, (DiI)(both >> shifts)) * scale);  // a shuffle reads 4 bits of each index
#elif defined(__AVX2__)
    typedef int32_t DiI8 __attribute__((vector_size(32)));
    const DiV8 table = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const DiI8 shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    for (int i = 0; i < 2; ++i) {
        int32_t four;
        memcpy(&four, p + 4 * i, 4);
        const DiI8 at = (DiI8{} + four) >> shifts, sign = at << 28 & (int32_t)0x80000000;
        const DiV8 y = (DiV8)((DiI8)__builtin_shuffle(table, at) | sign) * scale;  // a shuffle reads 3 bits of each index
        memcpy(out + 8 * i, &y, sizeof y);
    }
#else
    static const float table[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                    -3.0f, -4.0f, -6.0f};
    for (int i = 0; i < 8; ++i) {
        out[2 * i] = table[p[i] & 15] * scale;
        out[2 * i + 1] = table[p[i] >> 4] * scale;
    }
#endif
}

// Nearest, ties to the even code, clamped to +-6; the sign of zero is kept.
DI_INLINE uint8_t di_to_e2m1(float x) {
    const float a = di_abs(x);
    const uint32_t c = (uint32_t)(a > 0.25f) + (uint32_t)(a >= 0.75f) + (uint32_t)(a > 1.25f) + (uint32_t)(a >= 1.75f) +
                       (uint32_t)(a > 2.5f) + (uint32_t)(a >= 3.5f) + (uint32_t)(a > 5.0f);
    return (uint8_t)(c | ((di_bits<uint32_t>(x) >> 28) & 8u));
}

// E8M0 byte of the smallest power of two >= x, x positive and normal.
DI_INLINE uint8_t di_power2_above(float x) {
    const uint32_t u = di_bits<uint32_t>(x);
    return (uint8_t)((u >> 23) + ((u & 0x7fffffu) != 0));
}

// Largest magnitude, at least `floor`; compared as integers, which order like magnitudes.
DI_INLINE float di_group_maximum(const float* x, int n, float floor) {
    uint32_t m = di_bits<uint32_t>(floor);
    for (int i = 0; i < n; ++i) {
        const uint32_t u = di_bits<uint32_t>(x[i]) & 0x7fffffffu;
        m = u > m ? u : m;
    }
    return di_bits<float>(m);
}

// ---- groups: one scale and n codes of 8 bits each --------------------------------------------------------------------------
struct DiMxfp8 {
    enum { BITS = 8, SCALE_E4M3 = 0 };
    DI_INLINE uint8_t scale(const float* x, int n) {
        return di_power2_above(di_group_maximum(x, n, 1e-4f) * (1.0f / 448.0f));
    }
    DI_INLINE float scale_value(uint8_t s) { return di_e8m0(s); }
    DI_INLINE uint8_t code(float x) { return di_to_e4m3(x); }
    DI_INLINE float value(uint8_t c) { return di_e4m3(c); }
};

struct DiMxfp4 {
    enum { BITS = 4, SCALE_E4M3 = 0 };
    DI_INLINE uint8_t scale(const float* x, int n) {
        return di_power2_above(di_group_maximum(x, n, 0x6p-126f) * (1.0f / 6.0f));
    }
    DI_INLINE float scale_value(uint8_t s) { return di_e8m0(s); }
    DI_INLINE uint8_t code(float x) { return di_to_e2m1(x); }
    DI_INLINE float value(uint8_t c) { return di_e2m1(c); }
};

struct DiFp4E4m3 {
    enum { BITS = 4, SCALE_E4M3 = 1 };
    DI_INLINE uint8_t scale(const float* x, int n) { return di_to_e4m3(di_group_maximum(x, n, 0x6p-9f) / 6.0f); }
    DI_INLINE float scale_value(uint8_t s) { return di_e4m3(s); }
    DI_INLINE uint8_t code(float x) { return di_to_e2m1(x); }
    DI_INLINE float value(uint8_t c) { return di_e2m1(c); }
};

// The values n elements have once they are stored in groups of G.
template <class F, int G>
DI_INLINE void di_quantise(const float* x, int n, float* out) {
    for (int g = 0; g < n; g += G) {
        const float s = F::scale_value(F::scale(x + g, G));
        for (int i = 0; i < G; ++i) out[g + i] = F::value(F::code(x[g + i] / s)) * s;
    }
}

// Stored form of n elements: codes (two per byte for 4 bits, even element low) and n / G scale bytes.
template <class F, int G>
DI_INLINE void di_encode(const float* x, int n, uint8_t* codes, uint8_t* scales) {
    for (int g = 0; g < n; g += G) {
        const uint8_t b = F::scale(x + g, G);
        const float s = F::scale_value(b);
        uint8_t c[G];
        for (int i = 0; i < G; ++i) c[i] = F::code(x[g + i] / s);
        scales[g / G] = b;
        if (F::BITS == 8) {
            memcpy(codes + g, c, G);
        } else {
            for (int i = 0; i < G / 2; ++i) codes[g / 2 + i] = (uint8_t)(c[2 * i] | (c[2 * i + 1] << 4));
        }
    }
}

template <class F, int G>
DI_INLINE void di_decode(const uint8_t* codes, const uint8_t* scales, int n, float* out) {
    for (int g = 0; g < n; g += G) {
        const float s = F::scale_value(scales[g / G]);
        if (F::BITS == 8) {
            for (int i = 0; i < G; ++i) out[g + i] = F::value(codes[g + i]) * s;
        } else {
            int i = 0;
            for (; i + 16 <= G; i += 16) di_e2m1_16(codes + (g + i) / 2, s, out + g + i);
            for (; i < G; i += 2) {
                const uint8_t b = codes[(g + i) / 2];
                out[g + i] = F::value(b & 15u) * s;
                out[g + i + 1] = F::value(b >> 4) * s;
            }
        }
    }
}

// ---- plain parts of a record -----------------------------------------------------------------------------------------------
DI_INLINE void di_encode_plain(const float* x, int n, float* out) { memcpy(out, x, (size_t)n * sizeof *x); }
DI_INLINE void di_encode_plain(const float* x, int n, uint16_t* out) {
    for (int i = 0; i < n; ++i) out[i] = di_to_bf(x[i]);
}
DI_INLINE void di_decode_plain(const float* x, int n, float* out) { memcpy(out, x, (size_t)n * sizeof *x); }
DI_INLINE void di_decode_plain(const uint16_t* x, int n, float* out) {
    for (int i = 0; i < n; ++i) out[i] = di_bf(x[i]);
}

}  // namespace DI_ISA

#endif
