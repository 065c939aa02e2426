// Opening an engine of this host, its memory, and the arguments of its kernels.
#include "host.h"

#include <dlfcn.h>

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

HostEngine::HostEngine(const std::string& lib_dir) : DiEngine(lib_dir), library_(lib_dir + "/kernels.so") {
    for (const KernelRow& k : table_.kernels) kernels_.push_back(library_.kernel(k.symbol));
}

std::unique_ptr<DiEngine> open_engine(const std::string& lib_dir) { return std::make_unique<HostEngine>(lib_dir); }

void HostEngine::allocate(int32_t slots, int32_t blocks, int32_t threads) {
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
    team_.begin(threads);
    slots_ = slots;
    blocks_ = blocks;
    threads_ = threads;
}

char* HostEngine::state_base(int32_t state) const {
    const Block& block = table_.states[(size_t)state].paged ? pages_ : rings_;
    return block.data() + layout_.offset[(size_t)state];
}

void HostEngine::make_plan(int32_t entry) {
    const EntryRow& e = table_.entries[(size_t)entry];
    Plan& plan = plans_[(size_t)entry];
    for (size_t i = 0; i < table_.states.size(); ++i) {
        const StateRow& s = table_.states[i];
        char* fresh = e.fresh[i] < 0 ? nullptr : arena_.data() + e.buffers[(size_t)e.fresh[i]].offset;
        plan.states.push_back(DiState{state_base((int32_t)i), fresh, layout_.stride[i], s.record_bytes, s.rows, s.axis,
                                      s.ratio});
    }
    for (const ArgWord& a : e.args) {
        size_t i = (size_t)a.index;
        switch (a.kind) {
            case 'b': plan.args.push_back(arena_.data() + e.buffers[i].offset); break;
            case 'p': plan.args.push_back(params_[i].data()); break;
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
    plan.microseconds.resize(e.phases.size());
}

const char* HostEngine::output_rows(int32_t entry, const char* name, int64_t* row_bytes) {
    const BufferRow* b = output_buffer(entry, name);
    if (!b) return nullptr;
    *row_bytes = b->row_bytes;
    return arena_.data() + b->offset;
}

void HostEngine::profile(bool on, const double** times, int32_t* launches) {
    profiling_ = on;
    *times = nullptr;
    *launches = 0;
    if (on && last_entry_ >= 0) {
        *times = plans_[(size_t)last_entry_].microseconds.data();
        *launches = (int32_t)plans_[(size_t)last_entry_].microseconds.size();
    }
}
