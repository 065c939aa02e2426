// Arithmetic of vector functions.
#include <cmath>
#include <cstring>

#include "formats.h"
#include "lanes.h"

using namespace twin;

namespace {

template <class T> struct Wide { typedef T type; };
template <> struct Wide<int32_t> { typedef uint32_t type; };
template <> struct Wide<int16_t> { typedef uint32_t type; };
template <> struct Wide<uint16_t> { typedef uint32_t type; };

template <class T> T larger(T a, T b) { return a > b || a != a ? a : b; }
template <class T> T smaller(T a, T b) { return a < b || a != a ? a : b; }

// Pairs of neighbours, then pairs of pairs: the order of the reduction unit.
template <class T, class Op> T tree(const T* lanes, Op op) {
    T level[64];
    std::memcpy(level, lanes, sizeof level);
    for (int n = 64; n > 1; n /= 2) {
        for (int i = 0; i < n / 2; ++i) level[i] = op(level[2 * i], level[2 * i + 1]);
    }
    return level[0];
}

template <class T> void first_lane(di_register_of<T>& dst, T value) {
    std::memset((void*)&dst, 0, sizeof dst);
    dst.lane[0] = value;
}

// Index of the lane that holds the extreme, for the second lane of the result.
template <class T> void extreme(di_register_of<T>& dst, const di_register_of<T>& a, const vector_bool& mask, bool high,
                                const char* what) {
    need_defined(a, mask, what);
    int best = -1;
    for (int i = 0; i < 64; ++i) {
        if (!on<T>(mask.bit, i)) continue;
        const bool nan = a.lane[i] != a.lane[i];
        if (best < 0 || (a.lane[best] == a.lane[best] && (nan || (high ? a.lane[i] > a.lane[best]
                                                                         : a.lane[i] < a.lane[best])))) {
            best = i;
        }
    }
    if (best < 0) machine.stop("%s of no lanes", what);
    const T value = a.lane[best];
    first_lane(dst, value);
    const uint32_t where = (uint32_t)best;
    std::memcpy(&dst.lane[1], &where, 4);
}

}  // namespace

#define DI_BINARY(NAME, T, EXPRESSION) \
    void NAME(di_register_of<T>& dst, const di_register_of<T>& a, const di_register_of<T>& b, vector_bool mask) { \
        inside_vf(#NAME); \
        typedef Wide<T>::type W; \
        map(dst, mask, [&](int i) { const W x = (W)a.lane[i], y = (W)b.lane[i]; return (T)(EXPRESSION); }); \
        undefine(dst.undefined, a.undefined, b.undefined, mask); \
    }
#define DI_BY_SCALAR(NAME, T, EXPRESSION) \
    void NAME(di_register_of<T>& dst, const di_register_of<T>& a, T b, vector_bool mask) { \
        inside_vf(#NAME); \
        typedef Wide<T>::type W; \
        const W y = (W)b; \
        map(dst, mask, [&](int i) { const W x = (W)a.lane[i]; return (T)(EXPRESSION); }); \
        undefine(dst.undefined, a.undefined, nullptr, mask); \
    }
#define DI_UNARY(NAME, T, EXPRESSION) \
    void NAME(di_register_of<T>& dst, const di_register_of<T>& a, vector_bool mask) { \
        inside_vf(#NAME); \
        map(dst, mask, [&](int i) { const T x = a.lane[i]; return (T)(EXPRESSION); }); \
        undefine(dst.undefined, a.undefined, nullptr, mask); \
    }
#define DI_COMPARED(NAME, T, OPERATOR) \
    void NAME(vector_bool& dst, const di_register_of<T>& a, const di_register_of<T>& b, vector_bool mask, di_at at) { \
        machine.issue(at); \
        inside_vf(#NAME); \
        need_defined(a, mask, #NAME); \
        need_defined(b, mask, #NAME); \
        vector_bool out{}; \
        for (int i = 0; i < di_register_of<T>::LANES; ++i) { \
            if (on<T>(mask.bit, i) && a.lane[i] OPERATOR b.lane[i]) set<T>(out.bit, i); \
        } \
        dst = out; \
    } \
    void NAME##_scalar(vector_bool& dst, const di_register_of<T>& a, T b, vector_bool mask, di_at at) { \
        machine.issue(at); \
        inside_vf(#NAME); \
        need_defined(a, mask, #NAME); \
        vector_bool out{}; \
        for (int i = 0; i < di_register_of<T>::LANES; ++i) { \
            if (on<T>(mask.bit, i) && a.lane[i] OPERATOR b) set<T>(out.bit, i); \
        } \
        dst = out; \
    }
#define DI_ON_NUMBERS(T) \
    DI_BINARY(asc_add, T, x + y) \
    DI_BINARY(asc_sub, T, x - y) \
    DI_BINARY(asc_mul, T, x * y) \
    void asc_max(di_register_of<T>& dst, const di_register_of<T>& a, const di_register_of<T>& b, vector_bool mask) { \
        inside_vf("asc_max"); \
        map(dst, mask, [&](int i) { return larger(a.lane[i], b.lane[i]); }); \
        undefine(dst.undefined, a.undefined, b.undefined, mask); \
    } \
    void asc_min(di_register_of<T>& dst, const di_register_of<T>& a, const di_register_of<T>& b, vector_bool mask) { \
        inside_vf("asc_min"); \
        map(dst, mask, [&](int i) { return smaller(a.lane[i], b.lane[i]); }); \
        undefine(dst.undefined, a.undefined, b.undefined, mask); \
    } \
    void asc_madd(di_register_of<T>& dst, const di_register_of<T>& a, const di_register_of<T>& b, vector_bool mask) { \
        inside_vf("asc_madd"); \
        const di_register_of<T> c = dst; \
        map(dst, mask, [&](int i) { return (T)(c.lane[i] * a.lane[i] + b.lane[i]); }); \
        undefine(dst.undefined, a.undefined, b.undefined, mask); \
        for (int w = 0; w < 4; ++w) dst.undefined[w] |= c.undefined[w] & mask.bit[w]; \
    } \
    DI_BY_SCALAR(asc_add_scalar, T, x + y) \
    DI_BY_SCALAR(asc_mul_scalar, T, x * y) \
    void asc_max_scalar(di_register_of<T>& dst, const di_register_of<T>& a, T b, vector_bool mask) { \
        inside_vf("asc_max_scalar"); \
        map(dst, mask, [&](int i) { return larger(a.lane[i], b); }); \
        undefine(dst.undefined, a.undefined, nullptr, mask); \
    } \
    void asc_min_scalar(di_register_of<T>& dst, const di_register_of<T>& a, T b, vector_bool mask) { \
        inside_vf("asc_min_scalar"); \
        map(dst, mask, [&](int i) { return smaller(a.lane[i], b); }); \
        undefine(dst.undefined, a.undefined, nullptr, mask); \
    } \
    DI_COMPARED(asc_eq, T, ==) \
    DI_COMPARED(asc_ne, T, !=) \
    DI_COMPARED(asc_lt, T, <) \
    DI_COMPARED(asc_le, T, <=) \
    DI_COMPARED(asc_gt, T, >) \
    DI_COMPARED(asc_ge, T, >=)
DI_NUMBERS(DI_ON_NUMBERS)
void asc_eq_scalar(vector_bool& dst, const vector_uint8_t& a, uint8_t b, vector_bool mask, di_at at) {
    machine.issue(at);
    inside_vf("asc_eq_scalar");
    need_defined(a, mask, "asc_eq_scalar");
    vector_bool out{};
    for (int i = 0; i < vector_uint8_t::LANES; ++i) {
        if (on<uint8_t>(mask.bit, i) && a.lane[i] == b) set<uint8_t>(out.bit, i);
    }
    dst = out;
}
DI_BINARY(asc_div, float, x / y)
DI_UNARY(asc_abs, float, std::fabs(x))
DI_UNARY(asc_neg, float, -x)
DI_UNARY(asc_exp, float, std::exp(x))
DI_UNARY(asc_ln, float, std::log(x))
DI_UNARY(asc_sqrt, float, std::sqrt(x))
DI_UNARY(asc_relu, float, larger(x, 0.0f))
DI_UNARY(asc_abs, int32_t, x < 0 ? 0u - (uint32_t)x : (uint32_t)x)
DI_UNARY(asc_neg, int32_t, 0u - (uint32_t)x)

#define DI_ON_INTEGERS(T) \
    DI_BINARY(asc_and, T, x & y) \
    DI_BINARY(asc_or, T, x | y) \
    DI_BINARY(asc_xor, T, x ^ y) \
    DI_UNARY(asc_not, T, ~x) \
    void asc_shiftleft_scalar(di_register_of<T>& dst, const di_register_of<T>& a, int16_t n, vector_bool mask) { \
        inside_vf("asc_shiftleft_scalar"); \
        if (n < 0 || n >= (int)sizeof(T) * 8) machine.stop("asc_shiftleft_scalar by %d", n); \
        map(dst, mask, [&](int i) { return (T)((uint32_t)a.lane[i] << n); }); \
        undefine(dst.undefined, a.undefined, nullptr, mask); \
    } \
    void asc_shiftright_scalar(di_register_of<T>& dst, const di_register_of<T>& a, int16_t n, vector_bool mask) { \
        inside_vf("asc_shiftright_scalar"); \
        if (n < 0 || n >= (int)sizeof(T) * 8) machine.stop("asc_shiftright_scalar by %d", n); \
        map(dst, mask, [&](int i) { return (T)(a.lane[i] >> n); }); \
        undefine(dst.undefined, a.undefined, nullptr, mask); \
    }
DI_INTEGERS(DI_ON_INTEGERS)

// Counts of 32 and more empty the lane.
#define DI_SHIFT(T, EMPTY) \
    void asc_shiftleft(di_register_of<T>& dst, const di_register_of<T>& a, const vector_int32_t& n, \
                       vector_bool mask) { \
        inside_vf("asc_shiftleft"); \
        map(dst, mask, [&](int i) { return n.lane[i] > 31 ? (T)0 : (T)((uint32_t)a.lane[i] << n.lane[i]); }); \
        undefine(dst.undefined, a.undefined, n.undefined, mask); \
    } \
    void asc_shiftright(di_register_of<T>& dst, const di_register_of<T>& a, const vector_int32_t& n, \
                        vector_bool mask) { \
        inside_vf("asc_shiftright"); \
        map(dst, mask, [&](int i) { return n.lane[i] > 31 ? (T)(EMPTY) : (T)(a.lane[i] >> n.lane[i]); }); \
        undefine(dst.undefined, a.undefined, n.undefined, mask); \
    }
DI_SHIFT(uint32_t, 0)
DI_SHIFT(int32_t, a.lane[i] < 0 ? -1 : 0)

#define DI_MOVED(T) \
    void asc_select(di_register_of<T>& dst, const di_register_of<T>& a, const di_register_of<T>& b, \
                    vector_bool mask) { \
        inside_vf("asc_select"); \
        di_register_of<T> out; \
        for (int i = 0; i < di_register_of<T>::LANES; ++i) out.lane[i] = on<T>(mask.bit, i) ? a.lane[i] : b.lane[i]; \
        for (int w = 0; w < 4; ++w) { \
            out.undefined[w] = (a.undefined[w] & mask.bit[w]) | (b.undefined[w] & ~mask.bit[w]); \
        } \
        dst = out; \
    } \
    void asc_duplicate_scalar(di_register_of<T>& dst, T value, vector_bool mask) { \
        inside_vf("asc_duplicate_scalar"); \
        map(dst, mask, [&](int) { return value; }); \
        std::memset(dst.undefined, 0, sizeof dst.undefined); \
    } \
    void asc_duplicate(di_register_of<T>& dst, const di_register_of<T>& src, vector_bool mask) { \
        inside_vf("asc_duplicate"); \
        const T value = src.lane[0]; \
        const bool good = !(src.undefined[0] & 1); \
        map(dst, mask, [&](int) { return value; }); \
        for (int w = 0; w < 4; ++w) dst.undefined[w] = good ? 0 : every<sizeof(T)>() & mask.bit[w]; \
    } \
    void asc_squeeze(di_register_of<T>& dst, const di_register_of<T>& src, vector_bool mask) { \
        inside_vf("asc_squeeze"); \
        di_register_of<T> out; \
        std::memset((void*)&out, 0, sizeof out); \
        int to = 0; \
        for (int i = 0; i < di_register_of<T>::LANES; ++i) { \
            if (!on<T>(mask.bit, i)) continue; \
            if (on<T>(src.undefined, i)) set<T>(out.undefined, to); \
            out.lane[to++] = src.lane[i]; \
        } \
        dst = out; \
    }
DI_LANES(DI_MOVED)

#define DI_REDUCED(T) \
    void asc_reduce_sum(di_register_of<T>& dst, const di_register_of<T>& a, vector_bool mask) { \
        inside_vf("asc_reduce_sum"); \
        need_defined(a, mask, "asc_reduce_sum"); \
        T lanes[64]; \
        for (int i = 0; i < 64; ++i) lanes[i] = on<T>(mask.bit, i) ? a.lane[i] : T{}; \
        typedef Wide<T>::type W; \
        first_lane(dst, tree(lanes, [](T x, T y) { return (T)((W)x + (W)y); })); \
    } \
    void asc_reduce_max(di_register_of<T>& dst, const di_register_of<T>& a, vector_bool mask) { \
        inside_vf("asc_reduce_max"); \
        extreme(dst, a, mask, true, "asc_reduce_max"); \
    } \
    void asc_reduce_min(di_register_of<T>& dst, const di_register_of<T>& a, vector_bool mask) { \
        inside_vf("asc_reduce_min"); \
        extreme(dst, a, mask, false, "asc_reduce_min"); \
    }
DI_WORDS(DI_REDUCED)

void asc_arange(vector_int32_t& dst, int32_t start) {
    inside_vf("asc_arange");
    for (int i = 0; i < 64; ++i) dst.lane[i] = start + i;
    std::memset(dst.undefined, 0, sizeof dst.undefined);
}

// ---- histograms ----------------------------------------------------------------------------------------------------
namespace {

void histogram(vector_uint16_t& dst, const vector_uint8_t& src, const vector_bool& mask, int first, const char* what,
               di_at at) {
    machine.issue(at);
    inside_vf(what);
    need_defined(src, mask, what);
    need_defined(dst, vector_bool{{~0ull, ~0ull, ~0ull, ~0ull}}, what);
    for (int i = 0; i < vector_uint8_t::LANES; ++i) {
        const int bin = src.lane[i] - first;
        if (on<uint8_t>(mask.bit, i) && bin >= 0 && bin < 128 && !++dst.lane[bin]) {
            machine.report("%s counts beyond 65535", what);
        }
    }
}

}  // namespace

void asc_frequency_histogram_bin0(vector_uint16_t& dst, const vector_uint8_t& src, vector_bool mask, di_at at) {
    histogram(dst, src, mask, 0, "asc_frequency_histogram_bin0", at);
}
void asc_frequency_histogram_bin1(vector_uint16_t& dst, const vector_uint8_t& src, vector_bool mask, di_at at) {
    histogram(dst, src, mask, 128, "asc_frequency_histogram_bin1", at);
}

// ---- conversions ---------------------------------------------------------------------------------------------------
namespace {

int32_t to_int(float x) {
    if (x != x) return 0;
    return x >= 2147483648.0f ? INT32_MAX : x < -2147483648.0f ? INT32_MIN : (int32_t)x;
}

// Narrow results lie at the first part of their lane, zeros behind them.
template <class T, class Op>
void narrow(di_register_of<T>& dst, const vector_float& a, const vector_bool& mask, Op op) {
    di_register_of<T> out;
    std::memset((void*)&out, 0, sizeof out);
    const int step = 4 / (int)sizeof(T);
    for (int i = 0; i < 64; ++i) {
        if (!on<float>(mask.bit, i)) continue;
        out.lane[i * step] = op(a.lane[i]);
        if (on<float>(a.undefined, i)) set<float>(out.undefined, i);
    }
    dst = out;
}

template <class T, class Op>
void widen(vector_float& dst, const di_register_of<T>& a, const vector_bool& mask, Op op) {
    vector_float out;
    std::memset((void*)&out, 0, sizeof out);
    const int step = 4 / (int)sizeof(T);
    for (int i = 0; i < 64; ++i) {
        if (!on<float>(mask.bit, i)) continue;
        out.lane[i] = op(a.lane[i * step]);
        if (on<T>(a.undefined, i * step)) set<float>(out.undefined, i);
    }
    dst = out;
}

}  // namespace

void asc_float2int32_rn(vector_int32_t& dst, const vector_float& a, vector_bool mask) {
    inside_vf("asc_float2int32_rn");
    map(dst, mask, [&](int i) { return to_int(std::nearbyint(a.lane[i])); });
    undefine(dst.undefined, a.undefined, nullptr, mask);
}
void asc_float2int32_rz(vector_int32_t& dst, const vector_float& a, vector_bool mask) {
    inside_vf("asc_float2int32_rz");
    map(dst, mask, [&](int i) { return to_int(std::trunc(a.lane[i])); });
    undefine(dst.undefined, a.undefined, nullptr, mask);
}
void asc_int322float_rn(vector_float& dst, const vector_int32_t& a, vector_bool mask) {
    inside_vf("asc_int322float_rn");
    map(dst, mask, [&](int i) { return (float)a.lane[i]; });
    undefine(dst.undefined, a.undefined, nullptr, mask);
}
void asc_float2bfloat16_rn(vector_bfloat16_t& dst, const vector_float& a, vector_bool mask) {
    inside_vf("asc_float2bfloat16_rn");
    narrow(dst, a, mask, [](float x) { return bfloat16_t{to_bf16(x)}; });
}
void asc_bfloat162float(vector_float& dst, const vector_bfloat16_t& a, vector_bool mask) {
    inside_vf("asc_bfloat162float");
    widen(dst, a, mask, [](bfloat16_t x) { return from_bf16(x.bits); });
}
void asc_float2e4m3_rn_sat(vector_fp8_e4m3fn_t& dst, const vector_float& a, vector_bool mask) {
    inside_vf("asc_float2e4m3_rn_sat");
    narrow(dst, a, mask, [](float x) { return fp8_e4m3fn_t{to_e4m3(x)}; });
}
void asc_e4m32float(vector_float& dst, const vector_fp8_e4m3fn_t& a, vector_bool mask) {
    inside_vf("asc_e4m32float");
    widen(dst, a, mask, [](fp8_e4m3fn_t x) { return e4m3(x.bits); });
}
