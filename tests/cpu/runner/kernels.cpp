// Kernels small enough to check by hand: integers in, sums out.
#include <cstring>

#include "abi.h"

namespace {

const int WINDOW = 4;

int64_t* row_of(void* buffer, int64_t row, int64_t words = 1) { return (int64_t*)buffer + row * words; }

int64_t record(const DiState& s, const DiSeq& q, const DiAxis& axis, int seq, int64_t p) {
    int64_t first = q.c + q.rows - (axis.first[seq + 1] - axis.first[seq]);  // position of the first fresh row
    const char* at = s.fresh && p >= first ? s.fresh + (axis.first[seq] + p - first) * s.record_bytes
                                           : s.base + q.slot * s.stride + p % s.rows * s.record_bytes;
    int64_t v;
    std::memcpy(&v, at, sizeof v);
    return v;
}

int64_t entry_at(const DiState& s, const DiStep& step, const DiSeq& q, int64_t j, int64_t** out = nullptr) {
    int64_t token = j * s.ratio;
    char* at = s.base + q.blocks[token / step.block_tokens] * s.stride +
               token % step.block_tokens / s.ratio * s.record_bytes;
    if (out) *out = (int64_t*)at;
    return *(int64_t*)at;
}

struct Span {
    int64_t lo, hi;
};

// Rows of items lo .. hi - 1 when one item is `per` rows.
Span rows_of(const DiArgs* a, int64_t per) {
    int64_t rows = a->step->axis[a->axis].rows, hi = a->hi * per;
    return Span{a->lo * per, hi < rows ? hi : rows};
}

}  // namespace

extern "C" {

void extend(const DiArgs* a) {
    const DiAxis& x = a->step->axis[a->axis];
    DiState& s = *(DiState*)a->p[0];
    Span r = rows_of(a, 4);
    for (int64_t i = r.lo; i < r.hi; ++i) {
        int64_t v = 1000 * a->step->token_ids[x.step_row[i]] + x.pos[i];
        std::memcpy(s.fresh + i * s.record_bytes, &v, sizeof v);
    }
}

void window_sum(const DiArgs* a) {
    const DiAxis& x = a->step->axis[a->axis];
    const DiState& s = *(const DiState*)a->p[0];
    Span r = rows_of(a, a->axis == DI_AXIS_STEP ? 1 : 3);
    for (int64_t i = r.lo; i < r.hi; ++i) {
        const DiSeq& q = a->step->seq[x.seq[i]];
        int64_t start = s.axis == DI_AXIS_STEP ? q.start_step : q.start_kept, sum = 0;
        int64_t p = x.pos[i] - WINDOW + 1 > start ? x.pos[i] - WINDOW + 1 : start;
        for (; p <= x.pos[i]; ++p) sum += record(s, q, x, x.seq[i], p);
        *row_of(a->p[1], i) = sum;
    }
}

void append(const DiArgs* a) {
    const DiAxis& x = a->step->axis[a->axis];
    const DiState& s = *(const DiState*)a->p[0];
    Span r = rows_of(a, 1);
    for (int64_t i = r.lo; i < r.hi; ++i) {
        const DiSeq& q = a->step->seq[x.seq[i]];
        if (x.pos[i] < q.floor) continue;
        const int64_t* ids = a->step->lookback + x.step_row[i] * a->step->lookback_width;
        int64_t* out;
        entry_at(s, *a->step, q, x.pos[i] / s.ratio, &out);
        *out = ids[0] * 100 + ids[1];
    }
}

void pages_sum(const DiArgs* a) {
    const DiAxis& x = a->step->axis[a->axis];
    const DiState& s = *(const DiState*)a->p[0];
    Span r = rows_of(a, 1);
    for (int64_t i = r.lo; i < r.hi; ++i) {
        int64_t sum = a->p[2] ? -1 : 0;
        for (int64_t j = 0; j < (x.pos[i] + 1) / s.ratio; ++j) {
            sum += (j + 1) * entry_at(s, *a->step, a->step->seq[x.seq[i]], j);
        }
        *row_of(a->p[1], i) = sum;
    }
}

void params(const DiArgs* a) {
    const DiParam* w = (const DiParam*)a->p[0];
    const DiParam* e = (const DiParam*)a->p[1];
    int64_t sum = *(const int64_t*)w->data + 1000 * a->step->tables_in_memory;
    for (int i = 0; i < 3; ++i) sum += *(const int64_t*)e[i].data * *(const uint8_t*)e[i].scale;
    Span r = rows_of(a, 1);
    for (int64_t i = r.lo; i < r.hi; ++i) *row_of(a->p[2], i) = sum;
}

void pinned(const DiArgs* a) {
    const int32_t* pin = (const int32_t*)a->p[0];
    Span r = rows_of(a, 1);
    for (int64_t i = r.lo; i < r.hi; ++i) {
        for (int k = 0; k < 2; ++k) row_of(a->p[1], i, 2)[k] = pin ? pin[i * 2 + k] : -1;
    }
}

void rows(const DiArgs* a) {
    const DiAxis& x = a->step->axis[a->axis];
    Span r = rows_of(a, 1);
    for (int64_t i = r.lo; i < r.hi; ++i) {
        int64_t v[] = {x.seq[i], x.pos[i], x.step_row[i], x.first[x.seq[i]], x.first[x.seq[i] + 1]};
        std::memcpy(row_of(a->p[0], i, 5), v, sizeof v);
    }
}

// Three items a tile of two rows: column 0 writes, the others only fill their scratch and look whether it stays theirs.
void with_scratch(const DiArgs* a) {
    const DiAxis& x = a->step->axis[a->axis];
    const int64_t* const* in = (const int64_t* const*)a->p;
    for (int64_t item = a->lo; item < a->hi; ++item) {
        bool own = (uintptr_t)a->scratch % 64 == 0;
        std::memset(a->scratch, (int)item, 1000);
        for (int n = 0; n < 20000; ++n) own = own && ((volatile char*)a->scratch)[n % 1000] == (char)item;
        for (int64_t i = item / 3 * 2; item % 3 == 0 && i < item / 3 * 2 + 2 && i < x.rows; ++i) {
            *row_of(a->p[0], i) = own ? in[1][i] + in[2][i] + in[3][3 * i + 2] : -1;
        }
        if (!own) *row_of(a->p[0], item / 3 * 2) = -1;
    }
}

// A row loop: the first kernel fills a buffer of one tile, addressed by rows of the axis, the second reads it.
void into_tile(const DiArgs* a) {
    const DiAxis& x = a->step->axis[a->axis];
    Span r = rows_of(a, 2);
    for (int64_t i = r.lo; i < r.hi; ++i) *row_of(a->p[0], i) = 10 * a->step->token_ids[i] + x.pos[i];
}

void out_of_tile(const DiArgs* a) {
    Span r = rows_of(a, 4);
    for (int64_t i = r.lo; i < r.hi; ++i) *row_of(a->p[1], i) = *row_of(a->p[0], i) + 1;
}

void context_sum(const DiArgs* a) {
    const DiState& s = *(const DiState*)a->p[0];
    Span r = rows_of(a, 1);
    for (int64_t i = r.lo; i < r.hi; ++i) {
        const DiSeq& q = a->step->seq[i];
        int64_t sum = s.fresh ? -1 : 0;
        for (int64_t p = q.c > WINDOW ? q.c - WINDOW : 0; p < q.c; ++p) {
            int64_t v;
            std::memcpy(&v, s.base + q.slot * s.stride + p % s.rows * s.record_bytes, sizeof v);
            sum += v;
        }
        *row_of(a->p[1], i) = sum;
    }
}
}
