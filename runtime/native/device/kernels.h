// Kernels of a device as lib/kernels.json describes them; the page of the backend says what each word means.
#ifndef DEEPINFER_DEVICE_KERNELS_H
#define DEEPINFER_DEVICE_KERNELS_H
#include <string>
#include <vector>

#include "../table.h"

// Where the runner finds the value of a parameter. AXIS_*: of the launch's axis.
enum Source {
    ROW_FIRST, ROW_STOP, AXIS_ROWS, AXIS_SEQ, AXIS_STEP_ROW, AXIS_POS, AXIS_FIRST, OTHER_FIRST, OTHER_POS,
    SEQ_SLOT, SEQ_C, SEQ_FLOOR, SEQ_BLOCKS, SEQ_WIDTH, BLOCK_TOKENS, LOOKBACK_WIDTH, TOKEN_IDS, LOOKBACK, DRAW_ROWS,
    VALUE, PARAM_DATA, PARAM_SCALE, STATE_BASE, STATE_STRIDE, STATE_FRESH, STATE_HAS_FRESH, STATE_FIRST, STATE_FROM,
    STATE_VALID, STATE_RING, STATE_RECORD, PIN, PIN_GIVEN, SCRATCH, CONSTANTS, INTEGERS, FOLLOW_TABLE, AFTER_N,
    AFTER_IDS, AFTER_DRAFTS, DRAWN, DRAFTS, FILLER
};

struct Parameter {
    Source source;
    int32_t index;  // operand, axis of OTHER_*, or where the kernel's constants begin in lib/constants.bin
    int32_t bytes;  // 4 or 8
};

// One function of a binary. `handle`: of the device that loaded it.
struct Stage {
    std::string function;
    int64_t offset, bytes;           // in lib/kernels.bin
    int64_t of, per, plus, times;    // grid
    int64_t fixed;                   // > 0: so many blocks whatever the rows
    int32_t warps, shared;           // NVIDIA
    std::string kind;                // Ascend: the cores that a block is, else empty
    int32_t handle = -1;

    int64_t blocks(int64_t rows) const;
};

struct Variant {
    int64_t rows;  // most rows it is for, 0: any number
    std::vector<Stage> stages;
};

struct DeviceKernel {
    std::string symbol;
    std::vector<Parameter> parameters;
    int64_t scratch_fixed, scratch_row;
    int64_t scratch_entry, ratio;  // bytes for each cache entry that a sequence may have, positions of one
    std::vector<Variant> variants;

    const Variant& variant(int64_t rows) const;
    // Bytes of a launch for so many rows, where a sequence has at most so many positions.
    int64_t scratch(int64_t rows, int64_t positions) const;
};

struct DeviceKernels {
    std::string target, arch, folder;
    bool compiled;                      // else sources that only a stand-in for the device runs
    std::vector<DeviceKernel> kernels;  // in the order of the launch table, and behind them those of every engine:
    size_t commit;                      // the commit of rings
    size_t follow = 0, accept = 0;      // of steps that are sent ahead (following.h); 0: the target has none
};

// Faults with DI_BAD_KERNELS: a file that cannot be read, a kernel that is missing, an unknown word.
DeviceKernels read_kernels(const std::string& path, const Table& table);

#endif
