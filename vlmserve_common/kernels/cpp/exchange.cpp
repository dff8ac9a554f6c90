// What processes of one machine exchange through memory that all of them have mapped.
//
// Everybody enters the same exchanges in the same order and counts them. A process has two slots and writes to them in
// turns: to the one of exchange n - 2 only when all others have entered n - 1, and so have read that.
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "operators.h"
#include "simd.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int LOOK_MS = 100;  // between looks whether a process that is waited for is still there

// At the front of the memory, one for each process.
struct alignas(128) Seat {
  std::atomic<uint32_t> entered;   // exchanges
  std::atomic<uint32_t> sleepers;  // who wait for `entered`
  std::atomic<uint32_t> left;      // whether it has closed its end
};

// As `parallel/shared_memory.py` has it. pidfds: of all processes; it becomes readable when one has ended.
struct Group {
  uint8_t* memory;
  const int32_t* pidfds;
  int64_t slot_bytes;
  int32_t rank, size, watch_us;
  int64_t timeout_ms;

  Seat& seat(int of) const { return ((Seat*)memory)[of]; }
  uint8_t* slot(int of, uint32_t number) const {
    return memory + size * sizeof(Seat) + (2 * of + number % 2) * slot_bytes;
  }
};

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

long futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, (uint32_t*)&word, what, value, timeout, nullptr, 0);
}

bool is_gone(const Group& group, int other) {
  if (group.seat(other).left.load()) return true;
  pollfd ended{group.pidfds[other], POLLIN, 0};
  return poll(&ended, 1, 0) > 0;
}

// 0 once `other` has entered that many; 1 + other where it is gone, -1 when the time is over.
int64_t await_one(const Group& group, int other, uint32_t number) {
  Seat& seat = group.seat(other);
  auto there = [&] { return int32_t(seat.entered.load(std::memory_order_acquire) - number) >= 0; };
  auto began = Clock::now();
  do {
    for (int i = 0; i < 64; ++i) {
      if (there()) return 0;
      relax();
    }
  } while (Clock::now() - began < std::chrono::microseconds(group.watch_us));
  const timespec look{0, LOOK_MS * 1000000};
  while (true) {
    seat.sleepers.fetch_add(1);
    uint32_t seen = seat.entered.load();
    if (int32_t(seen - number) < 0) futex(seat.entered, FUTEX_WAIT, seen, &look);
    seat.sleepers.fetch_sub(1);
    if (there()) return 0;
    if (is_gone(group, other)) return there() ? 0 : 1 + other;
    if (Clock::now() - began > std::chrono::milliseconds(group.timeout_ms)) return -1;
  }
}

int64_t await_all(const Group& group, uint32_t number) {
  for (int other = 0; other < group.size; ++other)
    if (other != group.rank)
      if (int64_t lost = await_one(group, other, number)) return lost;
  return 0;
}

void wake(std::atomic<uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

// Enters an exchange with `bytes` of this process's own, which may be none; `number` becomes the exchange's.
int64_t enter(const Group& group, const void* own, int64_t bytes, uint32_t& number) {
  Seat& seat = group.seat(group.rank);
  number = seat.entered.load(std::memory_order_relaxed) + 1;
  if (bytes) {
    if (int64_t lost = await_all(group, number - 1)) return lost;
    std::memcpy(group.slot(group.rank, number), own, bytes);
  }
  seat.entered.store(number);
  if (seat.sleepers.load()) wake(seat.entered);
  return 0;
}

// Sums in the order of the processes, so that all get the same bits; rounded once. residual: added if not null.
template <class T>
void add_up(const Group& group, uint32_t number, const T* residual, T* out, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    f32x16 total = load_floats((const T*)group.slot(0, number) + i);
    for (int of = 1; of < group.size; ++of) total += load_floats((const T*)group.slot(of, number) + i);
    if (residual) total += load_floats(residual + i);
    store_floats(out + i, total);
  }
  for (; i < count; ++i) {
    float total = to_float(((const T*)group.slot(0, number))[i]);
    for (int of = 1; of < group.size; ++of) total += to_float(((const T*)group.slot(of, number))[i]);
    if (residual) total += to_float(residual[i]);
    from_float(out + i, total);
  }
}

template <class T>
int64_t all_reduce(const Group& group, const T* x, int64_t count, const T* residual, T* out) {
  const int64_t most = group.slot_bytes / int64_t(sizeof(T));
  for (int64_t first = 0; first < count; first += most) {
    int64_t part = std::min(most, count - first);
    uint32_t number;
    if (int64_t lost = enter(group, x + first, part * sizeof(T), number)) return lost;
    if (int64_t lost = await_all(group, number)) return lost;
    add_up(group, number, residual ? residual + first : nullptr, out + first, part);
  }
  return 0;
}

}  // namespace

// All return 0, 1 + the number of a process that is gone, or -1 when the time is over.

// out [count] = residual + the sum of x over all processes. residual may be null; x and residual may be out.
extern "C" int64_t vs_all_reduce(const void* of, const void* x, int64_t count, int32_t narrow, const void* residual,
                                 void* out) {
  const auto& group = *(const Group*)of;
  if (narrow) return all_reduce(group, (const bf16*)x, count, (const bf16*)residual, (bf16*)out);
  return all_reduce(group, (const float*)x, count, (const float*)residual, (float*)out);
}

// Copies x of `from` to all processes.
extern "C" int64_t vs_broadcast(const Group* group, uint8_t* x, int64_t bytes, int32_t from) {
  for (int64_t first = 0; first < bytes; first += group->slot_bytes) {
    int64_t part = std::min(group->slot_bytes, bytes - first);
    uint32_t number;
    if (int64_t lost = enter(*group, x + first, group->rank == from ? part : 0, number)) return lost;
    if (group->rank == from) continue;
    if (int64_t lost = await_one(*group, from, number)) return lost;
    std::memcpy(x + first, group->slot(from, number), part);
  }
  return 0;
}

// Gathers all processes' x in `out` of the first process, in their order; `out` is null elsewhere.
extern "C" int64_t vs_gather(const Group* group, const uint8_t* x, int64_t bytes, uint8_t* out) {
  for (int64_t first = 0; first < bytes; first += group->slot_bytes) {
    int64_t part = std::min(group->slot_bytes, bytes - first);
    uint32_t number;
    if (int64_t lost = enter(*group, x + first, part, number)) return lost;
    if (!out) continue;
    if (int64_t lost = await_all(*group, number)) return lost;
    for (int of = 0; of < group->size; ++of)
      std::memcpy(out + of * bytes + first, group->slot(of, number), part);
  }
  return 0;
}

// Tells the other processes that this one has left.
extern "C" void vs_leave(const Group* group) {
  group->seat(group->rank).left.store(1);
  wake(group->seat(group->rank).entered);
}
