// Numbers of the storage formats, exactly; rounding to the nearest, ties to the even code.
#ifndef DI_TWIN_FORMATS_H
#define DI_TWIN_FORMATS_H
#include <cmath>
#include <cstdint>
#include <cstring>

#include "include/di_asc.h"

namespace twin {

inline float from_bits(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline uint32_t to_bits(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}
inline uint16_t to_bf16(float f) {
    const uint32_t u = to_bits(f);
    if (f != f) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t h) { return from_bits((uint32_t)h << 16); }

inline float e8m0(uint8_t b) {
    return b == 255 ? from_bits(0x7FC00000) : b == 0 ? from_bits(0x00400000) : from_bits((uint32_t)b << 23);
}

inline float e4m3(uint8_t c) {
    const int e = (c >> 3) & 15, m = c & 7;
    if ((c & 127) == 127) return from_bits(0x7FC00000);
    const float v = e ? std::ldexp(1.0f + (float)m / 8.0f, e - 7) : std::ldexp((float)m, -9);
    return c & 128 ? -v : v;
}

inline float e2m1(uint8_t c) {
    static const float values[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return c & 8 ? -values[c & 7] : values[c & 7];
}

// Saturates to +-448.
inline uint8_t to_e4m3(float f) {
    const uint8_t sign = (uint8_t)(to_bits(f) >> 31 << 7);
    if (f != f) return (uint8_t)(sign | 127);
    const float a = std::fabs(f);
    if (a >= 448.0f) return (uint8_t)(sign | 126);
    if (a == 0.0f) return sign;
    int e = 0;
    std::frexp(a, &e);
    const int unit = (e - 1 < -6 ? -6 : e - 1) - 3;  // exponent of the last place
    const float steps = std::nearbyint(std::ldexp(a, -unit));
    const int q = (int)steps, high = unit + 9;  // q units of 2^unit; the smallest unit is 2^-9
    const int code = high == 0 ? q : q + high * 8;
    return (uint8_t)(sign | code);
}

template <class T> constexpr int64_t codes_per_byte() { return 1; }
template <> constexpr int64_t codes_per_byte<fp4x2_e2m1_t>() { return 2; }

// Element i of 32 bytes.
template <class T> float number(const uint8_t* row, int64_t i);
template <> inline float number<float>(const uint8_t* row, int64_t i) {
    float f;
    std::memcpy(&f, row + 4 * i, 4);
    return f;
}
template <> inline float number<bfloat16_t>(const uint8_t* row, int64_t i) {
    uint16_t h;
    std::memcpy(&h, row + 2 * i, 2);
    return from_bf16(h);
}
template <> inline float number<fp8_e4m3fn_t>(const uint8_t* row, int64_t i) { return e4m3(row[i]); }
template <> inline float number<fp4x2_e2m1_t>(const uint8_t* row, int64_t i) {
    return e2m1((uint8_t)(row[i / 2] >> 4 * (i % 2) & 15));
}

}  // namespace twin
#endif
