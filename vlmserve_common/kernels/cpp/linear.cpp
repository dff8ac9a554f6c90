// Products with packed weights: y = x W^T, and what follows on the way out (bias, activation, residual).
//
// Every output is summed over k in the same order however many rows there are: a row's result does not depend on its
// batch. With quantised weights the sums of a group are of whole numbers times x; scale and shift are applied to them.
// Many rows are multiplied by a slab of the panel while it is in the first-level cache, with its numbers unpacked. The
// next slab is prefetched meanwhile. This changes no result.
#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "amx.h"
#include "bytes.h"
#include "operators.h"
#include "pool.h"
#include "simd.h"
#include "weights.h"

namespace {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 4;  // 24 of the 32 registers hold sums
#else
constexpr int TILE_ROWS = 4, TILE_BLOCKS = 1;
#endif
constexpr int64_t SLAB = 128;  // inputs of a slab
#if defined(HAS_AMX)
constexpr int64_t AMX_SLAB = 1024;        // AMX does so much that taking up sums often would cost
constexpr int64_t AMX_CHUNK = 512 << 10;  // numbers of x that stay in the second cache while panels pass
#endif
constexpr int64_t CHUNK_ROWS = 192;  // rows that pass a slab of a panel while it is in the first cache
constexpr int64_t CHUNK_BYTES = 512 << 10;   // of these rows stay in the second cache while panels pass,
constexpr int64_t WEIGHT_BYTES = 16 << 20;   // if all panels of so many bytes stay in the third
constexpr int64_t AHEAD = 4096;              // bytes that are prefetched
constexpr int64_t ALONE = 1 << 20;           // multiplications that are not worth waking another thread for

struct Product {
  const void* x;
  int64_t rows, inner, row_stride;  // x [rows, inner], row_stride elements apart
  const uint8_t* weights;
  int64_t panels, outputs;
  int64_t group, groups;            // inputs of a group; one group for weights that are not quantised
  const float* sums;                // of x over the groups, [rows, groups]; null where nothing is shifted
  const float* bias;                // [panels * 64] in packed order, or null
  const float* added;               // by adapters: [rows, panels * 64] in packed order, or null
  int32_t act;
  bool gated;                       // a panel is 32 gates and their 32 ups: y = act(gate) * up
  const void* residual;             // [rows, outputs], or null
  bool y_bf16;                      // or y and residual are float32
  void* y;                          // [rows, outputs]
  int64_t y_stride;
  bool tiled = false;               // whether AMX multiplies
  bool x_bf16 = false;              // or x is float32
  bool passed = false;              // whether panels pass a few rows of x, or chunks of rows a panel
  const bf16* x_tiles = nullptr;    // see tiles_of
#if defined(HAS_BYTES)
  const int8_t* x_numbers = nullptr;        // x in whole numbers, [rows, inner]; see bytes.h
  const bytes::Group* x_groups = nullptr;
#endif
};

// Whether AMX multiplies: then it does for however few rows, as it rounds sums in an order of its own.
constexpr bool is_tiled([[maybe_unused]] int32_t kind, [[maybe_unused]] bool x_bf16) {
#if defined(HAS_AMX)
  return x_bf16 && kind != WEIGHT_W8A8;
#else
  return false;
#endif
}

// One pair of inputs of ROWS rows times that of BLOCKS blocks.
template <class Weights, int ROWS, int BLOCKS>
INLINE void add_pair(const bf16* x, int64_t stride, const uint8_t* w, int pair, f32x16 (&acc)[ROWS][BLOCKS]) {
  u32x16 b[BLOCKS];
#pragma GCC unroll 4
  for (int n = 0; n < BLOCKS; ++n) b[n] = Weights::pairs(w + n * Weights::CHUNK, pair);
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
    u32x16 a = splat_bits(load<uint32_t>(x + m * stride));
#pragma GCC unroll 4
    for (int n = 0; n < BLOCKS; ++n) acc[m][n] = dot_pairs(acc[m][n], a, b[n]);
  }
}

template <class Weights, int ROWS, int BLOCKS>
INLINE void add_pair(const float* x, int64_t stride, const uint8_t* w, int pair, f32x16 (&acc)[ROWS][BLOCKS]) {
#pragma GCC unroll 4
  for (int n = 0; n < BLOCKS; ++n) {
    f32x16 even, odd;
    Weights::floats(w + n * Weights::CHUNK, pair, even, odd);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      acc[m][n] += splat(x[m * stride]) * even;
      acc[m][n] += splat(x[m * stride + 1]) * odd;
    }
  }
}

// A piece of a panel that is multiplied in one go.
struct Piece {
  const uint8_t* weights;
  int64_t inputs;
  const uint8_t* next;  // what is asked of the memory meanwhile, or null
  int64_t next_bytes;   // for each chunk
};

// sums [ROWS][PANEL_BLOCKS] += x w.
template <class Weights, int ROWS, class X>
void tile(const X* x, int64_t stride, const Piece& piece, f32x16 (*sums)[PANEL_BLOCKS]) {
  for (int block = 0; block < PANEL_BLOCKS; block += TILE_BLOCKS) {
    f32x16 acc[ROWS][TILE_BLOCKS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < TILE_BLOCKS; ++n) acc[m][n] = sums[m][block + n];
    const uint8_t *w = piece.weights + block * Weights::CHUNK, *next = block ? nullptr : piece.next;
    for (int64_t k = 0; k < piece.inputs; k += 2 * Weights::PAIRS, w += PANEL_BLOCKS * Weights::CHUNK) {
      if (next) {
        for (int64_t byte = 0; byte < piece.next_bytes; byte += 64) __builtin_prefetch(next + byte);
        next += piece.next_bytes;
      }
#pragma GCC unroll 4
      for (int pair = 0; pair < Weights::PAIRS; ++pair) add_pair<Weights>(x + k + 2 * pair, stride, w, pair, acc);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < TILE_BLOCKS; ++n) sums[m][block + n] = acc[m][n];
  }
}

template <class Y>
INLINE void put(Y* to, f32x16 value, int64_t count, const Y* residual) {
  if (count >= BLOCK) {
    if (residual) value += load_floats(residual);
    return store_floats(to, value);
  }
  for (int64_t lane = 0; lane < count; ++lane)
    from_float(to + lane, value[lane] + (residual ? to_float(residual[lane]) : 0.0f));
}

template <class Y>
void finish_as(const Product& p, int64_t row, int rows, int64_t panel, const f32x16 (*sums)[PANEL_BLOCKS]) {
  const int blocks = p.gated ? PANEL_BLOCKS / 2 : PANEL_BLOCKS;
  const int64_t first = panel * blocks * BLOCK;
  f32x16 bias[PANEL_BLOCKS] = {};
  for (int n = 0; p.bias && n < PANEL_BLOCKS; ++n) bias[n] = load<f32x16>(p.bias + panel * PANEL + n * BLOCK);
  for (int m = 0; m < rows; ++m) {
    auto* y = (Y*)p.y + (row + m) * p.y_stride;
    auto* residual = p.residual ? (const Y*)p.residual + (row + m) * p.outputs : nullptr;
    auto* added = p.added ? p.added + (row + m) * p.panels * PANEL + panel * PANEL : nullptr;
    auto whole = [&](int n) {
      f32x16 value = sums[m][n] + bias[n];
      return added ? value + load<f32x16>(added + n * BLOCK) : value;
    };
    for (int n = 0; n < blocks; ++n) {
      int64_t column = first + n * BLOCK;
      if (column >= p.outputs) break;
      f32x16 value = activate(whole(n), p.act);
      if (p.gated) value *= whole(n + blocks);
      put(y + column, value, p.outputs - column, residual ? residual + column : nullptr);
    }
  }
}

// Not inline: it would be there once for each kind of tile.
__attribute__((noinline)) void finish(const Product& p, int64_t row, int rows, int64_t panel,
                                      const f32x16 (*sums)[PANEL_BLOCKS]) {
  p.y_bf16 ? finish_as<bf16>(p, row, rows, panel, sums) : finish_as<float>(p, row, rows, panel, sums);
}

// A block's sums over a group, scaled and shifted, to its sums over all.
template <class Weights>
INLINE void add_group(const Product& p, int64_t row, int64_t group, const f16* scales, int block, f32x16 part,
                      f32x16& sums) {
  const f16* own = scales + group * 2 * PANEL + block * BLOCK;
  f32x16 scale = load_halves(own), shift = p.sums ? load_halves(own + PANEL) : f32x16{};
  if (Weights::DOUBLED) scale *= splat(0.5f), shift = shift * splat(2.0f) - splat(1.0f);
  if (p.sums) part += shift * splat(p.sums[row * p.groups + group]);
  sums += scale * part;
}

// Numbers of a piece as those of bfloat16 or float32 weights lie.
template <class Weights, class X>
void write_out(const uint8_t* from, int64_t inner, X* to) {
  for (int64_t k = 0; k < inner; k += 2 * Weights::PAIRS)
#pragma GCC unroll 4
    for (int n = 0; n < PANEL_BLOCKS; ++n, from += Weights::CHUNK) {
      // read before anything is written, for the compiler to share what pairs have in common
      f32x16 even[Weights::PAIRS], odd[Weights::PAIRS];
      u32x16 both[Weights::PAIRS];
#pragma GCC unroll 4
      for (int j = 0; j < Weights::PAIRS; ++j) {
        if constexpr (std::is_same_v<X, bf16>) both[j] = Weights::pairs(from, j);
        else Weights::floats(from, j, even[j], odd[j]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < Weights::PAIRS; ++j) {
        if constexpr (std::is_same_v<X, bf16>) {
          store(to + 2 * pair_place(k / 2 + j, n * BLOCK, inner), both[j]);
          continue;
        }
        X* at = to + (k + 2 * j) * PANEL + n * 2 * BLOCK;
        store(at, even[j]), store(at + BLOCK, odd[j]);
      }
    }
}

// All rows by a piece that is in the first cache; the first two tiles ask for the next one.
template <class Weights, class X>
void all_rows(const X* x, int64_t stride, int64_t rows, Piece piece, f32x16 (*sums)[PANEL_BLOCKS]) {
  int64_t row = 0;
  for (int64_t now; row < rows; row += now) {
    // tiles of about the same size: 8 rows are 4 and 4
    const int64_t left = rows - row, tiles = (left + TILE_ROWS - 1) / TILE_ROWS;
    now = (left + tiles - 1) / tiles;
    with_constant<TILE_ROWS>(now, [&](auto m) { tile<Weights, m>(x + row * stride, stride, piece, sums + row); });
    if (row == 0 && piece.next) piece.next += piece.inputs / 2 * piece.next_bytes;
    else piece.next = nullptr;
  }
}

// Rows that are one tile, and scales of quantised weights. More bytes are asked of the memory than the processor, busy
// with numbers, would come to by itself.
template <class Weights, int ROWS, class X>
void few_rows(const Product& p, int64_t row, int64_t panel, const uint8_t* weights, const f16* scales) {
  constexpr int64_t NEXT = Weights::QUANTISED ? PANEL_BLOCKS * Weights::CHUNK : 0;
  const X* x = (const X*)p.x + row * p.row_stride;
  f32x16 sums[ROWS][PANEL_BLOCKS] = {};
  for (int64_t group = 0, k = 0; k < p.inner; ++group, k += p.group) {
    const uint8_t* w = weights + number_bytes<Weights>(k);
    const Piece piece{w, std::min(p.group, p.inner - k), NEXT ? w + AHEAD : nullptr, NEXT};
    if constexpr (!Weights::QUANTISED) {
      tile<Weights, ROWS>(x + k, p.row_stride, piece, sums);
    } else {
      f32x16 part[ROWS][PANEL_BLOCKS] = {};
      tile<Weights, ROWS>(x + k, p.row_stride, piece, part);
      for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < PANEL_BLOCKS; ++n) add_group<Weights>(p, row + m, group, scales, n, part[m][n], sums[m][n]);
    }
  }
  finish(p, row, ROWS, panel, sums);
}

#if defined(HAS_AMX)
constexpr int64_t AMX_ROWS = 2 * amx::ROWS;  // rows of x that lie together

// Rows by a piece of a panel in AMX's registers. Inputs behind the last INNER are multiplied as elsewhere.
void tiled_rows(const Product& p, int64_t row, int64_t rows, int64_t k, const Piece& piece,
                f32x16 (*sums)[PANEL_BLOCKS]) {
  const int64_t inner = piece.inputs / amx::INNER * amx::INNER, whole = p.inner / amx::INNER * amx::INNER;
  const int64_t full = rows / AMX_ROWS * AMX_ROWS, rest = rows - full;
  auto* to = (float*)sums;
  auto x_of = [&](int64_t first, int64_t together) { return p.x_tiles + (row + first) * whole + k * together; };
  auto more = [&](int64_t first, int64_t together, int half) {
    amx::add_more_rows(x_of(first, together), together * amx::INNER, piece.weights + half * 2 * amx::TILE, inner,
                       to + first * PANEL + half * 2 * BLOCK);
  };
  if (full) {
    amx::Registers registers(amx::ROWS, amx::ROWS);
    for (int half = 0; half < 2; ++half)
      for (int64_t done = 0; done < full; done += AMX_ROWS) more(done, AMX_ROWS, half);
  }
  if (rest > amx::ROWS) {
    amx::Registers registers(amx::ROWS, int(rest - amx::ROWS));
    for (int half = 0; half < 2; ++half) more(full, rest, half);
  } else if (rest) {
    amx::Registers registers(int(rest), 0);
    amx::add_rows(x_of(full, rest), rest * amx::INNER, piece.weights, inner, full ? 0 : piece.next_bytes,
                  to + full * PANEL);
  }
  if (inner < piece.inputs)
    all_rows<Bf16Weights>((const bf16*)p.x + row * p.row_stride + k + inner, p.row_stride, rows,
                          {piece.weights + number_bytes<Bf16Weights>(inner), piece.inputs - inner, nullptr, 0}, sums);
}
#endif

// More rows, by slabs of the panel.
template <class Weights, class X>
void many_rows(const Product& p, int64_t row, int64_t rows, int64_t panel, const uint8_t* weights, const f16* scales) {
  constexpr bool SCALED = Weights::QUANTISED;
  using Plain = std::conditional_t<std::is_same_v<X, bf16>, Bf16Weights, F32Weights>;
  using Sums = f32x16(*)[PANEL_BLOCKS];
  const X* x = (const X*)p.x + row * p.row_stride;
  int64_t slab = SLAB;
#if defined(HAS_AMX)
  if (p.tiled) slab = SCALED || rows > AMX_ROWS ? AMX_SLAB : p.inner;
#endif
  // of a group, and of all
  auto* memory = (float*)pool::scratch((2 * rows + (std::is_same_v<Weights, Plain> ? 0 : slab)) * PANEL * 4);
  Sums part = (Sums)memory, total = part + rows;
  auto* plain = (X*)(memory + 2 * rows * PANEL);
  std::fill(memory, memory + (SCALED ? 2 : 1) * rows * PANEL, 0.0f);
  for (int64_t group = 0, k = 0; k < p.inner; k += p.group, ++group) {
    const int64_t end = std::min(p.inner, k + p.group);
    for (int64_t from = k, inputs; from < end; from += inputs) {
      inputs = std::min(slab, end - from);
      const uint8_t* w = weights + number_bytes<Weights>(from);
      constexpr int64_t NEXT = PANEL_BLOCKS * Weights::CHUNK / Weights::PAIRS / 2;  // two tiles ask for it all
      Piece piece{w, inputs, w + number_bytes<Weights>(inputs), NEXT};
      if constexpr (!std::is_same_v<Weights, Plain>) {
        write_out<Weights>(w, inputs, plain);
        piece.weights = (const uint8_t*)plain;
      }
#if defined(HAS_AMX)
      if constexpr (std::is_same_v<X, bf16>)
        if (p.tiled) {
          tiled_rows(p, row, rows, from, {piece.weights, inputs, nullptr, SCALED ? 0 : AHEAD}, part);
          continue;
        }
#endif
      all_rows<Plain>(x + from, p.row_stride, rows, piece, part);
    }
    if constexpr (SCALED)
      for (int64_t m = 0; m < rows; ++m)
        for (int n = 0; n < PANEL_BLOCKS; ++n) {
          add_group<Weights>(p, row + m, group, scales, n, part[m][n], total[m][n]);
          part[m][n] = f32x16{};
        }
  }
  finish(p, row, int(rows), panel, SCALED ? total : part);
}

#if defined(HAS_BYTES)
// Rows by whole numbers. Few are multiplied by the panel as it is stored, more by a group of it at a time, which is
// written out before.
template <class X, class Weights>
void whole_rows(const Product& p, int64_t row, int64_t rows, int64_t panel, const uint8_t* weights, const f16* scales) {
  constexpr int64_t GROUP = bytes::GROUP;
  constexpr bool STORED = std::is_same_v<Weights, Int8Weights>;
  const int64_t groups = bytes::groups_of(p.inner);
  auto* memory = (float*)pool::scratch((rows + GROUP / 4) * PANEL * 4);
  auto* sums = (f32x16(*)[PANEL_BLOCKS])memory;
  auto* plain = (uint8_t*)(memory + rows * PANEL);
  std::fill(memory, memory + rows * PANEL, 0.0f);
  for (int64_t group = 0, k = 0; k < p.inner; ++group, k += GROUP) {
    const int64_t inputs = std::min(GROUP, p.inner - k);
    const uint8_t *stored = weights + k * PANEL, *w = STORED ? stored : plain;
    for (int64_t chunk = 0; !STORED && chunk < inputs * PANEL; chunk += Int8Weights::CHUNK)
      store(plain + chunk, Int8Weights::quads(stored + chunk));
    const uint8_t* next = stored + (STORED ? AHEAD : GROUP * PANEL);
    for (int64_t done = 0, now; done < rows; done += now, next = nullptr) {
      const int64_t left = rows - done, tiles = (left + TILE_ROWS - 1) / TILE_ROWS, first = row + done;
      now = (left + tiles - 1) / tiles;
      const bytes::Group* own = p.x_groups + first * groups + group;
      with_constant<TILE_ROWS>(now, [&](auto m) {
        bytes::tile<Weights, m>(p.x_numbers + first * p.inner + k, p.inner, own, groups, inputs, w, next, sums + done);
      });
      for (int64_t m = 0; m < now; ++m)
        bytes::add_far<Weights>((const X*)p.x + (first + m) * p.row_stride + k, own[m * groups], w, sums[done + m]);
    }
  }
  for (int64_t m = 0; m < rows; ++m)
    for (int n = 0; n < PANEL_BLOCKS; ++n) sums[m][n] *= load_halves(scales + n * BLOCK);
  finish(p, row, int(rows), panel, sums);
}
#endif

void plan(Product& p, int32_t kind, bool x_bf16) {
  p.x_bf16 = x_bf16;
  p.tiled = is_tiled(kind, x_bf16);
  p.passed = p.tiled || p.panels * PANEL * p.inner * (x_bf16 ? 2 : 4) <= WEIGHT_BYTES;
}

// Rows of a product that one of several weights multiplies, split by panels and these by chunks of rows.
struct Share {
  const uint8_t* weights;
  int64_t row, rows, chunks, end;  // end: tasks of this share and of all before it
};

Share share_of(const Product& p, const uint8_t* weights, int64_t row, int64_t rows, int64_t done) {
  int64_t most = CHUNK_ROWS;
  if (p.passed) most = std::clamp(CHUNK_BYTES / (p.inner * (p.x_bf16 ? 2 : 4)) / 48 * 48, int64_t(48), CHUNK_ROWS);
#if defined(HAS_AMX)
  if (p.tiled) most = std::clamp<int64_t>(AMX_CHUNK / p.inner / 64 * 64, 64, 512);
#endif
  const int64_t chunks = (rows + most - 1) / most;
  return {weights, row, rows, chunks, done + p.panels * chunks};
}

template <class Weights, class X>
void run_task(const Product& p, const Share& share, int64_t task) {
  int64_t panel = task / share.chunks, chunk = task % share.chunks;
  if (p.passed) panel = task % p.panels, chunk = task / p.panels;  // the rows stay in the cache, and panels pass
  const int64_t even = (share.rows + share.chunks - 1) / share.chunks;
  const int64_t chunk_rows = p.tiled ? (even + 31) / 32 * 32 : even;  // rows that lie together stay so
  const int64_t skipped = chunk * chunk_rows, row = share.row + skipped;
  const int64_t rows = std::min(share.rows - skipped, chunk_rows);
  const uint8_t* weights = share.weights + panel * panel_bytes<Weights>(p.inner, p.groups);
  auto* scales = (const f16*)(weights + number_bytes<Weights>(p.inner));
  if (rows <= 0) return;
#if defined(HAS_BYTES)
  if (p.x_numbers)
    return (rows > TILE_ROWS ? whole_rows<X, bytes::Plain> : whole_rows<X, Int8Weights>)(p, row, rows, panel, weights,
                                                                                         scales);
#endif
  if (rows > TILE_ROWS || p.tiled)
    many_rows<Weights, X>(p, row, rows, panel, weights, scales);
  else
    with_constant<TILE_ROWS>(rows, [&](auto m) { few_rows<Weights, m, X>(p, row, panel, weights, scales); });
}

#if defined(HAS_AMX)
// x as AMX wants it, without the inputs behind the last INNER: AMX_ROWS rows of a share, or its last ones, lie
// together, [inner / INNER][rows][INNER].
std::unique_ptr<bf16[]> tiles_of(const Product& p, const Share* shares, int64_t count) {
  const int64_t blocks = p.inner / amx::INNER, whole = blocks * amx::INNER;
  std::unique_ptr<bf16[]> tiles(new bf16[size_t(p.rows * whole)]);
  for (const Share* share = shares; share < shares + count; ++share) {
    const int64_t groups = (share->rows + AMX_ROWS - 1) / AMX_ROWS;
    pool::parallel_for(groups, share->rows * p.inner < (1 << 17) ? groups : 1, [&](int64_t first, int64_t last) {
      for (int64_t group = first; group < last; ++group) {
        const int64_t row = group * AMX_ROWS, rows = std::min(share->rows - row, AMX_ROWS);
        bf16* to = &tiles[size_t((share->row + row) * whole)];
        for (int64_t one = 0; one < rows; ++one) {
          auto* from = (const bf16*)p.x + (share->row + row + one) * p.row_stride;
          for (int64_t block = 0; block < blocks; ++block)
            std::memcpy(to + (block * rows + one) * amx::INNER, from + block * amx::INNER, 2 * amx::INNER);
        }
      }
    });
  }
  return tiles;
}
#endif

template <class Weights, class X>
void multiply(Product& p, const Share* shares, int64_t count) {
  if (p.rows == 0) return;
#if defined(HAS_AMX)
  std::unique_ptr<bf16[]> tiles;
  if (p.tiled) tiles = tiles_of(p, shares, count), p.x_tiles = tiles.get();
#endif
  const Share *end = shares + count, &last_share = end[-1];
  int64_t tasks = last_share.end;
  bool alone = p.rows * p.panels * PANEL * p.inner < ALONE;
  bool chunked = std::any_of(shares, end, [](const Share& share) { return share.chunks > 1; });
  // Small pieces share the work evenly.
  int64_t grain = chunked ? 1 : std::max<int64_t>(1, tasks / (pool::threads() * 8));
  if (alone) grain = tasks;
  pool::parallel_for(tasks, grain, [&](int64_t first, int64_t last) {
    auto* share = std::upper_bound(shares, end, first, [](int64_t task, const Share& s) { return task < s.end; });
    for (int64_t task = first; task < last; ++task) {
      if (task == share->end) ++share;
      run_task<Weights, X>(p, *share, task - (share->end - p.panels * share->chunks));
    }
  });
}

template <class X>
void sum_groups(const Product& p, float* sums) {
  int64_t groups = p.groups, grain = p.rows * p.inner < ALONE ? p.rows : 16;
  pool::parallel_for(p.rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for (int64_t group = 0; group < groups; ++group) {
        const X* x = (const X*)p.x + row * p.row_stride;
        int64_t k = group * p.group, end = std::min(p.inner, k + p.group);
        f32x16 lanes = {};
        for (; k + 16 <= end; k += 16) lanes += load_floats(x + k);
        float rest = 0;
        for (; k < end; ++k) rest += to_float(x[k]);
        sums[row * groups + group] = sum(lanes) + rest;
      }
  });
}

template <class Weights, class X>
void multiply_quantised(Product& p, const Share* shares, int64_t count, bool shifted) {
  std::vector<float> sums;
  if (shifted || Weights::DOUBLED) {
    sums.resize(size_t(p.rows * p.groups));
    sum_groups<X>(p, sums.data());
    p.sums = sums.data();
  }
  multiply<Weights, X>(p, shares, count);
}

#if defined(HAS_BYTES)
template <class X>
void multiply_whole(Product& p, const Share* shares, int64_t count) {
  const size_t groups = size_t(p.rows * bytes::groups_of(p.inner));
  // large, and all of it is written
  std::unique_ptr<bytes::Group[]> own(new bytes::Group[groups]);
  std::unique_ptr<int8_t[]> numbers(new int8_t[size_t(p.rows * p.inner)]);
  bytes::round_rows((const X*)p.x, p.rows, p.inner, p.row_stride, numbers.get(), own.get());
  p.x_numbers = numbers.get(), p.x_groups = own.get();
  multiply<Int8Weights, X>(p, shares, count);
}
#endif

void multiply_by(int32_t kind, bool x_bf16, bool shifted, Product& p, const Share* shares, int64_t count) {
  if (kind == WEIGHT_F32) return multiply<F32Weights, float>(p, shares, count);
  if (kind == WEIGHT_BF16) return multiply<Bf16Weights, bf16>(p, shares, count);
#if defined(HAS_BYTES)
  if (kind == WEIGHT_W8A8)
    return x_bf16 ? multiply_whole<bf16>(p, shares, count) : multiply_whole<float>(p, shares, count);
#endif
  if (kind == WEIGHT_INT8)
    x_bf16 ? multiply_quantised<Int8Weights, bf16>(p, shares, count, shifted)
           : multiply_quantised<Int8Weights, float>(p, shares, count, shifted);
  else
    x_bf16 ? multiply_quantised<Int4Weights, bf16>(p, shares, count, shifted)
           : multiply_quantised<Int4Weights, float>(p, shares, count, shifted);
}

}  // namespace

// kind: a WeightKind. x is bfloat16 or float32, as plain weights are; y is of x's type, or float32. group, shifted:
// inputs of a group of quantised weights, and whether any shift is not 0. See Product for the rest.
extern "C" void vs_linear(int32_t kind, int32_t x_bf16, int32_t y_bf16, const void* x, int64_t rows, int64_t inner,
                          int64_t row_stride, const void* weights, int64_t panels, int64_t outputs, int64_t group,
                          int32_t shifted, const float* bias, const float* added, int32_t act, int32_t gated,
                          const void* residual, void* y, int64_t y_stride) {
  Product p{x,    rows, inner, row_stride,  (const uint8_t*)weights, panels, outputs, group,
            (inner + group - 1) / group, nullptr, bias, added, act, bool(gated), residual, bool(y_bf16), y, y_stride};
  plan(p, kind, x_bf16);
  const Share all = share_of(p, p.weights, 0, rows, 0);
  multiply_by(kind, x_bf16, shifted, p, &all, 1);
}

// Multiplies rows starts[i] .. starts[i + 1] - 1 of x by the i-th of `count` weights, without bias; x and y
// [starts[count], *] have no gaps.
void grouped_linear(const Weight& w, bool narrow, int64_t count, const int64_t* starts, const void* x, int32_t act,
                    bool gated, void* y) {
  Product p{x, starts[count], w.inner, w.inner, (const uint8_t*)w.data, w.panels, w.outputs, w.group,
            (w.inner + w.group - 1) / w.group, nullptr, nullptr, nullptr, act, gated, nullptr, narrow, y, w.outputs};
  plan(p, w.kind, narrow);
  std::vector<Share> shares;
  for (int64_t i = 0; i < count; ++i)
    if (const int64_t rows = starts[i + 1] - starts[i])
      shares.push_back(share_of(p, p.weights + i * w.bytes, starts[i], rows, shares.empty() ? 0 : shares.back().end));
  multiply_by(w.kind, narrow, w.shifted, p, shares.data(), int64_t(shares.size()));
}

// Whether this process multiplies weights of kind WEIGHT_W8A8, and sooner than those of bfloat16: AMX is faster still.
extern "C" int32_t vs_multiplies_bytes() {
#if defined(HAS_BYTES) && !defined(HAS_AMX)
  return 1;
#else
  return 0;
#endif
}
