// Calls that are made one after the other while their sender goes on.
#ifndef DEEPINFER_AHEAD_H
#define DEEPINFER_AHEAD_H
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

// One sender. The thread begins with the first call, and each call right behind the one before it.
class Ahead {
  public:
    Ahead() = default;
    ~Ahead();
    Ahead(const Ahead&) = delete;
    Ahead& operator=(const Ahead&) = delete;

    void send(std::function<void()> call);
    // Waits for the oldest call and throws what it threw; those behind it are then not made. Faults with DI_NOT_READY
    // where there is none.
    void wait();

  private:
    std::mutex lock_;
    std::condition_variable sent_, ended_;
    std::deque<std::function<void()>> calls_;  // the first is being made, or is about to be
    std::deque<std::exception_ptr> results_;   // of calls that have ended and were not waited for
    bool failed_ = false, stop_ = false;
    std::thread thread_;

    void make();
};

#endif
