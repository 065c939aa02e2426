// The engine whose kernels are functions of a shared object, run by threads of this process.
#ifndef DEEPINFER_HOST_H
#define DEEPINFER_HOST_H
#include "barrier.h"
#include "engine.h"

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
    std::unique_ptr<Dealer[]> dealers;                 // by phase
    std::vector<double> microseconds;                  // by phase, summed over the tiles of a row loop
    std::vector<int64_t> tile_bytes;                   // by argument: bytes of a row if it holds one tile, else 0
};

class HostEngine final : public DiEngine {
  public:
    explicit HostEngine(const std::string& lib_dir);
    void allocate(int32_t slots, int32_t blocks, int32_t threads) override;
    void profile(bool on, const double** times, int32_t* launches) override;
    void place(const int32_t* cpus, int32_t count) override;

  protected:
    void run_entry(int32_t entry) override;
    const char* output_rows(int32_t entry, const char* name, int64_t* row_bytes) override;
    char* state_base(int32_t state) const override;

  private:
    Library library_;
    std::vector<DiKernel> kernels_;
    Block arena_, scratch_, rings_, pages_;
    std::vector<Plan> plans_;
    bool profiling_ = false;
    Barrier barrier_;
    std::vector<int32_t> cpus_;  // where threads run, empty: anywhere
    int32_t placed_ = 0;         // how often that was said

    void make_plan(int32_t entry);
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
