// What adapters add to a product: x A^T B^T, each row with the factors of its own adapter. Sums are float32, and a row's
// does not depend on its batch.
#include <algorithm>
#include <vector>

#include "operators.h"
#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t LANES = 16, RANKS = 4, ROWS = 4;
constexpr int64_t ALONE = 1 << 16;  // multiplications that are not worth waking another thread for

// inner [ROWS][RANKS] of x's rows and those of a. rows, ranks: how many there are.
template <int M, class T>
INLINE void shrink_tile(const T* x, int64_t stride, const T* a, int64_t inner, int64_t ranks, float* to, int64_t to_stride) {
  f32x16 sums[M][RANKS] = {};
  float rest[M][RANKS] = {};
  int64_t k = 0;
  for (; k + LANES <= inner; k += LANES)
    for (int64_t j = 0; j < ranks; ++j) {
      f32x16 w = load_floats(a + j * inner + k);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sums[m][j] += load_floats(x + m * stride + k) * w;
    }
  for (; k < inner; ++k)
    for (int64_t j = 0; j < ranks; ++j)
      for (int m = 0; m < M; ++m) rest[m][j] += to_float(x[m * stride + k]) * to_float(a[j * inner + k]);
  for (int m = 0; m < M; ++m)
    for (int64_t j = 0; j < ranks; ++j) to[m * to_stride + j] = sum(sums[m][j]) + rest[m][j];
}

// added [M][LANES] = h [M][rank] b [rank][LANES].
template <int M, class T>
INLINE void expand_tile(const float* h, int64_t h_stride, const T* b, int64_t rank, float* to, int64_t to_stride) {
  f32x16 sums[M] = {};
  for (int64_t j = 0; j < rank; ++j) {
    f32x16 w = load_floats(b + j * LANES);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sums[m] += splat(h[m * h_stride + j]) * w;
  }
  for (int m = 0; m < M; ++m) store(to + m * to_stride, sums[m]);
}

// Calls run(row, count) for rows of one adapter each, ROWS or 1 of them.
template <class Run>
INLINE void by_adapter(const int32_t* of_row, int64_t first, int64_t last, Run run) {
  for (int64_t row = first; row < last;) {
    bool together = row + ROWS <= last;
    for (int64_t m = 1; together && m < ROWS; ++m) together = of_row[row + m] == of_row[row];
    run(row, together);
    row += together ? ROWS : 1;
  }
}

template <class T>
void add_all(const T* x, int64_t rows, int64_t inner, int64_t stride, const int32_t* of_row, const Factors* factors,
             int64_t adapters, int64_t blocks, float* added) {
  int64_t most = 0;
  for (int64_t i = 0; i < adapters; ++i) most = std::max(most, factors[i].a ? factors[i].whole : 0);
  std::vector<float> h(size_t(rows * most));
  const int64_t groups = (most + RANKS - 1) / RANKS, tiles = (rows + ROWS - 1) / ROWS;
  int64_t grain = rows * most * inner < ALONE ? tiles * groups : std::max<int64_t>(1, tiles * groups / (pool::threads() * 4));
  pool::parallel_for(tiles * groups, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t tile = task / groups, rank = task % groups * RANKS;
      by_adapter(of_row, tile * ROWS, std::min(rows, (tile + 1) * ROWS), [&](int64_t row, bool together) {
        const int32_t own = of_row[row];
        if (own < 0 || !factors[own].a || rank >= factors[own].whole) return;
        const Factors& f = factors[own];
        const T* a = (const T*)f.a + rank * inner;
        const int64_t ranks = std::min(RANKS, f.whole - rank);
        float* to = h.data() + row * most + rank;
        together ? shrink_tile<ROWS>(x + row * stride, stride, a, inner, ranks, to, most)
                 : shrink_tile<1>(x + row * stride, stride, a, inner, ranks, to, most);
      });
    }
  });
  const int64_t columns = blocks * LANES;
  grain = rows * most * columns < ALONE ? tiles * blocks : std::max<int64_t>(1, tiles * blocks / (pool::threads() * 4));
  pool::parallel_for(tiles * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t tile = task / blocks, block = task % blocks;
      by_adapter(of_row, tile * ROWS, std::min(rows, (tile + 1) * ROWS), [&](int64_t row, bool together) {
        const int32_t own = of_row[row];
        float* to = added + row * columns + block * LANES;
        if (own < 0 || !factors[own].a) {
          for (int64_t m = 0; m < (together ? ROWS : 1); ++m) store(to + m * columns, f32x16{});
          return;
        }
        const Factors& f = factors[own];
        const T* b = (const T*)f.b + block * f.rank * LANES;
        const float* from = h.data() + row * most + (f.parts ? f.parts[block] * f.rank : 0);
        together ? expand_tile<ROWS>(from, most, b, f.rank, to, columns) : expand_tile<1>(from, most, b, f.rank, to, columns);
      });
    }
  });
}

}  // namespace

// x [rows, inner], stride elements apart, -> added float32 [rows, blocks * 16]: what the adapter factors[of_row[row]]
// adds to each row; 0 for rows with of_row below 0, and for adapters without factors here. x and factors are float32,
// or bfloat16 if narrow.
extern "C" void vs_lora(int32_t narrow, const void* x, int64_t rows, int64_t inner, int64_t stride,
                        const int32_t* of_row, const void* factors, int64_t adapters, int64_t blocks, float* added) {
  if (narrow) return add_all((const bf16*)x, rows, inner, stride, of_row, (const Factors*)factors, adapters, blocks, added);
  add_all((const float*)x, rows, inner, stride, of_row, (const Factors*)factors, adapters, blocks, added);
}
