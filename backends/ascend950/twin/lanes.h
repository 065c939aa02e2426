// Masks and definedness of registers, lane by lane; both have a bit for each byte, used at the first byte of a lane.
#ifndef DI_TWIN_LANES_H
#define DI_TWIN_LANES_H
#include "machine.h"

namespace twin {

// Bits at the first byte of every lane of so many bytes.
template <int BYTES> constexpr uint64_t every() {
    return BYTES == 1 ? ~0ull : BYTES == 2 ? 0x5555555555555555ull : BYTES == 4 ? 0x1111111111111111ull
                                                                               : 0x0101010101010101ull;
}

template <class T> bool full(const vector_bool& m) {
    const uint64_t all = every<sizeof(T)>();
    return (m.bit[0] & all) == all && (m.bit[1] & all) == all && (m.bit[2] & all) == all && (m.bit[3] & all) == all;
}

template <class T> bool on(const uint64_t* bits, int lane) {
    const int at = lane * (int)sizeof(T);
    return bits[at / 64] >> (at % 64) & 1;
}

template <class T> void set(uint64_t* bits, int lane) {
    const int at = lane * (int)sizeof(T);
    bits[at / 64] |= 1ull << (at % 64);
}

// dst = op(lane) where the mask is set, else zero.
template <class T, class Op> void map(di_register_of<T>& dst, const vector_bool& mask, Op op) {
    const int lanes = di_register_of<T>::LANES;
    if (full<T>(mask)) {
        for (int i = 0; i < lanes; ++i) dst.lane[i] = op(i);
        return;
    }
    T out[di_register_of<T>::LANES];
    for (int i = 0; i < lanes; ++i) out[i] = on<T>(mask.bit, i) ? op(i) : T{};
    __builtin_memcpy(dst.lane, out, sizeof out);
}

inline void undefine(uint64_t* dst, const uint64_t* a, const uint64_t* b, const vector_bool& mask) {
    for (int w = 0; w < 4; ++w) dst[w] = (a[w] | (b ? b[w] : 0)) & mask.bit[w];
}

// Lanes that count have to be defined.
template <class T> void need_defined(const di_register_of<T>& a, const vector_bool& mask, const char* what) {
    const uint64_t all = every<sizeof(T)>();
    for (int w = 0; w < 4; ++w) {
        if (const uint64_t bad = a.undefined[w] & mask.bit[w] & all) {
            machine.report("%s uses lane %d, which nothing has written", what,
                           (w * 64 + __builtin_ctzll(bad)) / (int)sizeof(T));
            return;
        }
    }
}

// Every instruction on registers passes here.
inline void inside_vf(const char* what) {
    if (!machine.core || !machine.core->in_vf) machine.stop("%s outside of a vector function", what);
    machine.count(DID_INSTRUCTIONS, 1);
}

}  // namespace twin
#endif
