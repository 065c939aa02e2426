// What every generated kernel includes: begin and end, addresses, copies and states. Everything is written in calls of
// the C API; di_asc.h is CANN's or the twin's.
#ifndef DI_KERNEL_H
#define DI_KERNEL_H
#include "di_asc.h"

#define DI_UB(T, offset) ((__ubuf__ T*)(uintptr_t)(offset))
#define DI_L1(T, offset) ((__cbuf__ T*)(uintptr_t)(offset))
#define DI_L0A(T, offset) ((__ca__ T*)(uintptr_t)(offset))
#define DI_L0B(T, offset) ((__cb__ T*)(uintptr_t)(offset))
#define DI_L0C(T, offset) ((__cc__ T*)(uintptr_t)(offset))
#define DI_INLINE __aicore__ inline

#include "di_vector.h"

DI_INLINE void di_begin() { asc_init(); }
DI_INLINE void di_end() { asc_sync_pipe(PIPE_ALL); }

DI_INLINE int64_t di_min64(int64_t a, int64_t b) { return a < b ? a : b; }
DI_INLINE int64_t di_max64(int64_t a, int64_t b) { return a > b ? a : b; }
DI_INLINE int64_t di_up64(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 64-bit integers that wrap.
DI_INLINE int64_t di_iadd(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
DI_INLINE int64_t di_isub(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }
DI_INLINE int64_t di_imul(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

// `bytes` bytes in one burst.
template <class T, class S>
DI_INLINE void di_in(__ubuf__ T* to, const __gm__ S* from, uint32_t bytes) {
    asc_copy_gm2ub_align((__ubuf__ uint8_t*)to, (__gm__ uint8_t*)from, 1, bytes, 0, 0, false, 0, bytes, (bytes + 31) / 32 * 32);
}
template <class T, class S>
DI_INLINE void di_out(__gm__ T* to, __ubuf__ S* from, uint32_t bytes) {
    asc_copy_ub2gm_align((__gm__ uint8_t*)to, (__ubuf__ uint8_t*)from, 1, bytes, 0, bytes, (bytes + 31) / 32 * 32);
}

// The scalar unit before and after the vector unit or the copies out.
DI_INLINE void di_vector_to_scalar() {
    asc_sync_notify(PIPE_V, PIPE_S, 0);
    asc_sync_wait(PIPE_V, PIPE_S, 0);
}
DI_INLINE void di_scalar_to_vector() {
    asc_sync_notify(PIPE_S, PIPE_V, 0);
    asc_sync_wait(PIPE_S, PIPE_V, 0);
}
DI_INLINE void di_copies_to_scalar() {
    asc_sync_notify(PIPE_MTE3, PIPE_S, 0);
    asc_sync_wait(PIPE_MTE3, PIPE_S, 0);
}
DI_INLINE void di_scalar_to_copies() {
    asc_sync_notify(PIPE_S, PIPE_MTE3, 0);
    asc_sync_wait(PIPE_S, PIPE_MTE3, 0);
}

// Record of position p in the view [old ring | this step's rows].
DI_INLINE __gm__ uint8_t* di_view(__gm__ uint8_t* base, int64_t stride, __gm__ uint8_t* fresh, int32_t has_fresh,
                                  int64_t first, int64_t from, int32_t slot, int32_t ring_rows, int32_t record_bytes,
                                  int64_t p) {
    if (has_fresh && p >= from) return fresh + (first + (p - from)) * record_bytes;
    return base + slot * stride + p % ring_rows * record_bytes;
}

// Paged entry j; `blocks`: the sequence's row of the block tables.
DI_INLINE __gm__ uint8_t* di_entry(__gm__ uint8_t* base, int64_t stride, __gm__ int32_t* blocks, int32_t block_tokens,
                                   int32_t ratio, int32_t record_bytes, int64_t j) {
    const int64_t at = j * ratio;
    return base + di_gm_load(blocks + at / block_tokens) * stride + at % block_tokens / ratio * record_bytes;
}

#endif
