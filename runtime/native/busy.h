// One run of an engine at a time.
#ifndef DEEPINFER_BUSY_H
#define DEEPINFER_BUSY_H
#include <atomic>

#include "fault.h"

// Marks the engine as busy; a second caller is refused, not queued.
class Busy {
  public:
    explicit Busy(std::atomic<bool>& flag) : flag_(flag) {
        if (flag_.exchange(true)) fail(DI_NOT_READY, "another run of this engine is in progress");
    }
    ~Busy() { flag_.store(false); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

  private:
    std::atomic<bool>& flag_;
};

#endif
