// The threads of an engine. A launch is cut into shares, which whoever runs takes: the caller, who opens launches one
// after the other, and helpers. The caller waits only for shares that helpers have begun, so a helper that the system
// holds back delays nothing but a share that it was at. Helpers that delay more than they do rest (`Account`).
#ifndef DEEPINFER_TEAM_H
#define DEEPINFER_TEAM_H
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

// What a helper brought and cost lately, in microseconds of the caller; both halve every HALF_LIFE.
class Account {
  public:
    void add(double gain, double loss, double elapsed);
    bool poor() const { return loss_ > 0.5 * gain_ + CREDIT; }

  private:
    static constexpr double HALF_LIFE = 64e3;  // some slices of the system's scheduler
    static constexpr double CREDIT = 500;      // what one interrupt may cost
    double gain_ = 0, loss_ = 0;
};

class Team {
  public:
    using Clock = std::chrono::steady_clock;
    // The work of one launch.
    struct Round {
        // Items lo .. hi - 1; `thread` 0 is the caller of run. Does not throw.
        virtual void items(int32_t thread, int64_t lo, int64_t hi) const = 0;

      protected:
        ~Round() = default;
    };

    Team() = default;
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Once. Faults with DI_NO_MEMORY where the system gives no more threads.
    void begin(int32_t threads);
    // Thread i keeps to processor cpus[i % count]; thread 0 is the caller's to place.
    void place(const std::vector<int32_t>& cpus);
    // Around the launches of a step: what helpers brought and cost is settled behind it.
    void enter() { since_ = usage(); }
    void leave() { settle(); }
    // Items 0 .. items - 1 are done when it returns, and seen by the caller. One caller at a time.
    void run(const Round& round, int64_t items);

  private:
    struct alignas(64) Helper {
        std::atomic<uint32_t> asleep{0};   // a futex
        std::atomic<bool> resting{false};
        std::atomic<bool> working{false};  // has a share
        std::atomic<bool> held{false};     // lost its processor since the caller last slept for it
        std::atomic<int64_t> shares{0};    // done
        int64_t switches = 0;              // the helper's own; what follows is the caller's
        Account account;
        int64_t counted = 0;               // of shares
        double delay = 0;                  // us that the caller slept for it
        Clock::duration rest{};
        Clock::time_point back{};          // end of its last rest
        std::thread thread;
    };
    // Of the calling thread.
    struct Usage {
        Clock::time_point at;
        double processor;   // us
        int64_t switches;   // times that it lost its processor
    };

    std::vector<std::unique_ptr<Helper>> helpers_;
    std::atomic<bool> stop_{false};
    // The open launch: its number, its shares (12 bits), the next share (12 bits). A share is taken by changing it, so
    // whoever comes late finds another number and takes nothing.
    alignas(64) std::atomic<uint64_t> open_{0};
    // What the launch is; read by owners of its shares only, and written when there are none.
    const Round* round_ = nullptr;
    int64_t items_ = 0, batch_ = 1;
    alignas(64) std::atomic<uint32_t> finished_{0};  // shares of the open launch that helpers did; a futex
    std::atomic<bool> waiting_{false};               // the caller sleeps on it
    // The caller's, since it last settled.
    Usage since_{};
    int64_t own_ = 0;    // shares
    double slept_ = 0;   // us
    size_t ready_ = 0;   // helpers that do not rest
    Clock::time_point next_back_ = Clock::time_point::max();

    static Usage usage();
    int64_t claim();
    bool left() const;
    void work(int32_t thread, int64_t share);
    void help(int32_t thread);
    int64_t next_share(Helper& me);
    bool anyone();
    void wake(int64_t wanted);
    void finish(uint32_t theirs);
    void settle();
    void rest(Helper& h, Clock::time_point now);
};

#endif
