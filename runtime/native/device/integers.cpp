#include "integers.h"

#include <algorithm>
#include <cstring>

#include "draws.h"
#include "following.h"

namespace {

const int64_t BOUNDARY = 16;  // what kernels may assume of an address

template <class T, class Value>
void each(char* to, int64_t count, Value value) {
    T* const out = (T*)to;
    for (int64_t i = 0; i < count; ++i) out[i] = value(i);
}

}  // namespace

bool Rows::operator==(const Rows& other) const { return std::equal(of, of + DI_MAX_AXES, other.of); }

Places::Places(const Table& table, const Rows& most) {
    int64_t at = 0;
    const auto room = [&](int64_t count, int64_t bytes) {
        const int64_t here = at;
        at += (std::max<int64_t>(count, 1) * bytes + BOUNDARY - 1) / BOUNDARY * BOUNDARY;
        return here;
    };
    const int64_t seqs = most.of[DI_AXIS_SEQ], rows = most.of[DI_AXIS_STEP];
    for (int32_t a = 0; a < table.axes; ++a) {
        const int64_t n = most.of[a];
        axis[a] = Axis{room(1, 4), room(n, 4), room(n, 4), room(seqs + 1, 4), room(n, 8)};
    }
    slot = room(seqs, 4);
    for (int64_t* place : {&c, &floor, &from_step, &from_kept, &valid_step, &valid_kept}) *place = room(seqs, 8);
    token_ids = room(rows, 8);
    lookback = room(rows * (table.lookback + 1), 8);
    end = at;
    follow = room(table.sequence.vocab ? FOLLOW_WORDS : 0, 8);
    for (int64_t* place : {&source, &draft, &verified}) *place = room(table.sequence.vocab ? seqs : 0, 8);
    follow_end = at;
    draws = room(table.sequence.vocab ? std::max(most.of[DI_AXIS_WANTED], seqs) * DRAW_WORDS : 0, 8);
    draws_end = at;
}

void write_integers(char* to, const Places& places, const DiStep& step, int32_t axes) {
    const int64_t seqs = step.seqs;
    for (int32_t a = 0; a < axes; ++a) {
        const DiAxis& x = step.axis[a];
        const Places::Axis& p = places.axis[a];
        *(int32_t*)(to + p.rows) = (int32_t)x.rows;
        std::memcpy(to + p.seq, x.seq, (size_t)x.rows * sizeof *x.seq);
        std::memcpy(to + p.step_row, x.step_row, (size_t)x.rows * sizeof *x.step_row);
        std::memcpy(to + p.pos, x.pos, (size_t)x.rows * sizeof *x.pos);
        std::memcpy(to + p.first, x.first, (size_t)(seqs + 1) * sizeof *x.first);
    }
    const DiSeq* const s = step.seq;
    each<int32_t>(to + places.slot, seqs, [&](int64_t i) { return s[i].slot; });
    each<int64_t>(to + places.c, seqs, [&](int64_t i) { return s[i].c; });
    each<int64_t>(to + places.floor, seqs, [&](int64_t i) { return s[i].floor; });
    each<int64_t>(to + places.from_step, seqs, [&](int64_t i) { return s[i].c; });
    each<int64_t>(to + places.from_kept, seqs, [&](int64_t i) { return s[i].c + s[i].rows - s[i].kept; });
    each<int64_t>(to + places.valid_step, seqs, [&](int64_t i) { return s[i].start_step; });
    each<int64_t>(to + places.valid_kept, seqs, [&](int64_t i) { return s[i].start_kept; });
    const int64_t rows = step.axis[DI_AXIS_STEP].rows;
    std::memcpy(to + places.token_ids, step.token_ids, (size_t)rows * sizeof *step.token_ids);
    std::memcpy(to + places.lookback, step.lookback, (size_t)(rows * step.lookback_width) * sizeof *step.lookback);
}
