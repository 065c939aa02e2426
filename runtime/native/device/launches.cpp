// From a step to launches: values of parameters, grids, row loops, graphs.
#include <algorithm>

#include "../fault.h"
#include "device_engine.h"

namespace {

const size_t MOST_PARAMETERS = 4 * MOST_ARGS;

}  // namespace

void DeviceEngine::run_entry(int32_t entry) {
    const EntryRow& e = table_.entries[(size_t)entry];
    const Rows rows = rows_of_step();
    last_entry_ = -1;
    fetched_ = false;
    const Graph* const graph = profiling_ || pinned(e) ? nullptr : recorded(entry, rows);
    const Places places(table_, graph ? graph->most : rows);
    send(entry, places);
    if (sending_ahead_ && following_.any) launch_common(kernels_.follow, entry, places);
    if (graph) {
        device_->replay(graph->id);
    } else {
        launch_all(e, rows, places);
    }
    if (sending_ahead_ && entry == drawing_.sample) launch_common(kernels_.accept, entry, places);
    if (profiling_) device_->wait(e.name.c_str());
    last_entry_ = entry;
}

// A kernel that every engine has, over the sequences of the step.
void DeviceEngine::launch_common(size_t kernel, int32_t entry, const Places& places) {
    const EntryRow& e = table_.entries[(size_t)entry];
    const Rows rows = rows_of_step();
    launch_kernel(kernels_.kernels[kernel], nullptr, Work{e, rows, places, DI_AXIS_SEQ, 0, rows.of[DI_AXIS_SEQ]},
                  e.name.c_str());
}

// The smallest recording that the rows fit into; launches that a step has no rows for end at once.
const DeviceEngine::Graph* DeviceEngine::recorded(int32_t entry, const Rows& rows) const {
    const Graph* best = nullptr;
    for (const Graph& g : graphs_) {
        if (g.entry != entry) continue;
        const auto fits = [&](int32_t a) { return rows.of[a] <= g.most.of[a]; };
        bool all = true;
        for (int32_t a = 0; a < table_.axes && all; ++a) all = fits(a);
        if (all && (!best || g.most.of[DI_AXIS_STEP] < best->most.of[DI_AXIS_STEP])) best = &g;
    }
    return best;
}

// Decodes and verifies of few sequences: one recording for every power of two rows, each of them a sequence of its own
// at most, kept and wanted. A draft brings whole blocks. Behind those, chunks of prompts beside all sequences: as many
// rows as the engine takes, half of them, and so on.
void DeviceEngine::warm() {
    for (size_t e = 0; e < table_.entries.size(); ++e) {
        const EntryRow& entry = table_.entries[e];
        const int64_t block = (int32_t)e == drawing_.draft ? std::max(table_.sequence.drafts, 1) : 1;
        const int64_t drafts = block > 1 ? 0 : table_.sequence.drafts;
        const int64_t most = std::min(entry.limit[DI_AXIS_STEP], entry.limit[DI_AXIS_SEQ] * (block + drafts));
        for (int64_t seqs = 1, last = 0; last < most; seqs *= 2) {
            Rows rows;
            last = std::min(seqs * block, most);
            for (int32_t a = 0; a < table_.axes; ++a) rows.of[a] = std::min(last, entry.limit[a]);
            rows.of[DI_AXIS_SEQ] = std::min({seqs, last, entry.limit[DI_AXIS_SEQ]});
            record((int32_t)e, rows);
        }
        for (int64_t chunk = (int32_t)e == drawing_.step ? entry.limit[DI_AXIS_STEP] : 0; chunk > most; chunk /= 2) {
            Rows rows;
            rows.of[DI_AXIS_STEP] = chunk;
            rows.of[DI_AXIS_KEPT] = std::min(chunk, entry.limit[DI_AXIS_KEPT]);
            rows.of[DI_AXIS_WANTED] = std::min(chunk, entry.limit[DI_AXIS_WANTED]);
            rows.of[DI_AXIS_SEQ] = entry.limit[DI_AXIS_SEQ];
            for (int32_t a = DI_AXIS_GROUPS; a < table_.axes; ++a) {
                const int64_t groups = chunk / table_.ratio[a] + rows.of[DI_AXIS_SEQ];
                rows.of[a] = std::min(groups, entry.limit[a]);
            }
            record((int32_t)e, rows);
        }
    }
    device_->wait("recording launches");
}

void DeviceEngine::record(int32_t entry, const Rows& most) {
    if (!device_->begin_graph()) return;
    launch_all(table_.entries[(size_t)entry], most, Places(table_, most));
    graphs_.push_back(Graph{entry, most, device_->end_graph()});
}

void DeviceEngine::launch_all(const EntryRow& entry, const Rows& rows, const Places& places) {
    marked_.clear();
    if (profiling_) device_->mark(0);
    for (size_t i = 0; i < entry.phases.size();) {
        const Phase& head = entry.phases[i];
        const int32_t axis = head.kernel < 0 ? table_.states[(size_t)head.state].axis : head.axis;
        const int64_t all = rows.of[axis];
        if (!head.loop_phases) {
            launch_phase(entry, i++, Work{entry, rows, places, axis, 0, all});
            continue;
        }
        const size_t stop = i + (size_t)head.loop_phases;
        for (int64_t first = 0; first < all; first += head.loop_rows) {
            const Work tile{entry, rows, places, axis, first, std::min(first + head.loop_rows, all)};
            for (size_t k = i; k < stop; ++k) launch_phase(entry, k, tile);
        }
        i = stop;
    }
}

void DeviceEngine::launch_phase(const EntryRow& entry, size_t phase, Work work) {
    const Phase& p = entry.phases[phase];
    if (work.stop <= work.first) return;
    if (p.kernel < 0) {
        const ArgWord state{'s', p.state};
        launch_kernel(kernels_.kernels[kernels_.commit], &state, work, entry.name.c_str());
    } else {
        launch_kernel(kernels_.kernels[(size_t)p.kernel], entry.args.data() + p.first_arg, work, entry.name.c_str());
    }
    if (!profiling_) return;
    marked_.push_back((int32_t)phase);
    device_->mark(marked_.size());
}

void DeviceEngine::launch_kernel(const DeviceKernel& kernel, const ArgWord* args, const Work& work, const char* what) {
    uint64_t values[MOST_PARAMETERS];
    if (kernel.parameters.size() > MOST_PARAMETERS) fail(DI_BAD_KERNELS, "%s: too many parameters", what);
    for (size_t i = 0; i < kernel.parameters.size(); ++i) values[i] = value(kernel.parameters[i], args, work);
    const int64_t rows = work.stop - work.first;
    for (const Stage& s : kernel.variant(rows).stages) {
        if (const int64_t blocks = s.blocks(rows)) device_->launch(kernel, s, blocks, values);
    }
}

// What the page of the backend says of each source.
uint64_t DeviceEngine::value(const Parameter& p, const ArgWord* args, const Work& work) const {
    const auto integers = [&](int64_t offset) { return (uint64_t)(integers_ + offset); };
    const Places& at = work.places;
    const auto here = [&]() -> const Places::Axis& { return at.axis[work.axis]; };
    switch (p.source) {
        case ROW_FIRST: return (uint64_t)work.first;
        case ROW_STOP: return (uint64_t)work.stop;
        case AXIS_ROWS: return integers(here().rows);
        case AXIS_SEQ: return integers(here().seq);
        case AXIS_STEP_ROW: return integers(here().step_row);
        case AXIS_POS: return integers(here().pos);
        case AXIS_FIRST: return integers(here().first);
        case OTHER_FIRST: return integers(at.axis[p.index].first);
        case OTHER_POS: return integers(at.axis[p.index].pos);
        case SEQ_SLOT: return integers(at.slot);
        case SEQ_C: return integers(at.c);
        case SEQ_FLOOR: return integers(at.floor);
        case SEQ_BLOCKS: return (uint64_t)tables_;
        case SEQ_WIDTH: return (uint64_t)width(blocks_);
        case BLOCK_TOKENS: return (uint64_t)table_.block_tokens;
        case LOOKBACK_WIDTH: return (uint64_t)(table_.lookback + 1);
        case TOKEN_IDS: return integers(at.token_ids);
        case LOOKBACK: return integers(at.lookback);
        case DRAW_ROWS: return integers(at.draws);
        case SCRATCH: return (uint64_t)scratch_;
        case CONSTANTS: return (uint64_t)(constants_ + p.index);
        case INTEGERS: return (uint64_t)integers_;
        case FOLLOW_TABLE: return integers(at.follow);
        case AFTER_N: return (uint64_t)after_;
        case AFTER_IDS: return (uint64_t)(after_ + after_bytes(1));
        case AFTER_DRAFTS: return (uint64_t)(after_ + after_bytes(2));
        case DRAWN: return (uint64_t)(arena_ + output_buffer(drawing_.sample, "tokens")->offset);
        case DRAFTS: return (uint64_t)table_.sequence.drafts;
        case FILLER: return (uint64_t)table_.sequence.filler;
        default: break;
    }
    const ArgWord& arg = args[p.index];
    switch (p.source) {
        case VALUE: {
            const BufferRow& b = work.entry.buffers[(size_t)arg.index];
            return (uint64_t)(arena_ + b.offset - (b.rows ? b.row_bytes * work.first : 0));
        }
        case PARAM_DATA: return (uint64_t)params_[(size_t)arg.index][0].data;
        case PARAM_SCALE: return (uint64_t)params_[(size_t)arg.index][0].scale;
        case PIN: return (uint64_t)(pins_[(size_t)arg.index] ? pins_[(size_t)arg.index] : arena_);
        case PIN_GIVEN: return step_.pin(arg.index) && pins_[(size_t)arg.index];
        default: return state_value(p, arg.index, work);
    }
}

uint64_t DeviceEngine::state_value(const Parameter& p, int32_t state, const Work& work) const {
    const StateRow& s = table_.states[(size_t)state];
    const int32_t fresh = work.entry.fresh[(size_t)state];
    const bool kept = s.axis == DI_AXIS_KEPT;
    const auto integers = [&](int64_t offset) { return (uint64_t)(integers_ + offset); };
    switch (p.source) {
        case STATE_BASE: return (uint64_t)state_base(state);
        case STATE_STRIDE: return (uint64_t)layout_.stride[(size_t)state];
        case STATE_FRESH: return (uint64_t)(arena_ + (fresh < 0 ? 0 : work.entry.buffers[(size_t)fresh].offset));
        case STATE_HAS_FRESH: return fresh >= 0;
        case STATE_FIRST: return integers(work.places.axis[s.axis].first);
        case STATE_FROM: return integers(kept ? work.places.from_kept : work.places.from_step);
        case STATE_VALID: return integers(kept ? work.places.valid_kept : work.places.valid_step);
        case STATE_RING: return (uint64_t)s.rows;
        case STATE_RECORD: return (uint64_t)s.record_bytes;
        default: fail(DI_BAD_KERNELS, "a kernel has a parameter without a value");
    }
}

void DeviceEngine::profile(bool on, const double** times, int32_t* launches) {
    profiling_ = on;
    *times = nullptr;
    *launches = 0;
    if (!on || last_entry_ < 0) return;
    microseconds_.assign(table_.entries[(size_t)last_entry_].phases.size(), 0);
    for (size_t i = 0; i < marked_.size(); ++i) microseconds_[(size_t)marked_[i]] += device_->between(i, i + 1);
    *times = microseconds_.data();
    *launches = (int32_t)microseconds_.size();
}
