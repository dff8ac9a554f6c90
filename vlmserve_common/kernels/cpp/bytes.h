// Products of whole numbers: weights of 8 bits by activations that are rounded to 8 bits on the way in.
//
// Each row of x has a scale for every GROUP inputs, chosen by these alone: an input that is far out costs accuracy in
// its group only, and a row's result depends on no other row. A group's sum is exact. Weights are taken as numbers from
// 0 to 255, as the processor wants one factor, so sums start at -128 times the sum of x.
#pragma once
#include <algorithm>

#include "pool.h"
#include "weights.h"

#if defined(__AVX512VNNI__)
#define HAS_BYTES 1

namespace bytes {

constexpr int64_t GROUP = 128;
constexpr int64_t ALONE = 1 << 15;  // elements that are not worth waking another thread for

inline int64_t groups_of(int64_t inner) { return (inner + GROUP - 1) / GROUP; }

// Quads of a panel that lie as products want them.
struct Plain {
  static constexpr int64_t CHUNK = 64;
  INLINE static u32x16 quads(const uint8_t* at) { return load<u32x16>(at); }
};

INLINE f32x16 load_some(const float* from, __mmask16 which) { return (f32x16)_mm512_maskz_loadu_ps(which, from); }
INLINE f32x16 load_some(const bf16* from, __mmask16 which) {
  return widen((u16x16)_mm256_maskz_loadu_epi16(which, from));
}

// A group of `count` inputs: numbers = x / scale, and where its sums start. x that is not finite makes the scale so.
template <class X>
INLINE void round_group(const X* x, int64_t count, int8_t* numbers, float& scale, int32_t& start) {
  auto lanes = [&](int64_t k) { return __mmask16(count - k >= 16 ? 0xffff : (1 << (count - k)) - 1); };
  __m512i most = _mm512_setzero_si512(), sum = most;
  for (int64_t k = 0; k < count; k += 16)  // sizes of floats are in the order of their bits; NaN is the largest
    most = _mm512_max_epu32(most, (__m512i)(as_bits(load_some(x + k, lanes(k))) & 0x7fffffffu));
  uint32_t bits = _mm512_reduce_max_epu32(most);
  float largest;
  std::memcpy(&largest, &bits, 4);
  scale = largest / 127.0f;
  const f32x16 inverse = splat(bits == 0 ? 0.0f : 1.0f / scale);
  for (int64_t k = 0; k < count; k += 16) {
    __m512i whole = _mm512_cvtps_epi32((__m512)(load_some(x + k, lanes(k)) * inverse));  // ties to even
    sum = _mm512_add_epi32(sum, whole);
    _mm512_mask_cvtsepi32_storeu_epi8(numbers + k, lanes(k), whole);
  }
  start = -128 * _mm512_reduce_add_epi32(sum);
}

// Rounds x [rows, inner], `stride` elements apart, to numbers [rows, inner]; scales and starts: [rows, groups].
template <class X>
void round_rows(const X* x, int64_t rows, int64_t inner, int64_t stride, int8_t* numbers, float* scales,
                int32_t* starts) {
  const int64_t groups = groups_of(inner), grain = rows * inner < ALONE ? rows : 16;
  pool::parallel_for(rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t group = 0, k = 0; k < inner; ++group, k += GROUP) {
        const int64_t at = row * groups + group;
        round_group(x + row * stride + k, std::min(GROUP, inner - k), numbers + row * inner + k, scales[at], starts[at]);
      }
  });
}

// A row tile's inputs of a group, and the scales and starts of its first row.
struct Group {
  const int8_t* numbers;
  const float* scales;
  const int32_t* starts;
  int64_t inner, groups;  // from row to row
  int64_t inputs;
};

// sums [ROWS][PANEL_BLOCKS] += scale * (x w). next: what is asked of the memory meanwhile, as much as w, or null.
template <class Weights, int ROWS>
void tile(const Group& x, const uint8_t* w, const uint8_t* next, f32x16 (*sums)[PANEL_BLOCKS]) {
  constexpr int64_t STEP = PANEL_BLOCKS * 64;
  i32x16 acc[ROWS][PANEL_BLOCKS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_BLOCKS; ++n) acc[m][n] = (i32x16)splat_bits(uint32_t(x.starts[m * x.groups]));
  for (int64_t k = 0; k < x.inputs; k += 4, w += STEP) {
    if (next) {
#pragma GCC unroll 4
      for (int64_t byte = 0; byte < STEP; byte += 64) __builtin_prefetch(next + byte);
      next += STEP;
    }
    u32x16 b[PANEL_BLOCKS];
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_BLOCKS; ++n) b[n] = Weights::quads(w + n * 64);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      u32x16 a = splat_bits(load<uint32_t>(x.numbers + m * x.inner + k));
#pragma GCC unroll 4
      for (int n = 0; n < PANEL_BLOCKS; ++n)
        acc[m][n] = (i32x16)_mm512_dpbusd_epi32((__m512i)acc[m][n], (__m512i)b[n], (__m512i)a);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_BLOCKS; ++n) sums[m][n] += splat(x.scales[m * x.groups]) * convert<f32x16>(acc[m][n]);
}

}  // namespace bytes
#endif
