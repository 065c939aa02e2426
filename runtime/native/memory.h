// Memory of an engine: four blocks, each allocated once and touched at once, so that a machine that is too small says so
// before the first step and no page is made while serving.
#ifndef DEEPINFER_MEMORY_H
#define DEEPINFER_MEMORY_H
#include <cstddef>
#include <cstdint>
#include <vector>

#include "table.h"

const int64_t ALIGNMENT = 64;  // a cache line and the widest vector

inline int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Zeroed, 64-byte aligned, freed with the object.
class Block {
  public:
    Block() = default;
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    // Faults with DI_NO_MEMORY, naming the purpose and the bytes.
    void allocate(int64_t bytes, const char* purpose);
    char* data() const { return data_; }

  private:
    char* data_ = nullptr;
    int64_t bytes_ = 0;
};

// Where everything lies: a function of the table and of slots, blocks and threads alone.
struct Layout {
    int64_t arena = 0, scratch = 0, rings = 0, pages = 0;  // bytes of the four blocks
    int64_t drawing = 0;                                   // of the records of slots.h
    int64_t scratch_stride = 0;                            // from thread to thread
    int64_t exchange = 0;                                  // behind the scratch of the last thread
    std::vector<int64_t> offset, stride;                   // by state, inside rings or pages

    Layout() = default;
    Layout(const Table& table, int32_t slots, int32_t blocks, int32_t threads);
};

#endif
