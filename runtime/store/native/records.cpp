// Batches of records in one call: read neighbours past the page cache, prove each, copy its payload to whoever asked;
// and the way back, assembling records that prove themselves. The meaning is that of runtime/store/record.py, and a
// test compares the two. Nothing is allocated while records are moved.

#include <fcntl.h>
#include <sched.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "gate.h"
#include "ring.h"

#define STORE_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kAbi = 4;
constexpr int kMostSections = 16;
constexpr int kMostNeighbours = 64;
constexpr int kWrittenTogether = 4;
constexpr uint32_t kHeaderBytes = 256;
constexpr uint32_t kMagic = 0x63724944;  // "DIrc"
constexpr uint16_t kReplayed = 1;

using Sum = uint64_t (*)(const void*, size_t, uint64_t);  // xxh3-64 with a seed

enum Status : int32_t { kPending, kOk, kMiss, kOther, kDamaged, kIoError, kCancelled };
enum State : int32_t { kWaiting, kCopying, kEnded, kGivenUp };

struct Layout {
  uint64_t stride, sections, tokens, format;
  uint64_t offsets[kMostSections + 1];
  uint8_t space[16];
};

struct Header {
  uint32_t magic;
  uint16_t version, flags;
  uint8_t key[16], parent[16];
  uint32_t number, tokens, slot, spare;
  uint8_t uuid[16], space[16], extra[16];
  uint64_t written;
  uint64_t sums[kMostSections];
  uint64_t ids_sum, sum;
};
static_assert(sizeof(Header) == kHeaderBytes && offsetof(Header, sums) == 112, "the format of docs/store.md");

// One record that is to be read. ``ids`` and the buffers of ``into`` are addresses; ``parts`` of them, in order.
struct Want {
  int32_t fd;
  uint32_t slot;
  uint64_t offset, seed;
  uint8_t uuid[16], key[16], extra[16];
  uint64_t ids, into, parts;
  uint32_t exact, flags;
  int32_t state, status;
  int64_t got;  // bytes read, or a negative errno
};

// One record that is to be written; ``sum`` comes back and names this very record.
struct Make {
  uint64_t record, ids, from, parts, seed, written, sum;
  uint8_t uuid[16], key[16], parent[16], extra[16];
  uint32_t number, slot, flags, spare;
};

struct Part {
  uint64_t address, size;
};

bool same(const void* a, const void* b) { return std::memcmp(a, b, 16) == 0; }

bool moves(int32_t* state, int32_t from, int32_t to) {
  return __atomic_compare_exchange_n(state, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

bool whole(const Layout& layout, const Header& head, const uint8_t* record, uint64_t seed, Sum sum) {
  if (sum(record + kHeaderBytes, layout.offsets[0] - kHeaderBytes, seed) != head.ids_sum) return false;
  for (uint64_t i = 0; i < layout.sections; i++)
    if (sum(record + layout.offsets[i], layout.offsets[i + 1] - layout.offsets[i], seed) != head.sums[i]) return false;
  for (uint64_t i = layout.sections; i < kMostSections; i++)
    if (head.sums[i]) return false;
  return true;
}

// Whether the bytes are the wanted block, undamaged. ``flags`` come back where the header is whole.
Status proved(const Layout& layout, const uint8_t* record, Want& want, Sum sum) {
  Header head;
  std::memcpy(&head, record, sizeof head);
  if (sum(record, offsetof(Header, sum), want.seed) != head.sum) return kDamaged;
  if (head.magic != kMagic || head.version != layout.format || head.tokens != layout.tokens ||
      head.slot != want.slot || !same(head.uuid, want.uuid) || !same(head.space, layout.space))
    return kDamaged;
  want.flags = head.flags;
  if (!same(head.key, want.key)) return kOther;
  if (!same(head.extra, want.extra) || (want.exact && head.flags & kReplayed)) return kMiss;
  if (!whole(layout, head, record, want.seed, sum)) return kDamaged;
  const uint64_t ids = layout.offsets[0] - kHeaderBytes;
  if (want.ids && std::memcmp(record + kHeaderBytes, reinterpret_cast<const void*>(want.ids), ids) != 0) return kMiss;
  return kOk;
}

void scatter(const Layout& layout, const uint8_t* record, const Want& want) {
  const Part* parts = reinterpret_cast<const Part*>(want.into);
  uint64_t at = layout.offsets[0];
  for (uint64_t i = 0; i < want.parts; i++) {
    std::memcpy(reinterpret_cast<void*>(parts[i].address), record + at, parts[i].size);
    at += parts[i].size;
  }
}

void end(const Layout& layout, const uint8_t* record, bool complete, Want& want, Sum sum) {
  const Status status = complete ? proved(layout, record, want, sum) : kDamaged;
  if (status == kOk) {
    if (!moves(&want.state, kWaiting, kCopying)) {
      want.status = kCancelled;
      return;
    }
    scatter(layout, record, want);
    want.status = kOk;
    __atomic_store_n(&want.state, static_cast<int32_t>(kEnded), __ATOMIC_RELEASE);
    return;
  }
  want.status = moves(&want.state, kWaiting, kEnded) ? status : kCancelled;
}

void assemble(const Layout& layout, Make& make, Sum sum) {
  uint8_t* record = reinterpret_cast<uint8_t*>(make.record);
  const Part* parts = reinterpret_cast<const Part*>(make.from);
  const uint64_t ids = layout.offsets[0] - kHeaderBytes;
  std::memcpy(record + kHeaderBytes, reinterpret_cast<const void*>(make.ids), ids);
  uint64_t at = layout.offsets[0];
  for (uint64_t i = 0; i < make.parts; i++) {
    std::memcpy(record + at, reinterpret_cast<const void*>(parts[i].address), parts[i].size);
    at += parts[i].size;
  }
  std::memset(record + at, 0, layout.stride - at);
  Header head{};
  head.magic = kMagic;
  head.version = static_cast<uint16_t>(layout.format);
  head.flags = static_cast<uint16_t>(make.flags);
  std::memcpy(head.key, make.key, 16);
  std::memcpy(head.parent, make.parent, 16);
  head.number = make.number;
  head.tokens = static_cast<uint32_t>(layout.tokens);
  head.slot = make.slot;
  std::memcpy(head.uuid, make.uuid, 16);
  std::memcpy(head.space, layout.space, 16);
  std::memcpy(head.extra, make.extra, 16);
  head.written = make.written;
  for (uint64_t i = 0; i < layout.sections; i++)
    head.sums[i] = sum(record + layout.offsets[i], layout.offsets[i + 1] - layout.offsets[i], make.seed);
  head.ids_sum = sum(record + kHeaderBytes, ids, make.seed);
  std::memcpy(record, &head, sizeof head);
  head.sum = sum(record, offsetof(Header, sum), make.seed);
  std::memcpy(record + offsetof(Header, sum), &head.sum, 8);
  make.sum = head.sum;
}

int64_t read_some(int fd, iovec* pieces, int count, uint64_t offset) {
  for (;;) {
    const ssize_t got = preadv(fd, pieces, count, static_cast<off_t>(offset));
    if (got >= 0) return got;
    if (errno != EINTR) return -errno;
  }
}

// Bytes of ``count`` neighbours, or a negative errno. A short read that is not the end of the file is tried once more.
int64_t read_neighbours(const Layout& layout, const Want& first, int count, const uint64_t* slots) {
  iovec pieces[kMostNeighbours];
  for (int i = 0; i < count; i++) pieces[i] = {reinterpret_cast<void*>(slots[i]), layout.stride};
  const int64_t got = read_some(first.fd, pieces, count, first.offset);
  const int64_t total = static_cast<int64_t>(layout.stride) * count;
  if (got <= 0 || got >= total) return got;
  const int64_t done = got / static_cast<int64_t>(layout.stride), at = done * static_cast<int64_t>(layout.stride);
  const int64_t rest = read_some(first.fd, pieces + done, count - static_cast<int>(done),
                                 first.offset + static_cast<uint64_t>(at));
  return rest < 0 ? rest : (at + rest > got ? at + rest : got);
}

// One record of ``got`` bytes, or a negative errno, that was read into ``slot``: prove it and hand it over.
void judge(const Layout& layout, Want& want, uint64_t slot, int64_t got, Sum sum) {
  want.got = got;
  if (got < 0)
    want.status = moves(&want.state, kWaiting, kEnded) ? kIoError : kCancelled;
  else
    end(layout, reinterpret_cast<const uint8_t*>(slot), got >= static_cast<int64_t>(layout.stride), want, sum);
}

// ``count`` neighbours of ``got`` bytes together, or a negative errno, that were read into ``slots``.
void judge_all(const Layout& layout, Want* wants, int64_t count, int64_t got, const uint64_t* slots, Sum sum) {
  for (int64_t i = 0; i < count; i++)
    judge(layout, wants[i], slots[i], got < 0 ? got : got - i * static_cast<int64_t>(layout.stride), sum);
}

// Has ``read(first, n)`` read all records, up to ``most`` neighbours of one file at a time; returns the bytes.
template <typename Read>
int64_t read_all(const Layout& layout, Want* wants, int64_t count, int64_t most, Read read) {
  most = most < kMostNeighbours ? most : kMostNeighbours;
  int64_t moved = 0;
  for (int64_t first = 0; first < count;) {
    Want& want = wants[first];
    if (__atomic_load_n(&want.state, __ATOMIC_ACQUIRE) != kWaiting) {
      want.status = kCancelled;
      first++;
      continue;
    }
    int64_t n = 1;
    while (n < most && first + n < count && wants[first + n].fd == want.fd &&
           wants[first + n].offset == want.offset + static_cast<uint64_t>(n) * layout.stride)
      n++;
    const int64_t got = read(first, n);
    if (got > 0) moved += got;
    first += n;
  }
  return moved;
}

// Reads of one call through a ring: which record is in which slot.
struct UnderWay {
  int64_t record[kMostNeighbours];
  int free[kMostNeighbours];
  int free_count = 0, reads = 0;
};

// Queue records from ``next`` on while there are slots; returns the first that is not queued.
int64_t queue(store::Ring& ring, const Layout& layout, Want* wants, int64_t next, int64_t count, const uint64_t* slots,
              UnderWay& under_way) {
  for (; next < count && under_way.free_count; next++) {
    Want& want = wants[next];
    if (__atomic_load_n(&want.state, __ATOMIC_ACQUIRE) != kWaiting) {
      want.status = kCancelled;
      continue;
    }
    const int slot = under_way.free[--under_way.free_count];
    under_way.record[slot] = next;
    under_way.reads++;
    ring.prepare(want.fd, slots[slot], static_cast<uint32_t>(layout.stride), want.offset, static_cast<uint64_t>(slot));
  }
  return next;
}

}  // namespace

STORE_API int store_abi() { return kAbi; }

// Sizes of the three structs above, in order: a binding that means others is refused.
STORE_API void store_sizes(uint64_t* sizes) {
  sizes[0] = sizeof(Layout);
  sizes[1] = sizeof(Want);
  sizes[2] = sizeof(Make);
}

// A gate for ``reads`` reads at a time, or null without memory.
STORE_API void* store_gate_open(uint32_t reads) { return new (std::nothrow) store::Gate(reads); }

// With nobody at it.
STORE_API void store_gate_close(void* gate) { delete static_cast<store::Gate*>(gate); }

// Read, prove and hand over ``count`` records in order; neighbours of one file with one call, up to ``slot_count``
// [stride] areas of memory at ``slots``. ``given``: the gate that reads pass, or null. Returns the number of bytes read.
STORE_API int64_t store_read(void* given, const Layout* layout, Want* wants, int64_t count, const uint64_t* slots,
                             int64_t slot_count, Sum sum) {
  store::Gate* gate = static_cast<store::Gate*>(given);
  return read_all(*layout, wants, count, slot_count, [=](int64_t first, int64_t n) {
    if (gate != nullptr) gate->enter();
    const int64_t got = read_neighbours(*layout, wants[first], static_cast<int>(n), slots);
    if (gate != nullptr) gate->leave();
    judge_all(*layout, wants + first, n, got, slots, sum);
    return got;
  });
}

// A ring for ``reads`` reads under way that was seen to read, or null and the errno of what is forbidden here.
STORE_API void* store_ring_open(uint32_t reads, int32_t* error) {
  store::Ring* ring = new (std::nothrow) store::Ring;
  *error = ring == nullptr ? ENOMEM : -ring->open(reads);
  const int zeros = *error ? -1 : open("/dev/zero", O_RDONLY | O_CLOEXEC);
  if (zeros >= 0) {
    uint64_t data = 1, tag = 0;
    int64_t got = 0;
    ring->prepare(zeros, reinterpret_cast<uint64_t>(&data), sizeof data, 0, 7);
    *error = -ring->enter(true);
    if (!*error && !(ring->next(tag, got) && tag == 7 && got == sizeof data && data == 0)) *error = got < 0 ? -got : EIO;
    close(zeros);
  }
  if (!*error) return ring;
  delete ring;
  return nullptr;
}

STORE_API void store_ring_close(void* ring) { delete static_cast<store::Ring*>(ring); }

// As store_read, through a ring: as many records as there are slots are read at a time, and each is proved and handed
// over while the others are on their way. What the kernel does not take is read with preadv.
STORE_API int64_t store_read_ring(void* given, const Layout* layout, Want* wants, int64_t count, const uint64_t* slots,
                                  int64_t slot_count, Sum sum) {
  store::Ring& ring = *static_cast<store::Ring*>(given);
  UnderWay under_way;
  while (under_way.free_count < slot_count && under_way.free_count < kMostNeighbours &&
         under_way.free_count < static_cast<int>(ring.room)) {
    under_way.free[under_way.free_count] = under_way.free_count;
    under_way.free_count++;
  }
  int64_t moved = 0;
  const auto ended = [&](uint64_t slot, int64_t got) {
    Want& want = wants[under_way.record[slot]];
    if (got == -EINTR || got == -EAGAIN || (got > 0 && got < static_cast<int64_t>(layout->stride)))
      got = read_neighbours(*layout, want, 1, slots + slot);
    if (got > 0) moved += got;
    judge(*layout, want, slots[slot], got, sum);
    under_way.free[under_way.free_count++] = static_cast<int>(slot);
    under_way.reads--;
  };
  for (int64_t next = 0; next < count || under_way.reads;) {
    next = queue(ring, *layout, wants, next, count, slots, under_way);
    const int failed = under_way.reads ? ring.enter(true) : 0;
    if (failed && failed != -EINTR) {
      sched_yield();
      while (ring.waiting) {
        const uint64_t slot = ring.take_back();
        ended(slot, read_neighbours(*layout, wants[under_way.record[slot]], 1, slots + slot));
      }
    }
    uint64_t slot = 0;
    int64_t got = 0;
    while (ring.next(slot, got)) {
      ended(slot, got);
      next = queue(ring, *layout, wants, next, count, slots, under_way);
      if (ring.waiting) ring.enter(false);  // at once: the disk is not to wait for the proof of the next record
    }
  }
  return moved;
}

// The same for a record whose bytes are in memory already.
STORE_API void store_prove(const Layout* layout, Want* want, const uint8_t* record, Sum sum) {
  end(*layout, record, true, *want, sum);
}

// Give up on records: when this returns, nobody writes to their buffers any more.
STORE_API void store_give_up(Want* wants, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    while (!moves(&wants[i].state, kWaiting, kGivenUp) &&
           __atomic_load_n(&wants[i].state, __ATOMIC_ACQUIRE) == kCopying)
      sched_yield();
}

// Assemble ``count`` records in their memory, and write them from ``offset`` on where there is a file (``fd`` >= 0): a
// few at a time, while they are in the processor's cache. Returns the bytes written, fewer than asked for where the
// file took fewer, or a negative errno; all records are assembled in any case.
STORE_API int64_t store_make(const Layout* layout, Make* makes, int64_t count, int fd, uint64_t offset, Sum sum) {
  int64_t written = 0;
  bool going = fd >= 0;
  for (int64_t first = 0; first < count; first += kWrittenTogether) {
    iovec pieces[kWrittenTogether];
    const int64_t n = count - first < kWrittenTogether ? count - first : kWrittenTogether;
    for (int64_t i = 0; i < n; i++) {
      assemble(*layout, makes[first + i], sum);
      pieces[i] = {reinterpret_cast<void*>(makes[first + i].record), layout->stride};
    }
    if (!going) continue;
    const ssize_t got = pwritev(fd, pieces, static_cast<int>(n), static_cast<off_t>(offset) + written);
    if (got < 0) {
      written = errno == EINTR ? written : -errno;
      going = false;
      continue;
    }
    written += got;
    going = got == n * static_cast<int64_t>(layout->stride);
  }
  return written;
}
