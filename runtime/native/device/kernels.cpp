#include "kernels.h"

#include <algorithm>

#include "../fault.h"
#include "json.h"

namespace {

const int64_t FORMAT = 1;
const int64_t ENTRIES = 4096;  // scratch for entries is made for multiples of so many
const char COMMIT[] = "di_commit", FOLLOW[] = "di_follow", ACCEPT[] = "di_accept";

struct Word {
    const char *first, *second;
    Source source;
};

const Word WORDS[] = {
    {"launch", "row_first", ROW_FIRST}, {"launch", "row_stop", ROW_STOP}, {"axis", "rows", AXIS_ROWS},
    {"axis", "seq", AXIS_SEQ}, {"axis", "step_row", AXIS_STEP_ROW}, {"axis", "pos", AXIS_POS},
    {"axis", "first", AXIS_FIRST}, {"seq", "slot", SEQ_SLOT}, {"seq", "c", SEQ_C}, {"seq", "floor", SEQ_FLOOR},
    {"seq", "blocks", SEQ_BLOCKS}, {"seq", "width", SEQ_WIDTH}, {"step", "block_tokens", BLOCK_TOKENS},
    {"step", "lookback_width", LOOKBACK_WIDTH}, {"input", "token_ids", TOKEN_IDS}, {"input", "lookback", LOOKBACK},
    {"draw", "rows", DRAW_ROWS}, {"draw", "tokens", DRAWN}, {"follow", "words", INTEGERS},
    {"follow", "halves", INTEGERS}, {"follow", "table", FOLLOW_TABLE}, {"after", "n", AFTER_N},
    {"after", "ids", AFTER_IDS}, {"after", "drafts", AFTER_DRAFTS}, {"sequence", "drafts", DRAFTS},
    {"sequence", "filler", FILLER}};

const Word OF_OPERAND[] = {
    {"value", "", VALUE}, {"param", "data", PARAM_DATA}, {"param", "scale", PARAM_SCALE},
    {"state", "base", STATE_BASE}, {"state", "stride", STATE_STRIDE}, {"state", "fresh", STATE_FRESH},
    {"state", "has_fresh", STATE_HAS_FRESH}, {"state", "first", STATE_FIRST}, {"state", "from", STATE_FROM},
    {"state", "valid", STATE_VALID}, {"state", "ring", STATE_RING}, {"state", "record", STATE_RECORD},
    {"pin", "", PIN}, {"pin", "given", PIN_GIVEN}};

int32_t axis_named(const std::string& name, const Table& table) {
    static const char* const fixed[] = {"T", "T_kept", "T_wanted", "S"};
    for (int32_t a = 0; a < DI_AXIS_GROUPS; ++a) {
        if (name == fixed[a]) return a;
    }
    for (int32_t a = DI_AXIS_GROUPS; a < table.axes; ++a) {
        if (name == "T/" + std::to_string(table.ratio[a])) return a;
    }
    fail(DI_BAD_KERNELS, "a kernel reads rows of the axis %s, which the launch table does not know", name.c_str());
}

Parameter parameter(const Json& listed, const std::string& symbol, const Table& table) {
    const std::string& type = listed.items().at(1).text();
    const std::vector<Json>& where = listed.items().at(2).items();
    const int32_t bytes = type[0] == '*' || type == "i64" ? 8 : 4;
    const std::string& first = where.at(0).text();
    if (first == "constants") return Parameter{CONSTANTS, 0, bytes};
    if (first == "scratch") return Parameter{SCRATCH, 0, bytes};
    if (first == "axis_of") {
        const bool pos = where.at(2).text() == "pos";
        return Parameter{pos ? OTHER_POS : OTHER_FIRST, axis_named(where.at(1).text(), table), bytes};
    }
    if (where.size() > 1 && where[1].is_text()) {
        for (const Word& w : WORDS) {
            if (first == w.first && where[1].text() == w.second) return Parameter{w.source, 0, bytes};
        }
    } else if (where.size() > 1) {
        const std::string second = where.size() > 2 ? where[2].text() : "";
        for (const Word& w : OF_OPERAND) {
            if (first == w.first && second == w.second) return Parameter{w.source, (int32_t)where[1].integer(), bytes};
        }
    }
    fail(DI_BAD_KERNELS, "the kernel %s has a parameter %s that this runner does not know", symbol.c_str(),
         listed.items().at(0).text().c_str());
}

Stage stage(const Json& j) {
    Stage s;
    s.function = j.at("function").text();
    s.offset = j.at("offset").integer();
    s.bytes = j.at("bytes").integer();
    const Json& grid = j.at("grid");
    s.of = grid.at_or("of", 1);
    s.per = std::max<int64_t>(grid.at_or("per", 1), 1);
    s.plus = grid.at_or("plus", 0);
    s.times = grid.at_or("times", 1);
    s.fixed = grid.at_or("fixed", 0);
    s.warps = (int32_t)j.at_or("warps", 1);
    s.shared = (int32_t)j.at_or("shared", 0);
    s.kind = j.text_or("kind", "");
    return s;
}

DeviceKernel kernel(const std::string& symbol, const Json& j, const Table& table) {
    DeviceKernel k;
    k.symbol = symbol;
    for (const Json& p : j.at("parameters").items()) {
        k.parameters.push_back(parameter(p, symbol, table));
        if (k.parameters.back().source == CONSTANTS) k.parameters.back().index = (int32_t)j.at_or("constants", 0);
    }
    k.scratch_fixed = j.at("scratch").at("fixed").integer();
    k.scratch_row = j.at("scratch").at("row").integer();
    k.scratch_entry = j.at("scratch").at_or("entry", 0);
    k.ratio = std::max<int64_t>(j.at("scratch").at_or("ratio", 1), 1);
    for (const Json& v : j.at("variants").items()) {
        Variant made{v.at("rows").integer(), {}};
        for (const Json& s : v.at("stages").items()) made.stages.push_back(stage(s));
        k.variants.push_back(made);
    }
    if (k.variants.empty() || k.variants.back().rows) {
        fail(DI_BAD_KERNELS, "the kernel %s has no variant for any number of rows", symbol.c_str());
    }
    return k;
}

}  // namespace

int64_t Stage::blocks(int64_t rows) const {
    if (fixed) return fixed;
    return std::min(rows * of, (rows * of + per - 1) / per + plus) * times;
}

int64_t DeviceKernel::scratch(int64_t rows, int64_t positions) const {
    const int64_t entries = (positions / ratio + ENTRIES - 1) / ENTRIES * ENTRIES;
    return (scratch_fixed + scratch_row * rows + scratch_entry * entries + 255) / 256 * 256;
}

const Variant& DeviceKernel::variant(int64_t rows) const {
    for (const Variant& v : variants) {
        if (!v.rows || rows <= v.rows) return v;
    }
    return variants.back();
}

DeviceKernels read_kernels(const std::string& path, const Table& table) {
    const Json whole = Json::read(path);
    if (whole.at("format").integer() != FORMAT) {
        fail(DI_BAD_KERNELS, "%s: the table of kernels has format %lld, this runner reads %lld", path.c_str(),
             (long long)whole.at("format").integer(), (long long)FORMAT);
    }
    DeviceKernels out{whole.at("target").text(), whole.at("arch").text(), path.substr(0, path.rfind('/')),
                      whole.at_or("compiled", 1) != 0, {}, table.kernels.size()};
    const Json& all = whole.at("kernels");
    const auto add = [&](const std::string& symbol) -> size_t {
        for (const auto& f : all.fields()) {
            if (f.first != symbol) continue;
            out.kernels.push_back(kernel(symbol, f.second, table));
            return out.kernels.size() - 1;
        }
        return 0;
    };
    const auto must = [&](const std::string& symbol) {
        const size_t before = out.kernels.size();
        add(symbol);
        if (out.kernels.size() == before) {
            fail(DI_BAD_KERNELS, "%s: the kernel %s of the launch table is missing", path.c_str(), symbol.c_str());
        }
    };
    for (const KernelRow& k : table.kernels) must(k.symbol);
    must(COMMIT);
    out.follow = add(FOLLOW);
    out.accept = add(ACCEPT);
    return out;
}
