// The contract between the fixed native runner and compiled kernels, and between the runner and its caller.
// Plain C layout, so that any language can call it. A change here raises DI_ABI.
#ifndef DEEPINFER_ABI_H
#define DEEPINFER_ABI_H
#include <stdint.h>

#define DI_ABI 1
#define DI_MAX_AXES 12   // 0 step, 1 kept, 2 wanted, 3 seq, 4.. one per compressed ratio of the launch table

enum { DI_AXIS_STEP = 0, DI_AXIS_KEPT = 1, DI_AXIS_WANTED = 2, DI_AXIS_SEQ = 3, DI_AXIS_GROUPS = 4 };

// One row axis of this step. kept and wanted hold the last rows of each sequence, so a row of theirs maps to any
// wider axis B as  first_B[s + 1] - (first_step[s + 1] - step_row).
typedef struct {
    int64_t rows;
    const int32_t* seq;       // [rows] sequence (index into DiStep.seqs)
    const int64_t* pos;       // [rows] position; groups: first position of the group; seq: c
    const int32_t* step_row;  // [rows] index on the step axis; groups: of the group's last position; seq: first row
    const int32_t* first;     // [seqs + 1] rows of sequence s are first[s] .. first[s + 1] - 1
} DiAxis;

typedef struct {
    int32_t slot;             // ring slot of the sequence
    int32_t rows;             // q: rows this step brings, positions c .. c + q - 1
    int32_t kept;             // last rows on the kept axis (0 .. q)
    int32_t wanted;           // last rows on the wanted axis (0 .. kept)
    int64_t c;                // position of the first row
    int64_t floor;            // no paged entry that covers a position below it is written
    int64_t start_step;       // first position whose window rows are valid, windows extended on the step axis
    int64_t start_kept;       // the same for windows extended on the kept axis
    const int32_t* blocks;    // block table: block b holds positions b*B .. b*B + B - 1
    int32_t num_blocks;
    int32_t reserved;
} DiSeq;

typedef struct {
    int32_t seqs;
    int32_t block_tokens;     // B
    const DiSeq* seq;
    DiAxis axis[DI_MAX_AXES];
    const int64_t* token_ids; // [step rows]
    const int64_t* lookback;  // [step rows][lookback_tokens + 1], newest first, -1 before the sequence start
    int32_t lookback_width;   // lookback_tokens + 1
    int32_t reserved;
    const int32_t* const* pins;  // [pins of the launch table] selections from outside, or null: [rows of the region][k]
} DiStep;

typedef struct { const void* data; const void* scale; } DiParam;  // a stack operand points to E of these

// Rings: record of slot s at position p lies at base + s*stride + (p % rows)*record_bytes. A view reads a position
// >= c of this step from fresh + (row on the state's axis)*record_bytes, older ones from the ring.
// Paged: entry j of a sequence lies at base + blocks[j*ratio / B]*stride + (j*ratio % B)/ratio*record_bytes.
typedef struct {
    char* base;
    char* fresh;              // this step's rows, not yet committed (rings only)
    int64_t stride;           // bytes from slot to slot, or from block to block
    int32_t record_bytes;
    int32_t rows;             // ring rows R (paged: entries per block)
    int32_t axis;             // axis the ring is extended on (DI_AXIS_STEP or DI_AXIS_KEPT)
    int32_t ratio;            // tokens per entry (rings: 1)
} DiState;

typedef struct {
    const DiStep* step;
    void* const* p;           // operands in the order of the KernelSpec: buffer, DiParam*, DiState*, pin, per role
    char* scratch;            // this thread's scratch, at least the bytes the kernel asked for, 64-byte aligned
    int64_t lo, hi;           // items lo .. hi - 1 are this call's
    int32_t axis;             // row axis of the launch
    int32_t reserved;
} DiArgs;

typedef void (*DiKernel)(const DiArgs*);

// ---- runner: called by the engine's user ------------------------------------------------------------------------
#ifdef __cplusplus
extern "C" {
#endif
typedef struct DiEngine DiEngine;

// All functions return 0 or one of these; di_error() then holds one sentence (of the calling thread).
enum {
    DI_BAD_TABLE = 1,   // lib/launch.txt is unreadable or contradicts itself
    DI_BAD_KERNELS = 2, // lib/kernels.so cannot be loaded, lacks a symbol or does not run on this machine
    DI_NO_MEMORY = 3,   // an allocation failed
    DI_OVER_LIMIT = 4,  // the batch has more rows than the engine was compiled for
    DI_BAD_CALL = 5,    // an argument of the caller is wrong
    DI_NOT_READY = 6    // not allocated, a parameter not bound, nothing run yet, or another run in progress
};
const char* di_error(void);
int di_abi(void);
// Reads lib/launch.txt, loads lib/kernels.so.
int di_open(const char* engine_lib_dir, DiEngine** out);
void di_close(DiEngine*);
// Bytes that di_allocate will take: [0] arena, [1] scratch of all threads, [2] rings, [3] paged pools.
int di_memory(DiEngine*, int32_t slots, int32_t blocks, int32_t threads, int64_t bytes[4]);
int di_allocate(DiEngine*, int32_t slots, int32_t blocks, int32_t threads);
// Tensor i of parameter `index` (i = 0 unless it is a stack). Memory stays the caller's.
int di_bind(DiEngine*, int32_t index, int32_t i, const void* data, const void* scale);
// Runs one entry over a batch. token_ids: concatenated rows; lookback: as DiStep; pins: null or one pointer per pin.
int di_run(DiEngine*, const char* entry, int32_t seqs, const DiSeq* seq, const int64_t* token_ids,
           const int64_t* lookback, const int32_t* const* pins);
// Output of the last run of an entry: pointer, rows, bytes per row. Valid until the next run.
int di_output(DiEngine*, const char* entry, const char* name, const void** data, int64_t* rows, int64_t* row_bytes);
// Raw access to a state (copy, spill, fork, prefix adoption): pointer to slot or block `unit` and its bytes.
int di_state(DiEngine*, const char* name, int32_t unit, void** data, int64_t* bytes);
// Microseconds of each launch and commit of the last run when profiling is on, in the order of the launch table.
int di_profile(DiEngine*, int32_t on, const double** times, int32_t* launches);
#ifdef __cplusplus
}
#endif
#endif
