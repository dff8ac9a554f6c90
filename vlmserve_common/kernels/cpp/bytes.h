// Products of whole numbers: weights of 8 bits by activations that are rounded to 8 bits on the way in.
//
// Each row of x has a scale for every GROUP inputs, chosen by these alone, so a row's result depends on no other row.
// A group's sum is exact. Inputs that are far out would leave few numbers for the others: they are multiplied apart, as
// they are (LLM.int8(), arXiv:2208.07339, does so by columns). Weights are taken as numbers from 0 to 255, as the
// processor wants one factor, so sums start at -128 times the sum of x.
#pragma once
#include <algorithm>

#include "pool.h"
#include "weights.h"

#if defined(__AVX512VNNI__)
#define HAS_BYTES 1

namespace bytes {

constexpr int64_t GROUP = 128;
constexpr float FAR = 6;            // times a group's mean size: less than a sixth of its inputs
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

// A row's group of inputs: number = x / scale. Inputs that are FAR out are apart: their numbers are 0.
struct Group {
  float scale;
  int32_t start;    // of its sums
  uint64_t far[2];  // a bit for each input
};

// x that is not finite makes the scale so.
template <class X>
INLINE Group round_group(const X* x, int64_t count, int8_t* numbers) {
  auto lanes = [&](int64_t k) { return __mmask16(count - k >= 16 ? 0xffff : (1 << (count - k)) - 1); };
  auto size = [&](int64_t k) { return as_floats(as_bits(load_some(x + k, lanes(k))) & 0x7fffffffu); };
  f32x16 sizes = {};
  for (int64_t k = 0; k < count; k += 16) sizes += size(k);
  const __m512 limit = (__m512)splat(FAR / float(count) * sum(sizes));
  Group group{0, 0, {0, 0}};
  __m512i most = _mm512_setzero_si512(), total = most;
  for (int64_t k = 0; k < count; k += 16) {
    const __mmask16 far = _mm512_cmp_ps_mask((__m512)size(k), limit, _CMP_GT_OQ);
    group.far[k / 64] |= uint64_t(far) << k % 64;
    // sizes of floats are in the order of their bits, and NaN is the largest
    most = _mm512_mask_max_epu32(most, _knot_mask16(far), most, (__m512i)size(k));
  }
  const uint32_t bits = _mm512_reduce_max_epu32(most);
  float largest;
  std::memcpy(&largest, &bits, 4);
  group.scale = largest / 127.0f;
  const f32x16 inverse = splat(bits == 0 ? 0.0f : 1.0f / group.scale);
  for (int64_t k = 0; k < count; k += 16) {
    const auto near = __mmask16(~(group.far[k / 64] >> k % 64));
    __m512i whole = _mm512_maskz_cvtps_epi32(near, (__m512)(load_some(x + k, lanes(k)) * inverse));  // ties to even
    total = _mm512_add_epi32(total, whole);
    _mm512_mask_cvtsepi32_storeu_epi8(numbers + k, lanes(k), whole);
  }
  group.start = -128 * _mm512_reduce_add_epi32(total);
  return group;
}

// Rounds x [rows, inner], `stride` elements apart, to numbers [rows, inner] and groups [rows, *].
template <class X>
void round_rows(const X* x, int64_t rows, int64_t inner, int64_t stride, int8_t* numbers, Group* to) {
  const int64_t groups = groups_of(inner), grain = rows * inner < ALONE ? rows : 16;
  pool::parallel_for(rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t group = 0, k = 0; k < inner; ++group, k += GROUP)
        to[row * groups + group] =
            round_group(x + row * stride + k, std::min(GROUP, inner - k), numbers + row * inner + k);
  });
}

constexpr int64_t STEP = PANEL_BLOCKS * 64;  // bytes of a panel's four inputs

// sums [ROWS][PANEL_BLOCKS] += scale * (x w) for a group of `inputs`. x: numbers, `inner` apart; own: the rows' group,
// `groups` apart. next: what is asked of the memory meanwhile, as much as w, or null.
template <class Weights, int ROWS>
void tile(const int8_t* x, int64_t inner, const Group* own, int64_t groups, int64_t inputs, const uint8_t* w,
          const uint8_t* next, f32x16 (*sums)[PANEL_BLOCKS]) {
  i32x16 acc[ROWS][PANEL_BLOCKS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_BLOCKS; ++n) acc[m][n] = (i32x16)splat_bits(uint32_t(own[m * groups].start));
  for (int64_t k = 0; k < inputs; k += 4, w += STEP) {
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
      u32x16 a = splat_bits(load<uint32_t>(x + m * inner + k));
#pragma GCC unroll 4
      for (int n = 0; n < PANEL_BLOCKS; ++n)
        acc[m][n] = (i32x16)_mm512_dpbusd_epi32((__m512i)acc[m][n], (__m512i)b[n], (__m512i)a);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_BLOCKS; ++n) sums[m][n] += splat(own[m * groups].scale) * convert<f32x16>(acc[m][n]);
}

// sums += x w for the inputs of a row's group that are far out.
template <class Weights, class X>
INLINE void add_far(const X* x, const Group& own, const uint8_t* w, f32x16* sums) {
  for (int half = 0; half < 2; ++half)
    for (uint64_t left = own.far[half]; left; left &= left - 1) {
      const int64_t k = half * 64 + __builtin_ctzll(left);
      for (int n = 0; n < PANEL_BLOCKS; ++n) {
        auto number = (i32x16)(Weights::quads(w + k / 4 * STEP + n * 64) >> 8 * (k % 4) & 0xffu);
        sums[n] += splat(to_float(x[k])) * convert<f32x16>(number - 128);
      }
    }
}

}  // namespace bytes
#endif
