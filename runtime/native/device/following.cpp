#include "following.h"

#include <algorithm>

void write_following(char* to, const Places& places, const Table& table, const Following& step, int64_t seqs) {
    int64_t* const words = (int64_t*)(to + places.follow);
    words[FOLLOW_AXES] = table.axes;
    words[FOLLOW_SOURCE] = places.source / 8;
    words[FOLLOW_DRAFT] = places.draft / 8;
    words[FOLLOW_VERIFIED] = places.verified / 8;
    words[FOLLOW_C] = places.c / 8;
    words[FOLLOW_FROM_STEP] = places.from_step / 8;
    words[FOLLOW_FROM_KEPT] = places.from_kept / 8;
    words[FOLLOW_TOKEN_IDS] = places.token_ids / 8;
    words[FOLLOW_LOOKBACK] = places.lookback / 8;
    for (int32_t a = 0; a < table.axes; ++a) {
        int64_t* const of = words + FOLLOW_AXIS + a * AXIS_WORDS;
        const Places::Axis& at = places.axis[a];
        of[AXIS_WORD_ROWS] = at.rows / 4;
        of[AXIS_WORD_SEQ] = at.seq / 4;
        of[AXIS_WORD_STEP_ROW] = at.step_row / 4;
        of[AXIS_WORD_FIRST] = at.first / 4;
        of[AXIS_WORD_POS] = at.pos / 8;
        of[AXIS_WORD_RATIO] = table.ratio[a];
    }
    std::copy_n(step.source.begin(), seqs, (int64_t*)(to + places.source));
    std::copy_n(step.draft.begin(), seqs, (int64_t*)(to + places.draft));
    std::copy_n(step.verified.begin(), seqs, (int64_t*)(to + places.verified));
}

void Outbox::allocate(Device& device, size_t count, int64_t bytes, const char* purpose) {
    for (size_t i = 0; i < count; ++i) buffers_.push_back(device.take_host(bytes, purpose));
}

char* Outbox::next(Device& device) {
    const int64_t count = (int64_t)buffers_.size();
    if (sent_ - count >= arrived_) {  // whoever had it last may still be on the way
        device.wait("running a step");
        arrived_ = sent_;
    }
    return buffers_[(size_t)(sent_++ % count)];
}
