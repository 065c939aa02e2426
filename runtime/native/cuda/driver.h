// The CUDA driver as this runner calls it: own declarations of its C interface, found at run time in libcuda.so.1.
#ifndef DEEPINFER_CUDA_DRIVER_H
#define DEEPINFER_CUDA_DRIVER_H
#include <cstddef>
#include <cstdint>

typedef int CuResult;  // 0: done
typedef int CuDevice;
typedef void* CuContext;
typedef void* CuStream;
typedef void* CuModule;
typedef void* CuFunction;
typedef void* CuEvent;
typedef void* CuGraph;
typedef void* CuGraphExec;
typedef uint64_t CuAddress;

enum {
    CU_OUT_OF_MEMORY = 2,
    CU_NO_DEVICE = 100,
    CU_NO_BINARY = 209,
    CU_MAJOR = 75,                   // device attributes: compute capability
    CU_MINOR = 76,
    CU_MAX_SHARED = 8,               // function attribute: most dynamic shared memory
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_NO_TIME = 2,
    CU_CAPTURE_THREAD_LOCAL = 1
};

// name, arguments; each is the function of the driver's interface that the comment of the vendor's manual describes.
#define DI_CUDA_FUNCTIONS(F)                                                                                          \
    F(cuInit, (unsigned))                                                                                             \
    F(cuDriverGetVersion, (int*))                                                                                     \
    F(cuGetErrorName, (CuResult, const char**))                                                                       \
    F(cuDeviceGetCount, (int*))                                                                                       \
    F(cuDeviceGet, (CuDevice*, int))                                                                                  \
    F(cuDeviceGetName, (char*, int, CuDevice))                                                                        \
    F(cuDeviceGetAttribute, (int*, int, CuDevice))                                                                    \
    F(cuDevicePrimaryCtxRetain, (CuContext*, CuDevice))                                                               \
    F(cuDevicePrimaryCtxRelease_v2, (CuDevice))                                                                       \
    F(cuCtxSetCurrent, (CuContext))                                                                                   \
    F(cuMemGetInfo_v2, (size_t*, size_t*))                                                                            \
    F(cuMemAlloc_v2, (CuAddress*, size_t))                                                                            \
    F(cuMemFree_v2, (CuAddress))                                                                                      \
    F(cuMemHostAlloc, (void**, size_t, unsigned))                                                                     \
    F(cuMemFreeHost, (void*))                                                                                         \
    F(cuMemsetD8Async, (CuAddress, unsigned char, size_t, CuStream))                                                  \
    F(cuMemcpyHtoDAsync_v2, (CuAddress, const void*, size_t, CuStream))                                               \
    F(cuMemcpyDtoHAsync_v2, (void*, CuAddress, size_t, CuStream))                                                     \
    F(cuMemcpyDtoDAsync_v2, (CuAddress, CuAddress, size_t, CuStream))                                                 \
    F(cuStreamCreate, (CuStream*, unsigned))                                                                          \
    F(cuStreamDestroy_v2, (CuStream))                                                                                 \
    F(cuStreamSynchronize, (CuStream))                                                                                \
    F(cuModuleLoadData, (CuModule*, const void*))                                                                     \
    F(cuModuleUnload, (CuModule))                                                                                     \
    F(cuModuleGetFunction, (CuFunction*, CuModule, const char*))                                                      \
    F(cuFuncSetAttribute, (CuFunction, int, int))                                                                     \
    F(cuLaunchKernel, (CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CuStream,    \
                       void**, void**))                                                                               \
    F(cuEventCreate, (CuEvent*, unsigned))                                                                            \
    F(cuEventDestroy_v2, (CuEvent))                                                                                   \
    F(cuEventRecord, (CuEvent, CuStream))                                                                             \
    F(cuEventSynchronize, (CuEvent))                                                                                  \
    F(cuEventElapsedTime, (float*, CuEvent, CuEvent))                                                                 \
    F(cuStreamBeginCapture_v2, (CuStream, int))                                                                       \
    F(cuStreamEndCapture, (CuStream, CuGraph*))                                                                       \
    F(cuGraphInstantiateWithFlags, (CuGraphExec*, CuGraph, unsigned long long))                                       \
    F(cuGraphUpload, (CuGraphExec, CuStream))                                                                         \
    F(cuGraphLaunch, (CuGraphExec, CuStream))                                                                         \
    F(cuGraphDestroy, (CuGraph))                                                                                      \
    F(cuGraphExecDestroy, (CuGraphExec))

struct CudaDriver {
#define DI_CUDA_MEMBER(name, arguments) CuResult(*name) arguments;
    DI_CUDA_FUNCTIONS(DI_CUDA_MEMBER)
#undef DI_CUDA_MEMBER
    CudaDriver();  // faults in one sentence where there is no driver or an old one
};

#endif
