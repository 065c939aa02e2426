// Steps that are sent while others run. Launches, copies and results of a step are put in the device's queue without a
// wait; what the host does not know of its sequences yet, kernels put in (following.h). When the host waits for a step,
// tokens and drafts of it have been copied, and slots are brought up to date as behind a step that was waited for at once.
#include <algorithm>
#include <cstring>

#include "../busy.h"
#include "../fault.h"
#include "device_engine.h"
#include "draws.h"

namespace {

const int64_t BOUNDARY = 256;

int64_t even(int64_t bytes) { return (bytes + BOUNDARY - 1) / BOUNDARY * BOUNDARY; }

}  // namespace

// Runs of the draft entry in one step.
int64_t DeviceEngine::turns() const {
    return drawing_.turn ? (table_.limit[DI_AXIS_SEQ] + drawing_.turn - 1) / drawing_.turn : 0;
}

// Of the first `parts` of what is kept behind a step: rows, last ids, drafts of each sequence.
int64_t DeviceEngine::after_bytes(int parts) const {
    const int64_t words[AFTER_PARTS] = {1, table_.lookback + 1, table_.sequence.drafts};
    int64_t bytes = 0;
    for (int i = 0; i < parts && table_.sequence.vocab; ++i) bytes += even(words[i] * table_.limit[DI_AXIS_SEQ] * (int64_t)sizeof(int64_t));
    return bytes;
}

void DeviceEngine::allocate_flights(int32_t slots) {
    const int64_t seqs = table_.limit[DI_AXIS_SEQ], m = table_.sequence.drafts;
    const int64_t bytes = table_.limit[DI_AXIS_WANTED] * 8 + seqs * m * 8 + seqs * m * 4;
    after_ = device_->take(after_bytes(AFTER_PARTS), "ends of a step");
    for (size_t i = 0; i < FLIGHTS; ++i) {
        results_.push_back(device_->take_host(bytes, "results of a step"));
        device_->post(i);
    }
    ahead_.resize((size_t)slots);
}

const SlotHead& DeviceEngine::standing(int32_t slot) const {
    const Ahead& a = ahead_[(size_t)slot];
    return a.flight > landed_ ? a.head : slot_states_.head(slot);
}

// Whether all that a step needs is on the device, or known to the host.
bool DeviceEngine::can_fly(const DiWork& work) const {
    if (!sends_ahead() || profiling_) return false;
    int64_t drafts = 0;
    for (int32_t i = 0; i < work.count; ++i) {
        const DiRow& r = work.rows[i];
        if (r.slot < 0 || r.slot >= slots_) return false;  // said where rows are checked
        const Ahead& a = ahead_[(size_t)r.slot];
        const DiSampling& how = slot_states_.how(r.slot);
        if (r.mask || (work.logits && work.logits[i]) || r.logprobs >= 0 || r.prompt_logprobs >= 0) return false;
        if (r.decode && a.flight > landed_ && (!a.goes_on || a.flight != flown_)) return false;
        if (r.decode) drafts += std::max(0, std::min(r.rows - 1, standing(r.slot).drafted));
        if (!r.draws) continue;
        DiDraw draw{};
        draw.how = &how;
        draw.mode = DI_DRAW_CHOOSE;
        draw.answered = slot_states_.head(r.slot).answered;
        if (draws_on_host(draw) || (how.mode == DI_REJECTION && drawing_.turn)) return false;
    }
    return work.budget < 0 || drafts <= work.budget;  // shares follow from confidences
}

void DeviceEngine::submit(const DiWork* work, const DiOutcome* out) {
    Busy busy(running_);
    if (flights_.size() >= FLIGHTS) fail(DI_BAD_CALL, "%d steps are in flight already", FLIGHTS);
    require_ready();
    try {
        if (can_fly(*work)) {
            fly(*work, *out);
            return;
        }
        for (Flight& f : flights_) land(f);
        flights_.push_back(Flight{*work, *out, {}, {}, 0, 0, 0, true});
        ++flown_;
        run_step(*work, *out);
        landed_ = flown_;
    } catch (...) {
        sending_ahead_ = false;
        flights_.clear();
        landed_ = flown_;
        throw;
    }
}

void DeviceEngine::finish() {
    Busy busy(running_);
    if (flights_.empty()) fail(DI_NOT_READY, "no step is in flight");
    Flight flight = std::move(flights_.front());
    flights_.pop_front();
    land(flight);
}

void DeviceEngine::fly(const DiWork& work, const DiOutcome& out) {
    fill_rows(work, out);
    follow(work, out);
    ++flown_;
    flights_.push_back(Flight{work, out, {}, {}, (size_t)(flown_ % FLIGHTS), 0, 0, false});
    Flight& flight = flights_.back();
    flight.seqs.assign(drawing_.seqs.begin(), drawing_.seqs.begin() + work.count);
    sending_ahead_ = true;
    run_entry(drawing_.step);
    if (const int64_t rows = fill_draws(work, out)) {
        step_.draw(drawing_.draws.data());
        run_entry(drawing_.sample);
        bring(drawing_.sample, "tokens", results_[flight.place], rows);
    }
    for (int32_t i = 0; i < work.count; ++i) {
        const DiRow& r = work.rows[i];
        const DiSeq& s = flight.seqs[(size_t)i];
        Ahead& a = ahead_[(size_t)r.slot];
        a = Ahead{SlotHead{}, flown_, i, -1, r.draws != 0};
        a.head.n = s.c + s.rows;
        a.head.t = a.head.n + 1;
        if (!r.want_draft || !r.draws || !drawing_.turn) continue;
        a.block = (int32_t)flight.asked.size();
        a.head.drafted = table_.sequence.drafts;
        flight.asked.push_back(i);
    }
    draft_ahead(flight);
    sending_ahead_ = false;
    device_->post(flight.place);
    flight.integers = integers_out_.sent();
    flight.tables = tables_out_.sent();
    last_entry_ = -1;
}

// Which sequences go on from the step before.
void DeviceEngine::follow(const DiWork& work, const DiOutcome& out) {
    following_.any = false;
    for (int32_t i = 0; i < work.count; ++i) {
        const DiRow& r = work.rows[i];
        const Ahead& a = ahead_[(size_t)r.slot];
        const bool follows = r.decode && a.flight > landed_;
        following_.source[(size_t)i] = follows ? a.at : -1;
        following_.draft[(size_t)i] = follows ? a.block : -1;
        following_.verified[(size_t)i] = out.verified[i];
        following_.any |= follows;
    }
}

void DeviceEngine::draft_ahead(Flight& flight) {
    const int64_t m = table_.sequence.drafts, limit = table_.limit[DI_AXIS_SEQ];
    char* const tokens = results_[flight.place] + table_.limit[DI_AXIS_WANTED] * 8;
    char* const stated = tokens + limit * m * 8;
    for (size_t first = 0; first < flight.asked.size(); first += (size_t)drawing_.turn) {
        const int32_t count = (int32_t)std::min(flight.asked.size() - first, (size_t)drawing_.turn);
        const int32_t* const asked = flight.asked.data() + first;
        fill_drafts(flight.work, asked, count);
        following_.any = true;
        for (int32_t k = 0; k < count; ++k) {
            following_.source[(size_t)k] = asked[k];
            following_.draft[(size_t)k] = -1;
            following_.verified[(size_t)k] = 0;
        }
        run_entry(drawing_.draft);
        const BufferRow& made = *output_buffer(drawing_.draft, "tokens");
        device_->copy_within(after_ + after_bytes(2) + (int64_t)first * m * 8, arena_ + made.offset, count * m * 8);
        bring(drawing_.draft, "tokens", tokens + (int64_t)first * m * 8, count);
        bring(drawing_.draft, "confidence", stated + (int64_t)first * m * 4, count);
    }
}

// An output of the entry that ran last, on its way to the host.
void DeviceEngine::bring(int32_t entry, const char* output, char* to, int64_t rows) {
    const BufferRow* const b = output_buffer(entry, output);
    if (b) device_->copy_out_later(to, arena_ + b->offset, rows * b->row_bytes);
}

// Waits for a step and takes what it brought.
void DeviceEngine::land(Flight& flight) {
    if (flight.ended) return;
    device_->await(flight.place, "running a step");
    integers_out_.arrived(flight.integers);
    tables_out_.arrived(flight.tables);
    flight.ended = true;
    ++landed_;
    const DiWork& work = flight.work;
    const int64_t* const tokens = (const int64_t*)results_[flight.place];
    std::copy(flight.seqs.begin(), flight.seqs.end(), drawing_.seqs.begin());
    for (int32_t i = 0; i < work.count; ++i) {
        const SlotHead& h = slot_states_.head(work.rows[i].slot);
        const bool failed = work.rows[i].decode && h.t != h.n + 1;  // in a step that it was sent behind
        const int64_t none[] = {-1};
        accept(work.rows[i], i, failed ? none : tokens + flight.out.wanted[i], flight.out);
    }
    if (flight.asked.empty()) return;
    const int64_t m = table_.sequence.drafts;
    const int64_t* const drafts = tokens + table_.limit[DI_AXIS_WANTED];
    const float* const stated = (const float*)(drafts + table_.limit[DI_AXIS_SEQ] * m);
    const bool states = output_buffer(drawing_.draft, "confidence");
    take_drafts(work, flight.out, flight.asked.data(), (int32_t)flight.asked.size(), drafts, states ? stated : nullptr);
}
