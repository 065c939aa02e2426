// Arrays of a loop's step, sized by the limits of the launch table.
#ifndef DEEPINFER_DRAWING_H
#define DEEPINFER_DRAWING_H
#include <vector>

#include "table.h"

struct Share {
    double reach;  // probability that this draft and those before it are accepted
    int32_t seq;
    int32_t draft;
};

struct Drawing {
    std::vector<DiSeq> seqs;
    std::vector<const float*> confidence;  // of the drafts of each sequence
    std::vector<int64_t> ids, lookback;
    std::vector<DiDraw> draws;
    std::vector<Share> shares;
    std::vector<int32_t> asked;
    int32_t step = -1, sample = -1, draft = -1;  // entries
    int64_t turn = 0;                            // sequences that draft together

    explicit Drawing(const Table& table);
};

// Drafts that each of `count` sequences verifies, so that there are `budget` in all: verified holds how many it has and
// may verify, confidence [count][m] the probability of each if those before it are accepted, NaN: 1. The largest
// products win, ties go to the lower sequence, then to the lower position. A product never rises along a block, and
// whether draft j is looked at depends on confidences of drafts up to j, which know of the tokens before it only.
void share_drafts(int32_t count, int32_t budget, const float* const* confidence, int32_t* verified,
                  std::vector<Share>& shares);

#endif
