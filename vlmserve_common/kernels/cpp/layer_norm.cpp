// Layer normalisation: statistics and products in float32, rounded once.
#include <cmath>

#include "pool.h"
#include "simd.h"

namespace {

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, int64_t size, float eps, T* out) {
  const int64_t whole = size / 16 * 16;
  f32x16 totals = {}, squares = {};
  float total = 0, square = 0;
  for (int64_t k = 0; k < whole; k += 16) totals += load_floats(x + k);
  for (int64_t k = whole; k < size; ++k) total += to_float(x[k]);
  const float mean = (sum(totals) + total) / float(size);
  for (int64_t k = 0; k < whole; k += 16) {
    f32x16 off = load_floats(x + k) - splat(mean);
    squares += off * off;
  }
  for (int64_t k = whole; k < size; ++k) square += (to_float(x[k]) - mean) * (to_float(x[k]) - mean);
  const float scale = 1.0f / std::sqrt((sum(squares) + square) / float(size) + eps);
  for (int64_t k = 0; k < whole; k += 16) {
    f32x16 value = (load_floats(x + k) - splat(mean)) * splat(scale);
    store_floats(out + k, value * load_floats(weight + k) + load_floats(bias + k));
  }
  for (int64_t k = whole; k < size; ++k)
    from_float(out + k, (to_float(x[k]) - mean) * scale * to_float(weight[k]) + to_float(bias[k]));
}

template <class T>
void layer_norm(const T* x, const T* weight, const T* bias, int64_t rows, int64_t size, float eps, T* out) {
  int64_t grain = rows * size < (1 << 17) ? rows : 16;
  pool::parallel_for(rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      layer_norm_row(x + row * size, weight, bias, size, eps, out + row * size);
  });
}

}  // namespace

// x [rows, size], weight and bias [size] -> out [rows, size]; all bfloat16 or all float32.
extern "C" void vs_layer_norm(int32_t narrow, const void* x, const void* weight, const void* bias, int64_t rows,
                              int64_t size, float eps, void* out) {
  if (narrow)
    return layer_norm((const bf16*)x, (const bf16*)weight, (const bf16*)bias, rows, size, eps, (bf16*)out);
  layer_norm((const float*)x, (const float*)weight, (const float*)bias, rows, size, eps, (float*)out);
}
