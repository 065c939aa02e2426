// Who touches what: on-chip memory by granules of 32 bytes, global memory by bytes. Two accesses, one of them a write,
// that nothing orders are a hazard on any schedule, however the instructions happened to run here.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace twin {

namespace {

// Bits of the bytes first .. stop - 1 of a granule.
uint32_t bits(int64_t first, int64_t stop) {
    const uint64_t all = ((uint64_t)1 << (stop - first)) - 1;
    return (uint32_t)(all << first);
}

std::string place(const Space& space, int64_t offset) {
    for (const Named& n : space.named) {
        if (offset >= n.first && offset < n.stop) {
            return std::string(SPACE_NAMES[space.kind]) + " buffer '" + n.name + "' + " +
                   std::to_string(offset - n.first);
        }
    }
    return std::string(SPACE_NAMES[space.kind]) + " offset " + std::to_string(offset);
}

}  // namespace

void Machine::conflict(const Space& space, int64_t offset, int part, const char* did, int other, const char* before,
                       int other_line) {
    const char* const cores[] = {"AIC", "AIV0", "AIV1"};
    report("%s.%s %s %s that %s.%s %s%s%s with nothing in between", cores[part / PIPES], PIPE_NAMES[part % PIPES], did,
           place(space, offset).c_str(), cores[other / PIPES], PIPE_NAMES[other % PIPES], before,
           other_line ? " at line " : "", other_line ? std::to_string(other_line).c_str() : "");
}

void Machine::check_named(const Space& space, int64_t offset, int64_t bytes, const char* what) {
    if (space.named.empty()) return;
    for (const Named& n : space.named) {
        if (offset >= n.first && offset + bytes <= n.stop) return;
    }
    stop("%s of %lld bytes leaves %s", what, (long long)bytes, place(space, offset).c_str());
}

uint8_t* Machine::touch(Space& space, int64_t offset, int64_t bytes, int pipe, bool write, bool whole, int align,
                        const char* what) {
    const int64_t capacity = CAPACITY[space.kind];
    if (space.bytes.empty()) stop("%s reaches into %s, which this core does not have", what, SPACE_NAMES[space.kind]);
    if (offset < 0 || bytes < 0 || offset + bytes > capacity) {
        stop("%s of %lld bytes at %s offset %lld, which has %lld", what, (long long)bytes, SPACE_NAMES[space.kind],
             (long long)offset, (long long)capacity);
    }
    if (offset % align) {
        stop("%s at %s offset %lld, which is no multiple of %d", what, SPACE_NAMES[space.kind], (long long)offset,
             align);
    }
    if (!bytes) return space.bytes.data() + offset;
    check_named(space, offset, bytes, what);
    const int me = core->part(pipe);
    Clock& clock = core->clock[pipe];
    const uint32_t epoch = clock.t[me];
    space.low = std::min(space.low, offset);
    space.high = std::max(space.high, offset + bytes);
    const int64_t last = (offset + bytes - 1) / GRANULE;
    bool clean = true;  // one sentence for each access is enough
    for (int64_t i = offset / GRANULE; i <= last; ++i) {
        Granule& g = space.shadow[(size_t)i];
        const int64_t from = std::max<int64_t>(offset - i * GRANULE, 0);
        const uint32_t mask = bits(from, std::min<int64_t>(offset + bytes - i * GRANULE, GRANULE));
        const int64_t at = i * GRANULE + from;
        if (clean && g.writer_epoch && g.writer != me && clock.t[g.writer] < g.writer_epoch) {
            clean = false;
            conflict(space, at, me, write ? "overwrites" : "reads", g.writer, "wrote", g.writer_line);
        }
        if (!write) {
            if (clean && whole && (g.written & mask) != mask) {
                clean = false;
                report("%s reads %s, which nothing has written", what, place(space, at).c_str());
            }
            if (clean && core->in_vf && g.vf == core->vf && (g.vf_bytes & mask)) {
                clean = false;
                report("%s reads %s, stored at line %d of the same vector function without asc_mem_bar", what,
                       place(space, at).c_str(), g.writer_line);
            }
            g.reader_epoch[me] = epoch;
            g.readers |= 1u << me;
            continue;
        }
        for (uint32_t left = g.readers & ~(1u << me); left; left &= left - 1) {
            const int r = __builtin_ctz(left);
            if (clean && clock.t[r] < g.reader_epoch[r]) {
                clean = false;
                conflict(space, at, me, "overwrites", r, "reads", 0);
            }
        }
        g.readers = 0;
        g.writer = (int16_t)me;
        g.writer_epoch = epoch;
        g.writer_line = line;
        g.written |= mask;
        if (core->in_vf) {
            g.vf_bytes = mask | (g.vf == core->vf ? g.vf_bytes : 0);
            g.vf = core->vf;
        } else {
            g.vf_bytes = 0;
        }
    }
    return space.bytes.data() + offset;
}

bool Machine::known(const Clock& mine, int32_t block, int part, uint32_t epoch) const {
    return block == core->block && mine.t[part] >= epoch;
}

void Machine::check_line(uint64_t number, uint32_t mask, int pipe, bool write) {
    std::vector<Access>& before = lines_[number];
    const int me = core->part(pipe);
    const Clock& clock = core->clock[pipe];
    const uint32_t epoch = clock.t[me];
    bool mine = false;
    for (size_t i = 0; i < before.size();) {
        Access& a = before[i];
        const bool same = a.block == core->block && a.part == me;
        const bool over = same || known(clock, a.block, a.part, a.epoch);
        if ((a.bytes & mask) && (a.write || write) && !over) {
            const char* const cores[] = {"AIC", "AIV0", "AIV1"};
            report("%s.%s %s global memory that %s.%s of block %d %s at line %d with nothing in between",
                   cores[me / PIPES], PIPE_NAMES[pipe], write ? "overwrites" : "reads", cores[a.part / PIPES],
                   PIPE_NAMES[a.part % PIPES], a.block, a.write ? "wrote" : "reads", a.line);
        }
        if (same && a.write == write && a.epoch == epoch) {
            a.bytes |= mask;
            mine = true;
        } else if (write && over && !(a.bytes & ~mask)) {
            a = before.back();  // what is over and written again says nothing more
            before.pop_back();
            continue;
        }
        ++i;
    }
    if (!mine) before.push_back(Access{mask, epoch, core->block, (int16_t)me, (int16_t)line, write});
}

uint8_t* Machine::global(const void* address, int64_t bytes, int pipe, bool write) {
    const uint64_t first = (uint64_t)address;
    if (last_extent_ >= extents_.size() || first < extents_[last_extent_].first ||
        first + (uint64_t)bytes > extents_[last_extent_].stop) {
        size_t at = (size_t)(std::upper_bound(extents_.begin(), extents_.end(), first,
                                              [](uint64_t v, const Extent& e) { return v < e.first; }) -
                             extents_.begin());
        if (at == 0 || first + (uint64_t)bytes > extents_[at - 1].stop) {
            const long long behind = at ? (long long)(first + (uint64_t)bytes - extents_[at - 1].stop) : 0;
            stop("%s of %lld bytes of global memory outside of every tensor%s%s", write ? "a write" : "a read",
                 (long long)bytes, at ? "; bytes beyond the end of the nearest: " : "",
                 at ? std::to_string(behind).c_str() : "");
        }
        last_extent_ = at - 1;
    }
    for (uint64_t l = first / GRANULE; bytes && l <= (first + (uint64_t)bytes - 1) / GRANULE; ++l) {
        const int64_t base = (int64_t)(l * GRANULE);
        const int64_t from = std::max<int64_t>((int64_t)first - base, 0);
        check_line(l, bits(from, std::min<int64_t>((int64_t)first + bytes - base, GRANULE)), pipe, write);
    }
    return (uint8_t*)first;
}

}  // namespace twin

using twin::machine;

void di_buffer(di_space which, const char* name, uint64_t offset, uint64_t bytes) {
    twin::Space& space = machine.space(which);
    if (offset + bytes > (uint64_t)twin::CAPACITY[which]) {
        machine.stop("the buffer '%s' ends at %s offset %llu, which has %lld", name, twin::SPACE_NAMES[which],
                     (unsigned long long)(offset + bytes), (long long)twin::CAPACITY[which]);
    }
    space.named.push_back(twin::Named{name, (int64_t)offset, (int64_t)(offset + bytes)});
}

void* di_gm_at(const void* address, int bytes, bool write, di_at at) {
    machine.issue(at);
    if (machine.core->in_vf) machine.stop("a vector function reads global memory");
    if ((uint64_t)address % (unsigned)bytes) machine.stop("a scalar at an address that is no multiple of %d", bytes);
    return machine.global(address, bytes, PIPE_S, write);
}

void* di_ub_at(const void* offset, int bytes, bool write, di_at at) {
    machine.issue(at);
    if (machine.core->in_vf) machine.stop("a vector function uses a scalar of UB");
    machine.need(false, "a scalar access to UB");
    return machine.touch(machine.space(DI_SPACE_UB), (int64_t)(uintptr_t)offset, bytes, PIPE_S, write, true, bytes,
                         write ? "a scalar store" : "a scalar load");
}
