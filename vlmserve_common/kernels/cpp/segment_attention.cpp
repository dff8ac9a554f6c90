// Attention of a tower: every patch of a packed batch attends to those of its segment, for all heads.
//
// Queries and keys are turned by their positions and laid out as the products read them: what is multiplied comes in
// 32-bit units, a pair of bfloat16 or one float. First all keys and values are packed, in blocks of 16 keys, then the
// queries go through: few of them at a time past some hundred keys, whose scores, weights and sums stay in the core's
// own caches. The highest score so far is kept, and sums made with a lower one are scaled down (Dao et al. 2022).
// Every query's sums are made in the same order whatever else is in the batch. Packing and attending may be done in
// several calls.
#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 6, BLOCKS = 4;  // queries by blocks of a product; 24 of the 32 registers hold sums
#else
constexpr int ROWS = 4, BLOCKS = 1;
#endif
constexpr int64_t LANES = 16, PIECE = 96, KEYS = 512, MOST_DIM = 128;
constexpr float NEVER = -INFINITY;

// Powers of two from -1/2 to 1/2 by polynomials of least relative error: 2.6e-6 where they are rounded to bfloat16
// afterwards, else 2e-9.
struct Pairs {
  using Element = bf16;
  static constexpr int64_t ELEMENTS = 2;
  static constexpr float POWERS[] = {0.9999992614f, 0.6931218147f, 0.2402474483f, 0.0559178603f, 0.009570101699f};
  INLINE static f32x16 multiply(f32x16 acc, u32x16 a, u32x16 b) { return dot_pairs(acc, a, b); }
  INLINE static u32x16 join(const Element (*rows)[MOST_DIM], int64_t i) {
    return convert<u32x16>(load<u16x16>(rows[0] + i)) | convert<u32x16>(load<u16x16>(rows[1] + i)) << 16;
  }
};
struct Floats {
  using Element = float;
  static constexpr int64_t ELEMENTS = 1;
  static constexpr float POWERS[] = {1.000000001f,    0.6931472057f,  0.2402264689f,   0.05550328777f,
                                     0.009618488958f, 0.001339993122f, 0.0001534581184f};
  INLINE static f32x16 multiply(f32x16 acc, u32x16 a, u32x16 b) { return acc + as_floats(a) * as_floats(b); }
  INLINE static u32x16 join(const Element (*rows)[MOST_DIM], int64_t i) { return load<u32x16>(rows[0] + i); }
};

// 2^x for x of 0 or less; next to nothing below -125.
template <class Unit>
INLINE f32x16 power_of_two(f32x16 x) {
  x = larger(x, splat(-125.0f));
  f32x16 shifted = x + splat(12582912.0f);  // 1.5 * 2^23: the lowest bits are the nearest whole number
  f32x16 rest = x - (shifted - splat(12582912.0f));
  constexpr int terms = sizeof Unit::POWERS / sizeof(float);
  f32x16 p = splat(Unit::POWERS[terms - 1]);
#pragma GCC unroll 8
  for (int i = terms - 2; i >= 0; --i) p = p * rest + splat(Unit::POWERS[i]);
  return as_floats(as_bits(p) + (as_bits(shifted) << 23));
}

struct Attention {
  const void* qkv;               // [patches, 3, heads, dim]
  const float *cos, *signed_sin; // [patches, dim]: see `rotation` in vlmserve_common/compute/rotary.py; or null
  int64_t heads, dim;
  float scale;
  void* out;                     // [patches, heads, dim]
};

// Sixteen patches from `first` on, as keys and values, or fewer at the end of their segment.
struct Block {
  int64_t first, end;
};

// Up to PIECE queries of a head from `first` on; their segment, and its first block.
struct Piece {
  int64_t begin, end, first, head, block;
};

int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple; }

template <class Unit>
struct Layout {
  int64_t key_units, value_blocks;  // of one key; of 16 dimensions
  explicit Layout(const Attention& a) : key_units(a.dim / Unit::ELEMENTS), value_blocks(up_to(a.dim, LANES)) {}
  int64_t keys_block() const { return key_units * LANES; }
  int64_t values_block() const { return LANES / Unit::ELEMENTS * value_blocks * LANES; }
};

template <class X, class Element>
INLINE void copy(const X* x, int64_t count, float scale, Element* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store_floats(to + i, load_floats(x + i) * splat(scale));
  for (; i < count; ++i) from_float(to + i, to_float(x[i]) * scale);
}

// x turned by the patch's position, if there are any, times `scale`.
template <class X, class Element>
INLINE void turn(const Attention& a, const X* x, int64_t patch, float scale, Element* to) {
  if (!a.cos) return copy(x, a.dim, scale, to);
  const int64_t half = a.dim / 2;
  const float *cos = a.cos + patch * a.dim, *sin = a.signed_sin + patch * a.dim + half;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    f32x16 x0 = load_floats(x + i), x1 = load_floats(x + half + i);
    f32x16 c = load<f32x16>(cos + i) * splat(scale), s = load<f32x16>(sin + i) * splat(scale);
    store_floats(to + i, x0 * c - x1 * s);
    store_floats(to + half + i, x1 * c + x0 * s);
  }
  for (; i < half; ++i) {
    float x0 = to_float(x[i]), x1 = to_float(x[half + i]), c = cos[i] * scale, s = sin[i] * scale;
    from_float(to + i, x0 * c - x1 * s);
    from_float(to + half + i, x1 * c + x0 * s);
  }
}

template <class X>
const X* part_of(const Attention& a, int part, int64_t patch, int64_t head) {
  return (const X*)a.qkv + ((patch * 3 + part) * a.heads + head) * a.dim;
}

// A block for one head. Patches beyond the segment's end are zeros.
template <class Unit, class X>
void pack(const Attention& a, const Block& block, int64_t head, uint32_t* keys, uint32_t* values) {
  const Layout<Unit> layout(a);
  alignas(64) typename Unit::Element key[MOST_DIM] = {}, value[Unit::ELEMENTS][MOST_DIM] = {};
  for (int64_t lane = 0; lane < LANES; ++lane) {
    const int64_t patch = block.first + lane, within = lane % Unit::ELEMENTS;
    if (patch < block.end) {
      turn(a, part_of<X>(a, 1, patch, head), patch, 1.0f, key);
      copy(part_of<X>(a, 2, patch, head), a.dim, 1.0f, value[within]);
    } else {
      std::fill_n(key, a.dim, 0);
      std::fill_n(value[within], a.dim, 0);
    }
    for (int64_t unit = 0; unit < layout.key_units; ++unit)
      keys[unit * LANES + lane] = load<uint32_t>(key + unit * Unit::ELEMENTS);
    if (within == Unit::ELEMENTS - 1)
      for (int64_t i = 0; i < layout.value_blocks; ++i, values += LANES) store(values, Unit::join(value, i * LANES));
  }
}

// Adds to sums [ROWS, N * 16] the products of rows of units with N blocks of 16 columns.
template <class Unit, int N>
INLINE void tile(const typename Unit::Element* rows, int64_t row_stride, const uint32_t* columns, int64_t block_stride,
                 int64_t unit_stride, int64_t units, f32x16 (&sums)[ROWS][N]) {
  for (int64_t unit = 0; unit < units; ++unit, columns += unit_stride) {
    u32x16 b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = load<u32x16>(columns + n * block_stride);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      u32x16 x = splat_bits(load<uint32_t>(rows + m * row_stride + unit * Unit::ELEMENTS));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = Unit::multiply(sums[m][n], x, b[n]);
    }
  }
}

// Calls run<N>(first) for all of `count` blocks, N at a time, in parts of about the same size.
template <class Run>
INLINE void by_blocks(int64_t count, Run run) {
  for (int64_t first = 0; first < count;) {
    int64_t parts = up_to(count - first, BLOCKS), now = up_to(count - first, parts);
    switch (now) {
      case 1: run.template operator()<1>(first); break;
#if defined(__AVX512F__)
      case 2: run.template operator()<2>(first); break;
      case 3: run.template operator()<3>(first); break;
      default: run.template operator()<4>(first); break;
#endif
    }
    first += now;
  }
}

// What a thread needs for a piece; as many queries as a product takes at a time share scores and weights.
template <class Unit>
struct Memory {
  using Element = typename Unit::Element;
  Element queries[PIECE * MOST_DIM];
  f32x16 out[PIECE * MOST_DIM / LANES];
  float scores[ROWS * KEYS];
  Element weights[ROWS * KEYS];
  f32x16 sums[PIECE];
  float highest[PIECE];
};

template <class Unit>
void scores_of(const Layout<Unit>& layout, const typename Unit::Element* queries, const uint32_t* keys, int64_t count,
               float* scores, f32x16 (&highest)[ROWS]) {
  for (int m = 0; m < ROWS; ++m) highest[m] = splat(NEVER);
  by_blocks(up_to(count, LANES), [&]<int N>(int64_t block) {
    f32x16 sums[ROWS][N] = {};
    tile<Unit, N>(queries, layout.key_units * Unit::ELEMENTS, keys + block * layout.keys_block(), layout.keys_block(),
                  LANES, layout.key_units, sums);
    if ((block + N) * LANES > count) {
      float beyond[LANES] = {};
      std::fill(beyond + count % LANES, beyond + LANES, NEVER);
      for (int m = 0; m < ROWS; ++m) sums[m][N - 1] += load<f32x16>(beyond);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        store(scores + m * KEYS + (block + n) * LANES, sums[m][n]);
        highest[m] = larger(highest[m], sums[m][n]);
      }
  });
}

// One query's scores become weights. Returns by how much the sums of keys before shrink.
template <class Unit>
INLINE float weigh(const float* scores, int64_t blocks, f32x16 highest, float& so_far, f32x16& sum,
                   typename Unit::Element* weights) {
  float top = so_far;
  for (int64_t lane = 0; lane < LANES; ++lane) top = std::max(top, highest[lane]);
  float shrink = power_of_two<Unit>(splat(so_far - top))[0];
  so_far = top;
  sum *= splat(shrink);
  for (int64_t block = 0; block < blocks; ++block) {
    f32x16 weight = power_of_two<Unit>(load<f32x16>(scores + block * LANES) - splat(top));
    sum += weight;
    store_floats(weights + block * LANES, weight);
  }
  return shrink;
}

template <class Unit, class X>
void attend(const Attention& a, const Piece& p, const uint32_t* all_keys, const uint32_t* all_values) {
  const Layout<Unit> layout(a);
  const int64_t rows = std::min(p.end - p.first, PIECE), length = p.end - p.begin, wide = layout.value_blocks;
  auto& memory = *(Memory<Unit>*)pool::scratch(sizeof(Memory<Unit>));
  const int64_t padded = up_to(rows, ROWS) * ROWS;
  std::fill_n(memory.queries + rows * a.dim, (padded - rows) * a.dim, typename Unit::Element(0));
  for (int64_t row = 0; row < rows; ++row)
    turn(a, part_of<X>(a, 0, p.first + row, p.head), p.first + row, a.scale, memory.queries + row * a.dim);
  std::fill_n(memory.out, padded * wide, splat(0.0f));
  std::fill_n(memory.sums, padded, splat(0.0f));
  std::fill_n(memory.highest, padded, NEVER);
  for (int64_t key = 0; key < length; key += KEYS) {
    const int64_t count = std::min(KEYS, length - key), blocks = up_to(count, LANES);
    const uint32_t* keys = all_keys + key / LANES * layout.keys_block();
    const uint32_t* values = all_values + key / LANES * layout.values_block();
    for (int64_t row = 0; row < rows; row += ROWS) {
      f32x16 highest[ROWS];
      float shrink[ROWS];
      scores_of(layout, memory.queries + row * a.dim, keys, count, memory.scores, highest);
      for (int m = 0; m < ROWS; ++m)
        shrink[m] = weigh<Unit>(memory.scores + m * KEYS, blocks, highest[m], memory.highest[row + m],
                                memory.sums[row + m], memory.weights + m * KEYS);
      by_blocks(wide, [&]<int N>(int64_t block) {
        f32x16 sums[ROWS][N];
        f32x16* out = memory.out + row * wide + block;
        for (int m = 0; m < ROWS; ++m)
          for (int n = 0; n < N; ++n) sums[m][n] = out[m * wide + n] * splat(shrink[m]);
        tile<Unit, N>(memory.weights, KEYS, values + block * LANES, LANES,
                      wide * LANES, blocks * LANES / Unit::ELEMENTS, sums);
        for (int m = 0; m < ROWS; ++m)
          for (int n = 0; n < N; ++n) out[m * wide + n] = sums[m][n];
      });
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    X* to = (X*)a.out + ((p.first + row) * a.heads + p.head) * a.dim;
    f32x16 share = splat(1.0f / sum(memory.sums[row]));
    for (int64_t i = 0; i < a.dim; i += LANES) {
      f32x16 value = memory.out[row * wide + i / LANES] * share;
      if (i + LANES <= a.dim)
        store_floats(to + i, value);
      else
        for (int64_t lane = 0; i + lane < a.dim; ++lane) from_float(to + i + lane, value[lane]);
    }
  }
}

// Segments one behind the other, and the caller's memory for their packed blocks, head by head: keys, then values.
struct Segments {
  const int64_t* bounds;  // [count + 1]
  int64_t count;
  uint32_t* memory;
};

int64_t blocks_of(const Segments& s) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < s.count; ++i) blocks += up_to(s.bounds[i + 1] - s.bounds[i], LANES);
  return blocks;
}

// The blocks that begin at the patches from `first` to `last`.
template <class Unit, class X>
void pack_some(const Attention& a, const Segments& s, int64_t first, int64_t last) {
  const Layout<Unit> layout(a);
  std::vector<Block> blocks;
  int64_t before = 0;
  for (int64_t i = 0; i < s.count; ++i)
    for (int64_t at = s.bounds[i]; at < s.bounds[i + 1]; at += LANES)
      if (at < first)
        ++before;
      else if (at < last)
        blocks.push_back({at, s.bounds[i + 1]});
  const int64_t count = blocks_of(s);
  uint32_t *keys = s.memory, *values = keys + count * a.heads * layout.keys_block();
  pool::parallel_for(int64_t(blocks.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      for (int64_t head = 0; head < a.heads; ++head) {
        int64_t at = head * count + before + i;
        pack<Unit, X>(a, blocks[i], head, keys + at * layout.keys_block(), values + at * layout.values_block());
      }
  });
}

// The pieces of queries from number `first` to `last`: of a segment, head by head, since a head's share its keys and
// values.
template <class Unit, class X>
void attend_some(const Attention& a, const Segments& s, int64_t first, int64_t last) {
  const Layout<Unit> layout(a);
  std::vector<Piece> pieces;
  int64_t number = 0, block = 0;
  for (int64_t i = 0; i < s.count; ++i) {
    const int64_t begin = s.bounds[i], end = s.bounds[i + 1];
    for (int64_t head = 0; head < a.heads; ++head)
      for (int64_t at = begin; at < end; at += PIECE, ++number)
        if (number >= first && number < last) pieces.push_back({begin, end, at, head, block});
    block += up_to(end - begin, LANES);
  }
  const uint32_t *keys = s.memory, *values = keys + block * a.heads * layout.keys_block();
  pool::parallel_for(int64_t(pieces.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      int64_t at = pieces[i].head * block + pieces[i].block;
      attend<Unit, X>(a, pieces[i], keys + at * layout.keys_block(), values + at * layout.values_block());
    }
  });
}

// Calls run<Unit, X> as numbers of that width are multiplied here.
template <class Run>
auto by_width(int32_t narrow, Run run) {
  if (!narrow) return run.template operator()<Floats, float>();
#if defined(__AVX512BF16__)
  return run.template operator()<Pairs, bf16>();
#else
  return run.template operator()<Floats, bf16>();  // products of bfloat16 would be widened one by one
#endif
}

}  // namespace

// For all below: qkv and out are float32 or bfloat16; cos and signed_sin are null to turn nothing; bounds [segments + 1]:
// where segments begin, and the end of the last. dim: even, 128 at the most.

// Bytes of `memory` for so many blocks: 16 patches each, or fewer at the end of a segment.
extern "C" int64_t vs_segment_memory(int32_t narrow, int64_t heads, int64_t dim, int64_t blocks) {
  Attention a{nullptr, nullptr, nullptr, heads, dim, 0.0f, nullptr};
  return by_width(narrow, [&]<class Unit, class X>() {
    const Layout<Unit> layout(a);
    return blocks * heads * (layout.keys_block() + layout.values_block()) * 4;
  });
}

// Packs keys and values into `memory`, aligned to 64. first, last: patches: where a block begins, or the end.
extern "C" void vs_segment_pack(int32_t narrow, const void* qkv, const float* cos, const float* signed_sin,
                                int64_t heads, int64_t dim, const int64_t* bounds, int64_t segments, void* memory,
                                int64_t first, int64_t last) {
  Attention a{qkv, cos, signed_sin, heads, dim, 0.0f, nullptr};
  Segments s{bounds, segments, (uint32_t*)memory};
  by_width(narrow, [&]<class Unit, class X>() { pack_some<Unit, X>(a, s, first, last); });
}

// first, last: numbers of pieces, which are 96 queries of one head each, or fewer at the end of a segment; segment by
// segment, and in one head by head. Once all of their segments is packed.
extern "C" void vs_segment_attend(int32_t narrow, const void* qkv, const float* cos, const float* signed_sin,
                                  int64_t heads, int64_t dim, const int64_t* bounds, int64_t segments, void* memory,
                                  int64_t first, int64_t last, void* out) {
  // weights are powers of two, not of e
  Attention a{qkv, cos, signed_sin, heads, dim, 1.44269504f / std::sqrt(float(dim)), out};
  Segments s{bounds, segments, (uint32_t*)memory};
  by_width(narrow, [&]<class Unit, class X>() { attend_some<Unit, X>(a, s, first, last); });
}
