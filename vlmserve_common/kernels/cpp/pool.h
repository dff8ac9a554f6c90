// Threads that share the work of one call.
//
// Threads claim work piece by piece, so a core that other processes use does less of it. Between calls threads spin for
// a moment and then sleep: on a busy machine a spinning thread takes a core from other processes.
#pragma once
#include <cstdint>
#include <functional>

namespace pool {

// Threads of a call, the caller's included; how long one watches before it sleeps, in microseconds.
void configure(int threads, int watch_us);
int threads();

// Calls run(first, last) for pieces that cover 0 .. count - 1; `grain` of them are claimed at a time. The caller
// does all of it if there are no workers, or if they work for another caller.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& run);

// A thread's own memory of at least so many bytes, aligned to 64; its content does not outlast the call.
void* scratch(int64_t bytes);

}  // namespace pool
