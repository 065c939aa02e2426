// Asks for rows of a mapped table that are looked up later in the step.
#ifndef DI_FETCH_H
#define DI_FETCH_H
#include <sys/mman.h>
#include <unistd.h>

#include "di_base.h"

namespace DI_ISA {

// Starts to read the pages of `bytes` bytes from the file that they are mapped from and does not wait; nothing happens to
// pages that are there. It is a wish: no error of it matters, the lookup itself waits for its page.
DI_INLINE void di_fetch(const DiStep* step, const char* p, int64_t bytes) {
    if (step->tables_in_memory) return;
    const uintptr_t first = (uintptr_t)p & ~((uintptr_t)getpagesize() - 1);
    madvise((void*)first, (uintptr_t)p + (uintptr_t)bytes - first, MADV_WILLNEED);
}

}  // namespace DI_ISA

#endif
