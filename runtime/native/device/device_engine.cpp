// Memory of an engine on a device: what is taken, what is copied there and back.
#include "device_engine.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "../fault.h"
#include "draws.h"

namespace {

const int64_t PAGE = 256;  // boundary of parts of the device's memory

int64_t paged(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

Rows limits(const int64_t* most) {
    Rows out;
    std::copy(most, most + DI_MAX_AXES, out.of);
    return out;
}

}  // namespace

std::unique_ptr<DiEngine> open_engine(const std::string& lib_dir) { return std::make_unique<DeviceEngine>(lib_dir); }

DeviceEngine::DeviceEngine(const std::string& lib_dir)
    : DiEngine(lib_dir), kernels_(read_kernels(lib_dir + "/kernels.json", table_)), device_(open_device(kernels_)),
      following_(table_.limit[DI_AXIS_SEQ]), pins_(table_.pins.size()), pin_axis_(table_.pins.size()) {
    load(lib_dir);
    load_constants(lib_dir + "/constants.bin");
    for (const EntryRow& e : table_.entries) {
        for (const Phase& p : e.phases) {
            for (int32_t a = 0; a < p.args; ++a) {
                const ArgWord& w = e.args[(size_t)(p.first_arg + a)];
                if (w.kind == 'n') pin_axis_[(size_t)w.index] = p.axis;
            }
        }
    }
}

void DeviceEngine::load(const std::string& lib_dir) {
    const std::string path = lib_dir + "/kernels.bin";
    std::ifstream in(path, std::ios::binary);
    if (!in) fail(DI_BAD_KERNELS, "%s: the compiled kernels cannot be read", path.c_str());
    const std::string images((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    for (DeviceKernel& k : kernels_.kernels) {
        for (Variant& v : k.variants) {
            for (Stage& s : v.stages) {
                if (s.offset < 0 || s.bytes < 1 || s.offset + s.bytes > (int64_t)images.size()) {
                    fail(DI_BAD_KERNELS, "%s: the kernel %s lies beyond its end", path.c_str(), k.symbol.c_str());
                }
                s.handle = device_->load(s, images.data() + s.offset);
            }
        }
    }
}

void DeviceEngine::load_constants(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string all((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    if (all.empty()) return;
    constants_ = device_->take((int64_t)all.size(), "constants of the kernels");
    device_->copy_in(constants_, all.data(), (int64_t)all.size());
    device_->wait("copying constants");
}

// ---- sizes ---------------------------------------------------------------------------------------------------------
// Entries of a row of the block tables: what a sequence can hold.
int64_t DeviceEngine::width(int32_t blocks) const {
    const int64_t most = table_.positions ? (table_.positions + table_.block_tokens - 1) / table_.block_tokens : blocks;
    return std::max<int64_t>(1, std::min<int64_t>(most, blocks));
}

int64_t DeviceEngine::scratch_bytes(int32_t blocks) const {
    const int64_t positions = width(blocks) * table_.block_tokens;
    int64_t most = PAGE;
    for (const EntryRow& e : table_.entries) {
        for (size_t i = 0; i < e.phases.size(); ++i) {
            const Phase& p = e.phases[i];
            if (p.kernel < 0) continue;
            int64_t rows = e.limit[p.axis];
            for (size_t head = 0; head <= i; ++head) {  // inside a row loop: those of a tile
                const Phase& loop = e.phases[head];
                if (loop.loop_phases && i < head + (size_t)loop.loop_phases) rows = std::min(rows, loop.loop_rows);
            }
            most = std::max(most, kernels_.kernels[(size_t)p.kernel].scratch(rows, positions));
        }
    }
    return most;
}

int64_t DeviceEngine::table_bytes(int32_t blocks) const {
    return paged(table_.limit[DI_AXIS_SEQ] * width(blocks) * (int64_t)sizeof(int32_t));
}

// Scratch here holds the integers of a step and the block tables as well.
Layout DeviceEngine::layout(int32_t slots, int32_t blocks, int32_t threads) const {
    Layout out = DiEngine::layout(slots, blocks, threads);
    out.scratch = scratch_bytes(blocks) + paged(Places(table_, limits(table_.limit)).draws_end) + table_bytes(blocks) +
                  after_bytes(AFTER_PARTS);
    return out;
}

const char* DeviceEngine::device(int64_t memory[2]) const {
    device_->memory(memory);
    return device_->name();
}

// ---- memory --------------------------------------------------------------------------------------------------------
void DeviceEngine::allocate(int32_t slots, int32_t blocks, int32_t threads) {
    if (threads_) fail(DI_BAD_CALL, "the engine has its memory already");
    layout_ = layout(slots, blocks, threads);
    const Places places(table_, limits(table_.limit));
    arena_ = device_->take(std::max(layout_.arena, PAGE), "values of a step");
    scratch_ = device_->take(scratch_bytes(blocks), "scratch of the kernels");
    integers_ = device_->take(places.draws_end, "integers of a step");
    tables_ = device_->take(table_bytes(blocks), "block tables");
    rings_ = device_->take(std::max(layout_.rings, PAGE), "rings of the sequences");
    pages_ = device_->take(std::max(layout_.pages, PAGE), "blocks of the cache");
    tables_sent_.assign((size_t)(table_bytes(blocks) / (int64_t)sizeof(int32_t)), 0);
    integers_out_.allocate(*device_, (size_t)(FLIGHTS * (2 + turns())), places.draws_end, "integers of a step");
    tables_out_.allocate(*device_, (size_t)(FLIGHTS * (1 + turns())), table_bytes(blocks), "block tables");
    int64_t answers = 0;
    for (const EntryRow& e : table_.entries) {
        std::vector<int64_t> at;
        int64_t end = 0;
        for (const auto& o : e.outputs) {
            const BufferRow& b = e.buffers[(size_t)o.second];
            at.push_back(end);
            end += paged(b.row_bytes * e.limit[b.axis]);
        }
        answer_at_.push_back(at);
        answers = std::max(answers, end);
    }
    answers_ = device_->take_host(std::max(answers, PAGE), "results of a step");
    if (table_.sequence.vocab) {
        const int64_t vocab = table_.sequence.vocab;
        const BufferRow* const logits = output_buffer(drawing_.step, "logits");
        if (!logits || logits->row_bytes != vocab * (int64_t)sizeof(float)) {
            fail(DI_BAD_TABLE, "the step has no logits of %lld f32 to draw from", (long long)vocab);
        }
        row_logits_ = device_->take_host(logits->row_bytes, "logits of a row");
        draw_scratch_.resize((size_t)host_draw_bytes(vocab));
        allocate_flights(slots);
    }
    slot_states_.allocate(slots);
    step_.bound(slots, blocks);
    slots_ = slots;
    blocks_ = blocks;
    threads_ = threads;
}

void* DeviceEngine::room(int64_t bytes) {
    if (weights_) fail(DI_BAD_CALL, "the weights of the engine have their memory already");
    weights_ = device_->take(std::max(bytes, PAGE), "weights");
    return weights_;
}

void DeviceEngine::copy(void* to, const void* from, int64_t bytes) {
    const bool there = device_->holds(to), here = device_->holds(from);
    if (there && here) {
        device_->copy_within(to, from, bytes);
    } else if (there) {
        device_->copy_in(to, from, bytes);
    } else if (here) {
        device_->copy_out(to, from, bytes);
    } else {
        std::memcpy(to, from, (size_t)bytes);
    }
}

char* DeviceEngine::state_base(int32_t state) const {
    return (table_.states[(size_t)state].paged ? pages_ : rings_) + layout_.offset[(size_t)state];
}

const char* DeviceEngine::output_rows(int32_t entry, const char* name, int64_t* row_bytes) {
    const EntryRow& e = table_.entries[(size_t)entry];
    for (size_t o = 0; o < e.outputs.size(); ++o) {
        if (e.outputs[o].first != name) continue;
        const BufferRow& b = e.buffers[(size_t)e.outputs[o].second];
        char* const to = answers_ + answer_at_[(size_t)entry][o];
        *row_bytes = b.row_bytes;
        if (!fetched_) {
            device_->copy_out(to, arena_ + b.offset, step_.rows(b.axis) * b.row_bytes);
            arrived();
            if (entry == drawing_.sample) draw_the_rest((int64_t*)to);
        }
        return to;
    }
    return nullptr;
}

int32_t DeviceEngine::draws_axis(int32_t entry) const {
    return entry == drawing_.draft ? (int32_t)DI_AXIS_SEQ : (int32_t)DI_AXIS_WANTED;
}

// Tokens of the rows whose draws the device has no kernel for; their logits are brought over one by one.
void DeviceEngine::draw_the_rest(int64_t* tokens) {
    const DiDraw* const draws = step_.view().draws;
    const BufferRow* const logits = output_buffer(drawing_.step, "logits");
    const DiAxis& rows = step_.view().axis[DI_AXIS_WANTED];
    for (int64_t r = 0; draws && r < rows.rows; ++r) {
        if (!draws_on_host(draws[r])) continue;
        device_->copy_out(row_logits_, arena_ + logits->offset + r * logits->row_bytes, logits->row_bytes);
        tokens[r] = host_draw(draws[r], (const float*)row_logits_, table_.sequence.vocab, rows.pos[r] + 1,
                              draw_scratch_.data());
    }
}

bool DeviceEngine::judges(const DiSampling& how) const { return !edits_drafts(how); }

// One wait for all of them.
void DeviceEngine::fetch(int32_t entry) {
    if (fetched_) return;
    const EntryRow& e = table_.entries[(size_t)entry];
    for (size_t o = 0; o < e.outputs.size(); ++o) {
        const BufferRow& b = e.buffers[(size_t)e.outputs[o].second];
        const int64_t bytes = step_.rows(b.axis) * b.row_bytes;
        if (bytes) device_->copy_out_later(answers_ + answer_at_[(size_t)entry][o], arena_ + b.offset, bytes);
    }
    device_->wait("running a step");
    arrived();
    fetched_ = true;
}

// Behind a wait for everything.
void DeviceEngine::arrived() {
    integers_out_.arrived(integers_out_.sent());
    tables_out_.arrived(tables_out_.sent());
}

// ---- what a step brings --------------------------------------------------------------------------------------------
// At most.
Rows DeviceEngine::rows_of_step() const {
    Rows out;
    for (int32_t a = 0; a < table_.axes; ++a) out.of[a] = step_.rows(a);
    if (!sending_ahead_ || !following_.any) return out;
    for (int32_t a = DI_AXIS_GROUPS; a < table_.axes; ++a) {  // wherever the sequences stand
        int64_t most = 0;
        for (int32_t s = 0; s < step_.view().seqs; ++s) most += (step_.view().seq[s].rows + table_.ratio[a] - 1) / table_.ratio[a];
        out.of[a] = std::min(most, table_.limit[a]);
    }
    return out;
}

void DeviceEngine::send(int32_t entry, const Places& places) {
    char* const block = integers_out_.next(*device_);
    write_integers(block, places, step_.view(), table_.axes);
    const bool draws = table_.sequence.vocab && (entry == drawing_.sample || entry == drawing_.draft);
    if (draws) write_draws((int64_t*)(block + places.draws), step_.view().draws, step_.rows(draws_axis(entry)));
    if (sending_ahead_) write_following(block, places, table_, following_, step_.view().seqs);
    device_->copy_in(integers_, block, draws ? places.draws_end : sending_ahead_ ? places.follow_end : places.end);
    if (table_.entries[(size_t)entry].uses_pages) send_tables();
    send_pins(table_.entries[(size_t)entry]);
}

// Rows of the tables that changed; as a rule a decoding sequence gets a block once in many steps.
void DeviceEngine::send_tables() {
    const DiStep& step = step_.view();
    const int64_t width = this->width(blocks_);
    int32_t* out = nullptr;
    for (int32_t s = 0; s < step.seqs; ++s) {
        const DiSeq& seq = step.seq[s];
        const int64_t need = (seq.c + seq.rows + step.block_tokens - 1) / step.block_tokens;
        if (need > width) {
            fail(DI_OVER_LIMIT, "a sequence of %lld blocks, allowed %lld", (long long)need, (long long)width);
        }
        int32_t* const row = tables_sent_.data() + s * width;
        const size_t bytes = (size_t)need * sizeof *row;
        if (!std::memcmp(row, seq.blocks, bytes)) continue;
        if (!out) out = (int32_t*)tables_out_.next(*device_);
        std::memcpy(row, seq.blocks, bytes);
        std::memcpy(out + s * width, row, bytes);
        device_->copy_in(tables_ + s * width * (int64_t)sizeof *row, out + s * width, (int64_t)bytes);
    }
}

// Selections from outside are for tests and evaluation: their memory is taken when the first one comes.
void DeviceEngine::send_pins(const EntryRow& entry) {
    if (!pinned(entry)) return;
    for (size_t i = 0; i < pins_.size(); ++i) {
        const int32_t* const given = step_.pin((int32_t)i);
        if (!given) continue;
        const int64_t row = table_.pins[i].k * (int64_t)sizeof *given;
        if (!pins_[i]) pins_[i] = device_->take(row * table_.limit[pin_axis_[i]], "pinned selections");
        device_->copy_in(pins_[i], given, row * step_.rows(pin_axis_[i]));
    }
}

bool DeviceEngine::pinned(const EntryRow& entry) const {
    for (const ArgWord& a : entry.args) {
        if (a.kind == 'n' && step_.pin(a.index)) return true;
    }
    return false;
}
