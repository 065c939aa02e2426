// Order: events, locks and barriers inside a core, counters between the cores of a block.
#include "machine.h"

using twin::Channel;
using twin::Clock;
using twin::Core;
using twin::machine;
using twin::PIPES;

namespace {

// What the pipe has done so far; what it does next comes after.
Clock release(Core& core, int pipe) {
    const Clock now = core.clock[pipe];
    ++core.clock[pipe].t[core.part(pipe)];
    return now;
}

// A scalar unit that waits issues nothing, to any pipe.
void acquire(Core& core, int pipe, const Clock& from) {
    if (pipe != PIPE_S) return core.clock[pipe].join(from);
    for (Clock& c : core.clock) c.join(from);
}

void check_pipe(int pipe, const char* what) {
    if (pipe < 0 || pipe >= PIPES) machine.stop("%s on a pipe that does not exist", what);
    if (machine.core->in_vf) machine.stop("%s inside a vector function", what);
}

void check_id(int id, int most, const char* what) {
    if (id < 0 || id > most) machine.stop("%s %d, allowed 0..%d", what, id, most);
}

void arrive(int to, int pipe, int id) {
    Channel& c = machine.channel(machine.core->number, to, id);
    if ((int)c.waiting.size() >= twin::MOST_WAITING) machine.stop("more than 15 arrivals wait at flag %d", id);
    c.waiting.push_back(release(*machine.core, pipe));
}

void wait(int from, int pipe, int id, const char* what) {
    Channel& c = machine.channel(from, machine.core->number, id);
    machine.wait_until(what, id, [&] { return !c.waiting.empty(); });
    acquire(*machine.core, pipe, c.waiting.front());
    c.waiting.pop_front();
}

// The other core of an intra flag and its number there: the cube core counts AIV1 from 16 on.
int partner(int& id, const char* what) {
    if (!machine.mixed()) machine.stop("%s in a kernel of one kind of core", what);
    if (!machine.core->cube()) {
        check_id(id, 15, what);
        return 0;
    }
    check_id(id, 31, what);
    const int other = id < 16 ? 1 : 2;
    id %= 16;
    return other;
}

}  // namespace

void asc_lock(di_pipe pipe, int id, di_at at) {
    machine.issue(at);
    check_pipe(pipe, "asc_lock");
    check_id(id, 27, "lock");
    twin::Lock& lock = machine.core->locks[id];
    if (lock.holder >= 0) machine.stop("lock %d is taken by %s already", id, twin::PIPE_NAMES[lock.holder]);
    lock.holder = pipe;
    acquire(*machine.core, pipe, lock.clock);
}

void asc_unlock(di_pipe pipe, int id, di_at at) {
    machine.issue(at);
    check_pipe(pipe, "asc_unlock");
    check_id(id, 27, "lock");
    twin::Lock& lock = machine.core->locks[id];
    if (lock.holder != pipe) machine.stop("lock %d is not held by %s", id, twin::PIPE_NAMES[pipe]);
    lock.holder = -1;
    lock.clock.join(release(*machine.core, pipe));
}

void asc_sync_notify(di_pipe from, di_pipe to, int id, di_at at) {
    machine.issue(at);
    check_pipe(from, "asc_sync_notify");
    check_pipe(to, "asc_sync_notify");
    check_id(id, 5, "event");
    if (from == to) machine.stop("an event from a pipe to itself");
    twin::Flag& flag = machine.core->flags[from][to][id];
    if (flag.set) {
        machine.stop("event %d from %s to %s is set again before anything waited for it", id, twin::PIPE_NAMES[from],
                     twin::PIPE_NAMES[to]);
    }
    flag.set = machine.core->used_flags = true;
    flag.clock = release(*machine.core, from);
}

void asc_sync_wait(di_pipe from, di_pipe to, int id, di_at at) {
    machine.issue(at);
    check_pipe(from, "asc_sync_wait");
    check_pipe(to, "asc_sync_wait");
    check_id(id, 5, "event");
    twin::Flag& flag = machine.core->flags[from][to][id];
    if (!flag.set) {
        machine.stop("deadlock: waits for event %d from %s to %s, which was not set", id, twin::PIPE_NAMES[from],
                     twin::PIPE_NAMES[to]);
    }
    flag.set = false;
    acquire(*machine.core, to, flag.clock);
}

void asc_sync_pipe(di_pipe pipe, di_at at) {
    machine.issue(at);
    if (machine.core->in_vf) machine.stop("asc_sync_pipe inside a vector function");
    if (pipe == PIPE_S) machine.stop("asc_sync_pipe(PIPE_S), which does not exist");
    Core& core = *machine.core;
    if (pipe != PIPE_ALL) return;  // one pipe is in order here
    Clock all;
    for (int p = 0; p < PIPES; ++p) all.join(release(core, p));
    for (int p = 0; p < PIPES; ++p) core.clock[p].join(all);
    core.finished_pipes = true;
}

// What the scalar unit stored is there for everything issued later.
void asc_sync_data_barrier(di_barrier_scope, di_at at) {
    machine.issue(at);
    Core& core = *machine.core;
    const Clock done = release(core, PIPE_S);
    for (int p = 0; p < PIPES; ++p) core.clock[p].join(done);
}

// Scalar loads see memory as it is here; docs/ascend.md says what that hides.
void di_dcci(const void*, di_at at) { machine.issue(at); }

void asc_sync_intra_arrive(di_pipe pipe, int id, di_at at) {
    machine.issue(at);
    check_pipe(pipe, "asc_sync_intra_arrive");
    const int other = partner(id, "asc_sync_intra_arrive");
    arrive(other, pipe, id);
}

void asc_sync_intra_wait(di_pipe pipe, int id, di_at at) {
    machine.issue(at);
    check_pipe(pipe, "asc_sync_intra_wait");
    const int other = partner(id, "asc_sync_intra_wait");
    wait(other, pipe, id, "cross-core flag");
}

void di_vf_begin() {
    machine.issue(di_at{machine.line});
    machine.need(false, "a vector function");
    if (machine.core->in_vf) machine.stop("a vector function inside a vector function");
    machine.core->in_vf = true;
    machine.count(twin::DID_FUNCTIONS, 1);
    ++machine.core->vf;
}

void di_vf_end() { machine.core->in_vf = false; }

void asc_mem_bar(di_memory_order) { ++machine.core->vf; }
