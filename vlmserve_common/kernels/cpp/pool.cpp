#include "pool.h"

#include "placement.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pool {
namespace {

using Run = std::function<void(int64_t, int64_t)>;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Waits until `value` is no longer `old`: watches it for a moment, then sleeps.
void await_change(std::atomic<uint32_t>& value, uint32_t old, int watch_us) {
  auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(watch_us);
  do {
    for (int i = 0; i < 64; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// One call at a time. Workers enter it through `inside_`, whose highest bit says that nobody may: a worker that the
// kernel has not let run by the time that all is claimed stays out, and is not waited for.
class Pool {
 public:
  Pool(int threads, int watch_us) : watch_us_(watch_us), placement_(threads) {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  }

  ~Pool() {
    stop_ = true;
    announce();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return int(workers_.size()) + 1; }

  void run(int64_t count, int64_t grain, const Run& run) {
    placement_.part();
    count_ = count;
    grain_ = grain;
    run_ = &run;
    next_.store(0, std::memory_order_relaxed);
    inside_.store(0, std::memory_order_release);
    announce();
    claim();
    inside_.fetch_or(SHUT, std::memory_order_acq_rel);
    for (uint32_t now; (now = inside_.load(std::memory_order_acquire)) != SHUT;) await_change(inside_, now, watch_us_);
  }

 private:
  static constexpr uint32_t SHUT = 1u << 31;

  void announce() {
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
  }

  bool enter() {
    uint32_t now = inside_.load(std::memory_order_relaxed);
    while (!(now & SHUT))
      if (inside_.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return true;
    return false;
  }

  void leave() {
    if (inside_.fetch_sub(1, std::memory_order_release) == (SHUT | 1)) inside_.notify_one();
  }

  void claim() {
    for (;;) {
      int64_t first = next_.fetch_add(grain_, std::memory_order_relaxed);
      if (first >= count_) return;
      (*run_)(first, first + grain_ < count_ ? first + grain_ : count_);
    }
  }

  void work(int thread) {
    placement_.hold(thread);
    for (uint32_t seen = 0;;) {
      await_change(calls_, seen, watch_us_);
      seen = calls_.load(std::memory_order_acquire);
      if (stop_) return;
      if (!enter()) continue;
      claim();
      leave();
    }
  }

  int watch_us_;
  Placement placement_;
  std::atomic<uint32_t> calls_{0};
  std::atomic<uint32_t> inside_{SHUT};
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stop_{false};
  int64_t count_ = 0, grain_ = 1;
  const Run* run_ = nullptr;
  std::vector<std::thread> workers_;
};

std::unique_ptr<Pool> current;
std::mutex in_use;  // held by the caller whose work is done

struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Scratch() { std::free(memory); }
};
thread_local Scratch own;

}  // namespace

void configure(int threads, int watch_us) {
  std::lock_guard<std::mutex> lock(in_use);
  current.reset();
  if (threads > 1) current = std::make_unique<Pool>(threads, watch_us);
}

int threads() { return current ? current->size() : 1; }

void parallel_for(int64_t count, int64_t grain, const Run& run) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  std::unique_lock<std::mutex> lock(in_use, std::defer_lock);
  if (count <= grain || !current || !lock.try_lock()) return run(0, count);
  current->run(count, grain, run);
}

void* scratch(int64_t bytes) {
  if (own.bytes < bytes) {
    std::free(own.memory);
    own.bytes = (bytes + 63) / 64 * 64;
    own.memory = std::aligned_alloc(64, size_t(own.bytes));
    if (!own.memory) throw std::bad_alloc();
  }
  return own.memory;
}

}  // namespace pool

extern "C" int32_t vs_threads() { return int32_t(pool::threads()); }

extern "C" void vs_configure(int32_t threads, int32_t watch_us) { pool::configure(threads, watch_us); }
