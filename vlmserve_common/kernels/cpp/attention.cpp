// Attention of a whole step over the paged KV cache: chunks of prompts and single tokens in one call.
//
// A task is a block of queries with all their heads of one KV head, or of several KV heads if there are few queries. A
// row is one head of one query. Keys are gathered from their slots 64 at a time, and laid out as products read them, so
// each key is read once for all rows of the task. A slot's heads lie side by side in memory, and are read together.
// Softmax is online, in parts of 512 keys that are merged in order. A row's result depends only on the row's own
// position: not on other rows, on where chunks end, or on the number of threads. In bfloat16, weights are rounded before
// they are multiplied by values.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "cache.h"
#include "operators.h"
#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t KEYS = 64, PART = 512, ROWS = 96;
constexpr float LOWEST = -1e30f;
constexpr int64_t LONE_TASKS = 2;   // tasks for each thread that the keys of lone tokens make at the least
constexpr int64_t ALONE = 1 << 18;  // elements of keys that are not worth waking another thread for
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 4;
#else
constexpr int TILE_ROWS = 4, TILE_BLOCKS = 1;
#endif

struct Request {
  int64_t row, prefix, extend, start;  // in the table; tokens before and of this step; its first token in the batch
};

struct Call {
  const void* q;  // [tokens, heads, dim], tokens q_stride elements apart
  int64_t q_stride;
  void* out;                          // [tokens, heads, dim]
  const void *keys, *values;          // [slots, kv_heads, dim]
  const float *key_scales, *value_scales;  // [slots, kv_heads], or null
  int64_t heads, kv_heads, dim;
  float scale;
  const int32_t* table;
  int64_t table_stride;
  int64_t window;  // keys that a query sees, its own the last of them; 0: all
  int64_t group() const { return heads / kv_heads; }
};

// Queries first .. first + count of a request, and all they do with KV heads head .. head + heads.
struct Block {
  const Request* request;
  int64_t head, heads, first, count, window;
  int64_t keys() const { return request->prefix + first + count; }
  int64_t lowest() const { return window ? std::max<int64_t>(0, request->prefix + first + 1 - window) : 0; }  // key seen
  int64_t first_part() const { return lowest() / PART; }
  int64_t parts() const { return (keys() + PART - 1) / PART - first_part(); }
};

#if defined(__AVX512BW__)
// Elements of two vectors in turns: the first of each, the second of each ...
struct InTurns {
  alignas(64) uint16_t order[64];
  constexpr InTurns() : order{} {
    for (int i = 0; i < 64; ++i) order[i] = uint16_t(i / 2 + i % 2 * 32);
  }
};
constexpr InTurns IN_TURNS_TABLE;
constexpr const uint16_t* IN_TURNS = IN_TURNS_TABLE.order;
#endif

// Products of 32-bit lanes: two bfloat16, or a float32.
struct Narrow {
  using Element = bf16;
  static constexpr int PER_LANE = 2;
  INLINE static f32x16 add(f32x16 sum, u32x16 a, u32x16 b) { return dot_pairs(sum, a, b); }
  // a vector of lanes of a key
  template <class E>
  INLINE static u32x16 lanes(const E* key, bool half) {
    if (!half) return load_pairs(key);
    E padded[32] = {};
    std::memcpy(padded, key, 16 * sizeof(E));
    return load_pairs(padded);
  }
  template <class E>
  INLINE static void lay(uint32_t* to, const E* const* rows, int64_t dim) {
    int64_t d = 0;
#if defined(__AVX512BW__)
    if constexpr (std::is_same_v<E, bf16>)
      for (; d + 32 <= dim; d += 32) {
        auto even = load<__m512i>(rows[0] + d), odd = rows[1] ? load<__m512i>(rows[1] + d) : __m512i{};
        store(to + d, _mm512_permutex2var_epi16(even, load<__m512i>(IN_TURNS), odd));
        store(to + d + 16, _mm512_permutex2var_epi16(even, load<__m512i>(IN_TURNS + 32), odd));
      }
#endif
    for (; d < dim; d += 16) {
      u32x16 pairs = load_halves(rows[0] + d);
      if (rows[1]) pairs |= load_halves(rows[1] + d) << 16;
      store(to + d, pairs);
    }
  }
};
struct Wide {
  using Element = float;
  static constexpr int PER_LANE = 1;
  INLINE static f32x16 add(f32x16 sum, u32x16 a, u32x16 b) { return sum + as_floats(a) * as_floats(b); }
  template <class E>
  INLINE static u32x16 lanes(const E* key, bool) {
    return as_bits(load_floats(key));
  }
  template <class E>
  INLINE static void lay(uint32_t* to, const E* const* rows, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 16) store(to + d, as_bits(load_floats(rows[0] + d)));
  }
};

// y [rows, 16 * blocks] = keep * y + x w, for x [rows, steps] and w [steps, 16 * blocks] of lanes; keep null: x w.
struct Product {
  const uint32_t* x;
  int64_t x_stride;
  const uint32_t* w;
  int64_t w_stride, steps;
  float* y;
  int64_t y_stride;
  const float* keep;
};

template <class T, int M, int N>
void tile(const Product& p, int64_t row, int64_t block) {
  f32x16 sums[M][N];
  float* y = p.y + row * p.y_stride + block * 16;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      sums[m][n] = p.keep ? splat(p.keep[row + m]) * load<f32x16>(y + m * p.y_stride + n * 16) : f32x16{};
  const uint32_t *x = p.x + row * p.x_stride, *w = p.w + block * 16;
  for (int64_t step = 0; step < p.steps; ++step, ++x, w += p.w_stride) {
    u32x16 b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) b[n] = load<u32x16>(w + n * 16);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      u32x16 a = splat_bits(x[m * p.x_stride]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = T::add(sums[m][n], a, b[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(y + m * p.y_stride + n * 16, sums[m][n]);
}

template <class T>
void multiply(const Product& p, int64_t rows, int64_t blocks) {
  for (int64_t block = 0; block < blocks; block += TILE_BLOCKS)
    with_constant<TILE_BLOCKS>(std::min<int64_t>(TILE_BLOCKS, blocks - block), [&](auto n) {
      for (int64_t row = 0, now; row < rows; row += now) {
        // parts of about the same size: 8 rows are 4 and 4, not 6 and 2
        int64_t left = rows - row, parts = (left + TILE_ROWS - 1) / TILE_ROWS;
        now = (left + parts - 1) / parts;
        with_constant<TILE_ROWS>(now, [&](auto m) { tile<T, m, n>(p, row, block); });
      }
    });
}

constexpr int32_t LANES[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE float highest(f32x16 v) {
#if defined(__AVX512F__)
#pragma GCC unroll 4
  for (int apart = 8; apart > 0; apart /= 2) {
    auto other = (f32x16)_mm512_permutex2var_ps((__m512)v, (__m512i)(load<i32x16>(LANES) ^ apart), (__m512)v);
    v = larger(v, other);
  }
  return v[0];
#else
  float top = v[0];
  for (int lane = 1; lane < 16; ++lane) top = std::max(top, v[lane]);
  return top;
#endif
}

#if defined(__AVX512F__)
// Swaps off-diagonal squares of size x size.
template <int SIZE>
INLINE void swap_squares(__m512i (&r)[16], __m512i low, __m512i high) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    if (!(i & SIZE)) {
      __m512i a = r[i], b = r[i + SIZE];
      r[i] = _mm512_permutex2var_epi32(a, low, b), r[i + SIZE] = _mm512_permutex2var_epi32(a, high, b);
    }
}
#endif

INLINE void transpose(u32x16 (&rows)[16]) {
#if defined(__AVX512F__)
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = (__m512i)rows[i];
  swap_squares<8>(r, _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                  _mm512_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  swap_squares<4>(r, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                  _mm512_setr_epi32(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
  swap_squares<2>(r, _mm512_setr_epi32(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                  _mm512_setr_epi32(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  swap_squares<1>(r, _mm512_setr_epi32(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                  _mm512_setr_epi32(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = (u32x16)r[i];
#else
  uint32_t from[16][16], to[16][16];
  for (int i = 0; i < 16; ++i) store(from[i], rows[i]);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[j][i] = from[i][j];
  for (int i = 0; i < 16; ++i) rows[i] = load<u32x16>(to[i]);
#endif
}

// Softmax over some keys, not yet divided: for each row the highest score, the sum of weights, the weighted values.
struct Sums {
  float *highest, *weights, *out;
  static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
  Sums(float* memory, int64_t rows) : highest(memory), weights(memory + rows), out(memory + 2 * rows) {}
  void clear(int64_t rows, int64_t dim) {
    std::fill(highest, highest + rows, LOWEST);
    std::fill(weights, out + rows * dim, 0.0f);
  }
};

INLINE float exp1(float x) { return exp16(splat(x))[0]; }

// total := total and part together.
void merge(const Sums& total, const Sums& part, int64_t rows, int64_t dim) {
  for (int64_t row = 0; row < rows; ++row) {
    float top = std::max(total.highest[row], part.highest[row]);
    float old = exp1(total.highest[row] - top), now = exp1(part.highest[row] - top);
    total.highest[row] = top;
    total.weights[row] = total.weights[row] * old + part.weights[row] * now;
    for (int64_t d = row * dim; d < (row + 1) * dim; d += 16)
      store(total.out + d, load<f32x16>(total.out + d) * splat(old) + load<f32x16>(part.out + d) * splat(now));
  }
}

// head: of the KV heads.
template <class T>
void finish(const Call& call, const Block& block, int64_t head_of_kv, const Sums& total) {
  auto* out = (typename T::Element*)call.out;
  int64_t group = call.group(), dim = call.dim;
  for (int64_t row = 0; row < block.count * group; ++row) {
    int64_t token = block.request->start + block.first + row / group, head = head_of_kv * group + row % group;
    f32x16 scale = splat(1.0f / total.weights[row]);
    for (int64_t d = 0; d < dim; d += 16)
      store_floats(out + (token * call.heads + head) * dim + d, load<f32x16>(total.out + row * dim + d) * scale);
  }
}

// The sums of several heads, one behind the other.
struct HeadSums {
  float* memory;
  int64_t rows, dim;
  static int64_t floats(int64_t heads, int64_t rows, int64_t dim) { return heads * Sums::floats(rows, dim); }
  Sums operator[](int64_t head) const { return Sums(memory + head * Sums::floats(rows, dim), rows); }
};

// Rows of a cache that are needed soon, asked of the memory in the order in which they lie, into the second cache (the
// first cannot wait for many).
class Ahead {
 public:
  Ahead(const void* cache, int64_t slot_bytes, int64_t offset, int64_t bytes, const int32_t* slots, int64_t count)
      : cache_((const char*)cache + offset), slot_bytes_(slot_bytes), bytes_(bytes), slots_(slots), count_(count) {}

  // The next 64 bytes, so many times.
  INLINE void ask(int64_t lines) {
    for (; lines > 0 && key_ < count_; --lines) {
      __builtin_prefetch(cache_ + slots_[key_] * slot_bytes_ + byte_, 0, 2);
      byte_ += 64;
      if (byte_ >= bytes_) byte_ = 0, ++key_;
    }
  }

 private:
  const char* cache_;
  int64_t slot_bytes_, bytes_;
  const int32_t* slots_;
  int64_t count_, key_ = 0, byte_ = 0;
};

// T: of queries and products; E: what the cache holds.
template <class T, class E>
class Worker {
 public:
  // rows: of a head, and heads, at most.
  Worker(const Call& call, int64_t rows, int64_t heads)
      : call_(call), dim_(call.dim), lanes_(call.dim / T::PER_LANE), rows_(rows), group_(call.group()) {
    int64_t tall = (lanes_ + 15) / 16 * 16, sums = HeadSums::floats(heads, rows, dim_);
    int64_t floats = tall * KEYS + KEYS / T::PER_LANE * dim_ + heads * rows * lanes_ + rows * KEYS / T::PER_LANE +
                     rows * KEYS + 2 * KEYS + heads * rows * 16 + rows + 2 * sums;
    auto* memory = (float*)pool::scratch((floats + 16 * 11) * 4);
    auto take = [&](int64_t count) {
      float* taken = memory;
      memory += (count + 15) / 16 * 16;
      return taken;
    };
    keys_ = (uint32_t*)take(tall * KEYS);
    values_ = (uint32_t*)take(KEYS / T::PER_LANE * dim_);
    queries_ = (uint32_t*)take(heads * rows * lanes_);
    weights_ = (uint32_t*)take(rows * KEYS / T::PER_LANE);
    scores_ = take(rows * KEYS);
    key_scales_ = take(KEYS), value_scales_ = take(KEYS);
    lane_sums_ = take(heads * rows * 16);
    keep_ = take(rows);
    sums_ = {take(sums), rows, dim_};
    total_ = {take(sums), rows, dim_};
  }

  // All of a block.
  void whole(const Block& block) {
    attend(block, 0, total_);
    for (int64_t part = 1; part < block.parts(); ++part) {
      attend(block, part, sums_);
      for (int64_t h = 0; h < block.heads; ++h) merge(total_[h], sums_[h], block.count * group_, dim_);
    }
    for (int64_t h = 0; h < block.heads; ++h) finish<T>(call_, block, block.head + h, total_[h]);
  }

  // A part of a block's keys; the first that it sees any of is number 0.
  void attend(const Block& block, int64_t part, const HeadSums& to) {
    const int64_t begin = (block.first_part() + part) * PART, end = std::min(begin + PART, block.keys());
    const int64_t rows = block.count * group_;
    take_queries(block);
    for (int64_t h = 0; h < block.heads; ++h) to[h].clear(rows, dim_);
    std::fill(lane_sums_, lane_sums_ + block.heads * rows_ * 16, 0.0f);
    const int32_t* slots = call_.table + block.request->row * call_.table_stride;
    for (int64_t first = std::max(begin, block.lowest() / KEYS * KEYS); first < end; first += KEYS) {
      const int64_t count = std::min(KEYS, end - first), after = first + count;
      Ahead next_keys = ahead(block, call_.keys, slots + after, block.keys() - after);
      Ahead next_values = ahead(block, call_.values, slots + after, block.keys() - after);
      for (int64_t h = 0; h < block.heads; ++h) {
        const Keys keys{slots + first, count, block.head + h};
        Sums sums = to[h];
        take_keys(keys, next_keys);
        take_values(keys, next_values);
        multiply<T>({queries_ + h * rows_ * lanes_, lanes_, keys_, KEYS, lanes_, scores_, KEYS, nullptr}, rows,
                    KEYS / 16);
        weigh(block, first, sums, lane_sums_ + h * rows_ * 16);
        const int64_t steps = (count + T::PER_LANE - 1) / T::PER_LANE;
        multiply<T>({weights_, KEYS / T::PER_LANE, values_, dim_, steps, sums.out, dim_, keep_}, rows, dim_ / 16);
      }
    }
    for (int64_t h = 0; h < block.heads; ++h)
      for (int64_t row = 0; row < rows; ++row)
        to[h].weights[row] = sum(load<f32x16>(lane_sums_ + (h * rows_ + row) * 16));
  }

 private:
  struct Keys {
    const int32_t* slots;
    int64_t count, head;
  };

  // The first of so many keys, as many as are taken at a time.
  Ahead ahead(const Block& block, const void* cache, const int32_t* slots, int64_t count) const {
    const int64_t head_bytes = dim_ * int64_t(sizeof(E));
    return {cache, call_.kv_heads * head_bytes, block.head * head_bytes, block.heads * head_bytes, slots,
            std::min(KEYS, count)};
  }

  void take_queries(const Block& block) {
    auto* q = (const typename T::Element*)call_.q;
    for (int64_t h = 0; h < block.heads; ++h)
      for (int64_t row = 0; row < block.count * group_; ++row) {
        int64_t token = block.request->start + block.first + row / group_;
        int64_t head = (block.head + h) * group_ + row % group_;
        std::memcpy(queries_ + (h * rows_ + row) * lanes_, q + token * call_.q_stride + head * dim_, lanes_ * 4);
      }
  }

  const E* row_of(const void* cache, int64_t slot, int64_t head) const {
    return (const E*)cache + (slot * call_.kv_heads + head) * dim_;
  }

  // Keys side by side: keys_ [lanes, KEYS].
  void take_keys(const Keys& keys, Ahead& next) {
    const int64_t lines = (16 * 16 * dim_ * int64_t(sizeof(E)) / 64 + lanes_ - 1) / lanes_;  // of 16 keys, by squares
    for (int64_t key = 0; key < keys.count; key += 16) {
      const E* rows[16];
      for (int64_t i = 0; i < 16; ++i)
        rows[i] = row_of(call_.keys, keys.slots[std::min(key + i, keys.count - 1)], keys.head);
      for (int64_t lane = 0; lane < lanes_; lane += 16) {
        next.ask(lines);
        bool half = lane + 16 > lanes_;
        u32x16 square[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) square[i] = T::lanes(rows[i] + lane * T::PER_LANE, half);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) store(keys_ + (lane + i) * KEYS + key, square[i]);
      }
    }
    take_scales(call_.key_scales, keys, key_scales_);
  }

  // values_ [KEYS / PER_LANE, dim].
  void take_values(const Keys& keys, Ahead& next) {
    const int64_t lines = (T::PER_LANE * dim_ * int64_t(sizeof(E)) + 63) / 64;
    for (int64_t key = 0; key < keys.count; key += T::PER_LANE) {
      next.ask(lines);
      const E* rows[2] = {row_of(call_.values, keys.slots[key], keys.head),
                          key + 1 < keys.count ? row_of(call_.values, keys.slots[key + 1], keys.head) : nullptr};
      T::lay(values_ + key / T::PER_LANE * dim_, rows, dim_);
    }
    take_scales(call_.value_scales, keys, value_scales_);
  }

  void take_scales(const float* scales, const Keys& keys, float* to) {
    if (!scales) return;
    for (int64_t key = 0; key < KEYS; ++key)
      to[key] = key < keys.count ? scales[int64_t(keys.slots[key]) * call_.kv_heads + keys.head] : 0.0f;
  }

  // Scores of keys first .. first + KEYS to weights; keep_: what earlier sums are worth now.
  void weigh(const Block& block, int64_t first, Sums& sums, float* lane_sums) {
    const i32x16 index = load<i32x16>(LANES);
    for (int64_t row = 0; row < block.count * group_; ++row) {
      int64_t visible = block.request->prefix + block.first + row / group_ + 1 - first;
      int64_t hidden = block.window ? visible - block.window : 0;  // keys before the row's window
      bool masked = visible < KEYS || hidden > 0;
      auto seen = [&](int n) {
        i32x16 key = index + 16 * n;
        return (key < i32x16{} + int32_t(visible)) & (key >= i32x16{} + int32_t(hidden));
      };
      f32x16 s[KEYS / 16];
#pragma GCC unroll 4
      for (int n = 0; n < KEYS / 16; ++n) {
        s[n] = load<f32x16>(scores_ + row * KEYS + n * 16) * splat(call_.scale);
        if (call_.key_scales) s[n] *= load<f32x16>(key_scales_ + n * 16);
        if (masked) s[n] = select(seen(n), s[n], splat(LOWEST));
      }
      float old = sums.highest[row], top = std::max(old, highest(larger(larger(s[0], s[1]), larger(s[2], s[3]))));
      sums.highest[row] = top;
      keep_[row] = old == top ? 1.0f : exp1(old - top);
      f32x16 lanes = load<f32x16>(lane_sums + row * 16) * splat(keep_[row]);
#pragma GCC unroll 4
      for (int n = 0; n < KEYS / 16; ++n) {
        f32x16 weight = exp16(s[n] - splat(top));
        if (masked) weight = select(seen(n), weight, f32x16{});
        lanes += weight;
        if (call_.value_scales) weight *= load<f32x16>(value_scales_ + n * 16);
        store_floats((typename T::Element*)weights_ + row * KEYS + n * 16, weight);
      }
      store(lane_sums + row * 16, lanes);
    }
  }

  const Call& call_;
  int64_t dim_, lanes_, rows_, group_;
  uint32_t *keys_, *values_, *queries_, *weights_;
  float *scores_, *key_scales_, *value_scales_, *lane_sums_, *keep_;
  HeadSums sums_, total_;
};

template <class T, class E>
void attention(const Call& call, const Request* requests, int64_t count) {
  const int64_t group = call.group(), queries = std::max<int64_t>(1, ROWS / group), threads = pool::threads();
  // Heads that read their keys together: many where there are single tokens of enough requests.
  int64_t lone = 0;
  const int64_t most = call.window ? call.window : INT64_MAX;
  for (int64_t i = 0; i < count; ++i)
    lone += requests[i].extend == 1 ? 1 + std::min(requests[i].prefix, most) / PART : 0;
  const int64_t shares = std::clamp<int64_t>(LONE_TASKS * threads / std::max<int64_t>(1, lone), 1, call.kv_heads);
  const int64_t together = (call.kv_heads + shares - 1) / shares;
  std::vector<Block> blocks;
  int64_t elements = 0, parts = 0, rows = 0, heads = 1;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t first = 0; first < requests[i].extend; first += queries)
      for (int64_t head = 0, now; head < call.kv_heads; head += now) {
        now = requests[i].extend == 1 ? std::min(together, call.kv_heads - head) : 1;
        Block& block = blocks.emplace_back(
            Block{&requests[i], head, now, first, std::min(queries, requests[i].extend - first), call.window});
        rows = std::max(rows, block.count * group);
        heads = std::max(heads, now);
        elements += (block.keys() - block.lowest()) * block.count * now * call.dim;
        parts += block.parts();
      }
  const int64_t tasks = int64_t(blocks.size());
  if (elements < ALONE || tasks >= 4 * threads || parts == tasks) {
    const int64_t grain = elements < ALONE ? tasks : std::max<int64_t>(1, tasks / (threads * 8));
    pool::parallel_for(tasks, grain, [&](int64_t first, int64_t last) {
      Worker<T, E> worker(call, rows, heads);
      for (int64_t task = first; task < last; ++task) worker.whole(blocks[task]);
    });
    return;
  }
  // few blocks with long histories: their parts on their own, then merged
  struct Piece {
    const Block* block;
    int64_t part;
  };
  std::vector<Piece> pieces;
  for (const Block& block : blocks)
    for (int64_t part = 0; part < block.parts(); ++part) pieces.push_back({&block, part});
  const int64_t floats = HeadSums::floats(heads, rows, call.dim);
  std::vector<float> memory(size_t(parts * floats));
  auto sums_of = [&](int64_t piece) { return HeadSums{memory.data() + piece * floats, rows, call.dim}; };
  pool::parallel_for(parts, 1, [&](int64_t first, int64_t last) {
    Worker<T, E> worker(call, rows, heads);
    for (int64_t i = first; i < last; ++i) worker.attend(*pieces[i].block, pieces[i].part, sums_of(i));
  });
  for (int64_t i = 0; i < parts; ++i) {
    const Block& block = *pieces[i].block;
    const HeadSums total = sums_of(i - pieces[i].part), part = sums_of(i);
    for (int64_t h = 0; h < block.heads; ++h) {
      if (pieces[i].part) merge(total[h], part[h], block.count * group, call.dim);
      if (pieces[i].part + 1 == block.parts()) finish<T>(call, block, block.head + h, total[h]);
    }
  }
}

template <class T>
void with_cache(const Call& call, int32_t kind, const Request* requests, int64_t count) {
  switch (kind) {
    case CACHE_FP8: return attention<T, fp8>(call, requests, count);
    case CACHE_INT8: return attention<T, int8_t>(call, requests, count);
    default: return attention<T, typename T::Element>(call, requests, count);
  }
}

}  // namespace

// See Call. q and out are float32, or bfloat16 if narrow; kind: of the caches. table int32: where requests' tokens
// lie. requests: int64 [count, 4], see Request; this step's keys and values are in the caches. dim: a multiple of 16.
extern "C" void vs_attention(int32_t narrow, int32_t kind, const void* q, int64_t q_stride, void* out, const void* keys,
                             const void* values, const float* key_scales, const float* value_scales, int64_t heads,
                             int64_t kv_heads, int64_t dim, float scale, const int32_t* table, int64_t table_stride,
                             const int64_t* requests, int64_t count, int64_t window) {
  Call call{q,     q_stride, out, keys,  values, key_scales,  value_scales, heads, kv_heads,
            dim,   scale,    table, table_stride, window};
  if (narrow) return with_cache<Narrow>(call, kind, (const Request*)requests, count);
  with_cache<Wide>(call, kind, (const Request*)requests, count);
}
