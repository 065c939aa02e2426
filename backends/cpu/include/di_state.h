// Where the records of a sequence lie: rings (old rows) with this step's rows beside them, and paged entries.
#ifndef DI_STATE_H
#define DI_STATE_H
#include "di_base.h"

namespace DI_ISA {

// First position whose row this step writes on the state's axis, and first position whose row may be read.
DI_INLINE int64_t di_fresh_from(const DiStep* step, const DiState* st, int32_t s) {
    const DiSeq* q = &step->seq[s];
    return st->axis == DI_AXIS_KEPT ? q->c + (q->rows - q->kept) : q->c;
}

DI_INLINE int64_t di_first_valid(const DiStep* step, const DiState* st, int32_t s, int64_t first_position) {
    const DiSeq* q = &step->seq[s];
    return di_max64(st->axis == DI_AXIS_KEPT ? q->start_kept : q->start_step, first_position);
}

// Record of position p in the view [old ring | this step's rows].
DI_INLINE const char* di_view(const DiStep* step, const DiState* st, int32_t s, int64_t p) {
    const int64_t from = di_fresh_from(step, st, s);
    if (st->fresh && p >= from) {
        return st->fresh + (step->axis[st->axis].first[s] + (p - from)) * (int64_t)st->record_bytes;
    }
    return st->base + (int64_t)step->seq[s].slot * st->stride + p % st->rows * (int64_t)st->record_bytes;
}

// Paged entry j of sequence s.
DI_INLINE char* di_entry(const DiStep* step, const DiState* st, int32_t s, int64_t j) {
    const int64_t at = j * st->ratio, b = step->block_tokens;
    return st->base + (int64_t)step->seq[s].blocks[at / b] * st->stride + at % b / st->ratio * (int64_t)st->record_bytes;
}

// Where the row of this step at `pos` (row `row` of the writing axis) is written, or null below the write floor.
DI_INLINE char* di_append_at(const DiStep* step, const DiState* st, int32_t s, int64_t pos) {
    return pos < step->seq[s].floor ? nullptr : di_entry(step, st, s, pos / st->ratio);
}

}  // namespace DI_ISA

#endif
