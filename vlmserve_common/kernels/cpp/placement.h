// Chooses the core of each thread of a pool that has a thread for every core of the process.
//
// An operating system may leave two threads that wake each other on one core, and another core idle. So each worker is
// bound to a core. The caller is not bound, but is moved when it runs on a worker's core.
#pragma once
#include <chrono>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace pool {

class Placement {
#if defined(__linux__)
 public:
  explicit Placement(int threads) {
    if (sched_getaffinity(0, sizeof all_, &all_) != 0 || CPU_COUNT(&all_) != threads) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &all_)) cores_.push_back(cpu);
  }

  // Called by a worker, counted from 1.
  void hold(int worker) const {
    if (!cores_.empty()) move_to(cores_[size_t(worker)]);
  }

  // Called by the caller before work: off the workers' cores, but no more than every 10 ms.
  void part() {
    if (cores_.empty() || sched_getcpu() == cores_[0]) return;
    auto now = std::chrono::steady_clock::now();
    if (now - parted_ < std::chrono::milliseconds(10)) return;
    parted_ = now;
    move_to(cores_[0]);
    sched_setaffinity(0, sizeof all_, &all_);
  }

 private:
  static void move_to(int core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
  }

  cpu_set_t all_;
  std::vector<int> cores_;  // the caller's, then the workers'; empty: all float
  std::chrono::steady_clock::time_point parted_;
#else
 public:
  explicit Placement(int) {}
  void hold(int) const {}
  void part() {}
#endif
};

}  // namespace pool
