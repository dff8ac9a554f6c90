// Products by AMX: 16 x 16 sums at a time, in registers of 16 rows of 64 bytes. A register of weights is 16 pairs of
// inputs by 16 columns.
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
inline thread_local int height[8];

inline void load_tile(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < height[tile]; ++row)
    std::memcpy(tiles[tile].rows[row], (const uint8_t*)from + row * stride, 64);
}
inline void store_tile(int tile, void* to, int64_t stride) {
  for (int row = 0; row < height[tile]; ++row) std::memcpy((uint8_t*)to + row * stride, tiles[tile].rows[row], 64);
}
inline void multiply(int sums, int a, int b) {
  for (int row = 0; row < height[a]; ++row) {
    f32x16 even = {}, odd = {};  // rounded apart, as the registers do
    for (int pair = 0; pair < 16; ++pair) {
      u32x16 x = splat_bits(load<uint32_t>(tiles[a].rows[row] + 4 * pair)), w = load<u32x16>(tiles[b].rows[pair]);
      even += as_floats(x << 16) * as_floats(w << 16);
      odd += as_floats(x & 0xffff0000u) * as_floats(w & 0xffff0000u);
    }
    store(tiles[sums].rows[row], load<f32x16>(tiles[sums].rows[row]) + (even + odd));
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

constexpr int ROWS = 16, INNER = 32;  // of a register: rows of x, and inputs

// Whether the system lets this process use the registers, and they compute what they should.
bool usable();

// A thread's registers while this lives. Registers 0 and 1 are sums of the rows of 4, and 2 and 3 are sums of the
// `more` rows of 5; without any, all four are sums of the rows of 4. Weights have 16 rows, each a pair of inputs.
struct Registers {
  Registers(int rows, int more) {
    const int under = more ? more : rows;
    const int heights[8] = {rows, rows, under, under, rows, more ? more : 16, 16, 16};
#if defined(AMX_STAND_IN)
    std::memcpy(amx_stand_in::height, heights, sizeof heights);
#else
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) shape.rows[tile] = uint8_t(heights[tile]);
    _tile_loadconfig(&shape);
#endif
  }
#if !defined(AMX_STAND_IN)
  ~Registers() { _tile_release(); }
#endif
};

constexpr int64_t SUMS_STRIDE = 256, TILE = 1024, K_BYTES = 4 * TILE;  // of a panel's INNER inputs

// sums [rows][64] += up to 16 rows of x times a panel. x: its rows' first INNER inputs, 64 bytes a row; the next ones
// are `x_step` numbers behind. ahead: bytes of weights that are asked of the memory early, or 0.
inline void add_rows(const bf16* x, int64_t x_step, const uint8_t* w, int64_t inner, int64_t ahead, float* sums) {
  AMX_LOAD(0, sums, SUMS_STRIDE);
  AMX_LOAD(1, sums + 16, SUMS_STRIDE);
  AMX_LOAD(2, sums + 32, SUMS_STRIDE);
  AMX_LOAD(3, sums + 48, SUMS_STRIDE);
  for (int64_t k = 0; k < inner; k += INNER, w += K_BYTES, x += x_step) {
    if (ahead)
      for (int64_t byte = 0; byte < K_BYTES; byte += 64) __builtin_prefetch(w + ahead + byte);
    AMX_LOAD(4, x, 64);
    AMX_LOAD(5, w, 64);
    AMX_MULTIPLY(0, 4, 5);
    AMX_LOAD(6, w + TILE, 64);
    AMX_MULTIPLY(1, 4, 6);
    AMX_LOAD(7, w + 2 * TILE, 64);
    AMX_MULTIPLY(2, 4, 7);
    AMX_LOAD(5, w + 3 * TILE, 64);
    AMX_MULTIPLY(3, 4, 5);
  }
  AMX_STORE(0, sums, SUMS_STRIDE);
  AMX_STORE(1, sums + 16, SUMS_STRIDE);
  AMX_STORE(2, sums + 32, SUMS_STRIDE);
  AMX_STORE(3, sums + 48, SUMS_STRIDE);
}

// The same for 17 to 32 rows and half of the panel's columns.
inline void add_more_rows(const bf16* x, int64_t x_step, const uint8_t* w, int64_t inner, float* sums) {
  AMX_LOAD(0, sums, SUMS_STRIDE);
  AMX_LOAD(1, sums + 16, SUMS_STRIDE);
  AMX_LOAD(2, sums + 16 * 64, SUMS_STRIDE);
  AMX_LOAD(3, sums + 16 * 64 + 16, SUMS_STRIDE);
  for (int64_t k = 0; k < inner; k += INNER, w += K_BYTES, x += x_step) {
    // four steps ahead: weights are in the first cache, and x is in the second
    for (int64_t line = 0; line < 2 * ROWS; ++line) __builtin_prefetch(x + 4 * x_step + line * INNER);
    AMX_LOAD(4, x, 64);
    AMX_LOAD(6, w, 64);
    AMX_MULTIPLY(0, 4, 6);
    AMX_LOAD(7, w + TILE, 64);
    AMX_MULTIPLY(1, 4, 7);
    AMX_LOAD(5, x + 16 * INNER, 64);
    AMX_MULTIPLY(2, 5, 6);
    AMX_MULTIPLY(3, 5, 7);
  }
  AMX_STORE(0, sums, SUMS_STRIDE);
  AMX_STORE(1, sums + 16, SUMS_STRIDE);
  AMX_STORE(2, sums + 16 * 64, SUMS_STRIDE);
  AMX_STORE(3, sums + 16 * 64 + 16, SUMS_STRIDE);
}

}  // namespace amx
#endif
