// The engine whose kernels run on a device with memory of its own. The host fills the integers of a step, launches, and
// copies back what is asked for; values, rings, blocks and weights stay on the device.
#ifndef DEEPINFER_DEVICE_ENGINE_H
#define DEEPINFER_DEVICE_ENGINE_H
#include "../engine.h"
#include "device.h"
#include "integers.h"

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

  protected:
    void run_entry(int32_t entry) override;
    const char* output_rows(int32_t entry, const char* name, int64_t* row_bytes) override;
    void fetch(int32_t entry) override;
    char* state_base(int32_t state) const override;
    bool judges(const DiSampling& how) const override;

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

    DeviceKernels kernels_;
    std::unique_ptr<Device> device_;
    char *arena_ = nullptr, *scratch_ = nullptr, *rings_ = nullptr, *pages_ = nullptr;
    char *integers_ = nullptr, *tables_ = nullptr, *weights_ = nullptr;
    char* constants_ = nullptr;          // of all kernels, where the engine has any
    std::vector<char*> sent_;            // by entry: the integers on their way
    int32_t* tables_sent_ = nullptr;     // block tables as the device has them
    char* answers_ = nullptr;            // outputs that were asked for
    char* row_logits_ = nullptr;         // of a row that the host draws from
    std::vector<char> draw_scratch_;
    bool fetched_ = false;               // all of the last run are there
    std::vector<char> on_the_way_;       // by entry: its integers may still be read by a copy
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
