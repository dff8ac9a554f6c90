// Finds the largest number in each row; the first of equal ones.
#include <algorithm>

#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t PART = 1024;

float largest_of(const float* x, int64_t size) {
  f32x16 lanes = splat(x[0]);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    f32x16 v = load<f32x16>(x + i);
    lanes = larger(v, lanes);
  }
  float largest = lanes[0];
  for (int lane = 1; lane < 16; ++lane) largest = std::max(largest, lanes[lane]);
  for (; i < size; ++i) largest = std::max(largest, x[i]);
  return largest;
}

// The part that has it first, then its place there.
int64_t argmax(const float* x, int64_t size) {
  int64_t part = 0;
  float largest = largest_of(x, std::min(PART, size));
  for (int64_t first = PART; first < size; first += PART) {
    float here = largest_of(x + first, std::min(PART, size - first));
    if (here > largest) largest = here, part = first;
  }
  int64_t end = std::min(size, part + PART);
  int64_t at = std::find(x + part, x + end, largest) - x;
  return at < end ? at : part;
}

}  // namespace

// x [rows, size], without NaN -> out [rows].
extern "C" void vs_argmax(const float* x, int64_t rows, int64_t size, int64_t* out) {
  pool::parallel_for(rows, rows * size < (1 << 16) ? rows : 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) out[row] = argmax(x + row * size, size);
  });
}
