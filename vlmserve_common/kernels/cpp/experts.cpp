// A sparse MLP: each row goes through the experts that its router chose; the result is the weighted sum of theirs.
//
// Rows are sorted by expert, so that each expert's weights are read once for all its rows. An expert's result for
// a row and the order of the sum depend on the row alone, not on its batch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "operators.h"
#include "pool.h"
#include "simd.h"

namespace {

int64_t grain_of(int64_t rows, int64_t size) { return rows * size < (1 << 16) ? rows : 16; }

// The likeliest of `experts`, likeliest first and the first of equals, and their shares of the probability they have.
// odds, best: room for those of all, and of the chosen.
template <class T>
void route_row(const T* logits, int64_t experts, int64_t chosen, float* odds, float* best, int64_t* ids, T* scores) {
  float largest = -INFINITY, sum = 0, kept = 0;
  for (int64_t e = 0; e < experts; ++e) largest = std::max(largest, to_float(logits[e]));
  for (int64_t e = 0; e < experts; ++e) sum += odds[e] = std::exp(to_float(logits[e]) - largest);
  for (int64_t e = 0; e < experts; ++e) odds[e] /= sum;
  for (int64_t j = 0; j < chosen; ++j) {
    ids[j] = std::max_element(odds, odds + experts) - odds;
    kept += best[j] = odds[ids[j]];
    odds[ids[j]] = -1;
  }
  for (int64_t j = 0; j < chosen; ++j) from_float(scores + j, best[j] / kept);
}

template <class T>
void route(const T* logits, int64_t rows, int64_t experts, int64_t chosen, int64_t* ids, T* scores) {
  pool::parallel_for(rows, grain_of(rows, experts * chosen), [&](int64_t first, int64_t last) {
    auto* odds = (float*)pool::scratch((experts + chosen) * 4);
    for (int64_t row = first; row < last; ++row)
      route_row(logits + row * experts, experts, chosen, odds, odds + experts, ids + row * chosen, scores + row * chosen);
  });
}

// out [size] = residual + the sum of scores times rows of `made` [*, size], in their order; places below 0 have none.
template <class T>
void add_up(const T* made, const int64_t* places, const T* scores, int64_t chosen, int64_t size, const T* residual,
            T* out) {
  int64_t k = 0;
  for (; k + 16 <= size; k += 16) {
    f32x16 total = residual ? load_floats(residual + k) : f32x16{};
    for (int64_t j = 0; j < chosen; ++j)
      if (places[j] >= 0) total += splat(to_float(scores[j])) * load_floats(made + places[j] * size + k);
    store_floats(out + k, total);
  }
  for (; k < size; ++k) {
    float total = residual ? to_float(residual[k]) : 0.0f;
    for (int64_t j = 0; j < chosen; ++j)
      if (places[j] >= 0) total += to_float(scores[j]) * to_float(made[places[j] * size + k]);
    from_float(out + k, total);
  }
}

template <class T>
void run_experts(const Weight& gate_up, const Weight& down, int64_t experts, int64_t chosen, int32_t act, const T* x,
                 int64_t rows, const int64_t* ids, const T* scores, const T* residual, T* out, T* scratch) {
  const bool narrow = sizeof(T) == 2;
  const int64_t size = gate_up.inner, all = rows * chosen;
  // where each expert's rows start, and where among these each row's are
  std::vector<int64_t> starts(experts + 1), next, places(all);
  for (int64_t i = 0; i < all; ++i)
    if (ids[i] >= 0) ++starts[ids[i] + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  next = starts;
  for (int64_t i = 0; i < all; ++i) places[i] = ids[i] < 0 ? -1 : next[ids[i]]++;
  T *sorted = scratch, *inside = scratch + all * size, *made = sorted;  // results overwrite inputs
  pool::parallel_for(all, grain_of(all, size), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      if (places[i] >= 0) std::memcpy(sorted + places[i] * size, x + i / chosen * size, size * sizeof(T));
  });
  grouped_linear(gate_up, narrow, experts, starts.data(), sorted, act, true, inside);
  grouped_linear(down, narrow, experts, starts.data(), inside, 0, false, made);
  pool::parallel_for(rows, grain_of(rows, size * chosen), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      add_up(made, places.data() + row * chosen, scores + row * chosen, chosen, size,
             residual ? residual + row * size : nullptr, out + row * size);
  });
}

// Each row times the sigmoid of its gate, which is rounded first.
template <class T>
void open_rows(T* x, const T* gates, int64_t rows, int64_t size) {
  pool::parallel_for(rows, grain_of(rows, size), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      T gate;
      from_float(&gate, 1 / (1 + std::exp(-to_float(gates[row]))));
      for (T* at = x + row * size; at < x + (row + 1) * size; ++at) from_float(at, to_float(*at) * to_float(gate));
    }
  });
}

}  // namespace

// logits [rows, experts] -> ids and scores [rows, chosen]: softmax in float32, the largest, divided
// by their sum, rounded to the logits' type.
extern "C" void vs_route(int32_t narrow, const void* logits, int64_t rows, int64_t experts, int64_t chosen,
                         int64_t* ids, void* scores) {
  if (narrow) return route((const bf16*)logits, rows, experts, chosen, ids, (bf16*)scores);
  route((const float*)logits, rows, experts, chosen, ids, (float*)scores);
}

// x [rows, size] -> out [rows, size] = residual + the sum over experts `ids` [rows, chosen] of x, times `scores`
// [rows, chosen]. Experts with ids below 0 are on other ranks, and add nothing. All bfloat16 or all float32. residual
// may be null, or out. gate_up, down: Weights of all experts. scratch: for each row chosen * (size + gates) elements of
// x's type.
extern "C" void vs_experts(int32_t narrow, const void* gate_up, const void* down, int64_t experts, int64_t chosen,
                           int32_t act, const void* x, int64_t rows, const int64_t* ids, const void* scores,
                           const void* residual, void* out, void* scratch) {
  const auto &first = *(const Weight*)gate_up, &second = *(const Weight*)down;
  if (narrow)
    return run_experts(first, second, experts, chosen, act, (const bf16*)x, rows, ids, (const bf16*)scores,
                       (const bf16*)residual, (bf16*)out, (bf16*)scratch);
  run_experts(first, second, experts, chosen, act, (const float*)x, rows, ids, (const float*)scores,
              (const float*)residual, (float*)out, (float*)scratch);
}

// A whole sparse MLP with an expert that all rows go through, times a gate: x [rows, size] -> out [rows, size]. All
// pointers before x: Weights. scratch: for each row router outputs + chosen * (1 + size + gates) + shared gates + size
// + 1 elements of x's type.
extern "C" void vs_shared_mlp(int32_t narrow, const void* router, const void* gate_up, const void* down,
                              const void* shared_gate_up, const void* shared_down, const void* shared_gate,
                              int64_t chosen, int32_t act, const void* x, int64_t rows, void* out, void* scratch) {
  const auto &r = *(const Weight*)router, &first = *(const Weight*)shared_gate_up, &second = *(const Weight*)shared_down;
  const int64_t element = narrow ? 2 : 4, size = r.inner;
  char *logits = (char*)scratch, *scores = logits + rows * r.outputs * element;
  char *inside = scores + rows * chosen * element, *beside = inside + rows * first.outputs * element;
  char *gates = beside + rows * size * element, *rest = gates + rows * element;
  multiply(narrow, x, rows, first, inside, act, true);
  multiply(narrow, inside, rows, second, beside);
  multiply(narrow, x, rows, *(const Weight*)shared_gate, gates);
  if (narrow) open_rows((bf16*)beside, (const bf16*)gates, rows, size);
  else open_rows((float*)beside, (const float*)gates, rows, size);
  std::vector<int64_t> ids(rows * chosen);
  multiply(narrow, x, rows, r, logits);
  vs_route(narrow, logits, rows, r.outputs, chosen, ids.data(), scores);
  vs_experts(narrow, gate_up, down, r.outputs, chosen, act, x, rows, ids.data(), scores, beside, out, rest);
}
