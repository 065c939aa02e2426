// An Ascend 950 through libascendcl, as the device core sees it. Kernels are one binary, lib/kernels.bin. The CPU twin
// has a libascendcl of its own; but for the name of the chip, this file does not know which one it found.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "../device/device.h"
#include "../fault.h"
#include "acl.h"

namespace {

const char SOC[] = "Ascend950", TWIN[] = "Ascend950-twin";
const char VECTOR[] = "vector";
const int64_t MOST_BLOCKS = 128;  // kernels keep rows in scratch of so many blocks

class AscendDevice final : public Device {
  public:
    explicit AscendDevice(const DeviceKernels& kernels);
    ~AscendDevice() override;
    const char* name() const override { return name_.c_str(); }
    void memory(int64_t all_and_free[2]) const override;
    char* take(int64_t bytes, const char* purpose) override;
    char* take_host(int64_t bytes, const char* purpose) override;
    void copy_in(void* to, const void* from, int64_t bytes) override;
    void copy_out(void* to, const void* from, int64_t bytes) override;
    void copy_within(void* to, const void* from, int64_t bytes) override;
    bool holds(const void* address) const override;
    int32_t load(const Stage& stage, const char* image) override;
    void launch(const DeviceKernel& kernel, const Stage& stage, int64_t blocks, uint64_t* values) override;
    void wait(const char* doing) override;
    void mark(size_t i) override;
    double between(size_t first, size_t last) override;

  private:
    Acl acl_;
    std::string name_ = "Ascend device", binary_path_;
    AclStream stream_ = nullptr;
    AclBinary binary_ = nullptr;
    int64_t ai_cores_ = 0, vector_cores_ = 0;
    std::vector<std::pair<char*, int64_t>> blocks_;
    std::vector<char*> host_;
    std::vector<AclFunction> functions_;
    std::vector<AclEvent> events_;

    void must(AclError result, const char* doing) const;
    void here() const;
    void copy(void* to, const void* from, int64_t bytes, int kind, const char* doing);
};

// A device belongs to the calls of a thread only once it was set there.
void AscendDevice::here() const {
    static thread_local bool set = false;
    if (set) return;
    must(acl_.aclrtSetDevice(0), "opening it");
    set = true;
}

void AscendDevice::must(AclError result, const char* doing) const {
    if (!result) return;
    const char* const said = acl_.aclGetRecentErrMsg();
    fail(DI_DEVICE, "%s failed while %s: error %d%s%s", name_.c_str(), doing, result, said && *said ? ": " : "",
         said ? said : "");
}

AscendDevice::AscendDevice(const DeviceKernels& kernels) : binary_path_(kernels.folder + "/kernels.bin") {
    uint32_t count = 0;
    const AclError started = acl_.aclInit(nullptr);
    if (started && started != ACL_ALREADY) must(started, "starting the runtime");
    if (acl_.aclrtGetDeviceCount(&count) || !count) fail(DI_DEVICE, "the Ascend runtime shows no device");
    here();
    const char* const soc = acl_.aclrtGetSocName();
    name_ = soc ? soc : "a chip without a name";
    if (name_.compare(0, sizeof SOC - 1, SOC)) {
        fail(DI_DEVICE, "the engine's kernels are for %s, the device here is %s", SOC, name_.c_str());
    }
    const bool twin = name_ == TWIN;
    if (twin == kernels.compiled) {
        fail(DI_DEVICE, twin ? "the engine's kernels were compiled for a device, the CPU twin runs their sources"
                             : "the engine holds sources for the CPU twin only: no CANN compiled its kernels");
    }
    must(acl_.aclrtGetDeviceInfo(0, ACL_AI_CORES, &ai_cores_), "asking for its cores");
    must(acl_.aclrtGetDeviceInfo(0, ACL_VECTOR_CORES, &vector_cores_), "asking for its cores");
    must(acl_.aclrtCreateStream(&stream_), "making a stream");
}

AscendDevice::~AscendDevice() {
    if (!stream_) return;
    acl_.aclrtSetDevice(0);
    acl_.aclrtSynchronizeStream(stream_);
    for (AclEvent e : events_) acl_.aclrtDestroyEvent(e);
    if (binary_) acl_.aclrtBinaryUnLoad(binary_);
    for (const auto& b : blocks_) acl_.aclrtFree(b.first);
    for (char* h : host_) acl_.aclrtFreeHost(h);
    acl_.aclrtDestroyStream(stream_);
}

// ---- memory --------------------------------------------------------------------------------------------------------
void AscendDevice::memory(int64_t all_and_free[2]) const {
    size_t left = 0, all = 0;
    here();
    must(acl_.aclrtGetMemInfo(ACL_HBM, &left, &all), "asking for its memory");
    all_and_free[0] = (int64_t)all;
    all_and_free[1] = (int64_t)left;
}

char* AscendDevice::take(int64_t bytes, const char* purpose) {
    void* at = nullptr;
    here();
    const AclError result = acl_.aclrtMalloc(&at, (size_t)bytes, ACL_HUGE_FIRST);
    if (result == ACL_NO_ROOM) {
        int64_t have[2];
        memory(have);
        fail(DI_NO_MEMORY, "%lld bytes on the %s for the %s cannot be had, %lld are free", (long long)bytes,
             name_.c_str(), purpose, (long long)have[1]);
    }
    must(result, "giving memory");
    blocks_.emplace_back((char*)at, bytes);
    must(acl_.aclrtMemsetAsync(at, (size_t)bytes, 0, (size_t)bytes, stream_), "clearing memory");
    return (char*)at;
}

char* AscendDevice::take_host(int64_t bytes, const char* purpose) {
    void* at = nullptr;
    here();
    const AclError result = acl_.aclrtMallocHost(&at, (size_t)bytes);
    if (result == ACL_NO_ROOM) {
        fail(DI_NO_MEMORY, "%lld bytes of page-locked memory for the %s cannot be had", (long long)bytes, purpose);
    }
    must(result, "locking memory of the host");
    std::memset(at, 0, (size_t)bytes);
    host_.push_back((char*)at);
    return (char*)at;
}

void AscendDevice::copy(void* to, const void* from, int64_t bytes, int kind, const char* doing) {
    here();
    if (!bytes) return;
    must(acl_.aclrtMemcpyAsync(to, (size_t)bytes, from, (size_t)bytes, kind, stream_), doing);
}

void AscendDevice::copy_in(void* to, const void* from, int64_t bytes) {
    copy(to, from, bytes, ACL_TO_DEVICE, "copying to it");
    // Ordinary memory may be gone when a copy in flight reads it.
    const bool locked = std::find(host_.begin(), host_.end(), (const char*)from) != host_.end();
    if (!locked) wait("copying to it");
}

void AscendDevice::copy_out(void* to, const void* from, int64_t bytes) {
    copy(to, from, bytes, ACL_TO_HOST, "copying from it");
    wait("running a step");
}

void AscendDevice::copy_within(void* to, const void* from, int64_t bytes) {
    copy(to, from, bytes, ACL_WITHIN, "copying on it");
}

bool AscendDevice::holds(const void* address) const {
    const char* const at = (const char*)address;
    return std::any_of(blocks_.begin(), blocks_.end(),
                       [&](const auto& b) { return at >= b.first && at < b.first + b.second; });
}

// ---- kernels -------------------------------------------------------------------------------------------------------
int32_t AscendDevice::load(const Stage& stage, const char*) {
    here();
    if (!binary_) {
        must(acl_.aclrtBinaryLoadFromFile(binary_path_.c_str(), nullptr, &binary_), "loading the kernels");
    }
    AclFunction function = nullptr;
    must(acl_.aclrtBinaryGetFunction(binary_, stage.function.c_str(), &function),
         ("looking for the kernel " + stage.function).c_str());
    functions_.push_back(function);
    return (int32_t)functions_.size() - 1;
}

// Kernels go over their items in steps of the blocks: no more blocks than cores are started. Arguments lie at multiples
// of their sizes, 8-byte steps in all.
void AscendDevice::launch(const DeviceKernel& kernel, const Stage& stage, int64_t blocks, uint64_t* values) {
    char packed[8 * 4 * MOST_ARGS];
    size_t at = 0;
    for (size_t i = 0; i < kernel.parameters.size(); ++i) {
        const size_t bytes = (size_t)kernel.parameters[i].bytes;
        at = (at + bytes - 1) / bytes * bytes;
        std::memcpy(packed + at, values + i, bytes);
        at += bytes;
    }
    while (at % 8) packed[at++] = 0;
    const int64_t cores = stage.kind == VECTOR ? vector_cores_ : ai_cores_;
    here();
    const AclError result = acl_.aclrtLaunchKernelWithHostArgs(functions_[(size_t)stage.handle],
                                                               (uint32_t)std::min({blocks, cores, MOST_BLOCKS}), stream_, nullptr,
                                                               packed, at, nullptr, 0);
    if (result) must(result, ("launching the kernel " + stage.function).c_str());
}

void AscendDevice::wait(const char* doing) {
    here();
    must(acl_.aclrtSynchronizeStream(stream_), doing);
}

// ---- times ---------------------------------------------------------------------------------------------------------
void AscendDevice::mark(size_t i) {
    here();
    while (events_.size() <= i) {
        events_.push_back(nullptr);
        must(acl_.aclrtCreateEvent(&events_.back()), "making a mark of time");
    }
    must(acl_.aclrtRecordEvent(events_[i], stream_), "marking time");
}

double AscendDevice::between(size_t first, size_t last) {
    float milliseconds = 0;
    here();
    must(acl_.aclrtEventElapsedTime(&milliseconds, events_[first], events_[last]), "reading time");
    return milliseconds * 1e3;
}

}  // namespace

Acl::Acl() {
    void* const library = dlopen("libascendcl.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(DI_DEVICE, "no Ascend runtime (libascendcl.so) is installed here");
    const auto find = [&](const char* symbol) {
        void* const at = dlsym(library, symbol);
        if (!at) fail(DI_DEVICE, "the Ascend runtime is too old: it has no %s", symbol);
        return at;
    };
#define DI_ACL_FIND(name, result, arguments) name = (result(*) arguments)find(#name);
    DI_ACL_FUNCTIONS(DI_ACL_FIND)
#undef DI_ACL_FIND
}

std::unique_ptr<Device> open_device(const DeviceKernels& kernels) { return std::make_unique<AscendDevice>(kernels); }
