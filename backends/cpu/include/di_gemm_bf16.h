// Contractions of bf16 rows with the bf16 dot instruction. One tree for every number of rows: a chunk of 128 features is
// summed from zero, chunks are added in order, lanes last. Scales are powers of two: applied to the weights, to the rows
// or to a chunk's sum they give the same bits.
#ifndef DI_GEMM_BF16_H
#define DI_GEMM_BF16_H
#include "di_words.h"

namespace DI_ISA {

// Nothing here fits: the caller takes the general form.
template <class W, class Rows>
DI_INLINE bool di_gemm_dot(const W&, int64_t, int, Rows&, float*, int) {
    return false;
}

#ifdef DI_DOT

enum { DI_FEW = 8 };         // rows that take the weights straight from memory, column by column
enum { DI_PANEL = 2048 };    // features of four columns that are expanded at a time, for more rows

// How far ahead of column j of n memory is fetched: behind the last column lies what is read next, if that is known.
template <class W>
DI_INLINE int64_t di_ahead_of(const W& w, int64_t n0, int n, int j, const void* next) {
    enum { BYTES = DiWords<W>::BYTES };
    const int64_t beyond = (int64_t)j * BYTES + DI_AHEAD - (int64_t)n * BYTES;
    if (beyond < 0) return DI_AHEAD;
    return next ? (const char*)next + beyond - (const char*)(w.data + 0) - (n0 + j) * BYTES : 0;
}

// ---- few rows ------------------------------------------------------------------------------------------------------------
// One column at a time, so that memory is read in order: two streams inside a page halve what the prefetchers bring. Rows
// that would fill the first cache are taken in pieces, each for a group of columns.
template <int K, int M, class W>
static void di_dot_few(const W& w, int64_t n0, int n, const uint16_t* x, const void* next, float* out, int ld) {
    enum { WHOLE = K / DI_CHUNK, REST = K % DI_CHUNK, FIT = 64 / M, PIECES = (WHOLE + FIT - 1) / FIT };
    enum { EACH = PIECES > 1 ? (WHOLE + PIECES - 1) / PIECES : WHOLE, GROUP = PIECES > 1 ? 16 : 4 };
    const typename DiWords<W>::Tables tables;
    __m512 sums[GROUP][M];
    for (int j = 0; j < n; j += GROUP) {
        const int some = n - j < GROUP ? n - j : GROUP;
        for (int first = 0; first == 0 || first < WHOLE; first += EACH) {
            const int stop = first + EACH < WHOLE ? first + EACH : WHOLE;
            for (int c = 0; c < some; ++c) {
                const DiWords<W> column(w, n0 + j + c, di_ahead_of(w, n0, n, j + c, next));
                __m512 acc[M];
#pragma GCC unroll 8
                for (int i = 0; i < M; ++i) acc[i] = first ? sums[c][i] : _mm512_setzero_ps();
                const uint16_t* at = x + first * M * DI_CHUNK;
                for (int q = first; q < stop; ++q, at += M * DI_CHUNK) {
                    column.template chunk<M, DI_CHUNK>(tables, q * DI_CHUNK, at, acc);
                }
                if (REST > 0 && stop == WHOLE) column.template chunk<M, 64>(tables, WHOLE * DI_CHUNK, at, acc);
#pragma GCC unroll 8
                for (int i = 0; i < M; ++i) sums[c][i] = acc[i];
            }
            if (WHOLE == 0) break;
        }
        for (int c = 0; c < some; c += 4) {
            const int last = some - c - 1;
            for (int i = 0; i < M; ++i) {
                di_sum4(sums[c][i], sums[c + (last < 1 ? last : 1)][i], sums[c + (last < 2 ? last : 2)][i],
                        sums[c + (last < 3 ? last : 3)][i], last < 3 ? last + 1 : 4, out + i * ld + j + c);
            }
        }
    }
}

// Columns that share their scales: the rows are scaled instead. False where a row cannot be.
template <int K, int M, class W>
static bool di_dot_few_scaled(const W& w, int64_t n0, int n, const uint16_t* x, uint16_t* room, const void* next, float* out,
                              int ld) {
    enum { SHARED = DiWords<W>::SHARED };
    DiScaleWords<DiWords<W>::BLOCKS> scales;
    for (int j = 0, some; j < n; j += some) {
        some = (int)di_min64(n - j, SHARED - (n0 + j) % SHARED);
        scales.fill(DiWords<W>::scales_of(w, n0 + j));
        __mmask32 bad = 0;
        for (int k = 0, at = 0; k < K; k += DI_CHUNK, at += M * DI_CHUNK) {
            int32_t group[4];
            for (int q = 0; q < 4; ++q) group[q] = k + 32 * q < K ? scales.words[(k + 32 * q) / DiWords<W>::COLUMNS] : 0;
            di_scale_chunk(x + at, M, group, room + at, bad);
        }
        if (bad) return false;
        const void* const then = j + some < n ? w.data + (n0 + j + some) * DiWords<W>::BYTES : next;
        di_dot_few<K, M>(w, n0 + j, some, room, then, out + j, ld);
    }
    return true;
}

// ---- many rows ----------------------------------------------------------------------------------------------------------
// I rows of a block of `width` times 4 expanded columns over `chunks` chunks. Not inlined: it needs all registers.
template <int I>
static __attribute__((noinline)) void di_dot_panel(const uint16_t* panel, const uint16_t* x, int chunks, int width, __m512 (*acc)[4]) {
    __m512 a[I][4];
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) a[i][j] = acc[i][j];
    }
    for (int c = 0; c < chunks; ++c, panel += 4 * DI_CHUNK, x += width * DI_CHUNK) {
        __m512 part[I][4];
#pragma GCC unroll 4
        for (int t = 0; t < DI_CHUNK; t += 32) {
            __m512bh b[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) b[j] = (__m512bh)_mm512_load_si512(panel + j * DI_CHUNK + t);
#pragma GCC unroll 4
            for (int i = 0; i < I; ++i) {
                const __m512bh v = (__m512bh)_mm512_load_si512(x + i * DI_CHUNK + t);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) part[i][j] = _mm512_dpbf16_ps(t ? part[i][j] : _mm512_setzero_ps(), b[j], v);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < I; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) a[i][j] = _mm512_add_ps(a[i][j], part[i][j]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[i][j] = a[i][j];
    }
}

// m <= DI_GEMM_ROWS rows, packed in blocks of `width`, times n columns; four columns are expanded once for all rows.
template <int K, class W>
static void di_dot_blocked(const W& w, int64_t n0, int n, const uint16_t* x, int m, int width, const void* next, float* out,
                           int ld) {
    enum { CHUNKS = (K + DI_CHUNK - 1) / DI_CHUNK, PIECE = DI_PANEL / DI_CHUNK, ROOM = CHUNKS < PIECE ? CHUNKS : PIECE };
    const typename DiWords<W>::Tables tables;
    alignas(64) uint16_t panel[ROOM * 4 * DI_CHUNK];
    __m512 acc[DI_GEMM_ROWS][4];
    for (int j = 0; j < n; j += 4) {
        const int some = n - j < 4 ? n - j : 4;
        if (some < 4) memset(panel, 0, sizeof panel);
        for (int i = 0; i < m; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = _mm512_setzero_ps();
        for (int first = 0; first < CHUNKS; first += PIECE) {
            const int chunks = CHUNKS - first < PIECE ? CHUNKS - first : PIECE;
            for (int c = 0; c < some; ++c) {
                DiWords<W> column(w, n0 + j + c, di_ahead_of(w, n0, n, j + c, next));
                column.take_scales(w, n0 + j + c);
                for (int q = 0; q < chunks; ++q) {
                    uint16_t* const to = panel + (q * 4 + c) * DI_CHUNK;
                    const int k = (first + q) * DI_CHUNK;
                    if (K % DI_CHUNK && k + DI_CHUNK > K) {
                        column.template words<64>(tables, k, to);
                    } else {
                        column.template words<DI_CHUNK>(tables, k, to);
                    }
                }
            }
            for (int i = 0; i < m; i += width) {
                const int rows = m - i < width ? m - i : width;
                const uint16_t* const from = x + (i * CHUNKS + first * rows) * DI_CHUNK;
                int r = 0;
                for (; r + 3 <= rows; r += 3) di_dot_panel<3>(panel, from + r * DI_CHUNK, chunks, rows, acc + i + r);
                if (rows - r == 2) di_dot_panel<2>(panel, from + r * DI_CHUNK, chunks, rows, acc + i + r);
                if (rows - r == 1) di_dot_panel<1>(panel, from + r * DI_CHUNK, chunks, rows, acc + i + r);
            }
        }
        for (int i = 0; i < m; ++i) di_sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3], some, out + i * ld + j);
    }
}

// Rows of a packed block: few rows are one, of many a register tile.
DI_INLINE int di_width(int m) { return m <= DI_FEW ? m : 3; }

// The rows in an order, DI_GEMM_ROWS of them after the other.
template <int ORDER, int K>
DI_INLINE const uint16_t* di_packed(DiRows<K, uint16_t>& rows) {
    if (!rows.ready[ORDER]) {
        for (int i = 0; i < rows.m; i += DI_GEMM_ROWS) {
            const int m = rows.m - i < DI_GEMM_ROWS ? rows.m - i : DI_GEMM_ROWS;
            di_pack_rows<K, ORDER>(rows.x + i, m, di_width(m), rows.room[ORDER] + (int64_t)i * rows.PADDED);
        }
        rows.ready[ORDER] = true;
    }
    return rows.room[ORDER];
}

template <int K, int M, class W>
DI_INLINE bool di_dot_rows(const W& w, int64_t n0, int n, const uint16_t* x, uint16_t* room, const void* next, float* out,
                              int ld) {
    if constexpr (DiWords<W>::SHARED > 0) return di_dot_few_scaled<K, M>(w, n0, n, x, room, next, out, ld);
    di_dot_few<K, M>(w, n0, n, x, next, out, ld);
    return true;
}

template <int K, class W>
DI_INLINE bool di_gemm_dot(const W& w, int64_t n0, int n, DiRows<K, uint16_t>& rows, float* out, int ld) {
    if constexpr (DiWords<W>::FITS) {
        if (!rows.room[DiWords<W>::ORDER] || !DiWords<W>::fits(w, n0, n)) return false;
        const uint16_t* const packed = di_packed<DiWords<W>::ORDER>(rows);
        for (int i = 0; i < rows.m; i += DI_GEMM_ROWS) {
            const int m = rows.m - i < DI_GEMM_ROWS ? rows.m - i : DI_GEMM_ROWS;
            const uint16_t* const x = packed + (int64_t)i * rows.PADDED;
            float* const to = out + i * ld;
            uint16_t* const room = rows.some_room;
            const bool done = m == 1   ? di_dot_rows<K, 1>(w, n0, n, x, room, rows.next, to, ld)
                              : m == 2 ? di_dot_rows<K, 2>(w, n0, n, x, room, rows.next, to, ld)
                              : m == 3 ? di_dot_rows<K, 3>(w, n0, n, x, room, rows.next, to, ld)
                              : m == 4 ? di_dot_rows<K, 4>(w, n0, n, x, room, rows.next, to, ld)
                              : m == 5 ? di_dot_rows<K, 5>(w, n0, n, x, room, rows.next, to, ld)
                              : m == 6 ? di_dot_rows<K, 6>(w, n0, n, x, room, rows.next, to, ld)
                              : m == 7 ? di_dot_rows<K, 7>(w, n0, n, x, room, rows.next, to, ld)
                              : m == 8 ? di_dot_rows<K, 8>(w, n0, n, x, room, rows.next, to, ld)
                                       : false;
            if (!done) di_dot_blocked<K>(w, n0, n, x, m, di_width(m), rows.next, to, ld);
        }
        return true;
    }
    return false;
}

#endif

}  // namespace DI_ISA

#endif
