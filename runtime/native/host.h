// The engine whose kernels are functions of a shared object, run by threads of this process.
#ifndef DEEPINFER_HOST_H
#define DEEPINFER_HOST_H
#include "ahead.h"
#include "engine.h"
#include "team.h"

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
    std::vector<double> microseconds;                  // by phase, summed over the tiles of a row loop
    std::vector<int64_t> tile_bytes;                   // by argument: bytes of a row if it holds one tile, else 0
};

class HostEngine final : public DiEngine {
  public:
    explicit HostEngine(const std::string& lib_dir);
    void allocate(int32_t slots, int32_t blocks, int32_t threads) override;
    void profile(bool on, const double** times, int32_t* launches) override;
    void place(const int32_t* cpus, int32_t count) override;
    void submit(const DiWork* work, const DiOutcome* out) override;
    void finish() override;
    bool sends_ahead() const override { return true; }

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
    std::vector<int32_t> cpus_;  // where threads run, empty: anywhere
    int32_t placed_ = 0;         // how often that was said
    Clock::time_point mark_;     // until when phases have been timed
    Team team_;                  // these last: threads end before what they work on
    Ahead ahead_;

    struct Work;

    void make_plan(int32_t entry);
    void settle() const;
    void loop(const EntryRow& entry, Plan& plan, size_t first);
    void one(const EntryRow& entry, Plan& plan, size_t phase, const Tile& tile);
    void commit(const Plan& plan, const Phase& phase, int64_t seq) const;
};

#endif
