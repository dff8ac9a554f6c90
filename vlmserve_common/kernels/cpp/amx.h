// Products by AMX: 16 x 16 sums at a time, in registers of 16 rows of 64 bytes. A panel's packed pairs are what such a
// register wants of weights: 16 pairs of inputs by 16 columns.
//
// AMX_STAND_IN computes what the registers would, so that everything but the instructions is tested on any CPU.
#pragma once
#include "simd.h"

#if defined(__AMX_BF16__) || defined(AMX_STAND_IN)
#define HAS_AMX 1

#if defined(AMX_STAND_IN)
namespace amx_stand_in {
struct Tile {
  alignas(64) uint8_t rows[16][64];
};
inline thread_local Tile tiles[8];

inline void load_tile(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(tiles[tile].rows[row], (const uint8_t*)from + row * stride, 64);
}
inline void store_tile(int tile, void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy((uint8_t*)to + row * stride, tiles[tile].rows[row], 64);
}
inline void multiply(int sums, int a, int b) {
  for (int row = 0; row < 16; ++row) {
    auto acc = load<f32x16>(tiles[sums].rows[row]);
    for (int pair = 0; pair < 16; ++pair)
      acc = dot_pairs(acc, splat_bits(load<uint32_t>(tiles[a].rows[row] + 4 * pair)),
                      load<u32x16>(tiles[b].rows[pair]));
    store(tiles[sums].rows[row], acc);
  }
}
}  // namespace amx_stand_in
#define AMX_LOAD(tile, from, stride) amx_stand_in::load_tile(tile, from, stride)
#define AMX_STORE(tile, to, stride) amx_stand_in::store_tile(tile, to, stride)
#define AMX_MULTIPLY(sums, a, b) amx_stand_in::multiply(sums, a, b)
#else
#define AMX_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define AMX_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define AMX_MULTIPLY(sums, a, b) _tile_dpbf16ps(sums, a, b)
#endif

namespace amx {

constexpr int ROWS = 32, INNER = 32;  // rows of x at a time, and what their length must be a multiple of

// Whether the system lets this process use the registers, and they compute what they should.
bool usable();

// A thread's registers, all of them 16 rows of 64 bytes, while this lives.
struct Registers {
#if defined(AMX_STAND_IN)
  Registers() {}
#else
  Registers() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
  }
  ~Registers() { _tile_release(); }
#endif
};

// sums [ROWS][64] += ROWS rows of x, `stride` elements apart, times a panel of bfloat16 pairs.
inline void add_panel(const bf16* x, int64_t stride, const uint8_t* panel, int64_t inner, float* sums) {
  constexpr int64_t PAIRS_STRIDE = 256, SUMS_STRIDE = 256;
  for (int half = 0; half < 2; ++half) {
    const uint8_t* w = panel + half * 128;
    float* to = sums + half * 32;
    AMX_LOAD(0, to, SUMS_STRIDE);
    AMX_LOAD(1, to + 16, SUMS_STRIDE);
    AMX_LOAD(2, to + 16 * 64, SUMS_STRIDE);
    AMX_LOAD(3, to + 16 * 64 + 16, SUMS_STRIDE);
    for (int64_t k = 0; k < inner; k += INNER, w += INNER / 2 * PAIRS_STRIDE) {
      AMX_LOAD(4, x + k, stride * 2);
      AMX_LOAD(6, w, PAIRS_STRIDE);
      AMX_MULTIPLY(0, 4, 6);
      AMX_LOAD(7, w + 64, PAIRS_STRIDE);
      AMX_MULTIPLY(1, 4, 7);
      AMX_LOAD(5, x + 16 * stride + k, stride * 2);
      AMX_MULTIPLY(2, 5, 6);
      AMX_MULTIPLY(3, 5, 7);
    }
    AMX_STORE(0, to, SUMS_STRIDE);
    AMX_STORE(1, to + 16, SUMS_STRIDE);
    AMX_STORE(2, to + 16 * 64, SUMS_STRIDE);
    AMX_STORE(3, to + 16 * 64 + 16, SUMS_STRIDE);
  }
}

}  // namespace amx
#endif
