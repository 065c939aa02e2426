// Launches: blocks in turn, the cores of a block as fibres that give way only where they have to wait.
#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace twin {

const char* const PIPE_NAMES[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
const char* const SPACE_NAMES[] = {"UB", "L1", "L0A", "L0B", "L0C", "L0A_MX", "L0B_MX"};
// Bytes that a kernel may use: of UB what the reserve and the stack of vector functions leave.
const int64_t CAPACITY[DI_SPACES] = {253952, 524288, 65536, 65536, 262144, 4096, 4096};

Machine machine;

namespace {

const size_t STACK_BYTES = 1 << 20;
const size_t MOST_REPORTS = 8;
const uint8_t POISON = 0xFF;  // not a number in every format of ours

std::string format(const char* text, va_list args) {
    va_list again;
    va_copy(again, args);
    std::string out((size_t)std::vsnprintf(nullptr, 0, text, args), '\0');
    std::vsnprintf(&out[0], out.size() + 1, text, again);
    va_end(again);
    return out;
}

// Subnormal results become zero on the vector and cube units; so here as long as a kernel runs.
class FlushSubnormals {
#if defined(__x86_64__)
    unsigned before_ = _mm_getcsr();

  public:
    FlushSubnormals() { _mm_setcsr(before_ | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before_); }
#endif
};

}  // namespace

std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

void Clock::join(const Clock& other) {
    for (int i = 0; i < PARTS; ++i) t[i] = std::max(t[i], other.t[i]);
}

void Space::open(di_space which, int32_t owner) {
    kind = which;
    core = owner;
    if (bytes.empty()) {
        bytes.assign((size_t)CAPACITY[which], POISON);
        shadow.assign((size_t)(CAPACITY[which] / GRANULE), Granule{});
    }
    clear();
}

void Space::clear() {
    if (high > low) {
        const int64_t first = low / GRANULE, stop = (high + GRANULE - 1) / GRANULE;
        std::memset(bytes.data() + first * GRANULE, POISON, (size_t)((stop - first) * GRANULE));
        std::memset((void*)(shadow.data() + first), 0, (size_t)(stop - first) * sizeof(Granule));
    }
    low = INT64_MAX;
    high = 0;
    named.clear();
}

void Core::start(int32_t block_number, int32_t core_number) {
    block = block_number;
    number = core_number;
    begun = finished_pipes = in_vf = nz2nd = false;
    pad = nz_para = 0;
    for (int p = 0; p < PIPES; ++p) {
        clock[p] = Clock();
        clock[p].t[part(p)] = 1;
    }
    if (used_flags) {
        for (auto& from : flags) {
            for (auto& to : from) {
                for (Flag& f : to) f.set = false;
            }
        }
    }
    used_flags = false;
    for (Lock& l : locks) l = Lock();
    if (cube()) {
        for (int s = DI_SPACE_L1; s < DI_SPACES; ++s) space[s].open((di_space)s, number);
    } else {
        space[DI_SPACE_UB].open(DI_SPACE_UB, number);
    }
}

void Machine::report(const char* text, ...) {
    va_list args;
    va_start(args, text);
    const std::string what = format(text, args);
    va_end(args);
    char where[96];
    std::snprintf(where, sizeof where, ", line %d, block %d, core %s", line, core ? core->block : 0,
                  !core ? "?" : core->cube() ? "AIC" : core->number == 1 ? "AIV0" : "AIV1");
    const std::string sentence = symbol_ + where + ": " + what;
    for (const std::string& known : reports_) {
        if (known == sentence) return;
    }
    if (reports_.size() < MOST_REPORTS) reports_.push_back(sentence);
}

void Machine::stop(const char* text, ...) {
    va_list args;
    va_start(args, text);
    const std::string what = format(text, args);
    va_end(args);
    report("%s", what.c_str());
    abandon();
}

void Machine::abandon() {
    failed_ = true;
    swapcontext(&running_->context, &scheduler_);
    __builtin_unreachable();
}

void Machine::need(bool cube, const char* what) {
    if (core->cube() != cube) stop("%s is an instruction of the %s core", what, cube ? "cube" : "vector");
}

void Machine::enter() {
    machine.kernel_->run(machine.arguments_);
    machine.running_->live = false;
    machine.progress_ = true;
    swapcontext(&machine.running_->context, &machine.scheduler_);
}

void Machine::turn_away(const char* what, int id) {
    running_->blocked_on = std::string(what) + " " + std::to_string(id) + " at line " + std::to_string(line);
    const int32_t here = line;
    swapcontext(&running_->context, &scheduler_);
    line = here;
}

void Machine::run_block(int32_t block) {
    const int first = kind_ == DI_KIND_vector ? 1 : 0, count = kind_ == DI_KIND_mix ? CORES : 1;
    for (int i = 0; i < count; ++i) {
        Fiber& f = fibers_[(size_t)i];
        f.core = &cores_[(size_t)(first + i)];
        f.core->start(block, first + i);
        if (!f.stack) f.stack.reset(new char[STACK_BYTES]);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = STACK_BYTES;
        f.context.uc_link = &scheduler_;
        makecontext(&f.context, &Machine::enter, 0);
        f.live = true;
    }
    for (Channel& c : channels_) c.waiting.clear();
    for (bool any = true; any && !failed_;) {
        any = progress_ = false;
        for (int i = 0; i < count && !failed_; ++i) {
            Fiber& f = fibers_[(size_t)i];
            if (!f.live) continue;
            any = true;
            running_ = &f;
            core = f.core;
            swapcontext(&scheduler_, &f.context);
        }
        if (any && !progress_ && !failed_) {
            for (int i = 0; i < count; ++i) {
                core = fibers_[(size_t)i].core;
                if (fibers_[(size_t)i].live) report("deadlock: waits for %s", fibers_[(size_t)i].blocked_on.c_str());
            }
            failed_ = true;
        }
    }
    for (int i = 0; i < count && !failed_; ++i) {
        core = fibers_[(size_t)i].core;
        finish_block();
    }
    for (int from = 0; from < CORES && !failed_; ++from) {
        for (int to = 0; to < CORES; ++to) {
            for (int id = 0; id < CHANNELS; ++id) {
                if (!channel(from, to, id).waiting.empty()) report("cross-core flag %d is never waited for", id);
            }
        }
    }
}

// What may not be left over when a core ends.
void Machine::finish_block() {
    if (!core->begun) report("the kernel does not begin with asc_init()");
    if (!core->finished_pipes) report("the kernel does not end with asc_sync_pipe(PIPE_ALL)");
    for (int l = 0; l < LOCKS; ++l) {
        if (core->locks[l].holder >= 0) report("lock %d is never given back", l);
    }
    for (int a = 0; a < PIPES && core->used_flags; ++a) {
        for (int b = 0; b < PIPES; ++b) {
            for (int id = 0; id < FLAGS; ++id) {
                if (core->flags[a][b][id].set) {
                    report("event %d from %s to %s is never waited for", id, PIPE_NAMES[a], PIPE_NAMES[b]);
                }
            }
        }
    }
}

std::string Machine::launch(const std::string& symbol, int64_t count, const char* arguments, size_t bytes,
                            std::vector<Extent> extents) {
    const auto found = kernels().find(symbol);
    if (found == kernels().end()) return symbol + ": there is no such kernel";
    if (bytes != found->second.bytes) {
        return symbol + ": takes " + std::to_string(found->second.bytes) + " bytes of arguments, found " +
               std::to_string(bytes);
    }
    if (count < 1) return symbol + ": launched for " + std::to_string(count) + " blocks";
    FlushSubnormals flush;
    symbol_ = symbol;
    kernel_ = &found->second;
    kind_ = kernel_->kind;
    arguments_ = arguments;
    blocks = count;
    reports_.clear();
    std::memset(did, 0, sizeof did);
    failed_ = false;
    extents_ = std::move(extents);
    std::sort(extents_.begin(), extents_.end(), [](const Extent& a, const Extent& b) { return a.first < b.first; });
    last_extent_ = 0;
    lines_.clear();
    for (int64_t b = 0; b < count && !failed_; ++b) run_block((int32_t)b);
    core = nullptr;
    std::string all;
    for (const std::string& r : reports_) all += (all.empty() ? "" : "\n") + r;
    return all;
}

}  // namespace twin

void di_register(const char* symbol, di_kind kind, void (*run)(const char*), size_t bytes) {
    twin::kernels()[symbol] = twin::Kernel{kind, run, bytes};
}

bool di_is_cube() { return twin::machine.core->cube(); }
int64_t asc_get_block_idx() { return twin::machine.core->block; }
int64_t asc_get_block_num() { return twin::machine.blocks; }
int64_t asc_get_sub_block_id() { return twin::machine.core->number == 2 ? 1 : 0; }
void asc_init() { twin::machine.core->begun = true; }
