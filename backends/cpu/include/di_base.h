// What every generated kernel starts from: the ABI, 16-lane vectors with one fixed reduction tree, bf16, row maps.
// Functions are static and always inlined: each kernel is compiled once per instruction set, and a shared copy could be
// the one that this machine cannot run.
#ifndef DI_BASE_H
#define DI_BASE_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "abi.h"

#define DI_INLINE static inline __attribute__((always_inline))
#define DI_JOIN_(a, b) a##_##b
#define DI_JOIN(a, b) DI_JOIN_(a, b)
#define DI_KERNEL(name) extern "C" void DI_JOIN(name, DI_ISA)(const DiArgs* args)

// Named after the instruction set, so that the linker never takes one form of a function for another.
namespace DI_ISA {}
using namespace DI_ISA;

namespace DI_ISA {

typedef float DiV __attribute__((vector_size(64)));
typedef float DiV8 __attribute__((vector_size(32)));
typedef float DiV4 __attribute__((vector_size(16)));
typedef int32_t DiI __attribute__((vector_size(64)));
typedef uint32_t DiU __attribute__((vector_size(64)));
typedef uint16_t DiH __attribute__((vector_size(32)));
typedef uint8_t DiB __attribute__((vector_size(16)));

enum { DI_LANES = 16, DI_STRIP = 512 };

template <class To, class From>
DI_INLINE To di_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

// ---- bf16: the upper half of an f32 ------------------------------------------------------------------------------
DI_INLINE float di_bf(uint16_t h) { return di_bits<float>((uint32_t)h << 16); }

// Nearest, ties to even; NaN stays NaN.
DI_INLINE uint16_t di_to_bf(float x) {
    uint32_t u = di_bits<uint32_t>(x);
    uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : r);
}

// Of a value that bf16 holds.
DI_INLINE uint16_t di_bf_exact(float x) { return (uint16_t)(di_bits<uint32_t>(x) >> 16); }

DI_INLINE float di_round_bf16(float x) { return di_bf(di_to_bf(x)); }

// ---- 16 lanes ------------------------------------------------------------------------------------------------------
DI_INLINE DiV di_splat(float x) { return DiV{} + x; }

DI_INLINE DiV di_load(const float* p) {
    DiV v;
    memcpy(&v, p, sizeof v);
    return v;
}

DI_INLINE DiV di_load(const uint16_t* p) {
    DiH h;
    memcpy(&h, p, sizeof h);
    return di_bits<DiV>(__builtin_convertvector(h, DiU) << 16);
}

DI_INLINE void di_store(float* p, DiV v) { memcpy(p, &v, sizeof v); }

// The first n < 16 elements, zeros behind them.
template <class T>
DI_INLINE DiV di_load_some(const T* p, int n) {
    T t[DI_LANES] = {};
    memcpy(t, p, (size_t)n * sizeof *p);
    return di_load(t);
}

DI_INLINE float di_get(const float* p, int64_t i) { return p[i]; }
DI_INLINE float di_get(const uint16_t* p, int64_t i) { return di_bf(p[i]); }

// a * b + c, in one rounding where the instruction set has it.
DI_INLINE DiV di_fma(DiV a, DiV b, DiV c) {
#ifdef __AVX512F__
    return __builtin_ia32_vfmaddps512_mask(a, b, c, (short)-1, 4);  // without the vector header: it takes long to read
#elif defined(__FMA__)
    struct Halves {
        DiV8 low, high;
    };
    const Halves x = di_bits<Halves>(a), y = di_bits<Halves>(b), z = di_bits<Halves>(c);
    return di_bits<DiV>(Halves{__builtin_ia32_vfmaddps256(x.low, y.low, z.low), __builtin_ia32_vfmaddps256(x.high, y.high, z.high)});
#else
    return a * b + c;
#endif
}

// The one tree over lanes: l + (l + 8), then 4, 2, 1.
DI_INLINE float di_sum(DiV v) {
    DiV8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    DiV4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

DI_INLINE DiV di_vmax(DiV a, DiV b) { return a > b ? a : b; }

DI_INLINE float di_maximum(DiV v) {
    float m = v[0];
    for (int i = 1; i < DI_LANES; ++i) m = m > v[i] ? m : v[i];
    return m;
}

// Adds n elements to the lane sums: element i belongs to lane i % 16.
DI_INLINE DiV di_add_lanes(DiV acc, const float* t, int n) {
    int i = 0;
    for (; i + DI_LANES <= n; i += DI_LANES) acc += di_load(t + i);
    if (i < n) acc += di_load_some(t + i, n - i);
    return acc;
}

DI_INLINE DiV di_max_lanes(DiV acc, const float* t, int n) {
    int i = 0;
    for (; i + DI_LANES <= n; i += DI_LANES) acc = di_vmax(di_load(t + i), acc);
    for (; i < n; ++i) acc[i % DI_LANES] = acc[i % DI_LANES] > t[i] ? acc[i % DI_LANES] : t[i];
    return acc;
}

// ---- rows ------------------------------------------------------------------------------------------------------------
// Row of axis `to` that holds the row `row` of axis `from`; kept and wanted rows are the last of each sequence.
DI_INLINE int64_t di_wider_row(const DiStep* step, int32_t from, int64_t row, int32_t to) {
    const DiAxis* a = &step->axis[from];
    const int32_t s = a->seq[row];
    const DiAxis* t = &step->axis[DI_AXIS_STEP];
    return step->axis[to].first[s + 1] - (t->first[s + 1] - a->step_row[row]);
}

DI_INLINE int64_t di_min64(int64_t a, int64_t b) { return a < b ? a : b; }
DI_INLINE int64_t di_max64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace DI_ISA

#endif
