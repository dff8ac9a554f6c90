// The elements of a KV cache: float32, bfloat16, e4m3 floats, or 8-bit integers with a float scale for each token and
// head. Both kinds of 8 bits are read exactly, also as bfloat16.
#pragma once
#include "simd.h"

enum CacheKind : int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_FP8 = 2, CACHE_INT8 = 3 };

struct fp8 {
  uint8_t bits;
};

// Sixteen 8-bit values, one in the lowest byte of each lane (what else is there does not matter), as floats.
template <class E>
INLINE f32x16 low_bytes(u32x16 bytes);
template <>
INLINE f32x16 low_bytes<int8_t>(u32x16 bytes) {
  return convert<f32x16>((i32x16)(bytes << 24) >> 24);
}
template <>
INLINE f32x16 low_bytes<fp8>(u32x16 bytes) {
  // exponents are 120 apart; as products they are right for subnormal numbers, too
  f32x16 magnitude = as_floats((bytes & 0x7fu) << 20) * splat(0x1p120f);
  return as_floats(as_bits(magnitude) | (bytes & 0x80u) << 24);
}

template <class E>
INLINE f32x16 load_bytes(const E* from) {
  return low_bytes<E>(convert<u32x16>(load<u8x16>(from)));
}
INLINE f32x16 load_floats(const int8_t* from) { return load_bytes(from); }
INLINE f32x16 load_floats(const fp8* from) { return load_bytes(from); }

// Sixteen elements as bfloat16, in the lower halves of lanes.
template <class E>
INLINE u32x16 load_halves(const E* from) {
  return as_bits(load_floats(from)) >> 16;
}
INLINE u32x16 load_halves(const bf16* from) { return convert<u32x16>(load<u16x16>(from)); }

// Thirty-two elements as bfloat16, two in a lane.
template <class E>
INLINE u32x16 load_pairs(const E* from) {
  u32x16 both = convert<u32x16>(load<u16x16>(from));
  return as_bits(low_bytes<E>(both)) >> 16 | (as_bits(low_bytes<E>(both >> 8)) & 0xffff0000u);
}
INLINE u32x16 load_pairs(const bf16* from) { return load<u32x16>(from); }

#if defined(__AVX512BW__)
// Of e4m3 floats without their sign, as bfloat16.
struct Bf16OfFp8 {
  alignas(64) bf16 values[128];
  constexpr Bf16OfFp8()
      : values{0, 118 << 7, 119 << 7, 119 << 7 | 64, 120 << 7, 120 << 7 | 32, 120 << 7 | 64, 120 << 7 | 96} {
    for (int bits = 8; bits < 128; ++bits) values[bits] = bf16((bits << 4) + (120 << 7));
  }
};
inline constexpr Bf16OfFp8 BF16_OF_FP8;

// One in the lower byte of each half of a lane; zeros above it.
INLINE u32x16 look_up(u32x16 bytes) {
  auto table = (const __m512i*)BF16_OF_FP8.values;
  auto low = (u32x16)_mm512_permutex2var_epi16(table[0], (__m512i)bytes, table[1]);
  auto high = (u32x16)_mm512_permutex2var_epi16(table[2], (__m512i)bytes, table[3]);
  auto upper = _mm512_test_epi16_mask((__m512i)bytes, _mm512_set1_epi16(64));
  auto size = (u32x16)_mm512_mask_blend_epi16(upper, (__m512i)low, (__m512i)high);
  return size | (bytes & 0x00800080u) << 8;
}
INLINE u32x16 load_halves(const fp8* from) { return look_up(convert<u32x16>(load<u8x16>(from))); }
INLINE u32x16 load_pairs(const fp8* from) {
  return look_up((u32x16)_mm512_maskz_cvtepu8_epi16(0xffffffffu, load<__m256i>(from)));
}
#endif
