// The integers of a step as kernels read them on a device: one block, filled on the host and brought over by one copy.
// Where the arrays lie follows from the most rows of each axis that the block is for, so that launches which were
// recorded for so many rows find them at the same addresses in every step.
#ifndef DEEPINFER_DEVICE_INTEGERS_H
#define DEEPINFER_DEVICE_INTEGERS_H
#include "../table.h"

struct Rows {
    int64_t of[DI_MAX_AXES] = {};
    bool operator==(const Rows& other) const;
};

// Offsets of the arrays in the block.
struct Places {
    struct Axis {
        int64_t rows, seq, step_row, first, pos;
    };
    Axis axis[DI_MAX_AXES];
    int64_t slot, c, floor, from_step, from_kept, valid_step, valid_kept, token_ids, lookback, end;
    int64_t follow, source, draft, verified, follow_end;  // following.h; behind the others, where steps are sent ahead
    int64_t draws, draws_end;                             // behind those, where a step draws

    Places() = default;
    Places(const Table& table, const Rows& most);
};

// Writes a step into the block at `to`.
void write_integers(char* to, const Places& places, const DiStep& step, int32_t axes);

#endif
