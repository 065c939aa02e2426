// The contract between the fixed native runner and compiled kernels, and between the runner and its caller.
// Plain C layout, so that any language can call it. A change here raises DI_ABI.
#ifndef DEEPINFER_ABI_H
#define DEEPINFER_ABI_H
#include <stdint.h>

#define DI_ABI 6
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

// How the tokens of a sequence are chosen (runtime/sampling.py). Lists stay the caller's as long as the sequence has
// its slot; ids in them are below the vocabulary.
typedef struct {
    int32_t mode;             // DI_GREEDY ..
    int32_t top_k;            // 0: all
    int32_t min_tokens;
    int32_t reserved;
    double temperature, top_p, min_p, repetition, frequency, presence;
    uint64_t key;             // draws are functions of (key, position, token, purpose) alone
    const int64_t* allowed;   // rising; null: all
    const int64_t* bias_ids;
    const double* bias;
    const int64_t* ends;      // not chosen before min_tokens
    const int64_t* bad;       // id sequences that are never completed: sequence i is bad[bad_first[i]] ..
    const int64_t* bad_first; // .. bad[bad_first[i + 1] - 1]
    int64_t num_allowed, num_bias, num_ends, num_bad;
} DiSampling;

enum { DI_GREEDY = 0, DI_COUPLED = 1, DI_REJECTION = 2 };

enum {
    DI_DRAW_NONE = 0,   // nothing
    DI_DRAW_CHOOSE = 1, // a token
    DI_DRAW_JUDGE = 2,  // the drafted token or another one, so that the result is a draw from the row
    DI_DRAW_GIVEN = 3   // the token is known; its log-probability is asked for
};

// What a draw of one row has to know. Token: -1 if the row's logits are no numbers, -2 if no token is left; always one
// where nothing is known of the row, or the draw is bare.
typedef struct {
    const DiSampling* how;    // null: the largest logit
    const uint32_t* mask;     // [ceil(V / 32)], bit 1: allowed; null: all are
    const uint32_t* counts;   // [V] how often the answer holds a token; the highest bit: the prompt holds it
    const int64_t* recent;    // ids before the token, the newest at recent[-1]; at least those of the longest bad word
    const float* drafted;     // DI_DRAW_JUDGE: [V], the logits that the draft was drawn from
    double* logprobs;         // null, or [1 + top] for the token and the most probable ones, and so ids and ranks
    int64_t* ids;
    int32_t* ranks;
    int64_t draft;            // DI_DRAW_JUDGE and DI_DRAW_GIVEN: the token
    int64_t answered;         // tokens of the answer so far
    int64_t round;            // DI_NOISE_DRAFT: sets this block of drafts apart from others over the same positions
    int32_t mode;
    int32_t noise;            // DI_NOISE_*
    int32_t uncounted;        // so many of the recent ids are not in `counts` yet
    int32_t top;
    int32_t bare;             // a draft: neither mask nor bad words nor min_tokens, and counts as they are
    int32_t reserved;
} DiDraw;

// Noise of a draw, a function of (key, position, token) and of its purpose. Drafts share that of the target, unless
// they are judged by rejection: then drafts, decisions and the draws of the target know nothing of each other.
enum { DI_NOISE_SHARED = 0, DI_NOISE_DRAFT = 1, DI_NOISE_TARGET = 2, DI_NOISE_DECISION = 3 };

typedef struct {
    int32_t seqs;
    int32_t block_tokens;     // B
    const DiSeq* seq;
    DiAxis axis[DI_MAX_AXES];
    const int64_t* token_ids; // [step rows]
    const int64_t* lookback;  // [step rows][lookback_tokens + 1], newest first, -1 before the sequence start
    int32_t lookback_width;   // lookback_tokens + 1
    int32_t tables_in_memory; // rows of lookup tables are not asked for ahead (di_tables)
    const int32_t* const* pins;  // [pins of the launch table] selections from outside, or null: [rows of the region][k]
    const DiDraw* draws;      // [rows of the axis that draws]; null: the largest logit of each row
} DiStep;

// One sequence of a step of the loop; the fields of DiSeq mean the same. Prefill: rows c .. c + rows - 1, ids given.
// Decode: the slot's last token and its drafts behind the rows it has; rows is 1 + most drafts to look at, all are kept
// and wanted.
typedef struct {
    int32_t slot;
    int32_t decode;           // 0: prefill
    int32_t rows, kept, wanted;
    int32_t first;            // prefill: where its ids begin
    int64_t c, floor, start_step, start_kept;
    const int32_t* blocks;
    const uint32_t* mask;     // [rows that draw][ceil(V / 32)], or null
    int32_t num_blocks;
    int32_t draws;            // a token is chosen behind the last row
    int32_t want_draft;
    int32_t logprobs;         // most probable tokens to report with each token; -1: none of it
    int32_t prompt_logprobs;  // the same for the given token behind each wanted row of a prefill
    int32_t reserved;
} DiRow;

typedef struct {
    const DiRow* rows;        // [count]
    const int64_t* token_ids; // of prefills
    const int64_t* lookback;  // [ids][lookback_tokens + 1]
    const int64_t* behind;    // [count] prefill: the given token behind the last row; -1: none
    float* const* logits;     // [count] where the logits of the wanted rows are copied to; null: not
    int32_t count;
    int32_t budget;           // drafts to verify in all; -1: as many as each row has room for
} DiWork;

// [count] each, or [count][..]; m: drafts of a block. Log-probabilities: [wanted rows of the step][1 + top].
typedef struct {
    int32_t *accepted, *verified, *chosen;  // drafts that stay, drafts looked at, tokens chosen
    int64_t* tokens;          // [count][m + 1]
    int64_t* n;               // rows that the slot has afterwards
    int32_t* status;          // 0, or -1: logits that are no numbers, or -2: no token left at position n
    int32_t* wanted;          // first wanted row of the sequence
    int32_t* drafted;
    int64_t* drafts;          // [count][m]
    float* confidence;        // [count][m], NaN: none is stated
    double* logprobs;
    int64_t* ids;
    int32_t* ranks;
    int32_t top;              // most that any row may ask for
    int32_t reserved;
} DiOutcome;

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
    int32_t stage;            // 1: the second half of a kernel that works in two, after all items of the first
    char* exchange;           // what the first half leaves to the second, the bytes the kernel asked for; of all threads
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
    DI_NOT_READY = 6,   // not allocated, a parameter not bound, nothing run yet, or another run in progress
    DI_DEVICE = 7       // the device or its driver is missing, too old, of another kind, or failed
};
const char* di_error(void);
int di_abi(void);
// Reads lib/launch.txt, loads lib/kernels.so.
int di_open(const char* engine_lib_dir, DiEngine** out);
void di_close(DiEngine*);
// Bytes that di_allocate will take: [0] arena, [1] scratch of all threads, [2] rings, [3] paged pools, [4] what draws
// keep of each slot.
int di_memory(DiEngine*, int32_t slots, int32_t blocks, int32_t threads, int64_t bytes[5]);
int di_allocate(DiEngine*, int32_t slots, int32_t blocks, int32_t threads);
// Tensor i of parameter `index` (i = 0 unless it is a stack). Memory stays the caller's. On a device: addresses in the
// memory of di_room, the tensors of a stack one after the other.
int di_bind(DiEngine*, int32_t index, int32_t i, const void* data, const void* scale);
// Whether the lookup tables are known to lie in memory. Where they do not (the default), kernels ask for their rows ahead,
// which costs a system call for each.
int di_tables(DiEngine*, int32_t in_memory);
// Runs one entry over a batch. token_ids: concatenated rows; lookback: as DiStep; pins: null or one pointer per pin.
int di_run(DiEngine*, const char* entry, int32_t seqs, const DiSeq* seq, const int64_t* token_ids,
           const int64_t* lookback, const int32_t* const* pins);
// Output of the last run of an entry: pointer, rows, bytes per row. Valid until the next run.
int di_output(DiEngine*, const char* entry, const char* name, const void** data, int64_t* rows, int64_t* row_bytes);
// A sequence takes a slot: how its tokens are chosen, its prompt and what of its answer is known. The next step of the
// slot is a prefill up to the last id, or decodes behind the last id but one.
int di_begin(DiEngine*, int32_t slot, const DiSampling*, const int64_t* prompt, int64_t prompt_ids,
             const int64_t* answer, int64_t answer_ids);
// One step of a loop: rows run, tokens are chosen, drafts are judged and made; see DiWork and DiOutcome.
int di_step(DiEngine*, const DiWork*, const DiOutcome*);
// The same in two calls, so that the next step can be sent while one runs: di_submit returns when the step is on its
// way, di_finish when the oldest of them has ended and its outcome is written. What DiWork and DiOutcome point to stays
// as it is until then. A decode goes on from where the step before it ends. Behind a fault nothing is in flight.
int di_submit(DiEngine*, const DiWork*, const DiOutcome*);
int di_finish(DiEngine*);
// Whether di_submit returns before the step has ended.
int di_sends_ahead(DiEngine*, int32_t* yes);
// Raw access to a state (copy, spill, fork, prefix adoption): address of slot or block `unit` and its bytes; what
// lies on a device only di_copy reaches. The state
// "sequence" is what draws keep of a slot; its lists belong to di_begin and are not part of it.
int di_state(DiEngine*, const char* name, int32_t unit, void** data, int64_t* bytes);
// What the engine runs on: "" for the host, else the device's name and its memory, [0] all and [1] free bytes.
int di_device(DiEngine*, const char** name, int64_t memory[2]);
// Memory of the device for weights, which lives as long as the engine; asked for once.
int di_room(DiEngine*, int64_t bytes, void** data);
// Copies between host memory, the memory of di_room, and states; `from` may change when it returns.
int di_copy(DiEngine*, void* to, const void* from, int64_t bytes);
// Does before the first step, with all parameters bound, what would else be done while serving.
int di_warm(DiEngine*);
// Microseconds of each launch and commit of the last run when profiling is on, in the order of the launch table.
int di_profile(DiEngine*, int32_t on, const double** times, int32_t* launches);
#ifdef __cplusplus
}
#endif
#endif
