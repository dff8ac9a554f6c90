// The neighbours of places, one behind the other: a convolution is a product of them.
#include <algorithm>
#include <cstring>

#include "pool.h"

namespace {

// x [count, rows, columns, bytes]; a place's neighbours: 3 columns around it, of `kernel_rows` rows.
struct Space {
  const char* x;
  int64_t rows, columns, bytes, kernel_rows, stride, out_rows, out_columns, row_bytes;
};

// Those of one row of places. Zeros stand for those outside, and behind all.
void gather_row(const Space& s, int64_t row, char* out) {
  const int64_t item = row / s.out_rows, first_row = row % s.out_rows * s.stride - s.kernel_rows / 2;
  const int64_t filled = 3 * s.bytes * s.kernel_rows;
  for (int64_t place = 0; place < s.out_columns; ++place, out += s.row_bytes) {
    const int64_t first = place * s.stride - 1;
    const int64_t begin = std::max<int64_t>(first, 0), end = std::min(first + 3, s.columns);
    const int64_t before = (begin - first) * s.bytes, size = (end - begin) * s.bytes;
    char* to = out;
    for (int64_t i = 0; i < s.kernel_rows; ++i, to += 3 * s.bytes) {
      const int64_t from = first_row + i;
      if (from < 0 || from >= s.rows) {
        std::memset(to, 0, size_t(3 * s.bytes));
        continue;
      }
      std::memset(to, 0, size_t(before));
      std::memcpy(to + before, s.x + ((item * s.rows + from) * s.columns + begin) * s.bytes, size_t(size));
      std::memset(to + before + size, 0, size_t(3 * s.bytes - before - size));
    }
    std::memset(to, 0, size_t(s.row_bytes - filled));
  }
}

}  // namespace

// x [count, rows, columns, bytes] -> out [count, out rows, out columns, row_bytes], of every `stride`-th place. Over one
// dimension: 1 row, and 1 kernel_rows; else 3.
extern "C" void vs_neighbours(const void* x, int64_t count, int64_t rows, int64_t columns, int64_t bytes,
                              int64_t kernel_rows, int64_t stride, int64_t row_bytes, void* out) {
  const Space s{(const char*)x,        rows, columns, bytes, kernel_rows, stride, (rows - 1) / stride + 1,
                (columns - 1) / stride + 1, row_bytes};
  pool::parallel_for(count * s.out_rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) gather_row(s, row, (char*)out + row * s.out_columns * row_bytes);
  });
}
