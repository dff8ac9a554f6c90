// Several residual streams: norms of each, the gated mean that a block reads, and its output added to each. Everything
// is computed in float32 and rounded once.
#include <cmath>

#include "activations.h"
#include "operators.h"
#include "pool.h"

namespace {

// Rows that a thread takes at a time: all of them if there is little to do.
int64_t grain_of(int64_t rows, int64_t size) { return rows * size < (1 << 17) ? rows : 4; }

template <class T>
void norm_stream(const T* x, const T* weight, int64_t size, float eps, T* out) {
  float scale = inverse_rms(x, size, eps);
  int64_t k = 0;
  for (; k + 16 <= size; k += 16)
    store_floats(out + k, load_floats(x + k) * splat(scale) * (splat(1.0f) + load_floats(weight + k)));
  for (; k < size; ++k) from_float(out + k, to_float(x[k]) * scale * (1 + to_float(weight[k])));
}

template <class T>
void stream_norm(const T* x, const T* weight, int64_t rows, int64_t streams, int64_t size, float eps, T* out) {
  pool::parallel_for(rows, grain_of(rows, streams * size), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t c = 0; c < streams; ++c) {
        int64_t at = (row * streams + c) * size;
        norm_stream(x + at, weight + c * size, size, eps, out + at);
      }
  });
}

template <class T>
void stream_mix(const T* gates, const T* normed, int64_t rows, int64_t streams, int64_t size, T* out) {
  pool::parallel_for(rows, grain_of(rows, streams * size), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T *g = gates + row * streams * size, *n = normed + row * streams * size;
      int64_t k = 0;
      for (; k + 16 <= size; k += 16) {
        f32x16 total = {};
        for (int64_t c = 0; c < streams; ++c)
          total += gated(load_floats(n + c * size + k), load_floats(g + c * size + k));
        store_floats(out + row * size + k, total * splat(1.0f / float(streams)));
      }
      for (; k < size; ++k) {
        float total = 0;
        for (int64_t c = 0; c < streams; ++c)
          total += to_float(n[c * size + k]) / (1 + std::exp(-to_float(g[c * size + k])));
        from_float(out + row * size + k, total / float(streams));
      }
    }
  });
}

template <class T>
void stream_add(const T* x, const T* made, const T* logits, int64_t rows, int64_t streams, int64_t size, T* out) {
  pool::parallel_for(rows, grain_of(rows, streams * size), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t c = 0; c < streams; ++c) {
        float weight = 2 / (1 + std::exp(-to_float(logits[row * streams + c]) / float(streams)));
        int64_t at = (row * streams + c) * size, k = 0;
        for (; k + 16 <= size; k += 16)
          store_floats(out + at + k, load_floats(x + at + k) + splat(weight) * load_floats(made + row * size + k));
        for (; k < size; ++k) from_float(out + at + k, to_float(x[at + k]) + weight * to_float(made[row * size + k]));
      }
  });
}

// x = silu(x / by), rounded in between as separate operators would.
template <class T>
void silu_of_part(T* x, int64_t rows, int64_t size, float by) {
  pool::parallel_for(rows, grain_of(rows, size), [&](int64_t first, int64_t last) {
    for (int64_t i = first * size; i < last * size; ++i) {
      from_float(x + i, to_float(x[i]) / by);
      const float part = to_float(x[i]);
      from_float(x + i, part / (1 + std::exp(-part)));
    }
  });
}

}  // namespace

// x, out [rows, streams * size], weight [streams * size]: each stream divided by its root mean square, times 1 + weight.
extern "C" void vs_stream_norm(int32_t narrow, const void* x, const void* weight, int64_t rows, int64_t streams,
                               int64_t size, float eps, void* out) {
  if (narrow) return stream_norm((const bf16*)x, (const bf16*)weight, rows, streams, size, eps, (bf16*)out);
  stream_norm((const float*)x, (const float*)weight, rows, streams, size, eps, (float*)out);
}

// gates, normed [rows, streams * size] -> out [rows, size]: the mean over streams of sigmoid(gates) * normed.
extern "C" void vs_stream_mix(int32_t narrow, const void* gates, const void* normed, int64_t rows, int64_t streams,
                              int64_t size, void* out) {
  if (narrow) return stream_mix((const bf16*)gates, (const bf16*)normed, rows, streams, size, (bf16*)out);
  stream_mix((const float*)gates, (const float*)normed, rows, streams, size, (float*)out);
}

// out [rows, streams * size] = x + made [rows, size] for each stream, times 2 sigmoid(logits [rows, streams] / streams).
extern "C" void vs_stream_add(int32_t narrow, const void* x, const void* made, const void* logits, int64_t rows,
                              int64_t streams, int64_t size, void* out) {
  if (narrow)
    return stream_add((const bf16*)x, (const bf16*)made, (const bf16*)logits, rows, streams, size, (bf16*)out);
  stream_add((const float*)x, (const float*)made, (const float*)logits, rows, streams, size, (float*)out);
}

// What a block reads of the streams x [rows, streams * size], and what the weights of its output are made of: `mixed`
// [rows, size], and `logits` [rows, streams] unless `inject` is null. down, up, inject: Weights. scratch: for each row
// 2 * streams * size and down's outputs, elements of x's type.
extern "C" void vs_stream_read(int32_t narrow, const void* x, int64_t rows, int64_t streams, int64_t size,
                               const void* norm, float eps, const void* down, const void* up, const void* inject,
                               void* mixed, void* logits, void* scratch) {
  const auto &first = *(const Weight*)down, &second = *(const Weight*)up;
  const int64_t whole = rows * streams * size, element = narrow ? 2 : 4, rank = first.outputs;
  char *normed = (char*)scratch, *gates = normed + whole * element, *inner = gates + whole * element;
  vs_stream_norm(narrow, x, norm, rows, streams, size, eps, normed);
  multiply(narrow, normed, rows, first, inner);
  narrow ? silu_of_part((bf16*)inner, rows, rank, float(streams))
         : silu_of_part((float*)inner, rows, rank, float(streams));
  multiply(narrow, inner, rows, second, gates);
  vs_stream_mix(narrow, gates, normed, rows, streams, size, mixed);
  if (inject) multiply(narrow, normed, rows, *(const Weight*)inject, logits);
}
