// Tells whether AMX can be used. Linux gives its registers to processes that ask for them, from 5.16 on.
#include "amx.h"

#if defined(HAS_AMX)
#include <cmath>

#if !defined(AMX_STAND_IN)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amx {
namespace {

bool granted() {
#if defined(AMX_STAND_IN)
  return true;
#else
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
}

// A small product beside the same by hand: numbers that bfloat16 and their sums hold exactly.
bool computes_right() {
  constexpr int INNER_SIZE = 2 * INNER;
  bf16 x[INNER_SIZE / INNER][ROWS][INNER], panel[INNER_SIZE / INNER][4][INNER / 2][16][2];
  for (int row = 0; row < ROWS; ++row)
    for (int k = 0; k < INNER_SIZE; ++k) x[k / INNER][row][k % INNER] = narrow(float((row * 7 + k * 3) % 11 - 5));
  for (int k = 0; k < INNER_SIZE; ++k)
    for (int column = 0; column < 64; ++column)
      panel[k / INNER][column / 16][k % INNER / 2][column % 16][k % 2] = narrow(float((column * 5 + k) % 13 - 6));
  float sums[ROWS][64] = {};
  {
    Registers registers(ROWS, 0);
    add_rows(x[0][0], ROWS * INNER, (const uint8_t*)panel, INNER_SIZE, 0, sums[0]);
  }
  for (int row = 0; row < ROWS; ++row)
    for (int column = 0; column < 64; ++column) {
      float truth = 0;
      for (int k = 0; k < INNER_SIZE; ++k)
        truth += widen(x[k / INNER][row][k % INNER]) *
                 widen(panel[k / INNER][column / 16][k % INNER / 2][column % 16][k % 2]);
      if (sums[row][column] != truth) return false;
    }
  return true;
}

}  // namespace

bool usable() {
  static const bool is = granted() && computes_right();
  return is;
}

}  // namespace amx

extern "C" int32_t vs_amx() { return amx::usable(); }
#else
#include <cstdint>
extern "C" int32_t vs_amx() { return 0; }
#endif
