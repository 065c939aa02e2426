// The launch table as the runner holds it; see codegen/plan/launch.py for the text form and the meaning of each record.
#ifndef DEEPINFER_TABLE_H
#define DEEPINFER_TABLE_H
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"

struct ParamRow {
    std::string name;
    int32_t stack;  // tensors of a stack, 0: a single tensor
};

struct PinRow {
    std::string name;
    int32_t k;  // entries of a row
};

struct StateRow {
    std::string name;
    bool paged;
    int32_t rows;  // ring rows, or entries per block
    int32_t record_bytes;
    int32_t axis;   // rings: the axis that extends them
    int32_t ratio;  // paged: tokens per entry
};

struct KernelRow {
    std::string symbol;
    int64_t scratch_bytes;
    int64_t exchange_bytes;  // > 0: works in two stages
};

struct BufferRow {
    int32_t axis;
    int64_t row_bytes;
    int64_t offset;
    int64_t rows;  // > 0: lives inside a row loop and holds the rows of one tile
};

struct ArgWord {
    char kind;  // b buffer, p parameter, s state, n pin, i input, z nothing
    int32_t index;
};

enum { INPUT_TOKEN_IDS = 0, INPUT_POSITIONS = 1, INPUT_LOOKBACK = 2, INPUTS = 3 };

enum { MOST_ARGS = 256 };  // of one launch

// A launch, or (kernel < 0) the commit of a ring.
struct Phase {
    int32_t kernel = -1;
    int32_t state = -1;
    int32_t axis = 0;
    int64_t rows_per_item = 1;
    int64_t items_per_tile = 1;
    int64_t first_arg = 0;
    int32_t args = 0;
    int32_t stage = 0;
    int32_t loop_phases = 0;  // > 0: so many phases from this one on run for loop_rows rows at a time
    int64_t loop_rows = 0;
};

struct EntryRow {
    std::string name;
    int64_t arena_bytes = 0;
    int64_t limit[DI_MAX_AXES] = {};  // most rows of each axis in this entry
    bool uses_pages = false;
    std::vector<BufferRow> buffers;
    std::vector<int32_t> fresh;  // by state: buffer of this step's rows, or -1
    std::vector<ArgWord> args;
    std::vector<Phase> phases;
    std::vector<std::pair<std::string, int32_t>> outputs;
};

// What draws keep of a slot; vocab 0: the engine does not draw. Offsets are into the record of a slot.
struct SequenceRow {
    int64_t vocab = 0;
    int32_t drafts = 0;  // of a block
    int64_t filler = 0;  // id of the rows of a block behind its first
    int32_t ids = 0;     // last ids, right in front of the drafts
    int64_t tail_at = 0, drafts_at = 0, confidence_at = 0, counts_at = 0, logits_at = 0, end = 0;
};

struct Table {
    int32_t block_tokens = 0;
    int64_t positions = 0;  // most of a sequence, 0: not said
    int32_t lookback = 0;
    SequenceRow sequence;
    int32_t axes = DI_AXIS_GROUPS;
    int32_t ratio[DI_MAX_AXES] = {};  // of group axes
    int64_t limit[DI_MAX_AXES] = {};  // most rows of each axis
    std::vector<ParamRow> params;
    std::vector<StateRow> states;
    std::vector<PinRow> pins;
    std::vector<KernelRow> kernels;
    std::vector<EntryRow> entries;
};

// Reads and checks a launch table; a fault names file and line.
Table read_table(const std::string& path);

#endif
