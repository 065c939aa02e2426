// libascendcl without a device: memory is the host's, streams run at once, kernels run on the CPU twin. A launch that
// the twin complains of fails as on a device, and aclGetRecentErrMsg says what was wrong.
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#ifndef DI_SOC
#define DI_SOC "Ascend950-twin"
#endif
#define DI_OUT extern "C" __attribute__((visibility("default")))

namespace {

const int DONE = 0, WRONG_ARGUMENT = 107000, NO_CONTEXT = 107002, NO_ROOM = 207001, KERNEL_FAILED = 507015;
const int64_t AI_CORES = 2, VECTOR_CORES = 4;  // few, so that a block takes several items and steps stay short
const int64_t ROOM = 1 << 14;
const size_t BOUNDARY = 256;
const uint8_t POISON = 0xFF;

using Clock = std::chrono::steady_clock;
typedef int (*Run)(const char*, int64_t, const void*, int64_t, const uint64_t*, int64_t, char*, int64_t);

struct Binary {
    void* library;
    Run run;
    int64_t (*arguments)(const char*);
};

struct Function {
    Binary* binary;
    std::string name;
};

std::mutex busy;
std::map<char*, size_t> blocks;
std::vector<std::unique_ptr<Function>> functions;
std::string sentence;
thread_local bool has_device = false;

int wrong(int code, const std::string& why) {
    sentence = why;
    return code;
}

// Whether the bytes lie inside one block of the device's memory.
bool on_device(const void* address, size_t bytes) {
    auto at = blocks.upper_bound((char*)address);
    if (at == blocks.begin()) return false;
    --at;
    return (const char*)address + bytes <= at->first + at->second;
}

}  // namespace

DI_OUT int aclInit(const char*) { return DONE; }
DI_OUT int aclFinalize() { return DONE; }
DI_OUT const char* aclGetRecentErrMsg() { return sentence.c_str(); }
DI_OUT int aclrtGetDeviceCount(uint32_t* count) {
    *count = 1;
    return DONE;
}
DI_OUT int aclrtSetDevice(int32_t device) {
    if (device) return wrong(WRONG_ARGUMENT, "the twin has device 0 only");
    has_device = true;
    return DONE;
}
DI_OUT int aclrtResetDevice(int32_t) { return DONE; }
DI_OUT const char* aclrtGetSocName() { return DI_SOC; }
DI_OUT int aclrtGetDeviceInfo(uint32_t, int attribute, int64_t* value) {
    if (attribute != 101 && attribute != 102 && attribute != 201) return wrong(WRONG_ARGUMENT, "an unknown attribute");
    *value = attribute == 201 ? VECTOR_CORES : AI_CORES;
    return DONE;
}

// ---- memory --------------------------------------------------------------------------------------------------------
DI_OUT int aclrtGetMemInfo(int, size_t* left, size_t* all) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *all = (size_t)sysconf(_SC_PHYS_PAGES) * page;
    *left = (size_t)sysconf(_SC_AVPHYS_PAGES) * page;
    return DONE;
}
DI_OUT int aclrtMalloc(void** out, size_t bytes, int) {
    if (!has_device) return wrong(NO_CONTEXT, "memory is asked for by a thread that set no device");
    const std::lock_guard<std::mutex> hold(busy);
    const size_t whole = (bytes + BOUNDARY - 1) / BOUNDARY * BOUNDARY;
    char* const at = bytes ? (char*)std::aligned_alloc(BOUNDARY, whole) : nullptr;
    if (!at) return wrong(NO_ROOM, "no memory");
    std::memset(at, POISON, whole);
    blocks[at] = bytes;
    *out = at;
    return DONE;
}
DI_OUT int aclrtFree(void* at) {
    const std::lock_guard<std::mutex> hold(busy);
    if (!blocks.erase((char*)at)) return wrong(WRONG_ARGUMENT, "freed memory that was not given");
    std::free(at);
    return DONE;
}
DI_OUT int aclrtMallocHost(void** out, size_t bytes) {
    *out = std::malloc(bytes);
    return *out ? DONE : wrong(NO_ROOM, "no memory");
}
DI_OUT int aclrtFreeHost(void* at) {
    std::free(at);
    return DONE;
}
DI_OUT int aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
    if (bytes > room || !on_device(to, bytes)) return wrong(WRONG_ARGUMENT, "bytes set outside of the device's memory");
    std::memset(to, value, bytes);
    return DONE;
}
DI_OUT int aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, void*) {
    return aclrtMemset(to, room, value, bytes);
}
DI_OUT int aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, int kind) {
    const std::lock_guard<std::mutex> hold(busy);
    const bool into = kind == 1 || kind == 3, out_of = kind == 2 || kind == 3;
    if (bytes > room) return wrong(WRONG_ARGUMENT, "a copy is longer than its destination");
    if (into != on_device(to, bytes) || out_of != on_device(from, bytes)) {
        return wrong(WRONG_ARGUMENT, "a copy of kind " + std::to_string(kind) + " between other places");
    }
    std::memmove(to, from, bytes);
    return DONE;
}
DI_OUT int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int kind, void*) {
    return aclrtMemcpy(to, room, from, bytes, kind);
}

// ---- streams and events --------------------------------------------------------------------------------------------
DI_OUT int aclrtCreateStream(void** out) {
    *out = new int(0);
    return DONE;
}
DI_OUT int aclrtDestroyStream(void* stream) {
    delete (int*)stream;
    return DONE;
}
DI_OUT int aclrtSynchronizeStream(void*) { return DONE; }
DI_OUT int aclrtCreateEvent(void** out) {
    *out = new Clock::time_point();
    return DONE;
}
DI_OUT int aclrtDestroyEvent(void* event) {
    delete (Clock::time_point*)event;
    return DONE;
}
DI_OUT int aclrtRecordEvent(void* event, void*) {
    *(Clock::time_point*)event = Clock::now();
    return DONE;
}
DI_OUT int aclrtEventElapsedTime(float* milliseconds, void* first, void* last) {
    const Clock::time_point from = *(Clock::time_point*)first, to = *(Clock::time_point*)last;
    *milliseconds = std::chrono::duration<float, std::milli>(to - from).count();
    return DONE;
}

// ---- kernels -------------------------------------------------------------------------------------------------------
DI_OUT int aclrtBinaryLoadFromFile(const char* path, void*, void** out) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return wrong(WRONG_ARGUMENT, dlerror());
    Binary* const b = new Binary{library, (Run)dlsym(library, "di_twin_launch"),
                                 (int64_t(*)(const char*))dlsym(library, "di_twin_arguments")};
    *out = b;
    if (b->run && b->arguments) return DONE;
    return wrong(WRONG_ARGUMENT, std::string(path) + " holds no kernels of the twin");
}
DI_OUT int aclrtBinaryUnLoad(void* binary) {
    dlclose(((Binary*)binary)->library);
    delete (Binary*)binary;
    return DONE;
}
DI_OUT int aclrtBinaryGetFunction(void* binary, const char* name, void** out) {
    const std::lock_guard<std::mutex> hold(busy);
    Binary* const b = (Binary*)binary;
    if (b->arguments(name) < 0) return wrong(WRONG_ARGUMENT, std::string("there is no kernel ") + name);
    functions.push_back(std::unique_ptr<Function>(new Function{b, name}));
    *out = functions.back().get();
    return DONE;
}
DI_OUT int aclrtLaunchKernelWithHostArgs(void* function, uint32_t count, void* stream, void*, void* arguments,
                                         size_t bytes, void*, size_t) {
    if (!has_device || !stream) return wrong(NO_CONTEXT, "a launch without a device or a stream");
    const std::lock_guard<std::mutex> hold(busy);
    const Function& f = *(const Function*)function;
    std::vector<uint64_t> extents;
    for (const auto& b : blocks) {
        extents.push_back((uint64_t)b.first);
        extents.push_back((uint64_t)b.second);
    }
    std::string said((size_t)ROOM, '\0');
    if (!f.binary->run(f.name.c_str(), count, arguments, (int64_t)bytes, extents.data(), (int64_t)blocks.size(),
                       &said[0], ROOM)) {
        return DONE;
    }
    return wrong(KERNEL_FAILED, said.c_str());
}
