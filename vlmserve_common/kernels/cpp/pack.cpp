// Packs weights in the order in which products read them; see weights.h.
#include "pool.h"
#include "weights.h"

// Packs rows of a weight [*, inner] (inner even): packed column c is row order[c], and stays as it is where that is
// negative. columns: a multiple of 64.
extern "C" void vs_pack_bf16(const bf16* weight, int64_t inner, const int64_t* order, int64_t columns, uint32_t* packed) {
  pool::parallel_for(columns / PANEL, 1, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel)
      for (int64_t column = 0; column < PANEL; ++column) {
        int64_t row = order[panel * PANEL + column];
        if (row < 0) continue;
        uint32_t* to = packed + panel * (inner / 2) * PANEL;
        for (int64_t pair = 0; pair < inner / 2; ++pair)
          to[pair_place(pair, column, inner)] = load<uint32_t>(weight + row * inner + 2 * pair);
      }
  });
}

extern "C" void vs_pack_f32(const float* weight, int64_t inner, const int64_t* order, int64_t columns, float* packed) {
  pool::parallel_for(columns / PANEL, 1, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel)
      for (int64_t column = 0; column < PANEL; ++column) {
        int64_t row = order[panel * PANEL + column];
        if (row < 0) continue;
        float* to = packed + panel * inner * PANEL + column / BLOCK * 2 * BLOCK + column % BLOCK;
        for (int64_t k = 0; k < inner; ++k) to[k / 2 * 2 * PANEL + k % 2 * BLOCK] = weight[row * inner + k];
      }
  });
}

namespace {

template <class Weights>
void pack_quantised(const uint8_t* numbers, int64_t inner, const f16* scales, const f16* shifts, int64_t groups,
                    const int64_t* order, int64_t columns, uint8_t* packed) {
  const int64_t bytes = panel_bytes<Weights>(inner, groups);
  pool::parallel_for(columns / PANEL, 1, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) {
      uint8_t* to = packed + panel * bytes;
      auto* own = (f16*)(to + number_bytes<Weights>(inner));
      for (int64_t column = 0; column < PANEL; ++column) {
        int64_t row = order[panel * PANEL + column];
        if (row < 0) continue;
        for (int64_t group = 0; group < groups; ++group) {
          own[group * 2 * PANEL + column] = scales[row * groups + group];
          own[(group * 2 + 1) * PANEL + column] = shifts[row * groups + group];
        }
        Weights::put(to, column, numbers + row * inner, inner);
      }
    }
  });
}

}  // namespace

// numbers [*, inner] from 0, scales and shifts [*, groups] -> packed: as above. Shifts are those of int8's numbers less
// 128 and of int4's less 8. A chunk's inputs lie in one group.
extern "C" void vs_pack_quantised(int32_t kind, const uint8_t* numbers, int64_t inner, const f16* scales,
                                  const f16* shifts, int64_t groups, const int64_t* order, int64_t columns,
                                  uint8_t* packed) {
  auto* pack = kind == WEIGHT_INT4 ? pack_quantised<Int4Weights> : pack_quantised<Int8Weights>;
  pack(numbers, inner, scales, shifts, groups, order, columns, packed);
}
