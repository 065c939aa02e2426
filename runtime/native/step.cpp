#include "step.h"

#include <cstring>

#include "fault.h"

namespace {

const char* axis_name(int32_t axis) {
    static const char* const names[] = {"rows", "kept rows", "rows with wanted logits", "sequences"};
    return axis < DI_AXIS_GROUPS ? names[axis] : "completed groups";
}

[[noreturn]] void over(int32_t axis, int64_t rows, int64_t limit) {
    fail(DI_OVER_LIMIT, "the batch has %lld %s, the engine was compiled for at most %lld", (long long)rows,
         axis_name(axis), (long long)limit);
}

void check_range(int32_t seq, const char* what, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        fail(DI_BAD_CALL, "sequence %d of the batch: %s is %lld, allowed %lld..%lld", seq, what, (long long)value,
             (long long)low, (long long)high);
    }
}

}  // namespace

Step::Step(const Table& table)
    : table_(table),
      seqs_((size_t)table.limit[DI_AXIS_SEQ]),
      axes_((size_t)table.axes),
      token_ids_((size_t)table.limit[DI_AXIS_STEP]),
      lookback_((size_t)(table.limit[DI_AXIS_STEP] * (table.lookback + 1))),
      pins_(table.pins.size() + 1) {
    view_.block_tokens = table.block_tokens;
    view_.lookback_width = table.lookback + 1;
    view_.seq = seqs_.data();
    view_.token_ids = token_ids_.data();
    view_.lookback = lookback_.data();
    view_.pins = pins_.data();
    for (int32_t a = 0; a < table.axes; ++a) {
        Axis& x = axes_[(size_t)a];
        size_t rows = (size_t)table.limit[a];
        x.seq.resize(rows);
        x.pos.resize(rows);
        x.step_row.resize(rows);
        x.first.resize(seqs_.size() + 1);
        view_.axis[a] = DiAxis{0, x.seq.data(), x.pos.data(), x.step_row.data(), x.first.data()};
    }
}

void Step::bound(int32_t slots, int32_t blocks) {
    slots_ = slots;
    blocks_ = blocks;
    slot_used_in_.assign((size_t)slots, 0);
}

const void* Step::input(int32_t which) const {
    if (which == INPUT_TOKEN_IDS) return view_.token_ids;
    return which == INPUT_POSITIONS ? (const void*)view_.axis[DI_AXIS_STEP].pos : view_.lookback;
}

void Step::fill(const EntryRow& entry, int32_t seqs, const DiSeq* seq, const int64_t* token_ids,
                const int64_t* lookback, const int32_t* const* pins) {
    if (!seq || !token_ids) fail(DI_BAD_CALL, "the batch has no sequences or no token ids");
    if (!lookback && table_.lookback) fail(DI_BAD_CALL, "the batch has no look-back ids, which this model reads");
    if (seqs < 1) fail(DI_BAD_CALL, "the batch has %d sequences, at least 1 is needed", seqs);
    if (seqs > entry.limit[DI_AXIS_SEQ]) over(DI_AXIS_SEQ, seqs, entry.limit[DI_AXIS_SEQ]);
    ++step_number_;
    int64_t total[DI_AXIS_SEQ] = {};
    for (int32_t i = 0; i < seqs; ++i) {
        check_sequence(entry, i, seq[i]);
        total[DI_AXIS_STEP] += seq[i].rows;
        total[DI_AXIS_KEPT] += seq[i].kept;
        total[DI_AXIS_WANTED] += seq[i].wanted;
        seqs_[(size_t)i] = seq[i];
    }
    for (int32_t a = 0; a < DI_AXIS_SEQ; ++a) {
        if (total[a] > entry.limit[a]) over(a, total[a], entry.limit[a]);
    }
    size_t rows = (size_t)total[DI_AXIS_STEP];
    std::memcpy(token_ids_.data(), token_ids, rows * sizeof *token_ids);
    const int64_t* history = lookback ? lookback : token_ids;
    std::memcpy(lookback_.data(), history, rows * (size_t)view_.lookback_width * sizeof *history);
    for (size_t i = 0; i < table_.pins.size(); ++i) pins_[i] = pins ? pins[i] : nullptr;
    view_.draws = nullptr;
    fill_axes(seqs);
}

void Step::check_sequence(const EntryRow& entry, int32_t i, const DiSeq& s) {
    check_range(i, "slot", s.slot, 0, slots_ - 1);
    uint64_t& used = slot_used_in_[(size_t)s.slot];
    if (used == step_number_) fail(DI_BAD_CALL, "sequence %d of the batch: slot %d is another sequence's", i, s.slot);
    used = step_number_;
    check_range(i, "rows", s.rows, 1, INT32_MAX);
    check_range(i, "kept", s.kept, 0, s.rows);
    check_range(i, "wanted", s.wanted, 0, s.kept);
    check_range(i, "c", s.c, 0, INT64_MAX / 2);
    check_range(i, "floor", s.floor, 0, INT64_MAX / 2);
    check_range(i, "start_step", s.start_step, 0, INT64_MAX / 2);
    check_range(i, "start_kept", s.start_kept, 0, INT64_MAX / 2);
    if (entry.uses_pages) check_blocks(i, s);
}

void Step::check_blocks(int32_t i, const DiSeq& s) const {
    int64_t need = (s.c + s.rows + table_.block_tokens - 1) / table_.block_tokens;
    if (s.num_blocks < need || !s.blocks) {
        fail(DI_BAD_CALL, "sequence %d of the batch: its block table has %d blocks, its %lld positions need %lld", i,
             s.blocks ? s.num_blocks : 0, (long long)(s.c + s.rows), (long long)need);
    }
    for (int64_t b = 0; b < need; ++b) check_range(i, "a block", s.blocks[b], 0, blocks_ - 1);
}

void Step::add(int32_t axis, int32_t seq, int64_t pos, int32_t step_row) {
    int64_t row = view_.axis[axis].rows++;
    if (row >= table_.limit[axis]) over(axis, row + 1, table_.limit[axis]);
    Axis& x = axes_[(size_t)axis];
    x.seq[(size_t)row] = seq;
    x.pos[(size_t)row] = pos;
    x.step_row[(size_t)row] = step_row;
}

void Step::fill_axes(int32_t seqs) {
    view_.seqs = seqs;
    for (int32_t a = 0; a < table_.axes; ++a) view_.axis[a].rows = 0;
    for (int32_t i = 0; i < seqs; ++i) {
        const DiSeq& s = seqs_[(size_t)i];
        for (int32_t a = 0; a < table_.axes; ++a) axes_[(size_t)a].first[(size_t)i] = (int32_t)view_.axis[a].rows;
        int32_t first = (int32_t)view_.axis[DI_AXIS_STEP].rows;
        add(DI_AXIS_SEQ, i, s.c, first);
        const int32_t last_rows[] = {s.rows, s.kept, s.wanted};
        for (int32_t a = 0; a < DI_AXIS_SEQ; ++a) {
            for (int32_t row = s.rows - last_rows[a]; row < s.rows; ++row) add(a, i, s.c + row, first + row);
        }
        // Group j is completed by this step iff c < r (j + 1) <= c + q.
        for (int32_t a = DI_AXIS_GROUPS; a < table_.axes; ++a) {
            int64_t r = table_.ratio[a];
            for (int64_t j = s.c / r; j < (s.c + s.rows) / r; ++j) {
                add(a, i, j * r, first + (int32_t)(r * (j + 1) - 1 - s.c));
            }
        }
    }
    for (int32_t a = 0; a < table_.axes; ++a) axes_[(size_t)a].first[(size_t)seqs] = (int32_t)view_.axis[a].rows;
}
