#include "team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <system_error>

#include "abi.h"
#include "fault.h"

namespace {

const int64_t SHARES_PER_THREAD = 4;  // against uneven work
const int SPINS = 2000;               // some 20 to 60 microseconds, longer than most launches of a single item
const int NEXT_BITS = 12, NUMBER_AT = 2 * NEXT_BITS;
const int64_t MOST_SHARES = (1 << NEXT_BITS) - 1;
const auto FIRST_REST = std::chrono::milliseconds(10), LONGEST_REST = std::chrono::milliseconds(1000);

int64_t shares_of(uint64_t open) { return (int64_t)(open >> NEXT_BITS) & MOST_SHARES; }
int64_t next_of(uint64_t open) { return (int64_t)open & MOST_SHARES; }

int64_t parts(int64_t items, int64_t size) { return (items + size - 1) / size; }

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// The kernel compares the word again before it sleeps, so a wake between check and sleep is not lost.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    static_assert(sizeof word == sizeof(uint32_t), "a futex is 32 bits");
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

double microseconds(Team::Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

}  // namespace

void Account::add(double gain, double loss, double elapsed) {
    const double kept = std::exp2(-elapsed / HALF_LIFE);
    gain_ = gain_ * kept + gain;
    loss_ = loss_ * kept + loss;
}

// ---- threads -------------------------------------------------------------------------------------------------------
void Team::begin(int32_t threads) {
    for (int32_t i = 1; i < threads; ++i) helpers_.emplace_back(new Helper);
    ready_ = helpers_.size();
    try {
        for (int32_t i = 1; i < threads; ++i) helpers_[(size_t)i - 1]->thread = std::thread(&Team::help, this, i);
    } catch (const std::system_error& e) {
        fail(DI_NO_MEMORY, "the system does not start %d threads for an engine: %s", threads, e.what());
    }
}

Team::~Team() {
    stop_.store(true, std::memory_order_seq_cst);
    for (auto& h : helpers_) {
        h->asleep.store(0, std::memory_order_seq_cst);
        futex(h->asleep, FUTEX_WAKE_PRIVATE, INT_MAX);
    }
    for (auto& h : helpers_) {
        if (h->thread.joinable()) h->thread.join();
    }
}

void Team::place(const std::vector<int32_t>& cpus) {
    for (size_t i = 0; i < helpers_.size() && !cpus.empty(); ++i) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET((size_t)cpus[(i + 1) % cpus.size()], &set);
        // A wish: the processors were allowed when they were asked for.
        pthread_setaffinity_np(helpers_[i]->thread.native_handle(), sizeof set, &set);
    }
}

// ---- what a helper does --------------------------------------------------------------------------------------------
void Team::help(int32_t thread) {
    Helper& me = *helpers_[(size_t)thread - 1];
    for (int64_t share; (share = next_share(me)) >= 0;) {
        me.working.store(true, std::memory_order_relaxed);
        work(thread, share);
        me.shares.fetch_add(1, std::memory_order_relaxed);
        if (waiting_.load(std::memory_order_seq_cst)) {
            const int64_t switches = usage().switches;
            me.held.store(switches != me.switches, std::memory_order_relaxed);
            me.switches = switches;
        }
        me.working.store(false, std::memory_order_relaxed);
        finished_.fetch_add(1, std::memory_order_seq_cst);
        if (waiting_.load(std::memory_order_seq_cst)) futex(finished_, FUTEX_WAKE_PRIVATE, 1);
    }
}

// Waits for a share; -1: the team ends.
int64_t Team::next_share(Helper& me) {
    for (;;) {
        for (int i = 0; i < SPINS && !me.resting.load(std::memory_order_relaxed); ++i) {
            if (stop_.load(std::memory_order_relaxed)) return -1;
            const int64_t share = claim();
            if (share >= 0) return share;
            relax();
        }
        me.asleep.store(1, std::memory_order_seq_cst);
        if (stop_.load(std::memory_order_seq_cst)) return -1;
        if (left() && !me.resting.load(std::memory_order_relaxed)) {
            me.asleep.store(0, std::memory_order_relaxed);
            continue;
        }
        while (me.asleep.load(std::memory_order_acquire)) futex(me.asleep, FUTEX_WAIT_PRIVATE, 1);
    }
}

// A share of the open launch, -1: none is left.
int64_t Team::claim() {
    uint64_t open = open_.load(std::memory_order_acquire);
    while (next_of(open) < shares_of(open)) {
        if (open_.compare_exchange_weak(open, open + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            return next_of(open);
        }
    }
    return -1;
}

bool Team::left() const {
    const uint64_t open = open_.load(std::memory_order_seq_cst);
    return next_of(open) < shares_of(open);
}

void Team::work(int32_t thread, int64_t share) {
    const int64_t first = share * batch_;
    round_->items(thread, first, std::min(first + batch_, items_));
}

// ---- what the caller does ------------------------------------------------------------------------------------------
void Team::run(const Round& round, int64_t items) {
    if (items < 2 || !anyone()) {
        if (items) round.items(0, 0, items);
        return;
    }
    const int64_t threads = (int64_t)helpers_.size() + 1;
    round_ = &round;
    items_ = items;
    batch_ = std::max({(int64_t)1, items / (SHARES_PER_THREAD * threads), parts(items, MOST_SHARES)});
    const int64_t shares = parts(items, batch_);
    const uint64_t number = (open_.load(std::memory_order_relaxed) >> NUMBER_AT) + 1;
    finished_.store(0, std::memory_order_relaxed);
    open_.store(number << NUMBER_AT | (uint64_t)shares << NEXT_BITS, std::memory_order_seq_cst);
    wake(shares - 1);
    int64_t own = 0;
    for (int64_t share; (share = claim()) >= 0; ++own) work(0, share);
    own_ += own;
    if (own < shares) finish((uint32_t)(shares - own));
}

// Whether a helper may take shares; those whose rest is over are called back.
bool Team::anyone() {
    if (ready_ == helpers_.size()) return ready_ > 0;
    const Clock::time_point now = Clock::now();
    if (now < next_back_) return ready_ > 0;
    next_back_ = Clock::time_point::max();
    for (auto& h : helpers_) {
        if (!h->resting.load(std::memory_order_relaxed)) continue;
        if (h->back <= now) {
            h->resting.store(false, std::memory_order_relaxed);
            ++ready_;
        } else {
            next_back_ = std::min(next_back_, h->back);
        }
    }
    return ready_ > 0;
}

void Team::wake(int64_t wanted) {
    for (auto& h : helpers_) {
        if (h->resting.load(std::memory_order_relaxed)) continue;
        if (h->asleep.load(std::memory_order_seq_cst)) {
            h->asleep.store(0, std::memory_order_seq_cst);
            futex(h->asleep, FUTEX_WAKE_PRIVATE, 1);
        }
        if (!--wanted) return;
    }
}

// Waits for the shares that helpers have begun.
void Team::finish(uint32_t theirs) {
    for (int i = 0; i < SPINS; ++i) {
        if (finished_.load(std::memory_order_acquire) == theirs) return;
        relax();
    }
    const Clock::time_point start = Clock::now();
    std::vector<Helper*> late;
    for (auto& h : helpers_) {
        h->held.store(false, std::memory_order_relaxed);
        if (h->working.load(std::memory_order_relaxed)) late.push_back(h.get());
    }
    waiting_.store(true, std::memory_order_seq_cst);
    for (uint32_t seen; (seen = finished_.load(std::memory_order_seq_cst)) != theirs;) {
        futex(finished_, FUTEX_WAIT_PRIVATE, seen);
    }
    waiting_.store(false, std::memory_order_relaxed);
    const double slept = microseconds(Clock::now() - start);
    slept_ += slept;
    bool held = false;
    for (Helper* h : late) {
        if (!h->held.load(std::memory_order_relaxed)) continue;
        h->delay += slept;
        held = true;
    }
    if (held) settle();
}

// ---- whether helpers pay -------------------------------------------------------------------------------------------
Team::Usage Team::usage() {
    struct rusage r;
    getrusage(RUSAGE_THREAD, &r);
    const auto us = [](const timeval& t) { return 1e6 * (double)t.tv_sec + (double)t.tv_usec; };
    return {Clock::now(), us(r.ru_utime) + us(r.ru_stime), r.ru_nivcsw};
}

// A helper brings the time that its shares would have taken the caller. It costs the time that the caller slept for it
// while it was held, and its part of the time that the caller itself waited for a processor.
void Team::settle() {
    if (!ready_) return;
    const Usage now = usage();
    const double elapsed = microseconds(now.at - since_.at), ran = now.processor - since_.processor;
    const double lost = now.switches == since_.switches ? 0 : std::max(0.0, elapsed - ran - slept_);
    const double share = own_ ? ran / (double)own_ : 0;
    const double part = lost / (double)ready_;
    for (auto& h : helpers_) {
        const int64_t done = h->shares.load(std::memory_order_relaxed);
        if (!h->resting.load(std::memory_order_relaxed)) {
            h->account.add((double)(done - h->counted) * share, h->delay + part, elapsed);
            if (h->account.poor()) rest(*h, now.at);
        }
        h->counted = done;
        h->delay = 0;
    }
    own_ = 0;
    slept_ = 0;
    since_ = now;
}

// Twice as long as the last time, unless it did well for a while since.
void Team::rest(Helper& h, Clock::time_point now) {
    const bool soon = h.rest.count() && now - h.back < 4 * h.rest;
    h.rest = soon ? std::min<Clock::duration>(2 * h.rest, LONGEST_REST) : Clock::duration(FIRST_REST);
    h.back = now + h.rest;
    h.account = Account();
    h.resting.store(true, std::memory_order_relaxed);
    --ready_;
    next_back_ = std::min(next_back_, h.back);
}
