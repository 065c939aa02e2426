// An io_uring for reads, by its system calls. For one thread. The structs and numbers are the kernel's, the same on
// every architecture; without a polling thread of the kernel, entries that were not submitted yet may be taken back.

#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace store {

class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  ~Ring() {
    for (const Area* area : areas_)
      if (area->at != nullptr) munmap(area->at, area->size);
    if (fd_ >= 0) close(fd_);
  }

  // 0, or the negative errno of what is forbidden or missing here.
  int open(uint32_t reads) {
    Params params{};
    fd_ = static_cast<int>(syscall(kSetup, reads, &params));
    if (fd_ < 0) return -errno;
    if (!map(sq_, kSqAt, params.sq.array + sizeof(uint32_t) * params.sq_entries) ||
        !map(cq_, kCqAt, params.cq.cqes + sizeof(Done) * params.cq_entries) ||
        !map(entries_, kEntriesAt, sizeof(Entry) * params.sq_entries))
      return -errno;
    room = params.sq_entries;
    sq_tail_ = word(sq_, params.sq.tail);
    sq_mask_ = *word(sq_, params.sq.mask);
    array_ = word(sq_, params.sq.array);
    cq_head_ = word(cq_, params.cq.head);
    cq_tail_ = word(cq_, params.cq.tail);
    cq_mask_ = *word(cq_, params.cq.mask);
    done_ = reinterpret_cast<const Done*>(static_cast<uint8_t*>(cq_.at) + params.cq.cqes);
    return 0;
  }

  // Queue a read; at most ``room`` may be under way.
  void prepare(int fd, uint64_t to, uint32_t size, uint64_t offset, uint64_t tag) {
    const uint32_t tail = *sq_tail_, at = tail & sq_mask_;
    Entry& entry = static_cast<Entry*>(entries_.at)[at];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = kRead;
    entry.fd = fd;
    entry.offset = offset;
    entry.to = to;
    entry.size = size;
    entry.tag = tag;
    array_[at] = at;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    waiting++;
  }

  // Submit what is queued and wait for one result if ``wait``; 0 or a negative errno. What the kernel did not take is
  // still ``waiting``.
  int enter(bool wait) {
    const long took = syscall(kEnter, fd_, waiting, wait ? 1 : 0, wait ? kGetEvents : 0, nullptr, 0);
    if (took < 0) return -errno;
    waiting -= static_cast<uint32_t>(took);
    return 0;
  }

  // Take back the last entry that is ``waiting``; its tag.
  uint64_t take_back() {
    const uint32_t tail = *sq_tail_ - 1;
    __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
    waiting--;
    return static_cast<Entry*>(entries_.at)[tail & sq_mask_].tag;
  }

  // The next result that is there: its tag, and bytes or a negative errno.
  bool next(uint64_t& tag, int64_t& result) {
    const uint32_t head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    const Done& done = done_[head & cq_mask_];
    tag = done.tag;
    result = done.result;
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
  }

  uint32_t room = 0, waiting = 0;

 private:
  static constexpr long kSetup = 425, kEnter = 426;
  static constexpr off_t kSqAt = 0, kCqAt = 0x8000000, kEntriesAt = 0x10000000;
  static constexpr uint8_t kRead = 22;
  static constexpr unsigned kGetEvents = 1;

  struct SqPlaces {
    uint32_t head, tail, mask, entries, flags, dropped, array, spare[3];
  };
  struct CqPlaces {
    uint32_t head, tail, mask, entries, overflow, cqes, flags, spare[3];
  };
  struct Params {
    uint32_t sq_entries, cq_entries, flags, cpu, idle, features, other, spare[3];
    SqPlaces sq;
    CqPlaces cq;
  };
  struct Entry {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, to;
    uint32_t size, read_flags;
    uint64_t tag, spare[3];
  };
  struct Done {
    uint64_t tag;
    int32_t result;
    uint32_t flags;
  };
  static_assert(sizeof(Params) == 120 && sizeof(Entry) == 64 && sizeof(Done) == 16, "the kernel's");

  struct Area {
    void* at = nullptr;
    size_t size = 0;
  };

  bool map(Area& area, off_t offset, size_t size) {
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, offset);
    if (at == MAP_FAILED) return false;
    area = {at, size};
    return true;
  }

  static uint32_t* word(const Area& area, uint32_t offset) {
    return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(area.at) + offset);
  }

  int fd_ = -1;
  Area sq_, cq_, entries_;
  const Area* const areas_[3] = {&sq_, &cq_, &entries_};
  uint32_t *sq_tail_ = nullptr, *array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
  const Done* done_ = nullptr;
};

}  // namespace store
