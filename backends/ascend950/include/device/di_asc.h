// The interface of the generated kernels on a device: CANN's C API, and what this project adds to it. Nothing here was
// compiled: names that CANN gives otherwise are to be mended in this file alone.
#ifndef DI_ASC_H
#define DI_ASC_H
#include "c_api/asc_simd.h"

// Scalars in memory go through the data cache of a core: what another core wrote is read anew.
template <class T> __aicore__ inline T di_gm_load(const __gm__ T* p) {
    asc_dcci_single((__gm__ T*)p);
    return *p;
}
template <class T, class V> __aicore__ inline void di_gm_store(__gm__ T* p, V value) {
    *p = (T)value;
    asc_dcci_single(p);
}
template <class T> __aicore__ inline T di_ub_load(const __ubuf__ T* p) { return *p; }
template <class T, class V> __aicore__ inline void di_ub_store(__ubuf__ T* p, V value) { *p = (T)value; }

// The same bits as lanes of another type.
template <class To, class From> __simd_callee__ inline To di_as(const From& from) { return (To&)from; }

// Buffers have names on the twin.
#define DI_BUFFER(space, name, offset, bytes)

#endif
