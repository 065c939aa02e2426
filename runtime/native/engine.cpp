// Everything of an engine but the running of a step: opening, memory, parameters, outputs, raw state.
#include "engine.h"

#include <dlfcn.h>

#include <algorithm>

#include "fault.h"

Library::Library(const std::string& path) : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) fail(DI_BAD_KERNELS, "the compiled kernels cannot be loaded: %s", dlerror());
    auto refusal = (const char* (*)(void))dlsym(handle_, "di_kernels_refusal");
    if (const char* why = refusal ? refusal() : nullptr) {
        const std::string sentence = why;
        dlclose(handle_);
        fail(DI_BAD_KERNELS, "%s: %s", path.c_str(), sentence.c_str());
    }
}

Library::~Library() { dlclose(handle_); }

DiKernel Library::kernel(const std::string& symbol) const {
    void* address = dlsym(handle_, symbol.c_str());
    if (!address) {
        fail(DI_BAD_KERNELS, "%s: the kernel %s of the launch table is missing", path_.c_str(), symbol.c_str());
    }
    return (DiKernel)address;
}

DiEngine::DiEngine(const std::string& lib_dir)
    : table_(read_table(lib_dir + "/launch.txt")), library_(lib_dir + "/kernels.so"), step_(table_),
      slot_states_(table_.sequence), drawing_(table_) {
    for (const KernelRow& k : table_.kernels) kernels_.push_back(library_.kernel(k.symbol));
    for (const ParamRow& p : table_.params) params_.emplace_back((size_t)std::max(p.stack, 1));
}

Layout DiEngine::layout(int32_t slots, int32_t blocks, int32_t threads) const {
    if (slots < 1 || blocks < 0 || threads < 1) {
        fail(DI_BAD_CALL, "an engine needs at least 1 slot, 0 blocks and 1 thread, found %d, %d and %d", slots, blocks,
             threads);
    }
    return Layout(table_, slots, blocks, threads);
}

void DiEngine::allocate(int32_t slots, int32_t blocks, int32_t threads) {
    if (threads_) fail(DI_BAD_CALL, "the engine has its memory already");
    layout_ = layout(slots, blocks, threads);
    step_.bound(slots, blocks);
    arena_.allocate(layout_.arena, "values of a step");
    scratch_.allocate(layout_.scratch, "scratch of the threads");
    rings_.allocate(layout_.rings, "rings of the sequences");
    pages_.allocate(layout_.pages, "blocks of the cache");
    slot_states_.allocate(slots);
    plans_.resize(table_.entries.size());
    for (size_t e = 0; e < plans_.size(); ++e) make_plan((int32_t)e);
    slots_ = slots;
    blocks_ = blocks;
    threads_ = threads;
}

char* DiEngine::state_base(int32_t state) const {
    const Block& block = table_.states[(size_t)state].paged ? pages_ : rings_;
    return block.data() + layout_.offset[(size_t)state];
}

void DiEngine::make_plan(int32_t entry) {
    const EntryRow& e = table_.entries[(size_t)entry];
    Plan& plan = plans_[(size_t)entry];
    for (size_t i = 0; i < table_.states.size(); ++i) {
        const StateRow& s = table_.states[i];
        char* fresh = e.fresh[i] < 0 ? nullptr : arena_.data() + e.buffers[(size_t)e.fresh[i]].offset;
        plan.states.push_back(DiState{state_base((int32_t)i), fresh, layout_.stride[i], s.record_bytes, s.rows, s.axis,
                                      s.ratio});
    }
    std::vector<bool> seen(params_.size());
    for (const ArgWord& a : e.args) {
        size_t i = (size_t)a.index;
        switch (a.kind) {
            case 'b': plan.args.push_back(arena_.data() + e.buffers[i].offset); break;
            case 'p':
                plan.args.push_back(params_[i].data());
                if (!seen[i]) plan.params.push_back(a.index);
                seen[i] = true;
                break;
            case 's': plan.args.push_back(&plan.states[i]); break;
            case 'i': plan.args.push_back(const_cast<void*>(step_.input(a.index))); break;
            case 'n': plan.pin_args.emplace_back(plan.args.size(), a.index); [[fallthrough]];
            default: plan.args.push_back(nullptr);
        }
    }
    for (const ArgWord& a : e.args) {
        const bool tiled = a.kind == 'b' && e.buffers[(size_t)a.index].rows;
        plan.tile_bytes.push_back(tiled ? e.buffers[(size_t)a.index].row_bytes : 0);
    }
    plan.dealers.reset(new Dealer[e.phases.size()]);
    plan.microseconds.resize(e.phases.size());
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

void DiEngine::check_bound(const Plan& plan) const {
    for (int32_t p : plan.params) {
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

void DiEngine::output(const std::string& entry, const std::string& name, const void** data, int64_t* rows,
                      int64_t* row_bytes) const {
    int32_t at = entry_named(entry);
    if (last_entry_ != at) fail(DI_NOT_READY, "the last run was not one of the entry %s", entry.c_str());
    const EntryRow& e = table_.entries[(size_t)at];
    std::string known;
    for (const auto& o : e.outputs) {
        if (o.first == name) {
            const BufferRow& b = e.buffers[(size_t)o.second];
            *data = arena_.data() + b.offset;
            *rows = step_.rows(b.axis);
            *row_bytes = b.row_bytes;
            return;
        }
        known += (known.empty() ? "" : ", ") + o.first;
    }
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

void DiEngine::profile(bool on, const double** times, int32_t* launches) {
    profiling_ = on;
    *times = nullptr;
    *launches = 0;
    if (on && last_entry_ >= 0) {
        *times = plans_[(size_t)last_entry_].microseconds.data();
        *launches = (int32_t)plans_[(size_t)last_entry_].microseconds.size();
    }
}
