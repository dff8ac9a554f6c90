// The types of sixteen lanes. With AVX-512 they are the compiler's own vectors, one register each. Elsewhere compilers
// keep such wide vectors in memory; there they are pairs of eight lanes, which stay in registers.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include <immintrin.h>
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
#else
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

template <class Half, class T>
struct Halves {
  using Lane = T;
  Half low, high;

  Halves() = default;
  INLINE Halves(Half l, Half h) : low(l), high(h) {}
  // The same bits as lanes of another kind.
  template <class H, class U>
  INLINE explicit Halves(Halves<H, U> other) : low((Half)other.low), high((Half)other.high) {}

  INLINE T operator[](int lane) const { return lane < 8 ? low[lane] : high[lane - 8]; }
  INLINE Halves operator-() const { return {-low, -high}; }
  INLINE Halves operator~() const { return {~low, ~high}; }
  INLINE Halves operator<<(int bits) const { return {low << bits, high << bits}; }
  INLINE Halves operator>>(int bits) const { return {low >> bits, high >> bits}; }
#define LANEWISE(op)                                                                                       \
  friend INLINE Halves operator op(Halves a, Halves b) { return {a.low op b.low, a.high op b.high}; }      \
  friend INLINE Halves operator op(Halves a, T b) { return {a.low op b, a.high op b}; }                    \
  INLINE Halves& operator op##=(Halves b) { return *this = *this op b; }
  LANEWISE(+)
  LANEWISE(-)
  LANEWISE(*)
  LANEWISE(/)
  LANEWISE(&)
  LANEWISE(|)
  LANEWISE(^)
#undef LANEWISE
#define COMPARED(op)                                                                                       \
  friend INLINE Halves<i32x8, int32_t> operator op(Halves a, Halves b) {                                   \
    return {(i32x8)(a.low op b.low), (i32x8)(a.high op b.high)};                                           \
  }
  COMPARED(<)
  COMPARED(>)
  COMPARED(<=)
  COMPARED(>=)
  COMPARED(==)
  COMPARED(!=)
#undef COMPARED
};
using f32x16 = Halves<f32x8, float>;
using i32x16 = Halves<i32x8, int32_t>;
using u32x16 = Halves<u32x8, uint32_t>;
#endif
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

template <class V, class T>
INLINE void set_lane(V& v, int64_t lane, T value) {
#if defined(__AVX512F__)
  v[lane] = value;
#else
  if (lane < 8) v.low[lane] = value;
  else v.high[lane - 8] = value;
#endif
}

// Each lane's number as one of another type.
template <class To, class From>
INLINE To convert(From v) {
#if defined(__AVX512F__)
  // GCC's own way takes five instructions for these; without a mask it warns of them
  if constexpr (std::is_same_v<To, u32x16> && std::is_same_v<From, u16x16>)
    return (u32x16)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)v);
  else if constexpr (std::is_same_v<To, u32x16> && std::is_same_v<From, u8x16>)
    return (u32x16)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)v);
  else
    return __builtin_convertvector(v, To);
#else
  if constexpr (sizeof(From) == 64 && sizeof(To) == 64) {
    using Half = decltype(To::low);
    return {__builtin_convertvector(v.low, Half), __builtin_convertvector(v.high, Half)};
  } else if constexpr (sizeof(To) == 64) {  // from shorter lanes
    typedef std::remove_reference_t<decltype(v[0])> Lane;
    typedef Lane Eight __attribute__((vector_size(sizeof(From) / 2)));
    Eight parts[2];
    std::memcpy(parts, &v, sizeof v);
    using Half = decltype(To::low);
    return {__builtin_convertvector(parts[0], Half), __builtin_convertvector(parts[1], Half)};
  } else {  // to shorter lanes
    typedef std::remove_reference_t<decltype(To{}[0])> Lane;
    typedef Lane Eight __attribute__((vector_size(sizeof(To) / 2)));
    Eight parts[2] = {__builtin_convertvector(v.low, Eight), __builtin_convertvector(v.high, Eight)};
    To to;
    std::memcpy(&to, parts, sizeof to);
    return to;
  }
#endif
}
