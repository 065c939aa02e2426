// What is kept of every slot between steps, beside its rings: where its sequence stands, its last ids, its drafts and
// what they were drawn from, how often it holds each token. One record a slot, so that one copy moves all of it.
#ifndef DEEPINFER_SLOTS_H
#define DEEPINFER_SLOTS_H
#include <vector>

#include "memory.h"
#include "table.h"

struct SlotHead {
    int64_t n;         // rows that are committed
    int64_t t;         // ids that are known: n + 1 when the slot may decode
    int64_t answered;  // tokens of the answer
    int32_t drafted;   // drafts behind the last id
    int32_t reserved;
    int64_t spare[4];
};

class Slots {
  public:
    explicit Slots(const SequenceRow& row) : row_(row) {}
    Slots(const Slots&) = delete;
    Slots& operator=(const Slots&) = delete;

    static int64_t stride(const SequenceRow& row) { return aligned(row.end); }
    void allocate(int32_t slots);
    void begin(int32_t slot, const DiSampling& how, const int64_t* prompt, int64_t prompt_ids, const int64_t* answer,
               int64_t answer_ids);

    int32_t count() const { return (int32_t)how_.size(); }
    const SequenceRow& row() const { return row_; }
    const DiSampling& how(int32_t slot) const { return how_[(size_t)slot]; }
    bool penalised(int32_t slot) const;
    char* record(int32_t slot) const { return block_.data() + slot * stride(row_); }
    SlotHead& head(int32_t slot) const { return *(SlotHead*)record(slot); }
    // The drafts; the ids before them lie in front of them, the newest at [-1], -1 where there are none.
    int64_t* drafts(int32_t slot) const { return (int64_t*)(record(slot) + row_.drafts_at); }
    float* confidence(int32_t slot) const { return (float*)(record(slot) + row_.confidence_at); }
    uint32_t* counts(int32_t slot) const { return (uint32_t*)(record(slot) + row_.counts_at); }
    float* logits(int32_t slot) const { return (float*)(record(slot) + row_.logits_at); }
    // The answer goes on with `ids`; drafts are used up.
    void take(int32_t slot, const int64_t* ids, int64_t count);

  private:
    const SequenceRow& row_;
    Block block_;
    std::vector<DiSampling> how_;

    void push(int32_t slot, const int64_t* ids, int64_t count);
};

#endif
