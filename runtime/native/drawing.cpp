// A step of the loop: rows of prefills and decodes run, tokens are chosen behind them, drafts are judged and made.
#include "drawing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "busy.h"
#include "engine.h"
#include "fault.h"

static_assert(sizeof(DiRow) == 96, "ROW of runtime/executor.py");
static_assert(sizeof(DiSampling) == 152, "RECORD of runtime/native_sampling.py");
static_assert(sizeof(DiDraw) == 112, "DRAW of tests/cpu/test_kernels_draw.py");

Drawing::Drawing(const Table& table)
    : seqs((size_t)table.limit[DI_AXIS_SEQ]),
      confidence(seqs.size()),
      ids((size_t)table.limit[DI_AXIS_STEP]),
      lookback((size_t)(table.limit[DI_AXIS_STEP] * (table.lookback + 1))),
      draws((size_t)std::max(table.limit[DI_AXIS_WANTED], table.limit[DI_AXIS_SEQ])) {
    for (size_t e = 0; e < table.entries.size(); ++e) {
        const std::string& name = table.entries[e].name;
        if (name == "step") step = (int32_t)e;
        if (name == "sample") sample = (int32_t)e;
        if (name == "draft") draft = (int32_t)e;
    }
    const int64_t m = table.sequence.drafts;
    shares.reserve(seqs.size() * (size_t)std::max<int64_t>(m, 1));
    asked.reserve(seqs.size());
    if (draft < 0 || m == 0) return;
    const int64_t* most = table.entries[(size_t)draft].limit;
    turn = std::min({most[DI_AXIS_STEP] / m, most[DI_AXIS_KEPT] / m, most[DI_AXIS_WANTED] / m, most[DI_AXIS_SEQ]});
    if (turn < 1) fail(DI_BAD_TABLE, "the draft entry has no room for one block of %lld drafts", (long long)m);
}

void share_drafts(int32_t count, int32_t budget, const float* const* confidence, int32_t* verified,
                  std::vector<Share>& shares) {
    int64_t all = 0;
    for (int32_t i = 0; i < count; ++i) all += verified[i];
    if (budget < 0 || all <= budget) return;
    shares.clear();
    for (int32_t i = 0; i < count; ++i) {
        double reach = 1.0;
        for (int32_t j = 0; j < verified[i]; ++j) {
            const float c = confidence[i][j];
            reach *= c == c ? (double)c : 1.0;
            shares.push_back(Share{reach, i, j});
        }
        verified[i] = 0;
    }
    std::nth_element(shares.begin(), shares.begin() + budget, shares.end(), [](const Share& a, const Share& b) {
        if (a.reach != b.reach) return a.reach > b.reach;
        return a.seq != b.seq ? a.seq < b.seq : a.draft < b.draft;
    });
    for (int32_t k = 0; k < budget; ++k) ++verified[shares[(size_t)k].seq];
}

void DiEngine::require_draws() const {
    if (!threads_) fail(DI_NOT_READY, "the engine has no memory yet");
    if (!table_.sequence.vocab || drawing_.step < 0 || drawing_.sample < 0) {
        fail(DI_BAD_CALL, "the engine was compiled without the entry sample");
    }
}

void DiEngine::begin(int32_t slot, const DiSampling* how, const int64_t* prompt, int64_t prompt_ids,
                     const int64_t* answer, int64_t answer_ids) {
    require_draws();
    DiSampling taken = *how;
    if (taken.mode == DI_REJECTION && !judges(taken)) taken.mode = DI_COUPLED;
    slot_states_.begin(slot, taken, prompt, prompt_ids, answer, answer_ids);
}

// Positions and ids of the rows; out: verified.
int32_t DiEngine::resolve(const DiWork& work, const DiOutcome& out) {
    const int64_t width = table_.lookback + 1;
    if (work.count < 1 || work.count > table_.limit[DI_AXIS_SEQ]) {
        fail(DI_OVER_LIMIT, "the batch has %d sequences, allowed 1..%lld", work.count,
             (long long)table_.limit[DI_AXIS_SEQ]);
    }
    for (int32_t i = 0; i < work.count; ++i) {
        const DiRow& r = work.rows[i];
        if (r.slot < 0 || r.slot >= slots_) {
            fail(DI_BAD_CALL, "sequence %d of the batch: slot %d, allowed 0..%d", i, r.slot, slots_ - 1);
        }
        const SlotHead& h = standing(r.slot);
        out.verified[i] = 0;
        drawing_.confidence[(size_t)i] = slot_states_.confidence(r.slot);
        if (!r.decode) continue;
        if (h.n < 0 || h.t != h.n + 1) {
            fail(DI_BAD_CALL, "sequence %d of the batch: slot %d has %lld rows and %lld ids before a decode", i, r.slot,
                 (long long)h.n, (long long)h.t);
        }
        out.verified[i] = std::max(0, std::min(r.rows - 1, h.drafted));
    }
    share_drafts(work.count, work.budget, drawing_.confidence.data(), out.verified, drawing_.shares);
    int64_t row = 0;
    for (int32_t i = 0; i < work.count; ++i) {
        const DiRow& r = work.rows[i];
        const int32_t rows = r.decode ? out.verified[i] + 1 : r.rows;
        if (rows < 1 || row + rows > table_.limit[DI_AXIS_STEP]) {
            fail(DI_OVER_LIMIT, "the batch has %lld rows up to its sequence %d, the engine was compiled for at most "
                 "%lld", (long long)row + rows, i, (long long)table_.limit[DI_AXIS_STEP]);
        }
        DiSeq& s = drawing_.seqs[(size_t)i];
        s = DiSeq{r.slot, rows, r.decode ? rows : r.kept, r.decode ? rows : r.wanted, r.c, r.floor, r.start_step,
                  r.start_kept, r.blocks, r.num_blocks, 0};
        int64_t* const ids = drawing_.ids.data() + row;
        int64_t* const back = drawing_.lookback.data() + row * width;
        if (r.decode) {
            s.c = standing(r.slot).n;
            const int64_t* const last = slot_states_.drafts(r.slot) - 1;
            for (int32_t j = 0; j < rows; ++j) {
                ids[j] = last[j];
                for (int64_t k = 0; k < width; ++k) back[j * width + k] = s.c + j - k < 0 ? -1 : last[j - k];
            }
        } else {
            std::memcpy(ids, work.token_ids + r.first, sizeof *ids * (size_t)rows);
            std::memcpy(back, work.lookback + r.first * width, sizeof *back * (size_t)(rows * width));
        }
        row += rows;
    }
    return work.count;
}

namespace {

// Where the log-probabilities of a row go.
void report(DiDraw& d, const DiOutcome& out, int64_t row, int32_t top) {
    if (top < 0) return;
    const int64_t at = row * (1 + out.top);
    d.top = std::min(top, out.top);
    d.logprobs = out.logprobs + at;
    d.ids = out.ids + at;
    d.ranks = out.ranks + at;
}

}  // namespace

void DiEngine::choose(const DiWork& work, const DiOutcome& out) {
    if (work.logits) copy_logits(work);
    if (fill_draws(work, out)) {
        step_.draw(drawing_.draws.data());
        run_entry(drawing_.sample);
    }
    int64_t row_bytes = 0;
    const int64_t* const tokens = (const int64_t*)output_rows(drawing_.sample, "tokens", &row_bytes);
    for (int32_t i = 0; i < work.count; ++i) accept(work.rows[i], i, tokens + out.wanted[i], out);
}

void DiEngine::copy_logits(const DiWork& work) {
    const char* logits = nullptr;
    int64_t row_bytes = 0, row = 0;
    for (int32_t i = 0; i < work.count; row += drawing_.seqs[(size_t)i++].wanted) {
        if (!work.logits[i]) continue;
        if (!logits) logits = output_rows(drawing_.step, "logits", &row_bytes);
        std::memcpy(work.logits[i], logits + row * row_bytes, (size_t)(drawing_.seqs[(size_t)i].wanted * row_bytes));
    }
}

// What the draws of the wanted rows have to know; how many rows there are.
int64_t DiEngine::fill_draws(const DiWork& work, const DiOutcome& out) {
    const int64_t vocab = table_.sequence.vocab;
    int64_t row = 0;
    for (int32_t i = 0; i < work.count; ++i) {
        const DiRow& r = work.rows[i];
        const DiSeq& s = drawing_.seqs[(size_t)i];
        const DiSampling& how = slot_states_.how(r.slot);
        const SlotHead& h = slot_states_.head(r.slot);
        const bool judged = how.mode == DI_REJECTION && how.temperature > 0.0;
        out.wanted[i] = (int32_t)row;
        for (int32_t w = 0; w < s.wanted; ++w, ++row) {
            DiDraw& d = drawing_.draws[(size_t)row] = DiDraw{};
            const bool draws = r.draws && (r.decode || w == s.wanted - 1);
            if (!draws) {  // the token is given, or only whether the logits are numbers is asked for
                const int64_t at = s.rows - s.wanted + w + 1;
                const int64_t behind = r.decode ? -1 : at < s.rows ? work.token_ids[r.first + at] : work.behind[i];
                d.mode = DI_DRAW_GIVEN;
                d.draft = std::max<int64_t>(behind, 0);
                if (!r.decode && behind >= 0) report(d, out, row, r.prompt_logprobs);
                continue;
            }
            const int32_t draft = r.decode ? w : 0;
            d.how = &how;
            d.mask = r.mask ? r.mask + draft * ((vocab + 31) / 32) : nullptr;
            d.counts = slot_states_.counts(r.slot);
            d.recent = slot_states_.drafts(r.slot) + draft;
            d.answered = h.answered + draft;
            d.uncounted = draft;
            d.mode = DI_DRAW_CHOOSE;
            d.noise = judged ? DI_NOISE_TARGET : DI_NOISE_SHARED;
            if (judged && draft < out.verified[i]) {
                d.mode = DI_DRAW_JUDGE;
                d.draft = slot_states_.drafts(r.slot)[draft];
                d.drafted = slot_states_.logits(r.slot) + draft * vocab;
            }
            report(d, out, row, r.logprobs);
        }
    }
    return row;
}

// Drafts stay as far as they are the tokens that their rows gave. `tokens`: of the wanted rows.
void DiEngine::accept(const DiRow& r, int32_t i, const int64_t* tokens, const DiOutcome& out) {
    const DiSeq& s = drawing_.seqs[(size_t)i];
    SlotHead& h = slot_states_.head(r.slot);
    const int32_t verified = out.verified[i];
    out.status[i] = out.chosen[i] = out.accepted[i] = out.drafted[i] = 0;
    if (!r.decode) h.n = s.c + s.rows;
    const int64_t n = h.n;
    out.n[i] = n;
    const int32_t room = h.drafted;
    h.drafted = 0;
    if (r.decode ? *tokens == -1 : std::find(tokens, tokens + s.wanted, -1) != tokens + s.wanted) {
        out.status[i] = -1;
        return;
    }
    if (!r.draws) {
        if (r.decode) out.n[i] = ++h.n;
        return;
    }
    if (!r.decode && h.t != h.n) {
        fail(DI_BAD_CALL, "sequence %d of the batch: a token behind row %lld of %lld", i, (long long)h.n,
             (long long)h.t);
    }
    const int64_t* const from = r.decode ? tokens : tokens + s.wanted - 1;
    int64_t* const to = out.tokens + (int64_t)i * (table_.sequence.drafts + 1);
    int32_t count = 0;
    for (;; ++count) {
        if (from[count] < 0 && count) {  // behind a draft that stays: fails by itself in the next step
            --count;
            break;
        }
        if (from[count] < 0) {
            out.status[i] = -2;
            out.n[i] = n + (r.decode ? 1 : 0);
            return;
        }
        to[count] = from[count];
        if (count == verified || count >= room || from[count] != slot_states_.drafts(r.slot)[count]) break;
    }
    ++count;
    slot_states_.take(r.slot, to, count);
    if (r.decode) h.n += count;
    out.n[i] = h.n;
    out.chosen[i] = count;
    out.accepted[i] = count - 1;
}

void DiEngine::draft(const DiWork& work, const DiOutcome& out) {
    std::vector<int32_t>& asked = drawing_.asked;
    asked.clear();
    for (int32_t i = 0; i < work.count; ++i) {
        if (work.rows[i].want_draft && out.chosen[i]) asked.push_back(i);
    }
    for (size_t first = 0; first < asked.size(); first += (size_t)drawing_.turn) {
        const size_t stop = std::min(asked.size(), first + (size_t)drawing_.turn);
        draft_some(work, out, asked.data() + first, (int32_t)(stop - first));
    }
}
