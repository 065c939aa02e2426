// The rows of one step: a checked copy of the batch and the index arrays of every row axis, in memory sized by the limits.
#ifndef DEEPINFER_STEP_H
#define DEEPINFER_STEP_H
#include <cstdint>
#include <vector>

#include "table.h"

class Step {
  public:
    explicit Step(const Table& table);
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    // What a batch may refer to; set when memory is allocated.
    void bound(int32_t slots, int32_t blocks);
    // Checks a batch and fills the view. Faults name the sequence, the value and the limit; the view is then unusable.
    void fill(const EntryRow& entry, int32_t seqs, const DiSeq* seq, const int64_t* token_ids, const int64_t* lookback,
              const int32_t* const* pins);

    // What the rows of the axis that draws know; null: the largest logit of each. Holds until the next fill.
    void draw(const DiDraw* draws) { view_.draws = draws; }

    // Whether kernels need not ask for rows of lookup tables ahead.
    void tables(bool in_memory) { view_.tables_in_memory = in_memory; }

    const DiStep& view() const { return view_; }
    const void* input(int32_t which) const;
    int64_t rows(int32_t axis) const { return view_.axis[axis].rows; }
    const int32_t* pin(int32_t index) const { return pins_[index]; }

  private:
    struct Axis {
        std::vector<int32_t> seq, step_row, first;
        std::vector<int64_t> pos;
    };

    const Table& table_;
    int32_t slots_ = 0, blocks_ = 0;
    uint64_t step_number_ = 0;
    std::vector<uint64_t> slot_used_in_;
    std::vector<DiSeq> seqs_;
    std::vector<Axis> axes_;
    std::vector<int64_t> token_ids_, lookback_;
    std::vector<const int32_t*> pins_;
    DiStep view_{};

    void check_sequence(const EntryRow& entry, int32_t i, const DiSeq& s);
    void check_blocks(int32_t i, const DiSeq& s) const;
    void add(int32_t axis, int32_t seq, int64_t pos, int32_t step_row);
    void fill_axes(int32_t seqs);
};

#endif
