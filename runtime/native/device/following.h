// Steps that are sent while the step before them runs. The device keeps of each sequence of the last step how many rows
// it has, its last ids and its drafts; a kernel puts them into the integers of the next step where the host could not
// know them, another one leaves them behind the draws (families/follow.py of the backend).
#ifndef DEEPINFER_DEVICE_FOLLOWING_H
#define DEEPINFER_DEVICE_FOLLOWING_H
#include <vector>

#include "device.h"
#include "integers.h"

// Words of the table that the kernels read: where the arrays of a step lie, from the begin of its integers, in words of
// 8 bytes, and `first`, `rows`, `seq`, `step_row` in halves of them. From FOLLOW_AXIS on AXIS_WORDS of each axis.
enum FollowWord {
    FOLLOW_AXES, FOLLOW_SOURCE, FOLLOW_DRAFT, FOLLOW_VERIFIED, FOLLOW_C, FOLLOW_FROM_STEP, FOLLOW_FROM_KEPT,
    FOLLOW_TOKEN_IDS, FOLLOW_LOOKBACK, FOLLOW_AXIS
};
enum AxisWord { AXIS_WORD_ROWS, AXIS_WORD_SEQ, AXIS_WORD_STEP_ROW, AXIS_WORD_FIRST, AXIS_WORD_POS, AXIS_WORD_RATIO,
                AXIS_WORDS };
enum { FOLLOW_WORDS = FOLLOW_AXIS + DI_MAX_AXES * AXIS_WORDS };

// Of each sequence of a step.
struct Following {
    std::vector<int64_t> source;    // its place in the step before, whose end the host does not know; -1: it knows all
    std::vector<int64_t> draft;     // row of the drafts that its ids are; -1: fillers behind the first
    std::vector<int64_t> verified;  // rows behind the first that are drafts
    bool any = false;               // has a source

    explicit Following(int64_t seqs) : source((size_t)seqs), draft((size_t)seqs), verified((size_t)seqs) {}
};

void write_following(char* to, const Places& places, const Table& table, const Following& step, int64_t seqs);

// Page-locked buffers for what is on its way to the device, taken in turn; one is taken again when it has arrived.
class Outbox {
  public:
    void allocate(Device& device, size_t count, int64_t bytes, const char* purpose);
    char* next(Device& device);
    int64_t sent() const { return sent_; }
    // Everything that was sent up to then is there.
    void arrived(int64_t sent) { arrived_ = sent > arrived_ ? sent : arrived_; }

  private:
    std::vector<char*> buffers_;
    int64_t sent_ = 0, arrived_ = 0;
};

#endif
