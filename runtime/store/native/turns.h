// Two areas of memory that take turns: one thread fills them, another one empties them behind it.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace store {

// What lies in one area: records ``first`` .. ``first + count - 1``, of ``got`` bytes together or a negative errno.
struct Filled {
  int64_t first = 0, count = 0, got = 0;
};

class Turns {
 public:
  // ``empty`` is called for each area that was filled, in order, in a thread of its own.
  // Throws std::system_error where there can be no further thread.
  explicit Turns(std::function<void(const Filled&, int)> empty)
      : empty_(std::move(empty)), thread_([this] { work(); }) {}
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  // Everything that was filled has been emptied when this ends.
  ~Turns() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // The area to be filled next, 0 or 1, once it is empty.
  int next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return filled_ - emptied_ < 2; });
    return static_cast<int>(filled_ % 2);
  }

  void filled(const Filled& what) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      areas_[filled_++ % 2] = what;
    }
    changed_.notify_all();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return emptied_ < filled_ || over_; });
      if (emptied_ == filled_) return;
      const int area = static_cast<int>(emptied_ % 2);
      lock.unlock();
      empty_(areas_[area], area);
      lock.lock();
      emptied_++;
      changed_.notify_all();
    }
  }

  std::function<void(const Filled&, int)> empty_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Filled areas_[2];
  uint64_t filled_ = 0, emptied_ = 0;
  bool over_ = false;
  std::thread thread_;  // last: it begins when the rest is there
};

}  // namespace store
