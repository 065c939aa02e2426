// An open engine, whatever runs its kernels: table, slots, the rows of a step, and the loop's step. What has memory and
// launches kernels derives from it: HostEngine (host.h), DeviceEngine (device/device_engine.h).
#ifndef DEEPINFER_ENGINE_H
#define DEEPINFER_ENGINE_H
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "drawing.h"
#include "memory.h"
#include "slots.h"
#include "step.h"
#include "table.h"

using Clock = std::chrono::steady_clock;

struct DiEngine {
    explicit DiEngine(const std::string& lib_dir);
    virtual ~DiEngine() = default;
    DiEngine(const DiEngine&) = delete;
    DiEngine& operator=(const DiEngine&) = delete;

    virtual Layout layout(int32_t slots, int32_t blocks, int32_t threads) const;
    virtual void allocate(int32_t slots, int32_t blocks, int32_t threads) = 0;
    virtual void bind(int32_t index, int32_t i, const void* data, const void* scale);
    void tables(bool in_memory) { step_.tables(in_memory); }
    virtual void profile(bool on, const double** times, int32_t* launches) = 0;
    virtual void place(const int32_t* cpus, int32_t count);
    // Memory of a device; for the host there is nothing to do (abi.h).
    virtual const char* device(int64_t memory[2]) const;
    virtual void* room(int64_t bytes);
    virtual void copy(void* to, const void* from, int64_t bytes);
    virtual void warm();

    void run(const std::string& entry, int32_t seqs, const DiSeq* seq, const int64_t* token_ids,
             const int64_t* lookback, const int32_t* const* pins);
    void begin(int32_t slot, const DiSampling* how, const int64_t* prompt, int64_t prompt_ids, const int64_t* answer,
               int64_t answer_ids);
    void loop_step(const DiWork* work, const DiOutcome* out);
    // The same in two: a step is sent behind those that were, and the oldest is waited for. `out` is written and both
    // are read until then. An engine that cannot send ahead runs the step at once.
    virtual void submit(const DiWork* work, const DiOutcome* out);
    virtual void finish();
    virtual bool sends_ahead() const { return false; }
    void output(const std::string& entry, const std::string& name, const void** data, int64_t* rows,
                int64_t* row_bytes);
    void state(const std::string& name, int32_t unit, void** data, int64_t* bytes) const;

  protected:
    Table table_;
    std::vector<std::vector<DiParam>> params_;
    Step step_;
    Layout layout_;
    int32_t slots_ = 0, blocks_ = 0, threads_ = 0;  // threads_ > 0: allocated
    int32_t last_entry_ = -1;
    std::atomic<bool> running_{false};
    Slots slot_states_;
    Drawing drawing_;
    std::vector<std::vector<int32_t>> read_;  // by entry: parameters that its launches read

    // Runs an entry over the rows that the step was filled with; results are there when it returns.
    virtual void run_entry(int32_t entry) = 0;
    // Rows of an output of the entry that ran last, where the host can read them; null: there is no such output.
    virtual const char* output_rows(int32_t entry, const char* name, int64_t* row_bytes) = 0;
    // All outputs of the entry that ran last are about to be asked for.
    virtual void fetch(int32_t) {}
    virtual char* state_base(int32_t state) const = 0;
    // Where a slot will stand before the next step, at most; its ids may be unknown still.
    virtual const SlotHead& standing(int32_t slot) const { return slot_states_.head(slot); }
    // Whether drafts of a sequence can be judged by rejection; else they are coupled.
    virtual bool judges(const DiSampling&) const { return true; }

    const BufferRow* output_buffer(int32_t entry, const char* name) const;
    // Parts of a step of the loop, in their order.
    void require_ready() const;
    void run_step(const DiWork& work, const DiOutcome& out);
    void fill_rows(const DiWork& work, const DiOutcome& out);
    int64_t fill_draws(const DiWork& work, const DiOutcome& out);
    void accept(const DiRow& row, int32_t i, const int64_t* tokens, const DiOutcome& out);
    void fill_drafts(const DiWork& work, const int32_t* asked, int32_t count);
    void take_drafts(const DiWork& work, const DiOutcome& out, const int32_t* asked, int32_t count,
                     const int64_t* tokens, const float* stated);

  private:
    int32_t entry_named(const std::string& name) const;
    void check_bound(int32_t entry) const;
    void require_draws() const;
    int32_t resolve(const DiWork& work, const DiOutcome& out);
    void choose(const DiWork& work, const DiOutcome& out);
    void copy_logits(const DiWork& work);
    void draft(const DiWork& work, const DiOutcome& out);
    void draft_some(const DiWork& work, const DiOutcome& out, const int32_t* asked, int32_t count);
};

// What di_open returns: a runner library has one kind of engine.
std::unique_ptr<DiEngine> open_engine(const std::string& lib_dir);

#endif
