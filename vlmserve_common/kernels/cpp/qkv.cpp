// Runs between the product of queries, keys and values, and attention: normalises and turns the heads of queries and
// keys, and writes keys and values to the cache. Computes in float32 and rounds once.
#include <algorithm>
#include <cmath>

#include "cache.h"
#include "operators.h"
#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t MOST_DIM = 256;
constexpr int64_t ALONE = 1 << 15;  // elements that are not worth waking another thread for

struct Step {
  void* qkv;  // [tokens, heads + 2 * kv_heads, dim]; queries are replaced
  int64_t tokens, heads, kv_heads, dim;
  const void *q_weight, *k_weight;  // [dim], or null: heads are not normalised
  float eps;
  const void *cos, *sin;  // [tokens, dim]; the first half of the sine is negative
  const int64_t* slots;   // [tokens]
  void *keys, *values;    // caches [slots, kv_heads, dim]
  float *key_scales, *value_scales;
};

// x [dim] to wide [2 * dim]: twice, so that the halves of a head are beside each other in either order.
template <class T>
INLINE void normalise(const T* x, const T* weight, int64_t dim, float eps, float* wide) {
  f32x16 scale = splat(1.0f);
  if (weight) {
    f32x16 squares = {};
    for (int64_t d = 0; d < dim; d += 16) squares += load_floats(x + d) * load_floats(x + d);
    scale = splat(1.0f / std::sqrt(sum(squares) / float(dim) + eps));
  }
  for (int64_t d = 0; d < dim; d += 16) {
    f32x16 value = load_floats(x + d) * scale;
    if (weight) value *= load_floats(weight + d);
    store(wide + d, value), store(wide + dim + d, value);
  }
}

template <class R>
INLINE void turn(float* wide, const R* cos, const R* sin, int64_t dim) {
  float turned[MOST_DIM];
  for (int64_t d = 0; d < dim; d += 16)
    store(turned + d, load<f32x16>(wide + d) * load_floats(cos + d) +
                          load<f32x16>(wide + dim / 2 + d) * load_floats(sin + d));
  std::memcpy(wide, turned, size_t(dim) * 4);
}

// To the nearest integer, ties to even, in the lowest byte; |x| below 2^22.
INLINE u32x16 whole(f32x16 x) { return as_bits(x + splat(12582912.0f)); }

template <class T>
INLINE void put(const float* x, int64_t dim, T* to, float*) {
  for (int64_t d = 0; d < dim; d += 16) store_floats(to + d, load<f32x16>(x + d));
}

// Numbers beyond 448, the largest, become 448.
INLINE void put(const float* x, int64_t dim, fp8* to, float*) {
  for (int64_t d = 0; d < dim; d += 16) {
    u32x16 bits = load<u32x16>(x + d), sign = bits >> 24 & 0x80u;
    f32x16 size = as_floats(bits & 0x7fffffffu);
    size = select(size > splat(448.0f), splat(448.0f), size);
    u32x16 rounded = ((as_bits(size) + 0x7ffffu + (as_bits(size) >> 20 & 1u)) >> 20) - (120u << 3);
    u32x16 subnormal = whole(size * splat(512.0f)) & 0xffu;
    auto small = (u32x16)(size < splat(0x1p-6f));
    store(to + d, convert<u8x16>((subnormal & small) | (rounded & ~small) | sign));
  }
}

// The largest becomes 127.
INLINE void put(const float* x, int64_t dim, int8_t* to, float* scale) {
  f32x16 most = {};
  for (int64_t d = 0; d < dim; d += 16) {
    f32x16 size = as_floats(load<u32x16>(x + d) & 0x7fffffffu);
    most = larger(size, most);
  }
  float largest = 0;
  for (int lane = 0; lane < 16; ++lane) largest = std::max(largest, most[lane]);
  *scale = largest > 0 ? largest / 127.0f : 1.0f;
  for (int64_t d = 0; d < dim; d += 16)
    store(to + d, convert<u8x16>(whole(load<f32x16>(x + d) / splat(*scale)) & 0xffu));
}

template <class T, class R, class E>
void step(const Step& s) {
  const int64_t heads = s.heads + 2 * s.kv_heads, grain = s.tokens * heads * s.dim < ALONE ? s.tokens : 4;
  pool::parallel_for(s.tokens, grain, [&](int64_t first, int64_t last) {
    float wide[2 * MOST_DIM];
    for (int64_t token = first; token < last; ++token)
      for (int64_t head = 0; head < heads; ++head) {
        T* x = (T*)s.qkv + (token * heads + head) * s.dim;
        bool query = head < s.heads, value = head >= s.heads + s.kv_heads;
        normalise<T>(x, (const T*)(query ? s.q_weight : value ? nullptr : s.k_weight), s.dim, s.eps, wide);
        if (!value) turn((float*)wide, (const R*)s.cos + token * s.dim, (const R*)s.sin + token * s.dim, s.dim);
        if (query) {
          put(wide, s.dim, x, nullptr);
          continue;
        }
        int64_t row = s.slots[token] * s.kv_heads + (head - s.heads) % s.kv_heads;
        float* scales = value ? s.value_scales : s.key_scales;
        put(wide, s.dim, (E*)(value ? s.values : s.keys) + row * s.dim, scales ? scales + row : nullptr);
      }
  });
}

template <class T, class R>
void with_cache(const Step& s, int32_t kind) {
  switch (kind) {
    case CACHE_FP8: return step<T, R, fp8>(s);
    case CACHE_INT8: return step<T, R, int8_t>(s);
    default: return step<T, R, T>(s);
  }
}

}  // namespace

// See Step. qkv, weights and plain caches are float32, or bfloat16 if narrow; cos and sin float32, or bfloat16 if
// narrow_turns; kind: of the caches. dim: a multiple of 16, at most 256.
extern "C" void vs_qkv(int32_t narrow, int32_t narrow_turns, int32_t kind, void* qkv, int64_t tokens, int64_t heads,
                       int64_t kv_heads, int64_t dim, const void* q_weight, const void* k_weight, float eps,
                       const void* cos, const void* sin, const int64_t* slots, void* keys, void* values,
                       float* key_scales, float* value_scales) {
  Step s{qkv, tokens, heads, kv_heads, dim, q_weight, k_weight, eps, cos, sin, slots, keys, values, key_scales,
         value_scales};
  if (!narrow) return with_cache<float, float>(s, kind);
  if (narrow_turns) return with_cache<bf16, bf16>(s, kind);
  with_cache<bf16, float>(s, kind);
}
