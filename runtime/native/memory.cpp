#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fault.h"

namespace {
const int64_t HUGE_PAGE = 2 << 20;
}

Block::~Block() {
    if (data_) munmap(data_, (size_t)bytes_);
}

void Block::allocate(int64_t bytes, const char* purpose) {
    if (bytes == 0) return;
    void* p = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        fail(DI_NO_MEMORY, "%lld bytes of memory for the %s cannot be had: %s", (long long)bytes, purpose,
             std::strerror(errno));
    }
    data_ = (char*)p;
    bytes_ = bytes;
    if (bytes >= HUGE_PAGE) madvise(p, (size_t)bytes, MADV_HUGEPAGE);  // a wish: refusal costs speed only
    std::memset(p, 0, (size_t)bytes);
}

Layout::Layout(const Table& table, int32_t slots, int32_t blocks, int32_t threads) {
    for (const EntryRow& e : table.entries) arena = std::max(arena, aligned(e.arena_bytes));
    for (const KernelRow& k : table.kernels) scratch_stride = std::max(scratch_stride, aligned(k.scratch_bytes));
    for (const KernelRow& k : table.kernels) exchange = std::max(exchange, aligned(k.exchange_bytes));
    scratch = scratch_stride * threads + exchange;
    drawing = aligned(table.sequence.end) * slots;
    for (const StateRow& s : table.states) {
        int64_t& total = s.paged ? pages : rings;
        int64_t step = aligned((int64_t)s.rows * s.record_bytes);
        offset.push_back(total);
        stride.push_back(step);
        total += step * (s.paged ? blocks : slots);
    }
}
