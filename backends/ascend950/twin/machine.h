// The machine behind the interface: cores with pipes, on-chip memory that knows who touched it, global memory with
// extents, and fibres that take turns. One launch at a time.
#ifndef DI_TWIN_MACHINE_H
#define DI_TWIN_MACHINE_H
#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "include/di_asc.h"

namespace twin {

const int PIPES = 7, CORES = 3, PARTS = PIPES * CORES;  // a part: one pipe of one core of a block
const int GRANULE = 32;
const int FLAGS = 8, LOCKS = 32, CHANNELS = 16, MOST_WAITING = 15;
extern const char* const PIPE_NAMES[];
extern const char* const SPACE_NAMES[];
extern const int64_t CAPACITY[DI_SPACES];

// What is known to be over: for each part of the block, up to which of its epochs.
struct Clock {
    uint32_t t[PARTS] = {};
    void join(const Clock& other);
};

// The last accesses of 32 bytes of on-chip memory.
struct Granule {
    uint32_t written;          // a bit for each byte
    int32_t writer_line;
    uint32_t writer_epoch;     // 0: never
    uint32_t vf_bytes;         // stored since the last barrier of the vector function `vf`
    uint32_t vf;
    int16_t writer;
    uint32_t readers;          // a bit for each part that read since the last write
    uint32_t reader_epoch[PARTS];
};

struct Named {
    const char* name;
    int64_t first, stop;
};

struct Space {
    di_space kind = DI_SPACE_UB;
    int32_t core = 0;  // of the block
    std::vector<uint8_t> bytes;
    std::vector<Granule> shadow;
    std::vector<Named> named;
    int64_t low = INT64_MAX, high = 0;  // touched

    void open(di_space which, int32_t owner);
    void clear();
};

struct Flag {
    bool set = false;
    Clock clock;
};

struct Lock {
    int32_t holder = -1;  // pipe
    Clock clock;
};

struct Core {
    int32_t number = 0;  // 0: cube, 1 and 2: vector
    int32_t block = 0;
    bool begun = false, finished_pipes = false, used_flags = false;
    Clock clock[PIPES];
    Flag flags[PIPES][PIPES][FLAGS];
    Lock locks[LOCKS];
    uint32_t vf = 0;
    bool in_vf = false;
    uint64_t pad = 0, nz_para = 0;
    bool nz2nd = false;
    Space space[DI_SPACES];

    int part(int pipe) const { return number * PIPES + pipe; }
    bool cube() const { return number == 0; }
    void start(int32_t block_number, int32_t core_number);
};

struct Channel {
    std::deque<Clock> waiting;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Core* core = nullptr;
    bool live = false, blocked = false;
    std::string blocked_on;
};

// Bytes of global memory that a launch may touch.
struct Extent {
    uint64_t first, stop;
};

struct Access {
    uint32_t bytes, epoch;
    int32_t block;
    int16_t part;
    int16_t line;
    bool write;
};

struct Kernel {
    di_kind kind;
    void (*run)(const char*);
    size_t bytes;
};

// What the pipes of cores did in a launch; run.py has the names, cost.py the cycles.
enum Did {
    DID_FUNCTIONS, DID_INSTRUCTIONS, DID_COPIES, DID_BYTES_IN, DID_BYTES_OUT, DID_BYTES_TO_L1, DID_BYTES_TO_L0,
    DID_BYTES_OF_RESULTS, DID_PRODUCTS, DIDS
};

class Machine {
  public:
    // Runs all blocks; returns what is wrong, one sentence a line, "" if nothing.
    std::string launch(const std::string& symbol, int64_t blocks, const char* arguments, size_t bytes,
                       std::vector<Extent> extents);

    Core* core = nullptr;  // whose turn it is
    int64_t blocks = 0;
    int32_t line = 0;
    int64_t did[2][DIDS] = {};  // of the cube cores, and of the vector cores, in the last launch
    void count(Did what, int64_t how_much) { did[core->cube() ? 0 : 1][what] += how_much; }

    // Reports and goes on; the second stops the launch.
    void report(const char* format, ...) __attribute__((format(printf, 2, 3)));
    [[noreturn]] void stop(const char* format, ...) __attribute__((format(printf, 2, 3)));
    [[noreturn]] void abandon();
    // Waits until `ready`, letting the other cores run.
    template <class Ready> void wait_until(const char* what, int id, Ready ready) {
        while (!ready()) turn_away(what, id);
        progress_ = true;
    }

    // Access of a pipe to on-chip memory; the address of the bytes. `whole`: every byte has to be written.
    uint8_t* touch(Space& space, int64_t offset, int64_t bytes, int pipe, bool write, bool whole, int align,
                   const char* what);
    Space& space(di_space which) { return core->space[which]; }
    Space& space_of(di_space which, int32_t core_number) { return cores_[(size_t)core_number].space[which]; }
    // Access to global memory.
    uint8_t* global(const void* address, int64_t bytes, int pipe, bool write);
    Channel& channel(int from, int to, int id) { return channels_[((from * CORES + to) * CHANNELS) + id]; }
    Core& core_of(int32_t number) { return cores_[(size_t)number]; }
    bool mixed() const { return kind_ == DI_KIND_mix; }
    void issue(di_at at) {
        line = at.line;
        core->finished_pipes = false;
    }
    void need(bool cube, const char* what);

  private:
    std::string symbol_;
    di_kind kind_ = DI_KIND_vector;
    const Kernel* kernel_ = nullptr;
    const char* arguments_ = nullptr;
    std::vector<std::string> reports_;
    std::vector<Core> cores_ = std::vector<Core>(CORES);
    std::vector<Channel> channels_ = std::vector<Channel>(CORES * CORES * CHANNELS);
    std::vector<Fiber> fibers_ = std::vector<Fiber>(CORES);
    Fiber* running_ = nullptr;
    ucontext_t scheduler_;
    bool progress_ = false, failed_ = false;
    std::vector<Extent> extents_;
    size_t last_extent_ = 0;
    std::unordered_map<uint64_t, std::vector<Access>> lines_;

    void run_block(int32_t block);
    void finish_block();
    void turn_away(const char* what, int id);
    static void enter();
    bool known(const Clock& mine, int32_t block, int part, uint32_t epoch) const;
    void conflict(const Space& space, int64_t offset, int part, const char* did, int other, const char* before,
                  int other_line);
    void check_named(const Space& space, int64_t offset, int64_t bytes, const char* what);
    void check_line(uint64_t line_number, uint32_t bytes, int pipe, bool write);
};

extern Machine machine;
std::map<std::string, Kernel>& kernels();

}  // namespace twin
#endif
