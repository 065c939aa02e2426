// The engine whose kernels run on a device with memory of its own. The host fills the integers of a step, launches, and
// copies back what is asked for; values, rings, blocks and weights stay on the device.
#ifndef DEEPINFER_DEVICE_ENGINE_H
#define DEEPINFER_DEVICE_ENGINE_H
#include <deque>

#include "../engine.h"
#include "device.h"
#include "following.h"
#include "integers.h"

// Steps that may be sent and not ended.
enum { FLIGHTS = 2 };
// Parts of what the device keeps of the sequences of the last step.
enum { AFTER_PARTS = 3 };

class DeviceEngine final : public DiEngine {
  public:
    explicit DeviceEngine(const std::string& lib_dir);
    Layout layout(int32_t slots, int32_t blocks, int32_t threads) const override;
    void allocate(int32_t slots, int32_t blocks, int32_t threads) override;
    void profile(bool on, const double** times, int32_t* launches) override;
    const char* device(int64_t memory[2]) const override;
    void* room(int64_t bytes) override;
    void copy(void* to, const void* from, int64_t bytes) override;
    void warm() override;
    void submit(const DiWork* work, const DiOutcome* out) override;
    void finish() override;
    bool sends_ahead() const override { return kernels_.follow && kernels_.accept; }

  protected:
    void run_entry(int32_t entry) override;
    const char* output_rows(int32_t entry, const char* name, int64_t* row_bytes) override;
    void fetch(int32_t entry) override;
    char* state_base(int32_t state) const override;
    bool judges(const DiSampling& how) const override;
    const SlotHead& standing(int32_t slot) const override;

  private:
    // Launches of one entry, recorded for so many rows.
    struct Graph {
        int32_t entry;
        Rows most;
        int32_t id;
    };
    // What the launches of a run share, and the rows that one of them is for.
    struct Work {
        const EntryRow& entry;
        const Rows& rows;
        const Places& places;
        int32_t axis;
        int64_t first, stop;
    };

    // A step that was sent. The host learns what it brought when it is waited for, and brings its slots up to date.
    struct Flight {
        DiWork work;
        DiOutcome out;
        std::vector<DiSeq> seqs;
        std::vector<int32_t> asked;      // sequences that draft, in the order of their blocks
        size_t place = 0;                // of FLIGHTS: its results and its post
        int64_t integers = 0, tables = 0;  // sent up to its end
        bool ended = false;              // its outcome is written
    };
    // What is on its way of a sequence: where it will stand at most, its place in the last flight, its block of drafts.
    struct Ahead {
        SlotHead head;
        int64_t flight = 0;  // number of the last flight that it is in
        int32_t at = -1, block = -1;
        bool goes_on = false;  // a token is chosen for it, so that a decode can follow
    };

    DeviceKernels kernels_;
    std::unique_ptr<Device> device_;
    char *arena_ = nullptr, *scratch_ = nullptr, *rings_ = nullptr, *pages_ = nullptr;
    char *integers_ = nullptr, *tables_ = nullptr, *weights_ = nullptr;
    char* constants_ = nullptr;          // of all kernels, where the engine has any
    Outbox integers_out_, tables_out_;
    std::vector<int32_t> tables_sent_;   // block tables as the device has them
    char* after_ = nullptr;              // how far sequences of the last step came: rows, ids, drafts
    Following following_;
    bool sending_ahead_ = false;         // the run is part of a flight
    std::deque<Flight> flights_;
    int64_t flown_ = 0, landed_ = 0;     // flights so far, and how many of them ended
    std::vector<Ahead> ahead_;           // by slot
    std::vector<char*> results_;         // by place of a flight: tokens, then drafts, then their confidences
    char* answers_ = nullptr;            // outputs that were asked for
    char* row_logits_ = nullptr;         // of a row that the host draws from
    std::vector<char> draw_scratch_;
    bool fetched_ = false;               // all of the last run are there
    std::vector<std::vector<int64_t>> answer_at_;  // by entry and output
    std::vector<char*> pins_;            // by pin, made when first given
    std::vector<int32_t> pin_axis_;
    std::vector<Graph> graphs_;
    bool profiling_ = false;
    std::vector<int32_t> marked_;        // phase behind each mark of the last run
    std::vector<double> microseconds_;   // by phase

    void load(const std::string& lib_dir);
    void load_constants(const std::string& path);
    int64_t width(int32_t blocks) const;
    int64_t scratch_bytes(int32_t blocks) const;
    int64_t table_bytes(int32_t blocks) const;
    Rows rows_of_step() const;
    void arrived();
    int64_t turns() const;
    int64_t after_bytes(int which) const;
    void allocate_flights(int32_t slots);
    bool can_fly(const DiWork& work) const;
    void fly(const DiWork& work, const DiOutcome& out);
    void follow(const DiWork& work, const DiOutcome& out);
    void draft_ahead(Flight& flight);
    void bring(int32_t entry, const char* output, char* to, int64_t rows);
    void land(Flight& flight);
    void launch_common(size_t kernel, int32_t entry, const Places& places);
    void send(int32_t entry, const Places& places);
    int32_t draws_axis(int32_t entry) const;
    void draw_the_rest(int64_t* tokens);
    void send_tables();
    void send_pins(const EntryRow& entry);
    const Graph* recorded(int32_t entry, const Rows& rows) const;
    void record(int32_t entry, const Rows& most);
    void launch_all(const EntryRow& entry, const Rows& rows, const Places& places);
    void launch_phase(const EntryRow& entry, size_t phase, Work work);
    void launch_kernel(const DeviceKernel& kernel, const ArgWord* args, const Work& work, const char* what);
    uint64_t value(const Parameter& p, const ArgWord* args, const Work& work) const;
    uint64_t state_value(const Parameter& p, int32_t state, const Work& work) const;
    bool pinned(const EntryRow& entry) const;
};

#endif
