// An open engine: table, loaded kernels, memory, bound parameters, and one plan of execution per entry.
#ifndef DEEPINFER_ENGINE_H
#define DEEPINFER_ENGINE_H
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "barrier.h"
#include "drawing.h"
#include "memory.h"
#include "slots.h"
#include "step.h"
#include "table.h"

// A shared object, closed with the engine.
class Library {
  public:
    explicit Library(const std::string& path);
    ~Library();
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;
    DiKernel kernel(const std::string& symbol) const;

  private:
    std::string path_;
    void* handle_;
};

// Takes items 0 .. items - 1 of one phase; on a cache line of its own, since all threads write it.
struct alignas(64) Dealer {
    std::atomic<int64_t> next{0};
    int64_t items = 0;
    bool meet = true;  // all threads wait for each other after this phase
};

// Rows of a row loop that are at work; outside of one all rows.
struct Tile {
    int64_t first = 0;
    int64_t stop = INT64_MAX;
};

// What one entry needs at run time. Argument pointers are resolved once; only pins change from run to run.
struct Plan {
    std::vector<DiState> states;
    std::vector<void*> args;
    std::vector<std::pair<size_t, int32_t>> pin_args;  // (place in args, pin)
    std::vector<int32_t> params;                       // parameters that its launches read
    std::unique_ptr<Dealer[]> dealers;                 // by phase
    std::vector<double> microseconds;                  // by phase, summed over the tiles of a row loop
    std::vector<int64_t> tile_bytes;                   // by argument: bytes of a row if it holds one tile, else 0
};

using Clock = std::chrono::steady_clock;

struct DiEngine {
    explicit DiEngine(const std::string& lib_dir);
    DiEngine(const DiEngine&) = delete;
    DiEngine& operator=(const DiEngine&) = delete;

    void allocate(int32_t slots, int32_t blocks, int32_t threads);
    void bind(int32_t index, int32_t i, const void* data, const void* scale);
    void run(const std::string& entry, int32_t seqs, const DiSeq* seq, const int64_t* token_ids,
             const int64_t* lookback, const int32_t* const* pins);
    void begin(int32_t slot, const DiSampling* how, const int64_t* prompt, int64_t prompt_ids, const int64_t* answer,
               int64_t answer_ids);
    void loop_step(const DiWork* work, const DiOutcome* out);
    void output(const std::string& entry, const std::string& name, const void** data, int64_t* rows,
                int64_t* row_bytes) const;
    void state(const std::string& name, int32_t unit, void** data, int64_t* bytes) const;
    void profile(bool on, const double** times, int32_t* launches);
    Layout layout(int32_t slots, int32_t blocks, int32_t threads) const;
    void place(const int32_t* cpus, int32_t count);

  private:
    Table table_;
    Library library_;
    std::vector<DiKernel> kernels_;
    std::vector<std::vector<DiParam>> params_;
    Step step_;
    Block arena_, scratch_, rings_, pages_;
    Layout layout_;
    std::vector<Plan> plans_;
    int32_t slots_ = 0, blocks_ = 0, threads_ = 0;  // threads_ > 0: allocated
    int32_t last_entry_ = -1;
    bool profiling_ = false;
    std::atomic<bool> running_{false};
    Barrier barrier_;
    std::vector<int32_t> cpus_;  // where threads run, empty: anywhere
    int32_t placed_ = 0;         // how often that was said
    Slots slot_states_;
    Drawing drawing_;

    int32_t entry_named(const std::string& name) const;
    char* state_base(int32_t state) const;
    void make_plan(int32_t entry);
    void check_bound(const Plan& plan) const;
    void require_draws() const;
    void run_entry(int32_t entry);
    int32_t resolve(const DiWork& work, const DiOutcome& out);
    void choose(const DiWork& work, const DiOutcome& out);
    void accept(const DiRow& row, int32_t i, const int64_t* tokens, const DiOutcome& out);
    void draft(const DiWork& work, const DiOutcome& out);
    void draft_some(const DiWork& work, const DiOutcome& out, const int32_t* asked, int32_t count);
    const char* output_rows(int32_t entry, const char* name, int64_t* row_bytes) const;
    void deal(const EntryRow& entry, Plan& plan);
    void execute(const EntryRow& entry, Plan& plan);
    void settle(int32_t thread) const;
    void work(const EntryRow& entry, const Plan& plan, size_t phase, const Tile& tile, int32_t thread);
    void phases(const EntryRow& entry, Plan& plan, int32_t thread);
    void loop(const EntryRow& entry, Plan& plan, size_t first, int32_t thread, Clock::time_point& start);
    void one(const EntryRow& entry, Plan& plan, size_t phase, const Tile& tile, int32_t thread,
             Clock::time_point& start);
    void rewind_dealer(const EntryRow& entry, Plan& plan, size_t phase, int64_t row);
    void commit(const Plan& plan, const Phase& phase, int64_t seq);
};

#endif
