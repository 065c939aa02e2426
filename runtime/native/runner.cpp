// Runs a step: the phases of an entry one after the other, the items of each shared by the team's threads.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "busy.h"
#include "host.h"

namespace {

// Items of a phase below `row`, rounded up to whole row tiles.
int64_t items_below(const Phase& phase, int64_t row) {
    return (row + phase.rows_per_item - 1) / phase.rows_per_item * phase.items_per_tile;
}

double microseconds_between(Clock::time_point start, Clock::time_point stop) {
    return std::chrono::duration<double, std::micro>(stop - start).count();
}

}  // namespace

// Items of one phase that belong to a tile of rows.
struct HostEngine::Work final : Team::Round {
    Work(const HostEngine& of, const Plan& its, const Phase& the, const Tile& tile)
        : engine(of), plan(its), phase(the), first(items_below(the, tile.first)) {
        operands = plan.args.data() + phase.first_arg;
        if (!tile.first) return;
        for (int32_t a = 0; a < phase.args; ++a) {  // a buffer of one tile is addressed by rows of the axis
            moved[a] = (char*)operands[a] - plan.tile_bytes[(size_t)(phase.first_arg + a)] * tile.first;
        }
        operands = moved;
    }

    void items(int32_t thread, int64_t lo, int64_t hi) const override {
        if (phase.kernel < 0) {
            for (int64_t s = lo; s < hi; ++s) engine.commit(plan, phase, s);
            return;
        }
        char* const exchange = engine.scratch_.data() + engine.threads_ * engine.layout_.scratch_stride;
        const DiArgs args{&engine.step_.view(), operands, engine.scratch_.data() + thread * engine.layout_.scratch_stride,
                          first + lo, first + hi, phase.axis, phase.stage, exchange};
        engine.kernels_[(size_t)phase.kernel](&args);
    }

    const HostEngine& engine;
    const Plan& plan;
    const Phase& phase;
    const int64_t first;
    void* const* operands;
    void* moved[MOST_ARGS];
};

void HostEngine::place(const int32_t* cpus, int32_t count) {
    Busy busy(running_);
    cpus_.assign(cpus, cpus + count);
    team_.place(cpus_);
    ++placed_;
}

void HostEngine::submit(const DiWork* work, const DiOutcome* out) {
    require_ready();
    ahead_.send([this, work, out] { loop_step(work, out); });
}

void HostEngine::finish() { ahead_.wait(); }

// The calling thread, once.
void HostEngine::settle() const {
    static thread_local const HostEngine* engine = nullptr;
    static thread_local int32_t turn = 0;
    if (engine == this && turn == placed_) return;
    engine = this;
    turn = placed_;
    if (cpus_.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpus_[0], &set);
    sched_setaffinity(0, sizeof set, &set);  // a wish: the processors were allowed when they were asked for
}

// Over the rows that the step was filled with.
void HostEngine::run_entry(int32_t entry) {
    const EntryRow& e = table_.entries[(size_t)entry];
    Plan& plan = plans_[(size_t)entry];
    last_entry_ = -1;
    for (const auto& p : plan.pin_args) plan.args[p.first] = const_cast<int32_t*>(step_.pin(p.second));
    std::fill(plan.microseconds.begin(), plan.microseconds.end(), 0.0);
    settle();
    team_.enter();
    mark_ = Clock::now();
    for (size_t i = 0; i < e.phases.size();) {
        if (e.phases[i].loop_phases) {
            loop(e, plan, i);
            i += (size_t)e.phases[i].loop_phases;
        } else {
            one(e, plan, i++, Tile());
        }
    }
    team_.leave();
    last_entry_ = entry;
}

void HostEngine::loop(const EntryRow& entry, Plan& plan, size_t first) {
    const Phase& head = entry.phases[first];
    const int64_t rows = step_.rows(head.axis);
    for (int64_t row = 0; row < rows; row += head.loop_rows) {
        const Tile tile{row, std::min(row + head.loop_rows, rows)};
        for (size_t i = first; i < first + (size_t)head.loop_phases; ++i) one(entry, plan, i, tile);
    }
}

void HostEngine::one(const EntryRow& entry, Plan& plan, size_t phase, const Tile& tile) {
    const Phase& p = entry.phases[phase];
    const int64_t rows = step_.rows(p.kernel < 0 ? (int32_t)DI_AXIS_SEQ : p.axis);
    const Work work(*this, plan, p, tile);
    team_.run(work, items_below(p, std::min(tile.stop, rows)) - work.first);
    if (!profiling_) return;
    const Clock::time_point now = Clock::now();
    plan.microseconds[phase] += microseconds_between(mark_, now);
    mark_ = now;
}

// Rows that a ring cannot hold are skipped, so each slot of the ring is written once.
void HostEngine::commit(const Plan& plan, const Phase& phase, int64_t seq) const {
    const DiState& state = plan.states[(size_t)phase.state];
    const DiAxis& axis = step_.view().axis[state.axis];
    const int64_t stop = axis.first[seq + 1];
    char* ring = state.base + step_.view().seq[seq].slot * state.stride;
    for (int64_t row = std::max<int64_t>(axis.first[seq], stop - state.rows); row < stop; ++row) {
        std::memcpy(ring + axis.pos[row] % state.rows * state.record_bytes, state.fresh + row * state.record_bytes,
                    (size_t)state.record_bytes);
    }
}
