// A CUDA driver without a device, for tests: memory is the host's, binaries are read as far as their lists of
// parameters, launches are recorded and, where a test gives a function for it, run by the test. What a stream is given
// happens at once, or, where a test wants it late, when somebody waits for it.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum { INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, BAD_IMAGE = 200, NOT_FOUND = 500 };
const int PARAMETER_INFO = 0x17;

struct Parameter {
    uint16_t offset = 0, bytes = 0;
};

struct Module;

struct Function {
    std::string name;
    const Module* module = nullptr;
    std::vector<Parameter> parameters;
    int most_shared = 48 << 10;
};

struct Module {
    std::vector<uint8_t> image;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

// As tests read it.
struct Launch {
    const char* function;
    uint32_t blocks, threads, shared, parameters;
    const uint8_t* values;   // packed as the binary says
    const uint16_t* places;  // offset and bytes of each
    const uint8_t* image;    // the binary
    uint64_t image_bytes;
};

struct Recorded {
    Function* function;
    uint32_t blocks, threads, shared;
    std::vector<uint8_t> values;
    std::vector<uint16_t> places;
};

typedef int (*Runner)(const Launch*);

struct Machine {
    std::mutex lock;
    std::map<uint64_t, size_t> memory;
    std::map<std::string, int64_t> calls;
    std::string failing;
    int64_t fail_after = 0;
    int fail_code = 0;
    int version = 13000, major = 9, minor = 0, devices = 1;
    size_t total = size_t(8) << 30, taken = 0;
    Runner runner = nullptr;
    bool late = false;
    std::deque<std::function<int()>> queue;
    int64_t done = 0;  // of all that was queued
    std::map<uint64_t, size_t> locked;
    bool capturing = false;
    std::vector<Recorded> captured, launched;
    bool keep = true;
} it;

// Counts a call; the code that a test wants of it.
int called(const char* name) {
    std::lock_guard<std::mutex> hold(it.lock);
    ++it.calls[name];
    if (it.failing == name && it.fail_after-- <= 0) return it.fail_code;
    return 0;
}

#define CALLED(name)                        \
    if (const int code = called(#name)) return code

template <class T>
T read(const uint8_t* at) {
    T out;
    std::memcpy(&out, at, sizeof out);
    return out;
}

std::vector<Parameter> parameters_of(const uint8_t* info, size_t bytes) {
    std::vector<Parameter> out;
    for (size_t at = 0; at + 4 <= bytes;) {
        const int form = info[at], attribute = info[at + 1];
        const size_t size = read<uint16_t>(info + at + 2);
        at += 4;
        if (form != 4) continue;
        if (attribute == PARAMETER_INFO) {
            const size_t ordinal = read<uint16_t>(info + at + 4);
            if (out.size() <= ordinal) out.resize(ordinal + 1);
            out[ordinal].offset = read<uint16_t>(info + at + 6);
            out[ordinal].bytes = (uint16_t)(read<uint32_t>(info + at + 8) >> 18);
        }
        at += size;
    }
    return out;
}

Launch shown(const Recorded& r) {
    const Module& m = *r.function->module;
    return Launch{r.function->name.c_str(), r.blocks, r.threads, r.shared, (uint32_t)r.places.size() / 2,
                  r.values.data(), r.places.data(), m.image.data(), m.image.size()};
}

int replay(const Recorded& r) {
    const Launch launch = shown(r);
    if (it.keep) it.launched.push_back(r);
    return it.runner ? it.runner(&launch) : 0;
}

bool inside(uint64_t at, size_t bytes, const std::map<uint64_t, size_t>& memory = it.memory) {
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return false;
    --after;
    return at + bytes <= after->first + after->second;
}

struct Event {
    int64_t behind = 0;  // so much of what was queued
};

int64_t queued() { return it.done + (int64_t)it.queue.size(); }

// Does what was queued, up to a number of it.
int catch_up(int64_t until) {
    while (it.done < until) {
        const auto next = it.queue.front();
        it.queue.pop_front();
        ++it.done;
        if (const int code = next()) return code;
    }
    return 0;
}

int stream(std::function<int()> what) {
    if (!it.late) return what();
    it.queue.push_back(std::move(what));
    return 0;
}

int copied(void* to, const void* from, size_t bytes) {
    std::memmove(to, from, bytes);
    return 0;
}

}  // namespace

// ---- for tests -------------------------------------------------------------------------------------------------------
EXPORT void fake_machine(int version, int major, int minor, int devices, uint64_t total) {
    it.version = version;
    it.major = major;
    it.minor = minor;
    it.devices = devices;
    it.total = (size_t)total;
}
EXPORT void fake_fail(const char* function, int64_t after, int code) {
    it.failing = function;
    it.fail_after = after;
    it.fail_code = code;
}
EXPORT int64_t fake_calls(const char* function) { return it.calls[function]; }
EXPORT uint64_t fake_taken() { return it.taken; }
EXPORT int fake_inside(uint64_t at, uint64_t bytes) { return inside(at, (size_t)bytes); }
EXPORT void fake_runner(Runner runner) { it.runner = runner; }
EXPORT void fake_late(int late) {
    catch_up(queued());
    it.late = late;
}
EXPORT void fake_forget() { it.launched.clear(); }
EXPORT int64_t fake_launches() { return (int64_t)it.launched.size(); }
EXPORT void fake_launch(int64_t i, Launch* out) {
    *out = shown(it.launched[(size_t)i]);
}

// ---- the driver ------------------------------------------------------------------------------------------------------
EXPORT int cuInit(unsigned) {
    CALLED(cuInit);
    return it.devices ? 0 : NO_DEVICE;
}
EXPORT int cuDriverGetVersion(int* out) {
    CALLED(cuDriverGetVersion);
    *out = it.version;
    return 0;
}
EXPORT int cuGetErrorName(int code, const char** out) {
    *out = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                                                            : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
EXPORT int cuDeviceGetCount(int* out) {
    *out = it.devices;
    return 0;
}
EXPORT int cuDeviceGet(int* out, int) {
    *out = 0;
    return 0;
}
EXPORT int cuDeviceGetName(char* out, int bytes, int) {
    std::strncpy(out, "Fake H200", (size_t)bytes);
    return 0;
}
EXPORT int cuDeviceGetAttribute(int* out, int which, int) {
    *out = which == 75 ? it.major : which == 76 ? it.minor : 0;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** out, int) {
    CALLED(cuDevicePrimaryCtxRetain);
    *out = &it;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
EXPORT int cuCtxSetCurrent(void*) {
    CALLED(cuCtxSetCurrent);
    return 0;
}
EXPORT int cuMemGetInfo_v2(size_t* left, size_t* all) {
    *all = it.total;
    *left = it.total - it.taken;
    return 0;
}
EXPORT int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
    CALLED(cuMemAlloc_v2);
    if (it.capturing || !bytes) return INVALID;
    if (bytes > it.total - it.taken) return OUT_OF_MEMORY;
    void* const at = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!at) return OUT_OF_MEMORY;
    std::memset(at, 0x5A, bytes);
    *out = (uint64_t)at;
    it.memory[*out] = bytes;
    it.taken += bytes;
    return 0;
}
EXPORT int cuMemFree_v2(uint64_t at) {
    CALLED(cuMemFree_v2);
    if (!it.memory.count(at)) return INVALID;
    catch_up(queued());
    it.taken -= it.memory[at];
    it.memory.erase(at);
    free((void*)at);
    return 0;
}
EXPORT int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    CALLED(cuMemHostAlloc);
    *out = std::calloc(1, bytes);
    if (!*out) return OUT_OF_MEMORY;
    it.locked[(uint64_t)*out] = bytes;
    return 0;
}
EXPORT int cuMemFreeHost(void* at) {
    it.locked.erase((uint64_t)at);
    std::free(at);
    return 0;
}
EXPORT int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void*) {
    CALLED(cuMemsetD8Async);
    if (!inside(at, bytes)) return INVALID;
    return stream([=] {
        std::memset((void*)at, value, bytes);
        return 0;
    });
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
    CALLED(cuMemcpyHtoDAsync_v2);
    if (!inside(to, bytes) || it.capturing) return INVALID;
    if (inside((uint64_t)from, bytes, it.locked)) return stream([=] { return copied((void*)to, from, bytes); });
    const std::string now((const char*)from, bytes);  // pageable memory is read before the call returns
    return stream([=] { return copied((void*)to, now.data(), bytes); });
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
    CALLED(cuMemcpyDtoHAsync_v2);
    if (!inside(from, bytes) || it.capturing) return INVALID;
    const int code = stream([=] { return copied(to, (void*)from, bytes); });
    return code || inside((uint64_t)to, bytes, it.locked) ? code : catch_up(queued());
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void*) {
    CALLED(cuMemcpyDtoDAsync_v2);
    if (!inside(to, bytes) || !inside(from, bytes)) return INVALID;
    return stream([=] { return copied((void*)to, (void*)from, bytes); });
}
EXPORT int cuStreamCreate(void** out, unsigned) {
    *out = &it;
    return 0;
}
EXPORT int cuStreamDestroy_v2(void*) { return 0; }
EXPORT int cuStreamSynchronize(void*) {
    CALLED(cuStreamSynchronize);
    return it.capturing ? INVALID : catch_up(queued());
}
EXPORT int cuModuleLoadData(void** out, const void* image) {
    CALLED(cuModuleLoadData);
    const uint8_t* const elf = (const uint8_t*)image;
    if (std::memcmp(elf, "\x7f" "ELF", 4)) return BAD_IMAGE;
    auto module = std::make_unique<Module>();
    const uint64_t at = read<uint64_t>(elf + 0x28);
    const size_t size = read<uint16_t>(elf + 0x3A), count = read<uint16_t>(elf + 0x3C);
    const auto header = [&](size_t i) { return elf + at + i * size; };
    const uint8_t* const names = elf + read<uint64_t>(header(read<uint16_t>(elf + 0x3E)) + 24);
    for (size_t i = 0; i < count; ++i) {
        const std::string name = (const char*)names + read<uint32_t>(header(i));
        const std::string mark = ".nv.info.";
        if (name.compare(0, mark.size(), mark)) continue;
        auto f = std::make_unique<Function>();
        f->name = name.substr(mark.size());
        f->module = module.get();
        f->parameters = parameters_of(elf + read<uint64_t>(header(i) + 24), read<uint64_t>(header(i) + 32));
        module->functions[f->name] = std::move(f);
    }
    uint64_t end = at + size * count;
    for (size_t i = 0; i < count; ++i) {
        const bool empty = read<uint32_t>(header(i) + 4) == 8;  // a section without bytes in the file
        if (!empty) end = std::max(end, read<uint64_t>(header(i) + 24) + read<uint64_t>(header(i) + 32));
    }
    const size_t segments = read<uint16_t>(elf + 0x38), segment = read<uint16_t>(elf + 0x36);
    if (segments) end = std::max<uint64_t>(end, read<uint64_t>(elf + 0x20) + segments * segment);
    module->image.assign(elf, elf + end);
    *out = module.release();
    return 0;
}
EXPORT int cuModuleUnload(void* module) {
    CALLED(cuModuleUnload);
    (void)module;  // recorded launches may still name its functions
    return 0;
}
EXPORT int cuModuleGetFunction(void** out, void* module, const char* name) {
    auto& functions = ((Module*)module)->functions;
    const auto found = functions.find(name);
    if (found == functions.end()) return NOT_FOUND;
    *out = found->second.get();
    return 0;
}
EXPORT int cuFuncSetAttribute(void* function, int which, int value) {
    if (which != 8 || value > 232448) return INVALID;
    ((Function*)function)->most_shared = value;
    return 0;
}
EXPORT int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                          unsigned shared, void*, void** values, void**) {
    CALLED(cuLaunchKernel);
    Function* const f = (Function*)function;
    const bool bad = !x || y != 1 || z != 1 || ty != 1 || tz != 1 || !threads || threads > 1024;
    if (bad || (int)shared > f->most_shared) return INVALID;
    Recorded r{f, x, threads, shared, {}, {}};
    for (size_t i = 0; i < f->parameters.size(); ++i) {
        const Parameter& p = f->parameters[i];
        if (r.values.size() < size_t(p.offset) + p.bytes) r.values.resize(size_t(p.offset) + p.bytes);
        std::memcpy(r.values.data() + p.offset, values[i], p.bytes);
        r.places.push_back(p.offset);
        r.places.push_back(p.bytes);
    }
    if (it.capturing) {
        it.captured.push_back(r);
        return 0;
    }
    return stream([=] { return replay(r); });
}
EXPORT int cuEventCreate(void** out, unsigned) {
    CALLED(cuEventCreate);
    *out = new Event;
    return 0;
}
EXPORT int cuEventDestroy_v2(void* event) {
    delete (Event*)event;
    return 0;
}
EXPORT int cuEventRecord(void* event, void*) {
    CALLED(cuEventRecord);
    ((Event*)event)->behind = queued();
    return 0;
}
EXPORT int cuEventSynchronize(void* event) {
    CALLED(cuEventSynchronize);
    return catch_up(((Event*)event)->behind);
}
EXPORT int cuEventElapsedTime(float* out, void*, void*) {
    *out = 0.001f;
    return 0;
}
EXPORT int cuStreamBeginCapture_v2(void*, int) {
    CALLED(cuStreamBeginCapture_v2);
    it.capturing = true;
    it.captured.clear();
    return 0;
}
EXPORT int cuStreamEndCapture(void*, void** out) {
    it.capturing = false;
    *out = new std::vector<Recorded>(it.captured);
    return 0;
}
EXPORT int cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long) {
    CALLED(cuGraphInstantiateWithFlags);
    *out = new std::vector<Recorded>(*(std::vector<Recorded>*)graph);
    return 0;
}
EXPORT int cuGraphUpload(void*, void*) { return 0; }
EXPORT int cuGraphLaunch(void* graph, void*) {
    CALLED(cuGraphLaunch);
    return stream([graph] {
        for (const Recorded& r : *(std::vector<Recorded>*)graph) {
            if (const int code = replay(r)) return code;
        }
        return 0;
    });
}
EXPORT int cuGraphDestroy(void* graph) {
    delete (std::vector<Recorded>*)graph;
    return 0;
}
EXPORT int cuGraphExecDestroy(void* graph) {
    delete (std::vector<Recorded>*)graph;
    return 0;
}
