// Loads and stores of vector functions, gathers and scatters, masks.
#include <cstring>

#include "lanes.h"

using namespace twin;

namespace {

const int REGISTER = 256, ALIGNED = 32;

int64_t offset_of(const void* p) { return (int64_t)(uintptr_t)p; }

const uint8_t* read(const void* src, int64_t bytes, int align, const char* what, di_at at) {
    machine.issue(at);
    inside_vf(what);
    return machine.touch(machine.space(DI_SPACE_UB), offset_of(src), bytes, PIPE_V, false, false, align, what);
}

uint8_t* write(void* dst, int64_t bytes, int align, const char* what) {
    return machine.touch(machine.space(DI_SPACE_UB), offset_of(dst), bytes, PIPE_V, true, false, align, what);
}

// Whether all of `bytes` bytes at an offset of UB were written.
bool written(int64_t offset, int bytes) {
    const Space& ub = machine.space(DI_SPACE_UB);
    for (int64_t i = offset; i < offset + bytes; ++i) {
        if (!(ub.shadow[(size_t)(i / GRANULE)].written >> (i % GRANULE) & 1)) return false;
    }
    return true;
}

template <class T>
void load(T* lanes, uint64_t* undefined, const void* src, int64_t bytes, di_at at, const char* what) {
    std::memcpy((void*)lanes, read(src, bytes, ALIGNED, what, at), (size_t)bytes);
    const Space& ub = machine.space(DI_SPACE_UB);
    const int64_t first = offset_of(src) / GRANULE;
    for (int g = 0; g < bytes / GRANULE; ++g) {
        uint32_t missing = ~ub.shadow[(size_t)(first + g)].written;
        for (unsigned step = 1; step < sizeof(T); step *= 2) missing |= missing >> step;
        const uint64_t part = missing & (uint32_t)every<sizeof(T)>();
        undefined[g / 2] = (g % 2 ? undefined[g / 2] : 0) | part << 32 * (g % 2);
    }
}

// Stores lanes of a contiguous range under a mask: the longest runs at once.
template <class T, class Lane>
void store(void* dst, const vector_bool& mask, int mask_bytes, int lanes, const char* what, Lane lane) {
    int first = -1;
    for (int i = 0; i <= lanes; ++i) {
        const int bit = i * mask_bytes;
        const bool active = i < lanes && (mask.bit[bit / 64] >> (bit % 64) & 1);
        if (active && first < 0) first = i;
        if (active || first < 0) continue;
        uint8_t* p = write((char*)dst + first * sizeof(T), (int64_t)(i - first) * (int64_t)sizeof(T), 1, what);
        for (int k = first; k < i; ++k) {
            const T v = lane(k);
            std::memcpy(p + (k - first) * sizeof(T), &v, sizeof(T));
        }
        first = -1;
    }
}

void begin_store(const void* dst, int align, const char* what, di_at at) {
    machine.issue(at);
    inside_vf(what);
    if (offset_of(dst) % align) {
        machine.stop("%s at UB offset %lld, which is no multiple of %d", what, (long long)offset_of(dst), align);
    }
}

vector_bool pattern(di_pattern which, int bytes) {
    const int lanes = REGISTER / bytes;
    int count = lanes;
    switch (which) {
        case PAT_ALLF: count = 0; break;
        case PAT_ALL: break;
        case PAT_VL1: count = 1; break;
        case PAT_VL2: count = 2; break;
        case PAT_VL3: count = 3; break;
        case PAT_VL4: count = 4; break;
        case PAT_VL8: count = 8; break;
        case PAT_VL16: count = 16; break;
        case PAT_VL32: count = 32; break;
        case PAT_VL64: count = 64; break;
        case PAT_VL128: count = 128; break;
        case PAT_H: count = lanes / 2; break;
        case PAT_Q: count = lanes / 4; break;
    }
    if (count > lanes) machine.stop("a mask of %d lanes, there are %d", count, lanes);
    vector_bool m{};
    for (int i = 0; i < count * bytes; i += bytes) m.bit[i / 64] |= 1ull << (i % 64);
    return m;
}

vector_bool next(uint32_t& count, int bytes) {
    const uint32_t lanes = (uint32_t)(REGISTER / bytes), n = count < lanes ? count : lanes;
    count -= n;
    vector_bool m{};
    for (uint32_t i = 0; i < n * (uint32_t)bytes; i += (uint32_t)bytes) m.bit[i / 64] |= 1ull << (i % 64);
    return m;
}

}  // namespace

vector_bool asc_create_mask_b8(di_pattern which) { return pattern(which, 1); }
vector_bool asc_create_mask_b16(di_pattern which) { return pattern(which, 2); }
vector_bool asc_create_mask_b32(di_pattern which) { return pattern(which, 4); }
vector_bool asc_update_mask_b8(uint32_t& count) { return next(count, 1); }
vector_bool asc_update_mask_b16(uint32_t& count) { return next(count, 2); }
vector_bool asc_update_mask_b32(uint32_t& count) { return next(count, 4); }

void asc_mask_and(vector_bool& dst, vector_bool a, vector_bool b, vector_bool mask) {
    for (int w = 0; w < 4; ++w) dst.bit[w] = a.bit[w] & b.bit[w] & mask.bit[w];
}
void asc_mask_or(vector_bool& dst, vector_bool a, vector_bool b, vector_bool mask) {
    for (int w = 0; w < 4; ++w) dst.bit[w] = (a.bit[w] | b.bit[w]) & mask.bit[w];
}
void asc_mask_xor(vector_bool& dst, vector_bool a, vector_bool b, vector_bool mask) {
    for (int w = 0; w < 4; ++w) dst.bit[w] = (a.bit[w] ^ b.bit[w]) & mask.bit[w];
}
void asc_mask_not(vector_bool& dst, vector_bool a, vector_bool mask) {
    for (int w = 0; w < 4; ++w) dst.bit[w] = ~a.bit[w] & mask.bit[w];
}

#define DI_MEMORY(T) \
    void asc_loadalign(di_register_of<T>& dst, const T* src, di_at at) { \
        load<T>(dst.lane, dst.undefined, src, REGISTER, at, "asc_loadalign"); \
    } \
    void asc_loadalign_brc_elem(di_register_of<T>& dst, const T* src, di_at at) { \
        T v; \
        std::memcpy((void*)&v, read(src, sizeof(T), sizeof(T), "asc_loadalign_brc_elem", at), sizeof(T)); \
        const bool good = written(offset_of(src), sizeof(T)); \
        for (T& lane : dst.lane) lane = v; \
        for (uint64_t& u : dst.undefined) u = good ? 0 : every<sizeof(T)>(); \
    } \
    void asc_loadalign_deintlv(di_register_of<T>& even, di_register_of<T>& odd, const T* src, di_at at) { \
        const int lanes = di_register_of<T>::LANES; \
        di_register_of<T> part[2]; \
        for (int h = 0; h < 2; ++h) { \
            load<T>(part[h].lane, part[h].undefined, src + h * lanes, REGISTER, at, "asc_loadalign_deintlv"); \
        } \
        std::memset(even.undefined, 0, sizeof even.undefined); \
        std::memset(odd.undefined, 0, sizeof odd.undefined); \
        for (int i = 0; i < 2 * lanes; ++i) { \
            di_register_of<T>& to = i % 2 ? odd : even; \
            to.lane[i / 2] = part[i / lanes].lane[i % lanes]; \
            if (on<T>(part[i / lanes].undefined, i % lanes)) set<T>(to.undefined, i / 2); \
        } \
    } \
    void asc_storealign(T* dst, const di_register_of<T>& src, vector_bool mask, di_at at) { \
        begin_store(dst, ALIGNED, "asc_storealign", at); \
        need_defined(src, mask, "asc_storealign"); \
        if (full<T>(mask)) { \
            std::memcpy(write(dst, REGISTER, ALIGNED, "asc_storealign"), src.lane, REGISTER); \
            return; \
        } \
        store<T>(dst, mask, sizeof(T), di_register_of<T>::LANES, "asc_storealign", \
                 [&](int i) { return src.lane[i]; }); \
    } \
    void asc_storealign_1st(T* dst, const di_register_of<T>& src, di_at at) { \
        begin_store(dst, sizeof(T), "asc_storealign_1st", at); \
        need_defined(src, pattern(PAT_VL1, sizeof(T)), "asc_storealign_1st"); \
        std::memcpy(write(dst, sizeof(T), sizeof(T), "asc_storealign_1st"), src.lane, sizeof(T)); \
    } \
    void asc_storealign_intlv(T* dst, const di_register_of<T>& even, const di_register_of<T>& odd, di_at at) { \
        const int lanes = di_register_of<T>::LANES; \
        begin_store(dst, ALIGNED, "asc_storealign_intlv", at); \
        need_defined(even, pattern(PAT_ALL, sizeof(T)), "asc_storealign_intlv"); \
        need_defined(odd, pattern(PAT_ALL, sizeof(T)), "asc_storealign_intlv"); \
        T* p = (T*)write(dst, 2 * REGISTER, ALIGNED, "asc_storealign_intlv"); \
        for (int i = 0; i < 2 * lanes; ++i) p[i] = i % 2 ? odd.lane[i / 2] : even.lane[i / 2]; \
    } \
    void asc_storealign_intlv(T* dst, const di_register_of<T>& even, const di_register_of<T>& odd, vector_bool mask, \
                              di_at at) { \
        if (!full<T>(mask)) machine.stop("asc_storealign_intlv with a mask, which it ignores"); \
        asc_storealign_intlv(dst, even, odd, at); \
    }
DI_LANES(DI_MEMORY)

#define DI_WIDEN(WIDE, NARROW) \
    void asc_loadalign_unpack(di_register_of<WIDE>& dst, const NARROW* src, di_at at) { \
        const int lanes = di_register_of<WIDE>::LANES; \
        NARROW half_lanes[REGISTER / sizeof(NARROW) / 2]; \
        uint64_t undefined[2] = {}; \
        load<NARROW>(half_lanes, undefined, src, REGISTER / 2, at, "asc_loadalign_unpack"); \
        std::memset((void*)&dst, 0, sizeof dst); \
        for (int i = 0; i < lanes; ++i) { \
            std::memcpy((void*)&dst.lane[i], &half_lanes[i], sizeof(NARROW)); \
            if (on<NARROW>(undefined, i)) set<WIDE>(dst.undefined, i); \
        } \
    } \
    void asc_storealign_pack(NARROW* dst, const di_register_of<WIDE>& src, vector_bool mask, di_at at) { \
        begin_store(dst, ALIGNED, "asc_storealign_pack", at); \
        need_defined(src, mask, "asc_storealign_pack"); \
        store<NARROW>(dst, mask, sizeof(WIDE), di_register_of<WIDE>::LANES, "asc_storealign_pack", [&](int i) { \
            NARROW v; \
            std::memcpy((void*)&v, &src.lane[i], sizeof v); \
            return v; \
        }); \
    }
DI_WIDEN(uint32_t, uint16_t)
DI_WIDEN(int32_t, int16_t)
DI_WIDEN(uint16_t, uint8_t)

void asc_loadalign_unpack4(vector_uint32_t& dst, const uint8_t* src, di_at at) {
    uint8_t codes[REGISTER / 4];
    uint64_t undefined[1] = {};
    load<uint8_t>(codes, undefined, src, REGISTER / 4, at, "asc_loadalign_unpack4");
    std::memset(dst.undefined, 0, sizeof dst.undefined);
    for (int i = 0; i < REGISTER / 4; ++i) {
        dst.lane[i] = codes[i];
        if (on<uint8_t>(undefined, i)) set<uint32_t>(dst.undefined, i);
    }
}

void asc_storealign_pack_quarter(uint8_t* dst, const vector_uint32_t& src, vector_bool mask, di_at at) {
    begin_store(dst, ALIGNED, "asc_storealign_pack_quarter", at);
    need_defined(src, mask, "asc_storealign_pack_quarter");
    store<uint8_t>(dst, mask, 4, REGISTER / 4, "asc_storealign_pack_quarter",
                   [&](int i) { return (uint8_t)src.lane[i]; });
}

namespace {

// Elements that one scatter writes twice end in no particular order.
void need_distinct(const vector_uint32_t& index, const vector_bool& mask) {
    static uint64_t seen[1 << 10];  // of every element of 32 bits that UB has
    for (int i = 0; i < 64; ++i) {
        if (!on<uint32_t>(mask.bit, i) || index.lane[i] >= 64 << 10) continue;
        uint64_t& word = seen[index.lane[i] / 64];
        if (word >> (index.lane[i] % 64) & 1) machine.report("asc_scatter writes element %u twice", index.lane[i]);
        word |= 1ull << (index.lane[i] % 64);
    }
    for (int i = 0; i < 64; ++i) {
        if (index.lane[i] < 64 << 10) seen[index.lane[i] / 64] = 0;
    }
}

}  // namespace

#define DI_INDEXED(T) \
    void asc_gather(di_register_of<T>& dst, const T* base, const vector_uint32_t& index, vector_bool mask, di_at at) { \
        machine.issue(at); \
        inside_vf("asc_gather"); \
        need_defined(index, mask, "asc_gather"); \
        std::memset(dst.undefined, 0, sizeof dst.undefined); \
        const vector_uint32_t places = index; \
        for (int i = 0; i < REGISTER / 4; ++i) { \
            dst.lane[i] = 0; \
            if (!on<T>(mask.bit, i)) continue; \
            const int64_t from = offset_of(base) + (int64_t)places.lane[i] * (int64_t)sizeof(T); \
            std::memcpy(&dst.lane[i], machine.touch(machine.space(DI_SPACE_UB), from, sizeof(T), PIPE_V, false, false, \
                                                    sizeof(T), "asc_gather"), sizeof(T)); \
            if (!written(from, sizeof(T))) set<T>(dst.undefined, i); \
        } \
    } \
    void asc_scatter(T* base, const di_register_of<T>& src, const vector_uint32_t& index, vector_bool mask, \
                     di_at at) { \
        machine.issue(at); \
        inside_vf("asc_scatter"); \
        need_defined(index, mask, "asc_scatter"); \
        need_defined(src, mask, "asc_scatter"); \
        need_distinct(index, mask); \
        for (int i = 0; i < REGISTER / 4; ++i) { \
            if (!on<T>(mask.bit, i)) continue; \
            const int64_t to = offset_of(base) + (int64_t)index.lane[i] * (int64_t)sizeof(T); \
            std::memcpy(machine.touch(machine.space(DI_SPACE_UB), to, sizeof(T), PIPE_V, true, false, sizeof(T), \
                                      "asc_scatter"), &src.lane[i], sizeof(T)); \
        } \
    }
DI_WORDS(DI_INDEXED)
