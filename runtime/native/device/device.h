// What a device has to do for the runner. Everything happens in the order of the calls, on one queue of the device.
// A fault carries DI_DEVICE and a sentence that names what failed, or DI_NO_MEMORY.
#ifndef DEEPINFER_DEVICE_H
#define DEEPINFER_DEVICE_H
#include <memory>
#include <string>

#include "kernels.h"

class Device {
  public:
    virtual ~Device() = default;

    virtual const char* name() const = 0;
    virtual void memory(int64_t all_and_free[2]) const = 0;
    // Device memory, zeroed, at a multiple of 256 bytes; it lives as long as the device.
    virtual char* take(int64_t bytes, const char* purpose) = 0;
    // Host memory that copies reach at full speed.
    virtual char* take_host(int64_t bytes, const char* purpose) = 0;
    // Returns at once if `from` is memory of take_host, which then stays as it is until the next wait.
    virtual void copy_in(void* to, const void* from, int64_t bytes) = 0;
    virtual void copy_out(void* to, const void* from, int64_t bytes) = 0;  // waits
    // Into memory of take_host; there after the next wait for it.
    virtual void copy_out_later(void* to, const void* from, int64_t bytes) { copy_out(to, from, bytes); }
    virtual void copy_within(void* to, const void* from, int64_t bytes) = 0;
    virtual bool holds(const void* address) const = 0;                     // memory of take
    // Makes the function of a stage callable. `image`: its binary.
    virtual int32_t load(const Stage& stage, const char* image) = 0;
    // `values`: of the parameters of the kernel, 8 bytes each, low bytes first.
    virtual void launch(const DeviceKernel& kernel, const Stage& stage, int64_t blocks, uint64_t* values) = 0;
    virtual void wait(const char* doing) = 0;
    // A place in the queue, and waiting until everything in front of it is done. `i`: of few, used again and again.
    virtual void post(size_t) {}
    virtual void await(size_t, const char* doing) { wait(doing); }

    // Graphs: what is launched between begin and end is kept, not run. A device without them answers false and -1.
    virtual bool begin_graph() { return false; }
    virtual int32_t end_graph() { return -1; }
    virtual void replay(int32_t) {}
    // Times: marks are set in order; microseconds between two of them once they have been waited for.
    virtual void mark(size_t) {}
    virtual double between(size_t, size_t) { return 0; }
};

// Opens the device that the kernels are for; a runner library has one kind of device.
std::unique_ptr<Device> open_device(const DeviceKernels& kernels);

#endif
