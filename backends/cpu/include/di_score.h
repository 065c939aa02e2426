// Index scores of cache entries and the selections made of them. Entries are scored in tiles, in order; candidates wait in
// buffers of fixed size, so memory does not grow with the context.
#ifndef DI_SCORE_H
#define DI_SCORE_H
#include "di_attend.h"
#include "di_codes.h"
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

    // Leaves the k best, in no order, 0 behind them, for another picker.
    void leave(uint64_t* out) {
        if (n > k) di_partition(keys, n, k);
        const int64_t found = di_min64(n, k);
        memcpy(out, keys, (size_t)found * sizeof *out);
        memset(out + found, 0, (size_t)(k - found) * sizeof *out);
    }

    void take(const uint64_t* left) {
        for (int64_t i = 0; i < k; ++i) push(left[i]);
    }

    void end(int32_t* out) {
        const int64_t found = di_best(keys, n, k);
        for (int64_t i = 0; i < k; ++i) out[i] = (int32_t)di_ranked(keys, i, found);
    }
};

template <int HEADS, bool ROUND>
DI_INLINE void di_index_sums(const float* dots, const float* w, float* scores) {
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

// Scores of up to DI_KEYS entries against the heads of one row: sum over heads, in order, of relu(q_h . k) w_h. With ROUND
// each dot, each product and the sum is held in bf16. WORDS: queries and keys are held in bf16.
template <int HEADS, int D, int DP, bool ROUND, bool WORDS>
struct DiIndex {
    float* q;     // [HEADS][DP]
    float* w;     // [HEADS]
    float* keys;  // [DI_KEYS][DP]
    float* dots;  // [HEADS][DI_KEYS]
    float* scores;

    template <class X, class Y>
    void begin(char* scratch, const X* query, const Y* weights) {
        q = (float*)scratch;
        w = q + HEADS * DP;
        keys = w + (HEADS + 15) / 16 * 16;
        dots = keys + DI_KEYS * DP;
        scores = dots + HEADS * DI_KEYS;
        if (D != DP) {
            memset(q, 0, sizeof *q * HEADS * DP);
            memset(keys, 0, sizeof *keys * DI_KEYS * DP);
        }
        for (int h = 0; h < HEADS; ++h) {
            for (int i = 0; i < D; ++i) q[h * DP + i] = di_get(query, h * D + i);
            w[h] = di_get(weights, h);
        }
    }

    // key(j, out) decodes entry j.
    template <class Keys>
    void score(int64_t first, int n, const Keys& key) {
        for (int i = 0; i < n; ++i) key(first + i, keys + i * DP);
        di_dots<HEADS, DP, DP>(q, keys, n, dots);
        di_index_sums<HEADS, ROUND>(dots, w, scores);
    }
};

// Entries first .. stop - 1 of a row: all of them, or one of its parts.
struct DiPart {
    int64_t first, stop;
    int parts;  // of the row
};

// Part `number` of the `visible` entries of a row. Rows are cut where a step has at most FEW of them and a part gets LEAST
// entries or more; cuts are multiples of UNIT. Parts that are not needed are empty.
template <int PARTS, int FEW, int LEAST, int UNIT>
DI_INLINE DiPart di_part(int64_t rows, int64_t visible, int number) {
    DiPart p = {0, visible, 1};
    if (rows <= FEW && visible >= 2 * LEAST) p.parts = (int)di_min64(PARTS, visible / LEAST);
    if (number >= p.parts) p.first = p.stop = 0;
    if (p.parts == 1 || number >= p.parts) return p;
    const int64_t each = ((visible + p.parts - 1) / p.parts + UNIT - 1) / UNIT * UNIT;
    p.first = di_min64(visible, each * number);
    p.stop = di_min64(visible, p.first + each);
    return p;
}

// Calls use(first, n) for every tile of up to DI_KEYS entries of a part, in order.
template <class Use>
DI_INLINE void di_every_tile(const DiPart& p, int64_t tile, const Use& use) {
    for (int64_t j = p.first; j < p.stop; j += tile) use(j, (int)di_min64(tile, p.stop - j));
}

enum { DI_MARKS = 1 << 15 };  // blocks whose listing is known at a time

// The same for the entries of the listed blocks only (-1: nothing), in the order of the entries. `marks`: DI_MARKS / 8 bytes.
template <class Use>
DI_INLINE void di_listed_tiles(const DiPart& p, int64_t block, const int32_t* list, int64_t count, uint64_t* marks,
                               const Use& use) {
    const int64_t blocks = (p.stop + block - 1) / block;
    for (int64_t from = p.first / block; from < blocks; from += DI_MARKS) {
        memset(marks, 0, DI_MARKS / 8);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t b = list[i] - from;
            if (list[i] >= 0 && b >= 0 && b < DI_MARKS) marks[b / 64] |= (uint64_t)1 << b % 64;
        }
        const int64_t words = (di_min64(blocks - from, DI_MARKS) + 63) / 64;
        for (int64_t word = 0; word < words; ++word) {
            for (uint64_t bits = marks[word]; bits; bits &= bits - 1) {
                const int64_t first = (from + word * 64 + __builtin_ctzll(bits)) * block;
                const int64_t stop = di_min64(first + block, p.stop);
                for (int64_t j = first; j < stop; j += DI_KEYS) use(j, (int)di_min64(DI_KEYS, stop - j));
            }
        }
    }
}

#ifdef DI_DOT

// 16 rows of 16 dwords, `stride` dwords apart, into columns.
DI_INLINE void di_transpose(const int32_t* x, int64_t stride, __m512i* out) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(x + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        _mm512_store_si512(out + i, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_store_si512(out + i + 4, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_store_si512(out + i + 8, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_store_si512(out + i + 12, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}

// A lane holds a key, so that no dot ends in a sum over lanes; features two by two, in order.
template <int HEADS, int D, int DP, bool ROUND>
struct DiIndex<HEADS, D, DP, ROUND, true> {
    uint16_t* q;
    float* w;
    uint16_t* keys;    // [DI_KEYS][DP]
    __m512i* columns;  // [DP / 2] of 16 keys
    float* dots;
    float* scores;

    template <class Y>
    void begin(char* scratch, const uint16_t* query, const Y* weights) {
        columns = (__m512i*)scratch;
        dots = (float*)(columns + DP / 2);
        scores = dots + HEADS * DI_KEYS;
        w = scores + DI_KEYS;
        q = (uint16_t*)(w + (HEADS + 15) / 16 * 16);
        keys = q + HEADS * DP;
        if (D != DP) {
            memset(q, 0, sizeof *q * HEADS * DP);
            memset(keys, 0, sizeof *keys * DI_KEYS * DP);
        }
        for (int h = 0; h < HEADS; ++h) {
            memcpy(q + h * DP, query + h * D, sizeof *q * D);
            w[h] = di_get(weights, h);
        }
    }

    template <class Keys>
    void score(int64_t first, int n, const Keys& key) {
        enum { H = HEADS % 8 == 0 ? 8 : HEADS % 4 == 0 ? 4 : HEADS % 2 == 0 ? 2 : 1 };
        for (int i = 0; i < n; ++i) key(first + i, keys + i * DP);
        for (int half = 0; half < n; half += 16) {
            for (int d = 0; d < DP; d += 32) di_transpose((const int32_t*)(keys + half * DP + d), DP / 2, columns + d / 2);
            for (int h = 0; h < HEADS; h += H) {
                __m512 acc[H];
#pragma GCC unroll 8
                for (int a = 0; a < H; ++a) acc[a] = _mm512_setzero_ps();
                for (int d = 0; d < DP; d += 2) {
                    const __m512bh k = (__m512bh)_mm512_load_si512(columns + d / 2);
#pragma GCC unroll 8
                    for (int a = 0; a < H; ++a) {
                        int32_t both;
                        memcpy(&both, q + (h + a) * DP + d, sizeof both);
                        acc[a] = _mm512_dpbf16_ps(acc[a], k, (__m512bh)_mm512_set1_epi32(both));
                    }
                }
#pragma GCC unroll 8
                for (int a = 0; a < H; ++a) _mm512_storeu_ps(dots + (h + a) * DI_KEYS + half, acc[a]);
            }
        }
        di_index_sums<HEADS, ROUND>(dots, w, scores);
    }
};

#endif

}  // namespace DI_ISA

#endif
