// What test_team.py runs: `team_check held|shares|account|ahead`. Says nothing and returns 0 where the property holds.
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ahead.h"
#include "fault.h"
#include "team.h"

void fail(int code, const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::vfprintf(stderr, format, args);
    va_end(args);
    std::exit(code);
}

namespace {

const int HELPERS = 3;
sem_t held, go_on;

void require(bool holds, const char* what) {
    if (!holds) fail(1, "not so: %s\n", what);
}

// What the system does when it takes a thread's processor away, until the test gives it back.
void hold(int) {
    sem_post(&held);
    while (sem_wait(&go_on)) {
    }
}

// Each item counts; the order in which items come is nobody's promise.
struct Count final : Team::Round {
    explicit Count(int64_t n) : done((size_t)n) {}
    void items(int32_t thread, int64_t lo, int64_t hi) const override {
        require(thread >= 0 && thread <= HELPERS, "a thread has a number of the team");
        for (int64_t i = lo; i < hi; ++i) {
            ++done[(size_t)i];
            for (int k = 0; k < 50; ++k) work = work + k;
        }
        if (thread) helped.store(true);
    }
    void check(int times) const {
        for (int n : done) require(n == times, "every item is done once");
    }
    mutable std::vector<int> done;  // without atomics: a launch is seen whole by whoever runs the next one
    mutable std::atomic<bool> helped{false};
    static thread_local volatile int work;
};
thread_local volatile int Count::work = 0;

// The number of the calling thread, from inside a share.
struct Meet final : Team::Round {
    void items(int32_t thread, int64_t lo, int64_t hi) const override {
        if (thread) who[thread - 1] = pthread_self();
        // All threads are here at once, so each helper has shown itself.
        for (int64_t i = lo; i < hi; ++i) here.fetch_add(1);
        while (here.load() < HELPERS + 1) usleep(100);
    }
    mutable pthread_t who[HELPERS] = {};
    mutable std::atomic<int> here{0};
};

void shares() {
    Team team;
    team.begin(HELPERS + 1);
    for (int64_t n : {1, 2, 3, 5, 16, 17, 1000, 100000}) {
        const Count count(n);
        for (int t = 1; t <= 40; ++t) {
            team.enter();
            team.run(count, n);
            team.leave();
            count.check(t);
        }
        team.run(count, 0);
        count.check(40);
    }
}

void held_helpers() {
    sem_init(&held, 0, 0);
    sem_init(&go_on, 0, 0);
    struct sigaction action = {};
    action.sa_handler = hold;
    sigaction(SIGUSR1, &action, nullptr);
    Team team;
    team.begin(HELPERS + 1);
    const Meet meet;
    team.run(meet, HELPERS + 1);
    for (pthread_t t : meet.who) pthread_kill(t, SIGUSR1);
    for (int i = 0; i < HELPERS; ++i) sem_wait(&held);  // none is at a share, none will run
    const Count count(64);
    for (int t = 1; t <= 200; ++t) team.run(count, 64);
    count.check(200);
    require(!count.helped.load(), "held threads do nothing");
    for (int i = 0; i < HELPERS; ++i) sem_post(&go_on);  // the team ends when all have come back
}

void account() {
    const double step = 1000;
    Account good, poor, once, late;
    for (int i = 0; i < 100; ++i) good.add(0.8 * step, 0.1 * step, step);
    require(!good.poor(), "a helper that does much and costs little stays");
    for (int i = 0; i < 100; ++i) poor.add(0.3 * step, 0.4 * step, step);
    require(poor.poor(), "a helper that costs more than it does rests");
    once.add(0, 300, step);
    require(!once.poor(), "one interrupt is nothing");
    late.add(0, 4000, step);
    require(late.poor(), "a helper that was held before it did anything rests");
    for (int i = 0; i < 1000; ++i) late.add(0.8 * step, 0, step);
    require(!late.poor(), "what was long ago is forgotten");
}

void calls_ahead() {
    std::vector<int> made;
    bool seen = false;
    {
        Ahead ahead;
        for (int round = 0; round < 3; ++round) {
            for (int i = 0; i < 5; ++i) {
                ahead.send([&made, i] {
                    if (i == 3) throw i;
                    made.push_back(i);
                });
            }
            for (int i = 0; i < 3; ++i) ahead.wait();
            try {
                ahead.wait();
            } catch (int fault) {
                seen = fault == 3;
            }
            require(seen, "a wait throws what its call threw");
        }
        ahead.send([&made] { made.push_back(9); });
        ahead.wait();
    }
    require(made == std::vector<int>{0, 1, 2, 0, 1, 2, 0, 1, 2, 9}, "calls behind a fault are not made, later ones are");
}

}  // namespace

int main(int, char** argv) {
    if (!std::strcmp(argv[1], "shares")) shares();
    else if (!std::strcmp(argv[1], "held")) held_helpers();
    else if (!std::strcmp(argv[1], "account")) account();
    else if (!std::strcmp(argv[1], "ahead")) calls_ahead();
    else return 2;
    return 0;
}
