#include "slots.h"

#include <algorithm>
#include <cstring>

#include "fault.h"

namespace {

const uint32_t PROMPT = 0x80000000u;  // of a count: the prompt holds the token

}  // namespace

void Slots::allocate(int32_t slots) {
    static_assert(sizeof(SlotHead) == 64, "codegen/plan/sequence_state.py");
    if (!row_.vocab) return;
    block_.allocate(stride(row_) * slots, "draws of the sequences");
    how_.assign((size_t)slots, DiSampling{});
    for (int32_t s = 0; s < slots; ++s) head(s).n = head(s).t = -1;
}

bool Slots::penalised(int32_t slot) const {
    const DiSampling& h = how(slot);
    return h.repetition != 1.0 || h.frequency != 0.0 || h.presence != 0.0;
}

void Slots::begin(int32_t slot, const DiSampling& given, const int64_t* prompt, int64_t prompt_ids,
                  const int64_t* answer, int64_t answer_ids) {
    if (slot < 0 || slot >= count()) fail(DI_BAD_CALL, "there is no slot %d, allowed 0..%d", slot, count() - 1);
    if (prompt_ids < 0 || answer_ids < 0 || prompt_ids + answer_ids < 1) {
        fail(DI_BAD_CALL, "a sequence begins with no ids");
    }
    const auto check = [&](const int64_t* ids, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            if (ids[i] < 0 || ids[i] >= row_.vocab) {
                fail(DI_BAD_CALL, "token id %lld, allowed 0..%lld", (long long)ids[i], (long long)row_.vocab - 1);
            }
        }
    };
    check(prompt, prompt_ids);
    check(answer, answer_ids);
    for (int64_t i = 0; i < given.num_bad; ++i) {
        const int64_t length = given.bad_first[i + 1] - given.bad_first[i];
        if (length > row_.ids) {
            fail(DI_BAD_CALL, "a bad word of %lld tokens, allowed %d", (long long)length, row_.ids);
        }
    }
    how_[(size_t)slot] = given;
    SlotHead& h = head(slot);
    h.t = prompt_ids + answer_ids;
    h.n = h.t - 1;
    h.answered = answer_ids;
    h.drafted = 0;
    int64_t* const tail = drafts(slot) - row_.ids;
    std::fill(tail, tail + row_.ids, -1);
    push(slot, prompt + std::max<int64_t>(0, prompt_ids - row_.ids), std::min<int64_t>(prompt_ids, row_.ids));
    push(slot, answer + std::max<int64_t>(0, answer_ids - row_.ids), std::min<int64_t>(answer_ids, row_.ids));
    if (!penalised(slot)) return;
    uint32_t* const c = counts(slot);
    std::memset(c, 0, sizeof *c * (size_t)row_.vocab);
    for (int64_t i = 0; i < prompt_ids; ++i) c[prompt[i]] |= PROMPT;
    for (int64_t i = 0; i < answer_ids; ++i) c[answer[i]] += 1;
}

// At most as many as the tail holds.
void Slots::push(int32_t slot, const int64_t* ids, int64_t count) {
    int64_t* const tail = drafts(slot) - row_.ids;
    std::memmove(tail, tail + count, sizeof *tail * (size_t)(row_.ids - count));
    std::memcpy(tail + row_.ids - count, ids, sizeof *tail * (size_t)count);
}

void Slots::take(int32_t slot, const int64_t* ids, int64_t count) {
    push(slot, ids, count);
    SlotHead& h = head(slot);
    h.t += count;
    h.answered += count;
    h.drafted = 0;
    if (!penalised(slot)) return;
    for (int64_t i = 0; i < count; ++i) counts(slot)[ids[i]] += 1;
}
