// AscendC as the generated kernels use it, on the CPU twin: the pointer-based interface of an Ascend 950, our own
// declarations. Pointers to on-chip memory are offsets into the space that a call implies, never addresses.
//
// With DI_CHECK (clang) these are declarations only, and every memory is an address space: a pointer into the wrong one
// is a type error.
#ifndef DI_ASC_H
#define DI_ASC_H
#include <stddef.h>
#include <stdint.h>

#ifndef INFINITY
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#endif
#define __aicore__
#define __global__
#define __vector__
#define __cube__
#define __mix__(cubes, vectors)
#define __schedmode__(mode)
#ifdef DI_CHECK
#define __gm__ __attribute__((address_space(1)))
#define __ubuf__ __attribute__((address_space(2)))
#define __cbuf__ __attribute__((address_space(3)))
#define __ca__ __attribute__((address_space(4)))
#define __cb__ __attribute__((address_space(5)))
#define __cc__ __attribute__((address_space(6)))
#define DI_BODY(...) ;
#else
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define DI_BODY(...) { __VA_ARGS__ }
#endif
#define __simd_vf__
#define __simd_callee__
#define __simt_vf__
#define __simt_callee__

enum di_pipe { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
typedef di_pipe pipe_t;
enum { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
enum di_barrier_scope { DSB_ALL, DSB_DDR, DSB_UB };

// Where in the generated text a call stands; filled in by the compiler at each call.
struct di_at {
    int line;
};
inline di_at di_here(int line = __builtin_LINE()) { return di_at{line}; }

struct bfloat16_t {
    uint16_t bits;
};
struct half {
    uint16_t bits;
};
struct fp8_e4m3fn_t {
    uint8_t bits;
};
struct fp8_e8m0_t {
    uint8_t bits;
};
struct fp4x2_e2m1_t {
    uint8_t bits;
};

// ---- kernels ------------------------------------------------------------------------------------------------------
// DI_EXPORT(symbol, vector | cube | mix) stands behind every kernel (build.py adds it): the twin finds kernels by name
// and unpacks its arguments, each at a multiple of its alignment and of 4, in 8-byte steps in all.
enum di_kind { DI_KIND_vector, DI_KIND_cube, DI_KIND_mix };
void di_register(const char* symbol, di_kind kind, void (*run)(const char*), size_t bytes);
template <class T> constexpr size_t di_step() { return alignof(T) < 4 ? 4 : alignof(T); }
template <class...> struct di_types {};
template <class F, class... Done> void di_unpack(F f, const char*, size_t, di_types<>, Done... done) { f(done...); }
template <class F, class T, class... Left, class... Done>
void di_unpack(F f, const char* from, size_t at, di_types<T, Left...>, Done... done) {
    at = (at + di_step<T>() - 1) / di_step<T>() * di_step<T>();
    T value;
    __builtin_memcpy(&value, from + at, sizeof(T));
    di_unpack(f, from, at + sizeof(T), di_types<Left...>(), done..., value);
}
template <class... A> struct di_export {
    static size_t bytes() {
        size_t at = 0;
        ((at = (at + di_step<A>() - 1) / di_step<A>() * di_step<A>() + sizeof(A)), ...);
        return (at + 7) / 8 * 8;
    }
    template <void (*F)(A...)> static void run(const char* from) { di_unpack(F, from, 0, di_types<A...>()); }
};
template <class... A> di_export<A...> di_export_of(void (*)(A...));
#define DI_EXPORT(symbol, kind) \
    __attribute__((constructor)) static void di_register_##symbol() { \
        typedef decltype(di_export_of(&symbol)) export_; \
        di_register(#symbol, DI_KIND_##kind, &export_::run<&symbol>, export_::bytes()); \
    }

// ---- where a kernel runs ------------------------------------------------------------------------------------------
bool di_is_cube();
#define ASC_IS_AIC (di_is_cube())
#define ASC_IS_AIV (!di_is_cube())
int64_t asc_get_block_idx();
int64_t asc_get_block_num();
int64_t asc_get_sub_block_id();
void asc_init();

// Declares bytes of on-chip memory as a buffer of this core. Accesses then have to stay inside of one buffer.
enum di_space {
    DI_SPACE_UB, DI_SPACE_L1, DI_SPACE_L0A, DI_SPACE_L0B, DI_SPACE_L0C, DI_SPACE_L0A_MX, DI_SPACE_L0B_MX, DI_SPACES
};
void di_buffer(di_space space, const char* name, uint64_t offset, uint64_t bytes);
#define DI_BUFFER(space, name, offset, bytes) di_buffer(DI_SPACE_##space, name, offset, bytes)

// ---- order inside a core ------------------------------------------------------------------------------------------
void asc_lock(di_pipe pipe, int id, di_at at = di_here());
void asc_unlock(di_pipe pipe, int id, di_at at = di_here());
void asc_sync_notify(di_pipe from, di_pipe to, int id, di_at at = di_here());
void asc_sync_wait(di_pipe from, di_pipe to, int id, di_at at = di_here());
void asc_sync_pipe(di_pipe pipe, di_at at = di_here());
void asc_sync_data_barrier(di_barrier_scope scope, di_at at = di_here());
void di_dcci(const void* address, di_at at);
template <class T> void asc_dcci_single(__gm__ T* address, di_at at = di_here()) DI_BODY(di_dcci(address, at);)

// ---- order between cores ------------------------------------------------------------------------------------------
void asc_sync_intra_arrive(di_pipe pipe, int id, di_at at = di_here());
void asc_sync_intra_wait(di_pipe pipe, int id, di_at at = di_here());

// ---- scalar unit --------------------------------------------------------------------------------------------------
// A place in global memory or in UB that the scalar unit reads or writes.
void* di_gm_at(const void* address, int bytes, bool write, di_at at);
void* di_ub_at(const void* offset, int bytes, bool write, di_at at);
template <class T> T di_gm_load(const __gm__ T* p, di_at at = di_here())
    DI_BODY(T value; __builtin_memcpy(&value, di_gm_at(p, sizeof(T), false, at), sizeof(T)); return value;)
template <class T, class V> void di_gm_store(__gm__ T* p, V v, di_at at = di_here())
    DI_BODY(const T value = (T)v; __builtin_memcpy(di_gm_at(p, sizeof(T), true, at), &value, sizeof(T));)
template <class T> T di_ub_load(const __ubuf__ T* p, di_at at = di_here())
    DI_BODY(T value; __builtin_memcpy(&value, di_ub_at(p, sizeof(T), false, at), sizeof(T)); return value;)
template <class T, class V> void di_ub_store(__ubuf__ T* p, V v, di_at at = di_here())
    DI_BODY(const T value = (T)v; __builtin_memcpy(di_ub_at(p, sizeof(T), true, at), &value, sizeof(T));)

// ---- copies: global memory and UB ---------------------------------------------------------------------------------
void di_gm2ub(void* dst, const void* src, uint32_t n, uint32_t bytes, uint32_t left, uint32_t right, bool constant,
              uint32_t element, uint64_t src_stride, uint32_t dst_stride, di_at at);
void di_ub2gm(void* dst, const void* src, uint32_t n, uint32_t bytes, uint64_t dst_stride, uint32_t src_stride,
              di_at at);
template <class T>
void asc_copy_gm2ub_align(__ubuf__ T* dst, const __gm__ T* src, uint32_t n_burst, uint32_t len_burst, uint8_t left_pad,
                          uint8_t right_pad, bool constant_pad, uint8_t l2, uint64_t src_stride, uint32_t dst_stride,
                          di_at at = di_here())
    DI_BODY((void)l2;
    di_gm2ub(dst, src, n_burst, len_burst, left_pad, right_pad, constant_pad, sizeof(T), src_stride, dst_stride, at);)
template <class T>
void asc_copy_ub2gm_align(__gm__ T* dst, const __ubuf__ T* src, uint32_t n_burst, uint32_t len_burst, uint8_t l2,
                          uint64_t dst_stride, uint32_t src_stride, di_at at = di_here())
    DI_BODY((void)l2;
    di_ub2gm(dst, src, n_burst, len_burst, dst_stride, src_stride, at);)
void di_set_pad(uint64_t bits, di_at at);
template <class T> void asc_set_copy_pad_val(T value, di_at at = di_here())
    DI_BODY(uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    di_set_pad(bits, at);)
void asc_set_gm2ub_loop_size(uint32_t loop1, uint32_t loop2);
void asc_set_ub2gm_loop_size(uint32_t loop1, uint32_t loop2);
void asc_set_gm2l1_loop_size(uint32_t loop1, uint32_t loop2);

#include "di_asc_vector.h"
#include "di_asc_cube.h"
#endif
