// What a draw is made of: counter-based noise, the largest of a row, the largest of a row with noise added, sums of
// weights. Sums have one order that depends on the number of tokens alone.
#ifndef DI_DRAW_MATH_H
#define DI_DRAW_MATH_H
#include "di_base.h"
#include "di_draw_vector.h"
#include "di_math.h"

namespace DI_ISA {

// Tokens looked at together; parts of all tokens that are put into a list, to find a cut and to draw from; most sorted.
enum { DI_LOOK = 512, DI_LISTED = 64, DI_SOME = 4, DI_SORTED = 128 };

DI_INLINE bool di_is_finite(double x) { return x - x == 0.0; }

// ---- noise: runtime/noise.py ----------------------------------------------------------------------------------------
DI_INLINE uint64_t di_mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

#define DI_GOLDEN 0x9e3779b97f4a7c15u

DI_INLINE uint64_t di_key(uint64_t a, uint64_t b) { return di_mix64(di_mix64(a + DI_GOLDEN) + b + DI_GOLDEN); }
DI_INLINE uint64_t di_noise(uint64_t key, int64_t id) { return di_mix64(key + (uint64_t)(id + 1) * DI_GOLDEN); }
DI_INLINE double di_uniform(uint64_t z) { return ((double)(z >> 12) + 0.5) * 0x1p-52; }
DI_INLINE double di_gumbel(uint64_t key, int64_t id) { return -log(-log(di_uniform(di_noise(key, id)))); }

// ---- e^x for x <= 0 in f64, within 2 ulp; 0 below -700 --------------------------------------------------------------
DI_INLINE double di_exp64(double x) {
    const double c = x < -700.0 ? -700.0 : x;
    const double shifted = c * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52: its last bit is 1
    const double k = shifted - 6755399441055744.0;
    const double r = (c - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = (p * r) * r + r + 1.0;
    const double y = di_bits<double>(di_bits<uint64_t>(p) + (di_bits<uint64_t>(shifted) << 52));
    return x < -700.0 ? 0.0 : y;
}

// ---- largest of a row -----------------------------------------------------------------------------------------------
struct DiTop {
    float value;
    int64_t id;
    bool number;  // false: a NaN is among them
};

// Ties go to the lower index.
static inline DiTop di_largest(const float* l, int64_t n) {
    const int64_t whole = n / DI_LANES * DI_LANES;
    DiRi wrong{};
    float best = -HUGE_VALF;
    int64_t block = 0;
    for (int64_t first = 0; first < whole; first += DI_LOOK) {
        const float top = di_block_largest(l + first, di_min64(DI_LOOK, whole - first), &wrong);
        if (top > best) {
            best = top;
            block = first;
        }
    }
    bool number = true;
    for (int i = 0; i < DI_FLOATS; ++i) number = number && !wrong[i];
    for (int64_t i = whole; i < n; ++i) {
        number = number && l[i] == l[i];
        if (l[i] > best) {
            best = l[i];
            block = i;
        }
    }
    while (block + 1 < n && l[block] != best) ++block;
    return DiTop{best, block, number};
}

static inline double di_greatest(const double* z, int64_t n) {
    double best = di_lanes_greatest(z, n / 8 * 8);
    for (int64_t i = n / 8 * 8; i < n; ++i) best = z[i] > best ? z[i] : best;
    return best;
}

DI_INLINE int64_t di_first_of(const double* z, int64_t n) {
    const double best = di_greatest(z, n);
    int64_t i = 0;
    while (i + 1 < n && z[i] != best) ++i;
    return i;
}

// ---- sums -----------------------------------------------------------------------------------------------------------
// Sum of e^(l - top).
static inline double di_sum_exp(const float* l, int64_t n, float top) {
    double lanes[DI_LOOK] = {};
    for (int64_t first = 0; first < n; first += DI_LOOK) {
        const int64_t count = di_min64(DI_LOOK, n - first);
        for (int64_t i = 0; i < count; ++i) lanes[i] += di_exp64((double)l[first + i] - (double)top);
    }
    double sum = 0.0;
    for (int i = 0; i < DI_LOOK; ++i) sum += lanes[i];
    return sum;
}

// By z falling, ids of equal z rising; the ids come in rising order.
static inline void di_sort_falling(int32_t* ids, int64_t n, const double* z) {
    for (int64_t i = 1; i < n; ++i) {
        const int32_t x = ids[i];
        int64_t at = i;
        for (; at > 0 && z[ids[at - 1]] < z[x]; --at) ids[at] = ids[at - 1];
        ids[at] = x;
    }
}

// ---- argmax of z + noise --------------------------------------------------------------------------------------------
// z of a token: exactly, and nearly in f32.
struct DiPlain {
    const float* l;
    double temperature;
    float inverse;
    inline __attribute__((always_inline)) double exact(int64_t i) const { return (double)l[i] / temperature; }
    inline __attribute__((always_inline)) float near(int64_t i) const { return l[i] * inverse; }
    inline __attribute__((always_inline)) int64_t id(int64_t i) const { return i; }
    static constexpr bool listed = false;
};

struct DiWide {
    const double* z;
    inline __attribute__((always_inline)) double exact(int64_t i) const { return z[i]; }
    inline __attribute__((always_inline)) float near(int64_t i) const { return (float)z[i]; }
    inline __attribute__((always_inline)) int64_t id(int64_t i) const { return i; }
    static constexpr bool listed = false;
};

// The tokens of a list, which rises.
struct DiListed {
    const double* z;
    const int32_t* ids;
    inline __attribute__((always_inline)) double exact(int64_t i) const { return z[ids[i]]; }
    inline __attribute__((always_inline)) float near(int64_t i) const { return (float)z[ids[i]]; }
    inline __attribute__((always_inline)) int64_t id(int64_t i) const { return ids[i]; }
    static constexpr bool listed = true;
};

// The upper 24 bits of 1 - u of n tokens: floor of 2^24 t. The counter of a token is the one before plus DI_GOLDEN.
DI_INLINE void di_words24(uint64_t key, int64_t first, int64_t n, int32_t* word) {
    int64_t i = 0;
    DiRu at;
    for (int k = 0; k < DI_DOUBLES; ++k) at[k] = key + (uint64_t)(first + k + 1) * DI_GOLDEN;
    for (; i + DI_DOUBLES <= n; i += DI_DOUBLES) {
        DiRu z = at;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z = ~(z ^ (z >> 31)) >> 40;
        const auto narrow = __builtin_convertvector(z, DiHalf);
        memcpy(word + i, &narrow, sizeof narrow);
        at += (uint64_t)DI_DOUBLES * DI_GOLDEN;
    }
    for (; i < n; ++i) word[i] = (int32_t)(~di_noise(key, first + i) >> 40);
}

// Upper bounds of z + noise. With t = 1 - u the noise -log(-log u) is at most -log t, because -log(1 - t) >= t; and
// -log2 of t = 2^e (1 + f) is at most -(e + f). Both are close where noise is large, which is where it matters.
template <class Z>
DI_INLINE void di_bounds(const Z& z, int64_t first, int64_t n, uint64_t key, float* bound) {
    int32_t word[DI_LOOK];
    if (Z::listed) {
        for (int64_t i = 0; i < n; ++i) word[i] = (int32_t)(~di_noise(key, z.id(first + i)) >> 40);
    } else {
        di_words24(key, first, n, word);
    }
    for (int64_t i = 0; i < n; ++i) {
        const float t = (float)word[i] * 0x1p-24f;
        const float noise = (127.0f - (float)di_bits<int32_t>(t) * 0x1p-23f) * 0.69314724f;
        const float x = z.near(first + i), size = di_abs(x);
        bound[i] = x + (noise + 1e-3f + 1e-6f * (size < 1e30f ? size : 1e30f));
    }
}

// The token with the largest z + Gumbel, ties to the lower index; -1 when all z are -inf. Bounds leave some dozens of
// tokens whose noise has to be known exactly.
template <class Z>
static inline int64_t di_drawn(const Z& z, int64_t n, uint64_t key) {
    float bound[DI_LOOK];
    double best = -HUGE_VAL;
    int64_t token = -1;
    const auto look = [&](int64_t i) {
        const double score = z.exact(i) + di_gumbel(key, z.id(i));
        if (score > best || (score == best && i < token)) {
            best = score;
            token = i;
        }
    };
    for (int64_t first = 0; first < n; first += DI_LOOK) {
        const int64_t count = di_min64(DI_LOOK, n - first);
        di_bounds(z, first, count, key, bound);
        for (int64_t i = count; i < DI_LOOK; ++i) bound[i] = -HUGE_VALF;
        DiRi wrong{};
        const float top = di_block_largest(bound, DI_LOOK, &wrong);
        if (top == -HUGE_VALF || (double)top < best) continue;
        for (int64_t i = 0; i < count; ++i) {
            if (bound[i] == top) {
                look(first + i);
                break;
            }
        }
        for (int64_t i = 0; i < count; ++i) {
            if (bound[i] > -HUGE_VALF && (double)bound[i] >= best) look(first + i);
        }
    }
    return token < 0 ? token : z.id(token);
}

}  // namespace DI_ISA

#endif
