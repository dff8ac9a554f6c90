// Operations on sixteen lanes at a time.
#pragma once
#include <cmath>

#include "lanes.h"

using bf16 = uint16_t;  // the upper half of a float's bits

template <class V, class T>
INLINE V load(const T* from) {
#if !defined(__AVX512F__)
  // half by half, or it goes through memory in smaller pieces
  if constexpr (sizeof(V) == 64) {
    using Half = decltype(V::low);
    return {load<Half>((const uint8_t*)from), load<Half>((const uint8_t*)from + 32)};
  }
#endif
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class V, class T>
INLINE void store(T* to, V v) {
#if !defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    std::memcpy((uint8_t*)to, &v.low, 32);
    std::memcpy((uint8_t*)to + 32, &v.high, 32);
    return;
  }
#endif
  std::memcpy(to, &v, sizeof v);
}

#if defined(__AVX512F__)
INLINE f32x16 splat(float x) { return (f32x16)_mm512_set1_ps(x); }
INLINE u32x16 splat_bits(uint32_t x) { return (u32x16)_mm512_set1_epi32(int32_t(x)); }
#else
INLINE f32x16 splat(float x) {
  f32x8 all = {x, x, x, x, x, x, x, x};
  return {all, all};
}
INLINE u32x16 splat_bits(uint32_t x) {
  u32x8 all = {x, x, x, x, x, x, x, x};
  return {all, all};
}
#endif
INLINE f32x16 as_floats(u32x16 x) { return (f32x16)x; }
INLINE u32x16 as_bits(f32x16 x) { return (u32x16)x; }

// bfloat16 -> float32 is exact; the way back rounds to the nearest, ties to even.
INLINE float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
INLINE f32x16 widen(u16x16 x) { return as_floats(convert<u32x16>(x) << 16); }
INLINE u16x16 narrow(f32x16 x) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
  u32x16 bits = as_bits(x);
  u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  u32x16 quiet_nan = (bits >> 16) | 0x40u;
  auto is_nan = (u32x16)(x != x);
  return convert<u16x16>((rounded & ~is_nan) | (quiet_nan & is_nan));
#endif
}
INLINE bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bf16((bits >> 16) | 0x40u);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Elements of either type as floats.
INLINE f32x16 load_floats(const float* from) { return load<f32x16>(from); }
INLINE f32x16 load_floats(const bf16* from) { return widen(load<u16x16>(from)); }
INLINE void store_floats(float* to, f32x16 v) { store(to, v); }
INLINE void store_floats(bf16* to, f32x16 v) { store(to, narrow(v)); }
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return widen(x); }
INLINE void from_float(float* to, float x) { *to = x; }
INLINE void from_float(bf16* to, float x) { *to = narrow(x); }

INLINE float sum(f32x16 v) {
  float total = 0;
  for (int lane = 0; lane < 16; ++lane) total += v[lane];
  return total;
}

// 1 / sqrt(mean(x^2) + eps) of a row.
template <class T>
INLINE float inverse_rms(const T* x, int64_t size, float eps) {
  f32x16 squares = {};
  int64_t k = 0;
  float rest = 0;
  for (; k + 16 <= size; k += 16) {
    f32x16 v = load_floats(x + k);
    squares += v * v;
  }
  for (; k < size; ++k) rest += to_float(x[k]) * to_float(x[k]);
  return 1.0f / std::sqrt((sum(squares) + rest) / float(size) + eps);
}

INLINE f32x16 select(i32x16 where, f32x16 yes, f32x16 no) {
  return as_floats(((u32x16)where & as_bits(yes)) | (~(u32x16)where & as_bits(no)));
}

// run(a constant of that value), which is 1 to MOST.
template <int MOST, class Run>
INLINE void with_constant(int64_t value, const Run& run) {
  if constexpr (MOST > 1)
    if (value < MOST) return with_constant<MOST - 1>(value, run);
  run(std::integral_constant<int, MOST>{});
}

// acc + the products of pairs of bfloat16, two in each 32-bit lane.
INLINE f32x16 dot_pairs(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc += as_floats(a << 16) * as_floats(b << 16);
  return acc + as_floats(a & 0xffff0000u) * as_floats(b & 0xffff0000u);
#endif
}

// The larger and the smaller of two; b where either is no number.
INLINE f32x16 larger(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
  return {a.low > b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
#endif
}
INLINE f32x16 smaller(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#else
  return {a.low < b.low ? a.low : b.low, a.high < b.high ? a.high : b.high};
#endif
}

// e^x, within 2 units in the last place from -87 to 88; as good as 0 below, and the largest power of two above.
INLINE f32x16 exp16(f32x16 x) {
  x = smaller(larger(x, splat(-87.0f)), splat(88.0f));
  // the sum has the nearest whole number in its lowest bits
  const f32x16 magic = splat(12582912.0f);
  f32x16 sum = x * splat(1.44269504088896341f) + magic, k = sum - magic;
  f32x16 r = x - k * splat(0.693359375f);
  r = r + k * splat(2.12194440e-4f);
  // Taylor's series to r^7 / 7!, |r| <= ln 2 / 2
  f32x16 p = splat(1.0f / 5040.0f);
  p = p * r + splat(1.0f / 720.0f);
  p = p * r + splat(1.0f / 120.0f);
  p = p * r + splat(1.0f / 24.0f);
  p = p * r + splat(1.0f / 6.0f);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  return as_floats(as_bits(p) + (as_bits(sum) << 23));  // times 2^k
}
