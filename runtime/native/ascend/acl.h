// The Ascend runtime as this runner calls it: own declarations of its C interface, found at run time in libascendcl.so.
#ifndef DEEPINFER_ASCEND_ACL_H
#define DEEPINFER_ASCEND_ACL_H
#include <cstddef>
#include <cstdint>

typedef int AclError;  // 0: done
typedef void* AclStream;
typedef void* AclEvent;
typedef void* AclBinary;
typedef void* AclFunction;

enum {
    ACL_ALREADY = 100002,             // aclInit was called before
    ACL_NO_ROOM = 207001,
    ACL_HUGE_FIRST = 0,               // aclrtMalloc
    ACL_HBM = 1,                      // aclrtGetMemInfo
    ACL_TO_DEVICE = 1, ACL_TO_HOST = 2, ACL_WITHIN = 3,  // aclrtMemcpyAsync
    ACL_AI_CORES = 101, ACL_VECTOR_CORES = 201           // aclrtGetDeviceInfo
};

// name, result, arguments.
#define DI_ACL_FUNCTIONS(F)                                                                          \
    F(aclInit, AclError, (const char*))                                                              \
    F(aclGetRecentErrMsg, const char*, ())                                                           \
    F(aclrtGetDeviceCount, AclError, (uint32_t*))                                                    \
    F(aclrtSetDevice, AclError, (int32_t))                                                           \
    F(aclrtGetSocName, const char*, ())                                                              \
    F(aclrtGetDeviceInfo, AclError, (uint32_t, int, int64_t*))                                       \
    F(aclrtGetMemInfo, AclError, (int, size_t*, size_t*))                                            \
    F(aclrtMalloc, AclError, (void**, size_t, int))                                                  \
    F(aclrtFree, AclError, (void*))                                                                  \
    F(aclrtMallocHost, AclError, (void**, size_t))                                                   \
    F(aclrtFreeHost, AclError, (void*))                                                              \
    F(aclrtMemsetAsync, AclError, (void*, size_t, int32_t, size_t, AclStream))                       \
    F(aclrtMemcpyAsync, AclError, (void*, size_t, const void*, size_t, int, AclStream))              \
    F(aclrtCreateStream, AclError, (AclStream*))                                                     \
    F(aclrtDestroyStream, AclError, (AclStream))                                                     \
    F(aclrtSynchronizeStream, AclError, (AclStream))                                                 \
    F(aclrtCreateEvent, AclError, (AclEvent*))                                                       \
    F(aclrtDestroyEvent, AclError, (AclEvent))                                                       \
    F(aclrtRecordEvent, AclError, (AclEvent, AclStream))                                             \
    F(aclrtEventElapsedTime, AclError, (float*, AclEvent, AclEvent))                                 \
    F(aclrtBinaryLoadFromFile, AclError, (const char*, void*, AclBinary*))                           \
    F(aclrtBinaryUnLoad, AclError, (AclBinary))                                                      \
    F(aclrtBinaryGetFunction, AclError, (AclBinary, const char*, AclFunction*))                      \
    F(aclrtLaunchKernelWithHostArgs, AclError,                                                       \
      (AclFunction, uint32_t, AclStream, void*, void*, size_t, void*, size_t))

struct Acl {
#define DI_ACL_MEMBER(name, result, arguments) result(*name) arguments;
    DI_ACL_FUNCTIONS(DI_ACL_MEMBER)
#undef DI_ACL_MEMBER
    Acl();  // faults in one sentence where there is no runtime or an old one
};

#endif
