#include "table.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "fault.h"

namespace {

const int FORMAT = 1;
const int64_t HEAD_BYTES = 64;    // of a slot's record
const int64_t MOST_DRAFTS = 64;   // of a block; what a draw has room for
const char* const AXIS_NAMES[] = {"step", "kept", "wanted", "seq"};

// One line: words are taken from left to right, each must be there and none may be left.
class Line {
  public:
    Line(const std::string& file, int number, const std::string& text) : file_(file), number_(number) {
        std::istringstream in(text.substr(0, text.find('#')));
        for (std::string w; in >> w;) words_.push_back(w);
    }

    bool empty() const { return words_.empty(); }
    bool more() const { return at_ < words_.size(); }

    bool next_is(const char* expected) const { return more() && words_[at_] == expected; }

    std::string word(const char* what) {
        if (!more()) bad(std::string("ends before ") + what);
        return words_[at_++];
    }

    void literal(const char* expected) {
        std::string w = word(expected);
        if (w != expected) bad("has '" + w + "' where '" + expected + "' belongs");
    }

    int64_t integer(const char* what, int64_t low, int64_t high) { return number(word(what), what, low, high); }

    int64_t number(const std::string& w, const char* what, int64_t low, int64_t high) {
        char* end = nullptr;
        errno = 0;
        long long v = std::strtoll(w.c_str(), &end, 10);
        std::string found = std::string("has ") + what + " " + w;
        if (errno || end == w.c_str() || *end) bad(found + ", which is no integer");
        if (v < low || v > high) bad(found + ", allowed " + std::to_string(low) + ".." + std::to_string(high));
        return v;
    }

    // The word after which a list record of this kind continues: records are numbered from 0 without gaps.
    void next_of(size_t have) {
        int64_t i = integer("a number", 0, INT32_MAX);
        if (i != (int64_t)have) bad("is number " + std::to_string(i) + " where " + std::to_string(have) + " is due");
    }

    void done() {
        if (more()) bad("goes on with '" + words_[at_] + "'");
    }

    [[noreturn]] void bad(const std::string& what) const {
        fail(DI_BAD_TABLE, "%s line %d: the record %s", file_.c_str(), number_, what.c_str());
    }

  private:
    const std::string& file_;
    int number_;
    std::vector<std::string> words_;
    size_t at_ = 0;
};

class Reader {
  public:
    explicit Reader(const std::string& path) : path_(path) {}

    Table read() {
        std::ifstream in(path_);
        if (!in) fail(DI_BAD_TABLE, "%s: the launch table cannot be read: %s", path_.c_str(), std::strerror(errno));
        std::string text;
        for (int number = 1; !ended_ && std::getline(in, text); ++number) {
            Line line(path_, number, text);
            if (!line.empty()) record(line);
        }
        if (!ended_) fail(DI_BAD_TABLE, "%s: the launch table ends without its last record 'end'", path_.c_str());
        if (t_.entries.empty()) fail(DI_BAD_TABLE, "%s: the launch table has no entry", path_.c_str());
        return std::move(t_);
    }

  private:
    const std::string path_;
    Table t_;
    bool begun_ = false, ended_ = false;
    int32_t loop_axis_ = 0, loop_phases_ = 0, loop_left_ = 0;  // of the row loop whose launches are being read
    int64_t loop_rows_ = 0;

    void record(Line& line) {
        std::string kind = line.word("a record");
        if (!begun_) {
            if (kind != "deepinfer-launch") line.bad("is not the head of a launch table");
            line.integer("the format", FORMAT, FORMAT);
            begun_ = true;
        } else if (kind == "block_tokens") {
            t_.block_tokens = (int32_t)line.integer("block_tokens", 1, INT32_MAX);
        } else if (kind == "lookback") {
            t_.lookback = (int32_t)line.integer("lookback", 0, 1 << 20);
        } else if (kind == "positions") {
            t_.positions = line.integer("positions", 1, INT64_MAX / 2);
        } else if (kind == "sequence") {
            sequence(line);
        } else if (kind == "axis") {
            axis(line);
        } else if (kind == "limit") {
            limit(line, t_.entries.empty() ? t_.limit : t_.entries.back().limit);
        } else if (kind == "param") {
            line.next_of(t_.params.size());
            ParamRow p{line.word("a name"), 0};
            line.literal("stack");
            p.stack = (int32_t)line.integer("stack", 0, INT32_MAX);
            t_.params.push_back(p);
        } else if (kind == "state") {
            state(line);
        } else if (kind == "pin") {
            line.next_of(t_.pins.size());
            PinRow p{line.word("a name"), 0};
            line.literal("k");
            p.k = (int32_t)line.integer("k", 1, INT32_MAX);
            t_.pins.push_back(p);
        } else if (kind == "kernel") {
            line.next_of(t_.kernels.size());
            KernelRow k{line.word("a symbol"), 0, 0};
            line.literal("scratch");
            k.scratch_bytes = line.integer("scratch", 0, INT64_MAX / 4096);
            if (line.more()) {
                line.literal("exchange");
                k.exchange_bytes = line.integer("exchange", 1, INT64_MAX / 4096);
            }
            t_.kernels.push_back(k);
        } else if (kind == "end") {
            if (loop_left_) line.bad("comes before the last launch of a row loop");
            ended_ = true;
        } else {
            entry_record(line, kind);
        }
        line.done();
    }

    void sequence(Line& line) {
        SequenceRow& s = t_.sequence;
        const auto field = [&](const char* name, int64_t low, int64_t high) {
            line.literal(name);
            return line.integer(name, low, high);
        };
        s.vocab = field("vocab", 1, INT32_MAX);
        s.drafts = (int32_t)field("drafts", 0, MOST_DRAFTS);
        s.filler = field("filler", 0, s.vocab - 1);
        s.ids = (int32_t)field("ids", std::max(1, t_.lookback), 1 << 20);
        int64_t* const places[] = {&s.tail_at, &s.drafts_at, &s.confidence_at, &s.counts_at, &s.logits_at, &s.end};
        const char* const names[] = {"tail", "drafts", "confidence", "counts", "logits", "end"};
        const int64_t sizes[] = {HEAD_BYTES, 8 * (int64_t)s.ids, 8 * (int64_t)s.drafts, 4 * (int64_t)s.drafts,
                                 4 * s.vocab, 4 * s.vocab * s.drafts};
        int64_t at = 0;
        for (int i = 0; i < 6; ++i) {
            *places[i] = field(names[i], at + sizes[i], INT64_MAX / 2);
            at = *places[i];
            if (at % 8) line.bad(std::string("has an odd place for ") + names[i]);
        }
        if (s.drafts_at != s.tail_at + 8 * (int64_t)s.ids) line.bad("parts the drafts from the ids before them");
    }

    void axis(Line& line) {
        if (t_.axes == DI_MAX_AXES) line.bad("is one axis more than the runner knows");
        line.next_of((size_t)t_.axes);
        line.literal("groups");
        t_.ratio[t_.axes++] = (int32_t)line.integer("a ratio", 1, INT32_MAX);
    }

    // Of the whole table, or of the entry at whose head it stands.
    void limit(Line& line, int64_t* most) {
        std::fill(most, most + DI_MAX_AXES, 0);
        while (line.more()) {
            std::string name = line.word("an axis");
            int64_t rows = line.integer("a limit", 1, INT32_MAX);
            const int a = axis_named(line, name);
            if (most != t_.limit && rows > t_.limit[a]) line.bad("raises the limit of " + name + " above the table's");
            most[a] = rows;
        }
        for (int a = 0; a < DI_AXIS_GROUPS; ++a) {
            if (!most[a]) line.bad(std::string("lacks a limit for ") + AXIS_NAMES[a]);
        }
        // A sequence of q rows completes at most q / r + 1 groups of r.
        for (int a = DI_AXIS_GROUPS; a < t_.axes; ++a) {
            if (!most[a]) most[a] = most[DI_AXIS_STEP] / t_.ratio[a] + most[DI_AXIS_SEQ];
        }
    }

    int axis_named(Line& line, const std::string& name) {
        for (int a = 0; a < DI_AXIS_GROUPS; ++a) {
            if (name == AXIS_NAMES[a]) return a;
        }
        for (int a = DI_AXIS_GROUPS; a < t_.axes; ++a) {
            if (name == "T/" + std::to_string(t_.ratio[a])) return a;
        }
        line.bad("names an unknown axis '" + name + "'");
    }

    void state(Line& line) {
        line.next_of(t_.states.size());
        StateRow s{line.word("a name"), false, 0, 0, DI_AXIS_STEP, 1};
        std::string kind = line.word("ring or paged");
        if (kind != "ring" && kind != "paged") line.bad("has kind '" + kind + "', allowed ring, paged");
        s.paged = kind == "paged";
        line.literal(s.paged ? "entries" : "rows");
        s.rows = (int32_t)line.integer("rows", 1, INT32_MAX);
        line.literal("record");
        s.record_bytes = (int32_t)line.integer("record", 1, INT32_MAX);
        line.literal(s.paged ? "ratio" : "axis");
        if (s.paged) {
            s.ratio = (int32_t)line.integer("ratio", 1, INT32_MAX);
            if ((int64_t)s.rows * s.ratio != t_.block_tokens) line.bad("has entries x ratio other than block_tokens");
        } else {
            s.axis = (int32_t)line.integer("axis", DI_AXIS_STEP, DI_AXIS_KEPT);
        }
        t_.states.push_back(s);
    }

    void entry_record(Line& line, const std::string& kind) {
        if (kind == "entry") {
            if (!t_.block_tokens || !t_.limit[DI_AXIS_STEP]) line.bad("comes before block_tokens and limit");
            EntryRow e;
            e.name = line.word("a name");
            for (const EntryRow& known : t_.entries) {
                if (known.name == e.name) line.bad("names an entry a second time: " + e.name);
            }
            if (loop_left_) line.bad("comes before the last launch of a row loop");
            line.literal("arena");
            e.arena_bytes = line.integer("arena", 0, INT64_MAX / 2);
            e.fresh.assign(t_.states.size(), -1);
            std::copy(t_.limit, t_.limit + DI_MAX_AXES, e.limit);
            t_.entries.push_back(e);
            return;
        }
        if (t_.entries.empty()) line.bad("has an unknown kind '" + kind + "'");
        EntryRow& e = t_.entries.back();
        if (kind == "buffer") {
            buffer(line, e);
        } else if (kind == "fresh") {
            fresh(line, e);
        } else if (kind == "launch") {
            launch(line, e);
        } else if (kind == "loop") {
            loop(line);
        } else if (kind == "commit") {
            commit(line, e);
        } else if (kind == "output") {
            std::string name = line.word("a name");
            e.outputs.emplace_back(name, index(line, "an output buffer", e.buffers.size()));
        } else {
            line.bad("has an unknown kind '" + kind + "'");
        }
    }

    int32_t index(Line& line, const char* what, size_t count) {
        return (int32_t)line.integer(what, 0, (int64_t)count - 1);
    }

    void buffer(Line& line, EntryRow& e) {
        line.next_of(e.buffers.size());
        BufferRow b{};
        line.literal("axis");
        b.axis = (int32_t)line.integer("axis", 0, t_.axes - 1);
        line.literal("row_bytes");
        b.row_bytes = line.integer("row_bytes", 0, INT64_MAX / INT32_MAX);
        line.literal("offset");
        b.offset = line.integer("offset", 0, INT64_MAX / 2);
        if (line.more()) {
            line.literal("rows");
            b.rows = line.integer("rows", 1, INT32_MAX);
        }
        int64_t stop = b.offset + b.row_bytes * (b.rows ? b.rows : e.limit[b.axis]);
        if (stop > e.arena_bytes) {
            line.bad("ends at byte " + std::to_string(stop) + " of an arena of " + std::to_string(e.arena_bytes));
        }
        e.buffers.push_back(b);
    }

    void fresh(Line& line, EntryRow& e) {
        int32_t s = index(line, "a state", t_.states.size()), b = index(line, "a buffer", e.buffers.size());
        const StateRow& state = t_.states[s];
        if (state.paged) line.bad("gives fresh rows to the paged state " + state.name);
        if (e.buffers[b].axis != state.axis || e.buffers[b].row_bytes != state.record_bytes) {
            line.bad("gives " + state.name + " a buffer of another axis or row size");
        }
        e.fresh[s] = b;
    }

    void commit(Line& line, EntryRow& e) {
        Phase p;
        if (loop_left_) line.bad("commits inside a row loop");
        p.state = index(line, "a state", t_.states.size());
        if (e.fresh[p.state] < 0) line.bad("commits a state without fresh rows: " + t_.states[p.state].name);
        e.phases.push_back(p);
    }

    // Holds for the launches that follow; they are checked as they come.
    void loop(Line& line) {
        if (loop_left_) line.bad("begins a row loop inside another one");
        loop_axis_ = (int32_t)line.integer("axis", DI_AXIS_STEP, DI_AXIS_KEPT);
        loop_rows_ = line.integer("rows", 1, INT32_MAX);
        loop_left_ = loop_phases_ = (int32_t)line.integer("launches", 2, INT32_MAX);
    }

    void in_loop(Line& line, Phase& p) {
        if (!loop_left_) return;
        if (p.axis != loop_axis_) line.bad("lies in a row loop of another axis");
        if (loop_rows_ % p.rows_per_item) line.bad("has rows per item that do not divide the rows of its loop");
        if (loop_left_ == loop_phases_) {
            p.loop_phases = loop_phases_;
            p.loop_rows = loop_rows_;
        }
        --loop_left_;
    }

    void launch(Line& line, EntryRow& e) {
        Phase p;
        p.kernel = index(line, "a kernel", t_.kernels.size());
        line.literal("items");
        p.axis = (int32_t)line.integer("axis", 0, t_.axes - 1);
        p.rows_per_item = line.integer("rows per item", 1, INT32_MAX);
        p.items_per_tile = line.integer("items per tile", 1, INT32_MAX);
        in_loop(line, p);
        if (line.next_is("stage")) {
            line.literal("stage");
            p.stage = (int32_t)line.integer("a stage", 1, 1);
        }
        line.literal("args");
        p.first_arg = (int64_t)e.args.size();
        for (; line.more(); ++p.args) e.args.push_back(argument(line, e));
        if (p.args > MOST_ARGS) line.bad("has more than " + std::to_string(MOST_ARGS) + " arguments");
        e.phases.push_back(p);
    }

    ArgWord argument(Line& line, EntryRow& e) {
        std::string w = line.word("an argument");
        size_t count = 0;
        switch (w[0]) {
            case 'b': count = e.buffers.size(); break;
            case 'p': count = t_.params.size(); break;
            case 's': count = t_.states.size(); break;
            case 'n': count = t_.pins.size(); break;
            case 'i': count = INPUTS; break;
            case 'z': count = 1; break;
            default: line.bad("has an argument '" + w + "', allowed b, p, s, n, i or z and a number");
        }
        ArgWord a{w[0], (int32_t)line.number(w.substr(1), "an argument", 0, (int64_t)count - 1)};
        if (a.kind == 's' && t_.states[a.index].paged) e.uses_pages = true;
        return a;
    }
};

}  // namespace

Table read_table(const std::string& path) { return Reader(path).read(); }
