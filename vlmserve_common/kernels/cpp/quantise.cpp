// Rounds weights to integers with a scale and a zero for each row and group of inputs: w = scale * (number - zero).
#include <algorithm>
#include <cmath>

#include "pool.h"
#include "weights.h"

namespace {

// Nearest 16-bit float of one from 0 on, ties to even; the largest instead of infinity.
f16 to_half(float x) {
  float moved = std::min(x, 65504.0f) * 0x1p-112f;  // the exponents' bases are 112 apart
  uint32_t bits;
  std::memcpy(&bits, &moved, 4);
  return f16((bits + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

float from_half(f16 half) {
  uint32_t bits = uint32_t(half) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  return value * 0x1p112f;
}

struct Grid {
  f16 half;
  float scale, zero, most;  // most: the largest number

  // symmetric: the zero is in the middle.
  Grid(float low, float high, float most, bool symmetric) : most(most) {
    float middle = (most + 1) / 2;
    half = to_half(symmetric ? std::max(-low, high) / (middle - 1) : (high - low) / most);
    scale = from_half(half);
    zero = symmetric || scale == 0 ? middle : std::clamp(std::nearbyint(-low / scale), 0.0f, most);
  }
  float number(float w) const {
    return scale == 0 ? zero : std::clamp(std::nearbyint(w / scale) + zero, 0.0f, most);
  }
  float squared_error(const float* w, int64_t count) const {
    const float inverse = scale == 0 ? 0 : 1 / scale;
    f32x16 total = {};
    for (int64_t k = 0; k < count; k += 16) {
      f32x16 v = load<f32x16>(w + k), n = v * splat(inverse) + splat(zero);
      n = larger(n, splat(0));
      n = smaller(n, splat(most));
      n = convert<f32x16>(convert<i32x16>(n + splat(0.5f)));
      f32x16 error = (n - splat(zero)) * splat(scale) - v;
      total += error * error;
    }
    return sum(total);
  }
};

// Chooses the range with the least squared error: the range of the weights or a narrower one.
Grid best_grid(const float* w, int64_t count, float most, bool symmetric, int narrower) {
  auto [low, high] = std::minmax_element(w, w + count);
  float least = std::min(*low, 0.0f), largest = std::max(*high, 0.0f);
  Grid best(least, largest, most, symmetric);
  float best_error = narrower ? best.squared_error(w, count) : 0;
  for (int step = 1; step <= narrower; ++step) {
    float part = 1 - 0.05f * float(step);
    Grid grid(least * part, largest * part, most, symmetric);
    float error = grid.squared_error(w, count);
    if (error < best_error) best = grid, best_error = error;
  }
  return best;
}

template <class T>
void quantise(const T* weight, int64_t rows, int64_t inner, int64_t group, float most, bool symmetric, int narrower,
              uint8_t* numbers, f16* scales, uint8_t* zeros) {
  int64_t groups = (inner + group - 1) / group;
  pool::parallel_for(rows, 16, [&](int64_t first, int64_t last) {
    // a group, with zeros behind it: these have no error
    auto* w = (float*)pool::scratch((group + 16) * int64_t(sizeof(float)));
    for (int64_t row = first; row < last; ++row)
      for (int64_t g = 0; g < groups; ++g) {
        int64_t from = g * group, count = std::min(group, inner - from);
        for (int64_t k = 0; k < count; ++k) w[k] = to_float(weight[row * inner + from + k]);
        std::fill(w + count, w + count + 16, 0.0f);
        Grid grid = best_grid(w, count, most, symmetric, narrower);
        for (int64_t k = 0; k < count; ++k) numbers[row * inner + from + k] = uint8_t(grid.number(w[k]));
        scales[row * groups + g] = grid.half;
        zeros[row * groups + g] = uint8_t(grid.zero);
      }
  });
}

}  // namespace

// weight [rows, inner] of bfloat16 or float32 -> numbers [rows, inner] of `bits` bits, scales and zeros [rows, groups].
// narrower: ranges to try beside that of the weights, each 5% narrower than the last.
extern "C" void vs_quantise(int32_t narrow, const void* weight, int64_t rows, int64_t inner, int64_t group,
                            int32_t bits, int32_t symmetric, int32_t narrower, uint8_t* numbers, f16* scales,
                            uint8_t* zeros) {
  float most = float((1 << bits) - 1);
  if (narrow)
    return quantise((const bf16*)weight, rows, inner, group, most, bool(symmetric), narrower, numbers, scales, zeros);
  quantise((const float*)weight, rows, inner, group, most, bool(symmetric), narrower, numbers, scales, zeros);
}
