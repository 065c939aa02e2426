// Runs a step: one parallel region over the phases of an entry. Threads take items of a phase from its dealer and meet
// before the next one.
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "busy.h"
#include "host.h"

namespace {

const int64_t SHARES_PER_THREAD = 4;  // items are dealt in so many shares per thread, against uneven work

// Items of a phase below `row`, rounded up to whole row tiles.
int64_t items_below(const Phase& phase, int64_t row) {
    return (row + phase.rows_per_item - 1) / phase.rows_per_item * phase.items_per_tile;
}

double microseconds_between(Clock::time_point start, Clock::time_point stop) {
    return std::chrono::duration<double, std::micro>(stop - start).count();
}

}  // namespace

void HostEngine::place(const int32_t* cpus, int32_t count) {
    Busy busy(running_);
    cpus_.assign(cpus, cpus + count);
    ++placed_;
}

// Each thread once: threads of a parallel region belong to whoever opened it, so a new caller brings new ones.
void HostEngine::settle(int32_t thread) const {
    static thread_local const HostEngine* engine = nullptr;
    static thread_local int32_t turn = 0;
    if (engine == this && turn == placed_) return;
    engine = this;
    turn = placed_;
    if (cpus_.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpus_[(size_t)thread % cpus_.size()], &set);
    sched_setaffinity(0, sizeof set, &set);  // a wish: the processors were allowed when they were asked for
}

// Over the rows that the step was filled with.
void HostEngine::run_entry(int32_t entry) {
    const EntryRow& e = table_.entries[(size_t)entry];
    Plan& plan = plans_[(size_t)entry];
    last_entry_ = -1;
    for (const auto& p : plan.pin_args) plan.args[p.first] = const_cast<int32_t*>(step_.pin(p.second));
    deal(e, plan);
    execute(e, plan);
    last_entry_ = entry;
}

void HostEngine::deal(const EntryRow& entry, Plan& plan) {
    for (size_t i = 0; i < entry.phases.size(); ++i) {
        const Phase& p = entry.phases[i];
        Dealer& d = plan.dealers[i];
        int64_t rows = p.kernel < 0 ? step_.rows(DI_AXIS_SEQ) : step_.rows(p.axis);
        d.items = (rows + p.rows_per_item - 1) / p.rows_per_item * p.items_per_tile;
        d.next.store(0, std::memory_order_relaxed);
        plan.microseconds[i] = 0;
    }
    // A phase of one item is thread 0's; where another such phase follows, nobody has to wait in between.
    bool alone = false;
    for (size_t i = entry.phases.size(); i-- > 0;) {
        Dealer& d = plan.dealers[i];
        if (!d.items) continue;
        const bool single = d.items == 1;
        d.meet = !(single && alone);
        alone = single;
    }
}

void HostEngine::execute(const EntryRow& entry, Plan& plan) {
    if (threads_ == 1) {
        settle(0);
        phases(entry, plan, 0);
        return;
    }
#pragma omp parallel num_threads(threads_)
    {
#pragma omp single
        barrier_.resize(omp_get_num_threads());  // a limit of the environment may leave fewer than were asked for
        settle(omp_get_thread_num());
        phases(entry, plan, omp_get_thread_num());
    }
}

// What one thread does in a step. All threads walk the same phases and tiles, with a barrier after each.
void HostEngine::phases(const EntryRow& entry, Plan& plan, int32_t thread) {
    Clock::time_point start = Clock::now();
    for (size_t i = 0; i < entry.phases.size();) {
        if (entry.phases[i].loop_phases) {
            loop(entry, plan, i, thread, start);
            i += (size_t)entry.phases[i].loop_phases;
        } else {
            one(entry, plan, i++, Tile(), thread, start);
        }
    }
}

void HostEngine::one(const EntryRow& entry, Plan& plan, size_t phase, const Tile& tile, int32_t thread,
                   Clock::time_point& start) {
    if (!plan.dealers[phase].items) return;
    work(entry, plan, phase, tile, thread);
    if (threads_ > 1 && plan.dealers[phase].meet) barrier_.wait();
    if (thread || !profiling_) return;
    Clock::time_point now = Clock::now();
    plan.microseconds[phase] += microseconds_between(start, now);
    start = now;
}

void HostEngine::loop(const EntryRow& entry, Plan& plan, size_t first, int32_t thread, Clock::time_point& start) {
    const Phase& head = entry.phases[first];
    const size_t stop = first + (size_t)head.loop_phases;
    const int64_t rows = step_.rows(head.axis);
    for (int64_t row = 0; row < rows; row += head.loop_rows) {
        const Tile tile{row, std::min(row + head.loop_rows, rows)};
        for (size_t i = first; i < stop; ++i) {
            // The phase before has been left by all threads, and this phase's barrier comes before it is entered again.
            if (!thread) rewind_dealer(entry, plan, i == first ? stop - 1 : i - 1, i == first ? tile.first : tile.stop);
            one(entry, plan, i, tile, thread, start);
        }
    }
}

void HostEngine::rewind_dealer(const EntryRow& entry, Plan& plan, size_t phase, int64_t row) {
    plan.dealers[phase].next.store(items_below(entry.phases[phase], row), std::memory_order_relaxed);
}

void HostEngine::work(const EntryRow& entry, const Plan& plan, size_t phase, const Tile& tile, int32_t thread) {
    const Phase& p = entry.phases[phase];
    Dealer& d = plan.dealers[phase];
    if (d.items == 1 && thread) return;
    const int64_t stop = tile.stop == INT64_MAX ? d.items : items_below(p, tile.stop);
    const int64_t left = stop - (tile.first ? items_below(p, tile.first) : 0);
    const int64_t batch = std::max<int64_t>(1, left / (SHARES_PER_THREAD * threads_));
    char* scratch = scratch_.data() + thread * layout_.scratch_stride;
    void* const* operands = plan.args.data() + p.first_arg;
    void* moved[MOST_ARGS];
    if (tile.first) {  // a buffer of one tile is addressed by rows of the axis
        for (int32_t a = 0; a < p.args; ++a) {
            moved[a] = (char*)operands[a] - plan.tile_bytes[(size_t)(p.first_arg + a)] * tile.first;
        }
        operands = moved;
    }
    char* exchange = scratch_.data() + threads_ * layout_.scratch_stride;
    DiArgs args{&step_.view(), operands, scratch, 0, 0, p.axis, p.stage, exchange};
    for (;;) {
        args.lo = d.next.fetch_add(batch, std::memory_order_relaxed);
        if (args.lo >= stop) return;
        args.hi = std::min(args.lo + batch, stop);
        if (p.kernel >= 0) {
            kernels_[(size_t)p.kernel](&args);
        } else {
            for (int64_t s = args.lo; s < args.hi; ++s) commit(plan, p, s);
        }
    }
}

// Rows that a ring cannot hold are skipped, so each slot of the ring is written once.
void HostEngine::commit(const Plan& plan, const Phase& phase, int64_t seq) {
    const DiState& state = plan.states[(size_t)phase.state];
    const DiAxis& axis = step_.view().axis[state.axis];
    const int64_t stop = axis.first[seq + 1];
    char* ring = state.base + step_.view().seq[seq].slot * state.stride;
    for (int64_t row = std::max<int64_t>(axis.first[seq], stop - state.rows); row < stop; ++row) {
        std::memcpy(ring + axis.pos[row] % state.rows * state.record_bytes, state.fresh + row * state.record_bytes,
                    (size_t)state.record_bytes);
    }
}
