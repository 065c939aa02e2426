#include "placement.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>


#define DI_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const int32_t MOST_NODES = 1024;
const char ONLINE[] = "/sys/devices/system/node/online";

// Bits of the nodes that are online, from a list like 0-1,3; their number. One where the list cannot be read.
int32_t nodes_online(unsigned long* bits) {
    const int32_t word = 8 * sizeof *bits;
    int32_t count = 0, first, last;
    if (FILE* f = std::fopen(ONLINE, "r")) {
        while (std::fscanf(f, "%d", &first) == 1) {
            last = first;
            if (std::fscanf(f, "-%d", &last) < 0) last = first;
            for (int32_t n = first; n <= last && n < MOST_NODES; ++n, ++count) bits[n / word] |= 1ul << n % word;
            if (std::fgetc(f) != ',') break;
        }
        std::fclose(f);
    }
    return std::max(count, 1);
}

}  // namespace

DI_EXPORT int di_memory_policy(int32_t policy, int32_t* nodes) {
    unsigned long bits[MOST_NODES / (8 * sizeof(unsigned long))];
    std::memset(bits, 0, sizeof bits);
    *nodes = nodes_online(bits);
    if (*nodes < 2) return 0;
    const bool spread = policy == DI_MEMORY_INTERLEAVED;
    // Without the library for it, which machines may lack: a system call is all that it takes.
    const long done = syscall(SYS_set_mempolicy, spread ? MPOL_INTERLEAVE : MPOL_DEFAULT, spread ? bits : nullptr,
                              spread ? (unsigned long)MOST_NODES : 0ul);
    return done ? DI_NO_MEMORY : 0;
}
