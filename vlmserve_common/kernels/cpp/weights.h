// The memory layout of packed weights.
//
// Output columns are packed in panels of 64, four blocks of 16. For every pair of inputs (k, k + 1) a panel has the
// pair of each column, block by block, so a product reads its weights once and in order. A chunk is the smallest part
// of a block that lies together: one pair of inputs, or several.
//
// Quantised weights are integers with a scale and a shift, both 16-bit floats, for each column and group of inputs:
// weight = scale * (number + shift). The numbers, or 2 * number + 1, are exact in bfloat16. Behind its numbers a panel
// has, for each group, the scales of its columns and then their shifts.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "amx.h"
#include "simd.h"

constexpr int BLOCK = 16, PANEL_BLOCKS = 4, PANEL = BLOCK * PANEL_BLOCKS;

// W8A8: packed as INT8, and multiplied by activations that are rounded to 8 bits, too; see bytes.h.
enum WeightKind : int32_t { WEIGHT_F32 = 0, WEIGHT_BF16 = 1, WEIGHT_INT8 = 2, WEIGHT_INT4 = 3, WEIGHT_W8A8 = 4 };

using f16 = uint16_t;

INLINE f32x16 load_halves(const f16* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#else
  u32x16 bits = convert<u32x16>(load<u16x16>(from));
  f32x16 size = as_floats((bits & 0x7fffu) << 13) * splat(0x1p112f);  // the exponents' bases are 112 apart
  return as_floats(as_bits(size) | (bits & 0x8000u) << 16);
#endif
}

struct Bf16Weights {
  static constexpr int64_t PAIRS = 1, CHUNK = 64;  // pairs of a chunk, and its bytes
  static constexpr bool QUANTISED = false;
  INLINE static u32x16 pairs(const uint8_t* at, int) { return load<u32x16>(at); }
};

// Where a panel of bfloat16 weights has the pair of a column, counted in pairs. For AMX 16 pairs of a block lie
// together: a register.
INLINE int64_t pair_place(int64_t pair, int64_t column, [[maybe_unused]] int64_t inner) {
#if defined(HAS_AMX)
  if (pair < inner / 32 * 16)
    return pair / 16 * 16 * PANEL + column / BLOCK * 16 * BLOCK + pair % 16 * BLOCK + column % BLOCK;
#endif
  return pair * PANEL + column;
}

struct F32Weights {
  static constexpr int64_t PAIRS = 1, CHUNK = 128;
  static constexpr bool QUANTISED = false;
  INLINE static void floats(const uint8_t* at, int, f32x16& even, f32x16& odd) {
    even = load<f32x16>(at), odd = load<f32x16>(at + 64);
  }
};

// By hand: compilers take the lanes apart.
INLINE i32x16 widen_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  __m256i parts[2] = {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)),
                      _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))};
  return load<i32x16>(parts);
#else
  i32x16 wide;
  for (int lane = 0; lane < 16; ++lane) set_lane(wide, lane, int32_t(int8_t(from[lane])));
  return wide;
#endif
}
INLINE f32x16 whole(i32x16 numbers) { return convert<f32x16>(numbers); }
INLINE u32x16 pairs_of_whole(f32x16 even, f32x16 odd) { return as_bits(even) >> 16 | as_bits(odd); }

#if defined(__AVX512VBMI__)
// The bytes of bfloat16 numbers 1, 3, 5 ... 255.
struct OddNumbers {
  alignas(64) uint8_t low[128], high[128];
  constexpr OddNumbers() : low{}, high{} {
    for (int i = 0; i < 128; ++i) {
      int number = 2 * i + 1, exponent = 0;
      while (number >> (exponent + 1)) ++exponent;
      int bits = (127 + exponent) << 7 | (number << (7 - exponent) & 127);
      low[i] = uint8_t(bits), high[i] = uint8_t(bits >> 8);
    }
  }
};
inline constexpr OddNumbers ODD_NUMBERS;

// Each number n is read as 2 * n + 1: odd numbers have a sign and 128 sizes, for which there is a table. A chunk is 64
// bytes: in each 16 of them four columns' even and odd inputs of the first pair, and then of the second.
struct Int8Weights {
  static constexpr int64_t PAIRS = 2, CHUNK = 64;
  static constexpr bool QUANTISED = true, DOUBLED = true;
  INLINE static u32x16 pairs(const uint8_t* at, int pair) {
    auto bytes = _mm512_loadu_si512(at);
    auto table = [&](const uint8_t* of) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(of), bytes, _mm512_load_si512(of + 64));
    };
    auto low = table(ODD_NUMBERS.low);
    auto high = _mm512_ternarylogic_epi32(table(ODD_NUMBERS.high), bytes, _mm512_set1_epi8(-128), 0xf8);  // a | b & c
    return (u32x16)(pair ? _mm512_maskz_unpackhi_epi8(~0ull, low, high) : _mm512_maskz_unpacklo_epi8(~0ull, low, high));
  }
  INLINE static void floats(const uint8_t* at, int pair, f32x16& even, f32x16& odd) {
    u32x16 both = pairs(at, pair);
    even = as_floats(both << 16), odd = as_floats(both & 0xffff0000u);
  }
  // Numbers from 0 to 255, those of a column's four inputs in a lane.
  INLINE static u32x16 quads(const uint8_t* at) {
    auto bytes = _mm512_loadu_si512(at);
    auto flipped = _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), _mm512_set1_epi8(-128), _mm512_set1_epi8(-1));
    auto places = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    return (u32x16)_mm512_shuffle_epi8(_mm512_xor_si512(bytes, flipped), places);
  }
  // Puts a column's numbers from 0 to 255, which are less by 128, into a panel.
  static void put(uint8_t* panel, int64_t column, const uint8_t* numbers, int64_t inner) {
    const int64_t lane = column % BLOCK;
    for (int64_t k = 0; k < inner; ++k) {
      uint8_t* chunk = panel + (k / 4 * PANEL_BLOCKS + column / BLOCK) * CHUNK;
      chunk[lane / 4 * 16 + k % 4 / 2 * 8 + lane % 4 * 2 + k % 2] =
          numbers[k] < 128 ? uint8_t(128 | (127 - numbers[k])) : uint8_t(numbers[k] - 128);
    }
  }
};
#else
// A chunk is 16 bytes for even inputs and 16 for odd ones.
struct Int8Weights {
  static constexpr int64_t PAIRS = 1, CHUNK = 32;
  static constexpr bool QUANTISED = true, DOUBLED = false;
  INLINE static void floats(const uint8_t* at, int, f32x16& even, f32x16& odd) {
    even = whole(widen_bytes(at));
    odd = whole(widen_bytes(at + 16));
  }
  INLINE static u32x16 pairs(const uint8_t* at, int pair) {
    f32x16 even, odd;
    floats(at, pair, even, odd);
    return pairs_of_whole(even, odd);
  }
  // Puts a column's numbers from 0 to 255, which are less by 128, into a panel.
  static void put(uint8_t* panel, int64_t column, const uint8_t* numbers, int64_t inner) {
    for (int64_t k = 0; k < inner; ++k)
      panel[(k / 2 * PANEL_BLOCKS + column / BLOCK) * CHUNK + k % 2 * BLOCK + column % BLOCK] =
          uint8_t(numbers[k] - 128);
  }
};
#endif

// A chunk is 32 words of 16 bits, two for each column: that of the even and that of the odd inputs of four pairs. Bits
// 4 j to 4 j + 3 of a word are pair j's number plus 8.
struct Int4Weights {
  static constexpr int64_t PAIRS = 4, CHUNK = 64;
  static constexpr bool QUANTISED = true, DOUBLED = false;
  INLINE static void floats(const uint8_t* at, int pair, f32x16& even, f32x16& odd) {
    u32x16 words = load<u32x16>(at) >> 4 * pair;
    even = whole((i32x16)(words & 15u) - 8);
    odd = whole((i32x16)(words >> 16 & 15u) - 8);
  }
  INLINE static u32x16 pairs(const uint8_t* at, int pair) {
#if defined(__AVX512BW__)
    // -8 to 7 as bfloat16, twice: the permutation looks at five bits of each word, and only four are the number's
    alignas(64) static constexpr bf16 NUMBERS[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
        0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
        0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(at), 4 * pair);
    return (u32x16)_mm512_permutexvar_epi16(words, _mm512_load_si512(NUMBERS));
#else
    f32x16 even, odd;
    floats(at, pair, even, odd);
    return pairs_of_whole(even, odd);
#endif
  }
  // Puts a column's numbers from 0 to 15, which are less by 8, into a panel: eight, of one chunk, at a time.
  static void put(uint8_t* panel, int64_t column, const uint8_t* numbers, int64_t inner) {
    auto* to = panel + column / BLOCK * CHUNK + column % BLOCK * 4;
    for (int64_t k = 0; k < inner; k += 8, to += PANEL_BLOCKS * CHUNK) {
      const auto eight = load<uint64_t>(numbers + k);
      store(to, of_four(eight) | of_four(eight >> 8) << 16);
    }
  }

 private:
  // The lowest four bits of the first byte and every second one behind it, side by side.
  static uint32_t of_four(uint64_t bytes) {
    bytes &= 0x000f000f000f000full;
    return uint32_t(bytes | bytes >> 12 | bytes >> 24 | bytes >> 36) & 0xffffu;
  }
};

// Bytes of a panel's numbers, and of the whole panel.
template <class Weights>
constexpr int64_t number_bytes(int64_t inner) {
  return inner / (2 * Weights::PAIRS) * PANEL_BLOCKS * Weights::CHUNK;
}
template <class Weights>
constexpr int64_t panel_bytes(int64_t inner, int64_t groups) {
  return number_bytes<Weights>(inner) + (Weights::QUANTISED ? groups * 2 * PANEL * int64_t(sizeof(f16)) : 0);
}
