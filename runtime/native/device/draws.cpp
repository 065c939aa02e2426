#include "draws.h"

#include <algorithm>
#include <cstring>

#include "di_draw.h"

namespace {

int64_t bits(double x) { return DI_ISA::di_bits<int64_t>(x); }

}  // namespace

bool draws_on_host(const DiDraw& d) {
    if (d.bare || d.mode == DI_DRAW_NONE) return false;
    return d.logprobs || d.mode == DI_DRAW_JUDGE || (d.how && d.mode == DI_DRAW_CHOOSE && DI_ISA::di_edits(&d, false));
}

bool edits_drafts(const DiSampling& how) {
    DiDraw d{};
    d.how = &how;
    return DI_ISA::di_edits(&d, true);
}

void write_draws(int64_t* to, const DiDraw* draws, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r, to += DRAW_WORDS) {
        std::fill(to, to + DRAW_WORDS, 0);
        if (!draws) {
            to[DRAW_MODE] = DRAW_LARGEST;
            continue;
        }
        const DiDraw& d = draws[r];
        const bool host = draws_on_host(d);
        to[DRAW_MODE] = host ? (int64_t)DI_DRAW_GIVEN : d.mode;
        to[DRAW_TOKEN] = d.mode == DI_DRAW_GIVEN ? d.draft : 0;
        to[DRAW_BARE] = d.bare;
        if (host || d.mode != DI_DRAW_CHOOSE || !d.how) continue;
        to[DRAW_KEY] = (int64_t)DI_ISA::di_purpose_key(&d);  // the kernel mixes the position in
        to[DRAW_TEMPERATURE] = bits(d.how->temperature);
        to[DRAW_TOP_K] = d.how->top_k;
        to[DRAW_TOP_P] = bits(d.how->top_p);
        to[DRAW_MIN_P] = bits(d.how->min_p);
    }
}

int64_t host_draw_bytes(int64_t vocab) {
    return (vocab + 15) / 16 * 16 * (int64_t)(3 * sizeof(double) + sizeof(int32_t));
}

int64_t host_draw(const DiDraw& draw, const float* logits, int64_t vocab, int64_t position, char* scratch) {
    return DI_ISA::di_draw_row(&draw, logits, vocab, position, scratch);
}
