// RMS normalisation: statistics and products in float32, rounded once.
#include <cmath>

#include "operators.h"
#include "pool.h"
#include "simd.h"

namespace {

template <class T>
void rms_norm_row(const T* x, const T* weight, int64_t size, float eps, T* out) {
  float scale = inverse_rms(x, size, eps);
  int64_t k = 0;
  for (; k + 16 <= size; k += 16)
    store_floats(out + k, load_floats(x + k) * splat(scale) * load_floats(weight + k));
  for (; k < size; ++k) from_float(out + k, to_float(x[k]) * scale * to_float(weight[k]));
}

template <class T>
void rms_norm(const T* x, const T* weight, int64_t rows, int64_t size, float eps, T* out) {
  int64_t grain = rows * size < (1 << 17) ? rows : 16;
  pool::parallel_for(rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      rms_norm_row(x + row * size, weight, size, eps, out + row * size);
  });
}

}  // namespace

// x [rows, size], weight [size] -> out [rows, size]; all bfloat16 or all float32.
extern "C" void vs_rms_norm(int32_t narrow, const void* x, const void* weight, int64_t rows, int64_t size,
                            float eps, void* out) {
  if (narrow) return rms_norm((const bf16*)x, (const bf16*)weight, rows, size, eps, (bf16*)out);
  rms_norm((const float*)x, (const float*)weight, rows, size, eps, (float*)out);
}
