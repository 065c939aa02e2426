// Where the threads of a step meet. It spins for about as long as a small kernel runs and then sleeps: on a machine
// that other processes use as well, a thread that only spins keeps the one it waits for from running.
#ifndef DEEPINFER_BARRIER_H
#define DEEPINFER_BARRIER_H
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

class Barrier {
  public:
    void resize(int32_t threads) { threads_ = threads; }

    void wait() {
        const uint32_t turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_seq_cst);
            if (asleep_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
            return;
        }
        for (int i = 0; i < SPINS; ++i) {
            if (turn_.load(std::memory_order_acquire) != turn) return;
            pause();
        }
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        while (turn_.load(std::memory_order_seq_cst) == turn) futex(FUTEX_WAIT_PRIVATE, turn);
        asleep_.fetch_sub(1, std::memory_order_relaxed);
    }

  private:
    enum { SPINS = 2000 };  // some 20 to 60 microseconds
    int32_t threads_ = 1;
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    std::atomic<int32_t> asleep_{0};

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ __volatile__("yield");
#endif
    }

    // The kernel compares the turn again before it sleeps, so a wake between check and sleep is not lost.
    void futex(int operation, uint32_t value) {
        static_assert(sizeof turn_ == sizeof(uint32_t), "a futex is 32 bits");
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&turn_), operation, value, nullptr, nullptr, 0);
    }
};

#endif
