// What engines have in common: parameters, outputs, raw state, and a run of one entry.
#include "engine.h"

#include <algorithm>
#include <cstring>

#include "busy.h"
#include "fault.h"

DiEngine::DiEngine(const std::string& lib_dir)
    : table_(read_table(lib_dir + "/launch.txt")), step_(table_), slot_states_(table_.sequence), drawing_(table_) {
    for (const ParamRow& p : table_.params) params_.emplace_back((size_t)std::max(p.stack, 1));
    for (const EntryRow& e : table_.entries) {
        std::vector<int32_t> read;
        for (const ArgWord& a : e.args) {
            if (a.kind == 'p') read.push_back(a.index);
        }
        std::sort(read.begin(), read.end());
        read.erase(std::unique(read.begin(), read.end()), read.end());
        read_.push_back(read);
    }
}

Layout DiEngine::layout(int32_t slots, int32_t blocks, int32_t threads) const {
    if (slots < 1 || blocks < 0 || threads < 1) {
        fail(DI_BAD_CALL, "an engine needs at least 1 slot, 0 blocks and 1 thread, found %d, %d and %d", slots, blocks,
             threads);
    }
    return Layout(table_, slots, blocks, threads);
}

void DiEngine::bind(int32_t index, int32_t i, const void* data, const void* scale) {
    if (index < 0 || (size_t)index >= params_.size()) {
        fail(DI_BAD_CALL, "parameter %d does not exist, allowed 0..%zu", index, params_.size() - 1);
    }
    std::vector<DiParam>& tensors = params_[(size_t)index];
    const std::string& name = table_.params[(size_t)index].name;
    if (i < 0 || (size_t)i >= tensors.size()) {
        fail(DI_BAD_CALL, "parameter %s has no tensor %d, allowed 0..%zu", name.c_str(), i, tensors.size() - 1);
    }
    if (!data) fail(DI_BAD_CALL, "parameter %s is given no data", name.c_str());
    tensors[(size_t)i] = DiParam{data, scale};
}

void DiEngine::check_bound(int32_t entry) const {
    for (int32_t p : read_[(size_t)entry]) {
        const std::vector<DiParam>& tensors = params_[(size_t)p];
        for (size_t i = 0; i < tensors.size(); ++i) {
            if (!tensors[i].data) {
                fail(DI_NOT_READY, "tensor %zu of the parameter %s is not bound", i,
                     table_.params[(size_t)p].name.c_str());
            }
        }
    }
}

int32_t DiEngine::entry_named(const std::string& name) const {
    std::string known;
    for (size_t e = 0; e < table_.entries.size(); ++e) {
        if (table_.entries[e].name == name) return (int32_t)e;
        known += (e ? ", " : "") + table_.entries[e].name;
    }
    fail(DI_BAD_CALL, "the engine has no entry %s, allowed %s", name.c_str(), known.c_str());
}

void DiEngine::run(const std::string& entry, int32_t seqs, const DiSeq* seq, const int64_t* token_ids,
                   const int64_t* lookback, const int32_t* const* pins) {
    if (!threads_) fail(DI_NOT_READY, "the engine has no memory yet");
    Busy busy(running_);
    int32_t at = entry_named(entry);
    last_entry_ = -1;
    check_bound(at);
    step_.fill(table_.entries[(size_t)at], seqs, seq, token_ids, lookback, pins);
    run_entry(at);
}

void DiEngine::loop_step(const DiWork* work, const DiOutcome* out) {
    Busy busy(running_);
    require_ready();
    run_step(*work, *out);
}

void DiEngine::run_step(const DiWork& work, const DiOutcome& out) {
    fill_rows(work, out);
    run_entry(drawing_.step);
    choose(work, out);
    if (drawing_.turn) draft(work, out);
}

void DiEngine::submit(const DiWork* work, const DiOutcome* out) { loop_step(work, out); }

void DiEngine::finish() {}

void DiEngine::require_ready() const {
    require_draws();
    check_bound(drawing_.step);
    if (drawing_.draft >= 0) check_bound(drawing_.draft);
}

void DiEngine::fill_rows(const DiWork& work, const DiOutcome& out) {
    const int32_t count = resolve(work, out);
    step_.fill(table_.entries[(size_t)drawing_.step], count, drawing_.seqs.data(), drawing_.ids.data(),
               drawing_.lookback.data(), nullptr);
}

const BufferRow* DiEngine::output_buffer(int32_t entry, const char* name) const {
    const EntryRow& e = table_.entries[(size_t)entry];
    for (const auto& o : e.outputs) {
        if (o.first == name) return &e.buffers[(size_t)o.second];
    }
    return nullptr;
}

void DiEngine::output(const std::string& entry, const std::string& name, const void** data, int64_t* rows,
                      int64_t* row_bytes) {
    int32_t at = entry_named(entry);
    if (last_entry_ != at) fail(DI_NOT_READY, "the last run was not one of the entry %s", entry.c_str());
    if (const BufferRow* b = output_buffer(at, name.c_str())) {
        fetch(at);
        *data = output_rows(at, name.c_str(), row_bytes);
        *rows = step_.rows(b->axis);
        return;
    }
    std::string known;
    for (const auto& o : table_.entries[(size_t)at].outputs) known += (known.empty() ? "" : ", ") + o.first;
    fail(DI_BAD_CALL, "the entry %s has no output %s, allowed %s", entry.c_str(), name.c_str(), known.c_str());
}

void DiEngine::state(const std::string& name, int32_t unit, void** data, int64_t* bytes) const {
    if (!threads_) fail(DI_NOT_READY, "the engine has no memory yet");
    if (name == "sequence" && unit >= 0 && unit < slot_states_.count()) {
        *data = slot_states_.record(unit);
        *bytes = table_.sequence.end;
        return;
    }
    for (size_t i = 0; i < table_.states.size(); ++i) {
        const StateRow& s = table_.states[i];
        if (s.name != name) continue;
        int32_t units = s.paged ? blocks_ : slots_;
        if (unit < 0 || unit >= units) {
            fail(DI_BAD_CALL, "the state %s has no %s %d, there are %d", name.c_str(), s.paged ? "block" : "slot", unit,
                 units);
        }
        *data = state_base((int32_t)i) + unit * layout_.stride[i];
        *bytes = (int64_t)s.rows * s.record_bytes;
        return;
    }
    fail(DI_BAD_CALL, "the engine has no state %s", name.c_str());
}

// ---- what a host has nothing to do for -----------------------------------------------------------------------------
void DiEngine::place(const int32_t*, int32_t) {}

const char* DiEngine::device(int64_t memory[2]) const {
    memory[0] = memory[1] = 0;
    return "";
}

void* DiEngine::room(int64_t) { fail(DI_BAD_CALL, "weights of this engine lie where the checkpoint is mapped"); }

void DiEngine::copy(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, (size_t)bytes); }

void DiEngine::warm() {}
