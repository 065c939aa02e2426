// Blocks of drafts behind the last tokens of sequences.
#include <cmath>
#include <cstring>

#include "engine.h"
#include "fault.h"

// Rows of a block behind the last token of each sequence.
void DiEngine::fill_drafts(const DiWork& work, const int32_t* asked, int32_t count) {
    const int32_t m = table_.sequence.drafts;
    const int64_t width = table_.lookback + 1;
    for (int32_t k = 0; k < count; ++k) {
        const DiRow& r = work.rows[asked[k]];
        const SlotHead& h = standing(r.slot);
        const DiSampling& how = slot_states_.how(r.slot);
        drawing_.seqs[(size_t)k] = DiSeq{r.slot, m, m, m, h.n, r.floor, r.start_step, r.start_kept, r.blocks,
                                         r.num_blocks, 0};
        const int64_t* const last = slot_states_.drafts(r.slot) - 1;
        for (int32_t j = 0; j < m; ++j) {
            const int64_t row = (int64_t)k * m + j;
            drawing_.ids[(size_t)row] = j ? table_.sequence.filler : *last;
            for (int64_t b = 0; b < width; ++b) {
                const int64_t id = b < j ? table_.sequence.filler : h.n + j - b < 0 ? -1 : last[j - b];
                drawing_.lookback[(size_t)(row * width + b)] = id;
            }
        }
        DiDraw& d = drawing_.draws[(size_t)k] = DiDraw{};
        d.how = &how;
        d.counts = slot_states_.counts(r.slot);
        d.recent = last + 1;
        d.answered = h.answered;
        d.mode = DI_DRAW_CHOOSE;
        d.noise = how.mode == DI_REJECTION ? DI_NOISE_DRAFT : DI_NOISE_SHARED;
        d.round = h.n;
        d.bare = 1;
    }
    step_.fill(table_.entries[(size_t)drawing_.draft], count, drawing_.seqs.data(), drawing_.ids.data(),
               drawing_.lookback.data(), nullptr);
    step_.draw(drawing_.draws.data());
}

void DiEngine::draft_some(const DiWork& work, const DiOutcome& out, const int32_t* asked, int32_t count) {
    fill_drafts(work, asked, count);
    run_entry(drawing_.draft);
    int64_t bytes = 0;
    const int64_t* const tokens = (const int64_t*)output_rows(drawing_.draft, "tokens", &bytes);
    take_drafts(work, out, asked, count, tokens, (const float*)output_rows(drawing_.draft, "confidence", &bytes));
}

// `tokens`, `stated`: [count][m] of the draft entry's outputs; sequences without a token have no drafts.
void DiEngine::take_drafts(const DiWork& work, const DiOutcome& out, const int32_t* asked, int32_t count,
                           const int64_t* tokens, const float* stated) {
    const int32_t m = table_.sequence.drafts;
    const int64_t vocab = table_.sequence.vocab;
    const float* logits = nullptr;  // many, and only rejection wants them
    int64_t bytes = 0;
    for (int32_t k = 0; k < count; ++k) {
        const int32_t i = asked[k], slot = work.rows[i].slot;
        if (!out.chosen[i]) continue;
        int64_t* const drafts = slot_states_.drafts(slot);
        float* const confidence = slot_states_.confidence(slot);
        int32_t found = 0;
        for (; found < m && tokens[(int64_t)k * m + found] >= 0; ++found) {
            drafts[found] = tokens[(int64_t)k * m + found];
            confidence[found] = stated ? 1.0f / (1.0f + std::exp(-stated[(int64_t)k * m + found])) : NAN;
        }
        slot_states_.head(slot).drafted = out.drafted[i] = found;
        std::memcpy(out.drafts + (int64_t)i * m, drafts, sizeof *drafts * (size_t)found);
        std::memcpy(out.confidence + (int64_t)i * m, confidence, sizeof *confidence * (size_t)found);
        if (slot_states_.how(slot).mode == DI_REJECTION) {
            if (!logits) logits = (const float*)output_rows(drawing_.draft, "draft_logits", &bytes);
            if (!logits) fail(DI_BAD_TABLE, "the draft entry has no output draft_logits");
            const int64_t size = m * vocab;
            std::memcpy(slot_states_.logits(slot), logits + k * size, sizeof *logits * (size_t)size);
        }
    }
}
