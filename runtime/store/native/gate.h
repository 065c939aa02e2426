// At most so many reads at a time, by whichever threads: those that prove what they read let others read meanwhile.

#pragma once

#include <semaphore.h>

#include <cstdint>

namespace store {

class Gate {
 public:
  explicit Gate(uint32_t reads) { sem_init(&left_, 0, reads); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { sem_destroy(&left_); }

  void enter() {
    while (sem_wait(&left_) != 0) {  // a signal
    }
  }
  void leave() { sem_post(&left_); }

 private:
  sem_t left_;
};

}  // namespace store
