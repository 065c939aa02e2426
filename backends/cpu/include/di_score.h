// Index scores of cache entries and the selections made of them. Entries are scored in tiles, in order; candidates wait in
// buffers of fixed size, so memory does not grow with the context.
#ifndef DI_SCORE_H
#define DI_SCORE_H
#include "di_attend.h"
#include "di_select.h"

namespace DI_ISA {

// The k best of a stream of keys. `keys` holds 2 k + DI_KEYS of them.
struct DiPicker {
    uint64_t* keys;
    int64_t n, k;
    uint64_t least;  // no smaller key can be chosen any more

    void begin(uint64_t* room, int64_t count) {
        keys = room;
        n = 0;
        k = count;
        least = 0;
    }

    void push(uint64_t key) {
        if (key <= least) return;
        keys[n++] = key;
        if (n < 2 * k + DI_KEYS) return;
        di_partition(keys, n, k);
        n = k;
        least = keys[k - 1];
    }

    void end(int32_t* out) {
        const int64_t found = di_best(keys, n, k);
        for (int64_t i = 0; i < k; ++i) out[i] = (int32_t)di_ranked(keys, i, found);
    }
};

// Scores of n decoded keys: sum over heads, in order, of relu(q_h . k) w_h. With ROUND each dot, each product and the
// sum is held in bf16.
template <int HEADS, int DP, bool ROUND>
DI_INLINE void di_scores(const float* q, const float* w, const float* keys, int n, float* dots, float* scores) {
    di_dots<HEADS, DP, DP>(q, keys, n, dots);
    for (int j = 0; j < DI_KEYS; ++j) scores[j] = 0.0f;
    for (int h = 0; h < HEADS; ++h) {
        for (int j = 0; j < DI_KEYS; ++j) {
            float x = dots[h * DI_KEYS + j];
            x = ROUND ? di_round_bf16(x) : x;
            x = (x > 0.0f ? x : 0.0f) * w[h];
            scores[j] += ROUND ? di_round_bf16(x) : x;
        }
    }
    if (ROUND) {
        for (int j = 0; j < DI_KEYS; ++j) scores[j] = di_round_bf16(scores[j]);
    }
}

// Calls use(first, n) for every tile of up to DI_KEYS visible entries, in order.
template <class Use>
DI_INLINE void di_every_tile(int64_t visible, int64_t tile, const Use& use) {
    for (int64_t j = 0; j < visible; j += tile) use(j, (int)di_min64(tile, visible - j));
}

enum { DI_MARKS = 1 << 15 };  // blocks whose listing is known at a time

// The same for the entries of the listed blocks only (-1: nothing), in the order of the entries. `marks`: DI_MARKS / 8 bytes.
template <class Use>
DI_INLINE void di_listed_tiles(int64_t visible, int64_t block, const int32_t* list, int64_t count, uint64_t* marks,
                               const Use& use) {
    const int64_t blocks = (visible + block - 1) / block;
    for (int64_t from = 0; from < blocks; from += DI_MARKS) {
        memset(marks, 0, DI_MARKS / 8);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t b = list[i] - from;
            if (list[i] >= 0 && b >= 0 && b < DI_MARKS) marks[b / 64] |= (uint64_t)1 << b % 64;
        }
        const int64_t words = (di_min64(blocks - from, DI_MARKS) + 63) / 64;
        for (int64_t word = 0; word < words; ++word) {
            for (uint64_t bits = marks[word]; bits; bits &= bits - 1) {
                const int64_t first = (from + word * 64 + __builtin_ctzll(bits)) * block;
                const int64_t stop = di_min64(first + block, visible);
                for (int64_t j = first; j < stop; j += DI_KEYS) use(j, (int)di_min64(DI_KEYS, stop - j));
            }
        }
    }
}

}  // namespace DI_ISA

#endif
