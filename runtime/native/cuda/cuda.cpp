// A device behind the CUDA driver: its first one, in the primary context, one stream.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../device/device.h"
#include "../fault.h"
#include "driver.h"

namespace {

const int OLDEST[] = {12000, 12080};  // CUDA of the first driver that runs sm_90a, sm_100a
const int32_t FREE_SHARED = 48 << 10; // a function gets so much without asking
const int32_t WARP = 32;
const uint64_t NOTHING[2] = {0, 0};   // the two addresses behind the listed parameters

class CudaDevice final : public Device {
  public:
    explicit CudaDevice(const DeviceKernels& kernels);
    ~CudaDevice() override;

    const char* name() const override { return name_.c_str(); }
    void memory(int64_t all_and_free[2]) const override;
    char* take(int64_t bytes, const char* purpose) override;
    char* take_host(int64_t bytes, const char* purpose) override;
    void copy_in(void* to, const void* from, int64_t bytes) override;
    void copy_out(void* to, const void* from, int64_t bytes) override;
    void copy_out_later(void* to, const void* from, int64_t bytes) override;
    void copy_within(void* to, const void* from, int64_t bytes) override;
    bool holds(const void* address) const override;
    int32_t load(const Stage& stage, const char* image) override;
    void launch(const DeviceKernel& kernel, const Stage& stage, int64_t blocks, uint64_t* values) override;
    void wait(const char* doing) override;
    void post(size_t i) override;
    void await(size_t i, const char* doing) override;
    bool begin_graph() override;
    int32_t end_graph() override;
    void replay(int32_t graph) override;
    void mark(size_t i) override;
    double between(size_t first, size_t last) override;

  private:
    CudaDriver cu_;
    CuDevice device_ = 0;
    CuContext context_ = nullptr;
    int64_t number_ = 0;  // of this object, counted over the process's life
    CuStream stream_ = nullptr;
    std::string name_;
    std::vector<std::pair<char*, int64_t>> blocks_;
    std::vector<char*> host_;
    std::vector<CuModule> modules_;
    std::unordered_map<int64_t, CuModule> by_offset_;
    std::vector<CuFunction> functions_;
    std::vector<CuGraphExec> graphs_;
    std::vector<CuEvent> events_, posts_;

    void must(CuResult result, const char* doing) const;
    CuEvent event(std::vector<CuEvent>& made, size_t i, unsigned flags);
    void here() const;
    void require(const std::string& arch) const;
};

// The context belongs to a thread's calls only once it was made current there. A later context may have the address of
// one that is gone, hence numbers.
void CudaDevice::here() const {
    static thread_local int64_t current = 0;
    if (current == number_) return;
    must(cu_.cuCtxSetCurrent(context_), "making its context current");
    current = number_;
}

void CudaDevice::must(CuResult result, const char* doing) const {
    if (!result) return;
    const char* name = nullptr;
    if (cu_.cuGetErrorName(result, &name) || !name) name = "an error without a name";
    fail(DI_DEVICE, "the NVIDIA device %s failed while %s: %s (%d)", name_.c_str(), doing, name, result);
}

CudaDevice::CudaDevice(const DeviceKernels& kernels) {
    int count = 0;
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // nothing is loaded while serving, or while launches are recorded
    const CuResult started = cu_.cuInit(0);
    if (started == CU_NO_DEVICE || (!started && (cu_.cuDeviceGetCount(&count) || !count))) {
        fail(DI_DEVICE, "the NVIDIA driver shows no device");
    }
    must(started, "starting the driver");
    must(cu_.cuDeviceGet(&device_, 0), "opening it");
    char text[128] = "";
    must(cu_.cuDeviceGetName(text, sizeof text, device_), "asking for its name");
    name_ = text;
    require(kernels.arch);
    static std::atomic<int64_t> made{0};
    number_ = ++made;
    must(cu_.cuDevicePrimaryCtxRetain(&context_, device_), "making a context");
    here();
    must(cu_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "making a stream");
}

// Kernels are compiled for one architecture and run on no other.
void CudaDevice::require(const std::string& arch) const {
    int version = 0, major = 0, minor = 0;
    must(cu_.cuDriverGetVersion(&version), "asking for the driver's version");
    must(cu_.cuDeviceGetAttribute(&major, CU_MAJOR, device_), "asking for its compute capability");
    must(cu_.cuDeviceGetAttribute(&minor, CU_MINOR, device_), "asking for its compute capability");
    const std::string have = "sm_" + std::to_string(major) + std::to_string(minor) + "a";
    if (have != arch) {
        fail(DI_DEVICE, "the engine's kernels are for %s, the device here is a %s of %s", arch.c_str(), name_.c_str(),
             have.c_str());
    }
    const int oldest = OLDEST[major >= 10];
    if (version < oldest) {
        fail(DI_DEVICE,
             "the NVIDIA driver is too old: it is for CUDA %d.%d, engines for %s need a driver for CUDA %d.%d or newer",
             version / 1000, version % 1000 / 10, arch.c_str(), oldest / 1000, oldest % 1000 / 10);
    }
}

CudaDevice::~CudaDevice() {
    if (!context_) return;
    cu_.cuCtxSetCurrent(context_);
    if (stream_) cu_.cuStreamSynchronize(stream_);
    for (CuGraphExec g : graphs_) cu_.cuGraphExecDestroy(g);
    for (const auto* made : {&events_, &posts_}) {
        for (CuEvent e : *made) cu_.cuEventDestroy_v2(e);
    }
    for (CuModule m : modules_) cu_.cuModuleUnload(m);
    for (const auto& b : blocks_) cu_.cuMemFree_v2((CuAddress)b.first);
    for (char* h : host_) cu_.cuMemFreeHost(h);
    if (stream_) cu_.cuStreamDestroy_v2(stream_);
    cu_.cuDevicePrimaryCtxRelease_v2(device_);
}

// ---- memory --------------------------------------------------------------------------------------------------------
void CudaDevice::memory(int64_t all_and_free[2]) const {
    size_t left = 0, all = 0;
    here();
    must(cu_.cuMemGetInfo_v2(&left, &all), "asking for its memory");
    all_and_free[0] = (int64_t)all;
    all_and_free[1] = (int64_t)left;
}

char* CudaDevice::take(int64_t bytes, const char* purpose) {
    CuAddress at = 0;
    here();
    const CuResult result = cu_.cuMemAlloc_v2(&at, (size_t)bytes);
    if (result == CU_OUT_OF_MEMORY) {
        int64_t have[2];
        memory(have);
        fail(DI_NO_MEMORY, "%lld bytes on the %s for the %s cannot be had, %lld are free", (long long)bytes,
             name_.c_str(), purpose, (long long)have[1]);
    }
    must(result, "giving memory");
    blocks_.emplace_back((char*)at, bytes);
    must(cu_.cuMemsetD8Async(at, 0, (size_t)bytes, stream_), "clearing memory");
    return (char*)at;
}

char* CudaDevice::take_host(int64_t bytes, const char* purpose) {
    void* at = nullptr;
    here();
    const CuResult result = cu_.cuMemHostAlloc(&at, (size_t)bytes, 0);
    if (result == CU_OUT_OF_MEMORY) {
        fail(DI_NO_MEMORY, "%lld bytes of page-locked memory for the %s cannot be had", (long long)bytes, purpose);
    }
    must(result, "locking memory of the host");
    std::fill((char*)at, (char*)at + bytes, 0);
    host_.push_back((char*)at);
    return (char*)at;
}

void CudaDevice::copy_in(void* to, const void* from, int64_t bytes) {
    here();
    must(cu_.cuMemcpyHtoDAsync_v2((CuAddress)to, from, (size_t)bytes, stream_), "copying to it");
}

void CudaDevice::copy_out(void* to, const void* from, int64_t bytes) {
    here();
    if (bytes) must(cu_.cuMemcpyDtoHAsync_v2(to, (CuAddress)from, (size_t)bytes, stream_), "copying from it");
    wait("running a step");
}

void CudaDevice::copy_out_later(void* to, const void* from, int64_t bytes) {
    here();
    must(cu_.cuMemcpyDtoHAsync_v2(to, (CuAddress)from, (size_t)bytes, stream_), "copying from it");
}

void CudaDevice::copy_within(void* to, const void* from, int64_t bytes) {
    here();
    must(cu_.cuMemcpyDtoDAsync_v2((CuAddress)to, (CuAddress)from, (size_t)bytes, stream_), "copying on it");
}

bool CudaDevice::holds(const void* address) const {
    const char* const at = (const char*)address;
    return std::any_of(blocks_.begin(), blocks_.end(),
                       [&](const auto& b) { return at >= b.first && at < b.first + b.second; });
}

// ---- kernels -------------------------------------------------------------------------------------------------------
int32_t CudaDevice::load(const Stage& stage, const char* image) {
    CuFunction function = nullptr;
    here();
    CuModule& module = by_offset_[stage.offset];  // equal functions share a binary
    if (!module) {
        must(cu_.cuModuleLoadData(&module, image), ("loading the kernel " + stage.function).c_str());
        modules_.push_back(module);
    }
    must(cu_.cuModuleGetFunction(&function, module, stage.function.c_str()),
         ("looking for the kernel " + stage.function).c_str());
    if (stage.shared > FREE_SHARED) {
        must(cu_.cuFuncSetAttribute(function, CU_MAX_SHARED, stage.shared),
             ("giving shared memory to the kernel " + stage.function).c_str());
    }
    functions_.push_back(function);
    return (int32_t)functions_.size() - 1;
}

void CudaDevice::launch(const DeviceKernel& kernel, const Stage& stage, int64_t blocks, uint64_t* values) {
    const size_t count = kernel.parameters.size();
    void* pointers[4 * MOST_ARGS + 2];
    for (size_t i = 0; i < count; ++i) pointers[i] = values + i;
    pointers[count] = (void*)NOTHING;
    pointers[count + 1] = (void*)(NOTHING + 1);
    here();
    const CuResult result = cu_.cuLaunchKernel(functions_[(size_t)stage.handle], (unsigned)blocks, 1, 1,
                                               (unsigned)(WARP * stage.warps), 1, 1, (unsigned)stage.shared, stream_,
                                               pointers, nullptr);
    if (result) must(result, ("launching the kernel " + stage.function).c_str());
}

void CudaDevice::wait(const char* doing) {
    here();
    must(cu_.cuStreamSynchronize(stream_), doing);
}

// ---- graphs and times ----------------------------------------------------------------------------------------------
bool CudaDevice::begin_graph() {
    here();
    must(cu_.cuStreamBeginCapture_v2(stream_, CU_CAPTURE_THREAD_LOCAL), "recording launches");
    return true;
}

int32_t CudaDevice::end_graph() {
    CuGraph graph = nullptr;
    CuGraphExec made = nullptr;
    must(cu_.cuStreamEndCapture(stream_, &graph), "recording launches");
    const CuResult result = cu_.cuGraphInstantiateWithFlags(&made, graph, 0);
    cu_.cuGraphDestroy(graph);
    must(result, "making a graph of launches");
    graphs_.push_back(made);
    must(cu_.cuGraphUpload(made, stream_), "loading a graph of launches");
    return (int32_t)graphs_.size() - 1;
}

void CudaDevice::replay(int32_t graph) {
    here();
    must(cu_.cuGraphLaunch(graphs_[(size_t)graph], stream_), "launching a step");
}

CuEvent CudaDevice::event(std::vector<CuEvent>& made, size_t i, unsigned flags) {
    while (made.size() <= i) {
        made.push_back(nullptr);
        must(cu_.cuEventCreate(&made.back(), flags), "making an event");
    }
    return made[i];
}

void CudaDevice::post(size_t i) {
    here();
    must(cu_.cuEventRecord(event(posts_, i, CU_EVENT_NO_TIME), stream_), "marking the end of a step");
}

void CudaDevice::await(size_t i, const char* doing) {
    here();
    must(cu_.cuEventSynchronize(posts_[i]), doing);
}

void CudaDevice::mark(size_t i) {
    here();
    must(cu_.cuEventRecord(event(events_, i, 0), stream_), "marking time");
}

double CudaDevice::between(size_t first, size_t last) {
    float milliseconds = 0;
    here();
    must(cu_.cuEventElapsedTime(&milliseconds, events_[first], events_[last]), "reading time");
    return milliseconds * 1e3;
}

}  // namespace

CudaDriver::CudaDriver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(DI_DEVICE, "no NVIDIA driver (libcuda.so.1) is installed here");
    const auto find = [&](const char* symbol) {
        void* const at = dlsym(library, symbol);
        if (!at) fail(DI_DEVICE, "the NVIDIA driver is too old: it has no %s", symbol);
        return at;
    };
#define DI_CUDA_FIND(name, arguments) name = (CuResult(*) arguments)find(#name);
    DI_CUDA_FUNCTIONS(DI_CUDA_FIND)
#undef DI_CUDA_FIND
}

std::unique_ptr<Device> open_device(const DeviceKernels& kernels) { return std::make_unique<CudaDevice>(kernels); }
