// The k largest of many scores, best first, ties to the lower index: scores and indices become one ordered 64-bit key,
// so that the result does not depend on how the keys are sorted.
#ifndef DI_SELECT_H
#define DI_SELECT_H
#include "di_base.h"

namespace DI_ISA {

// Key of index i < 2^32; 0 for -inf and NaN, which are never chosen.
DI_INLINE uint64_t di_rank(float score, int64_t i) {
    const uint32_t u = di_bits<uint32_t>(score + 0.0f);  // -0 and +0 are equal
    const uint32_t ordered = u & 0x80000000u ? ~u : u | 0x80000000u;
    const uint64_t key = (uint64_t)ordered << 32 | (uint32_t)(0xffffffffu - (uint32_t)i);
    return score > -HUGE_VALF ? key : 0;
}

DI_INLINE int64_t di_rank_index(uint64_t key) { return 0xffffffffu - (uint32_t)key; }

// Moves the k largest of n keys to the front, in no order.
static inline void di_partition(uint64_t* keys, int64_t n, int64_t k) {
    int64_t lo = 0, hi = n - 1;
    while (lo < hi) {
        const uint64_t a = keys[lo], b = keys[lo + (hi - lo) / 2], c = keys[hi];
        const uint64_t pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
        int64_t i = lo, j = hi;
        while (i <= j) {
            while (keys[i] > pivot) ++i;
            while (keys[j] < pivot) --j;
            if (i <= j) {
                const uint64_t t = keys[i];
                keys[i++] = keys[j];
                keys[j--] = t;
            }
        }
        if (k - 1 <= j) {
            hi = j;
        } else if (k - 1 >= i) {
            lo = i;
        } else {
            return;
        }
    }
}

static inline void di_sift(uint64_t* keys, int64_t root, int64_t n) {
    const uint64_t x = keys[root];
    for (int64_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && keys[child + 1] < keys[child]) ++child;
        if (x <= keys[child]) break;
        keys[root] = keys[child];
    }
    keys[root] = x;
}

// Largest first.
static inline void di_sort_down(uint64_t* keys, int64_t n) {
    for (int64_t i = n / 2; i-- > 0;) di_sift(keys, i, n);
    for (int64_t i = n; i-- > 1;) {
        const uint64_t t = keys[0];
        keys[0] = keys[i];
        keys[i] = t;
        di_sift(keys, 0, i);
    }
}

// Leaves the best k of n keys sorted in front; returns how many of them stand for a score above -inf.
static inline int64_t di_best(uint64_t* keys, int64_t n, int64_t k) {
    const int64_t kept = di_min64(n, k);
    if (kept < n) di_partition(keys, n, kept);
    di_sort_down(keys, kept);
    int64_t found = kept;
    while (found > 0 && keys[found - 1] == 0) --found;
    return found;
}

// Index at place i of a selection, -1 behind the last one found.
DI_INLINE int64_t di_ranked(const uint64_t* keys, int64_t i, int64_t found) {
    return i < found ? di_rank_index(keys[i]) : -1;
}

}  // namespace DI_ISA

#endif
