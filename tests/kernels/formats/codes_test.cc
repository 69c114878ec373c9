// Packing of transposed codes, for every width and at the edges of blocks.
#include "kernels/formats/codes.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/base/math.h"
#include "kernels/scheme.h"

namespace awqd {
namespace {

int At(const std::vector<uint8_t>& codes, int64_t row_bytes, int place, int64_t row, int64_t col) {
  const int64_t bit = col * place;
  return codes[row * row_bytes + bit / 8] >> (bit % 8) & ((1 << place) - 1);
}

TEST(PackTransposed, EveryWidthAtTheEdgesOfBlocks) {
  for (const int bits : {1, 2, 3, 4, 5, 8}) {
    const int place = CodeBits(bits);
    for (const int64_t rows : {1, 7, 8, 63, 64, 65, 130}) {
      for (const int64_t cols : {1, 9, 64, 67}) {
        const auto code = [&](int64_t row, int64_t col) {
          return static_cast<uint8_t>((row * 31 + col * 7 + row * col) & ((1 << bits) - 1));
        };
        const std::vector<uint8_t> out = PackTransposed(
            rows, cols, bits, [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
              EXPECT_EQ(col % 8, 0);
              for (int64_t i = 0; i < count; ++i) to[i] = code(row, col + i);
            });
        const int64_t row_bytes = CeilDiv(rows * place, 8);
        ASSERT_EQ(static_cast<int64_t>(out.size()), cols * row_bytes);
        int wrong = 0;
        for (int64_t col = 0; col < cols; ++col) {
          for (int64_t row = 0; row < rows; ++row) {
            wrong += At(out, row_bytes, place, col, row) != code(row, col);
          }
          for (int64_t past = rows; past * place < row_bytes * 8; ++past) {
            wrong += At(out, row_bytes, place, col, past) != 0;
          }
        }
        EXPECT_EQ(wrong, 0) << bits << " bits, " << rows << " x " << cols;
      }
    }
  }
}

TEST(TransposedNibbles, BothOrders) {
  for (const int64_t cols : {2, 6, 8, 70, 128}) {
    const int64_t rows = 5;
    std::vector<uint8_t> from(rows * cols / 2);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 37 + 11);
    for (const FirstNibble first : {FirstNibble::kLow, FirstNibble::kHigh}) {
      const std::vector<uint8_t> out = TransposedNibbles(from, rows, cols, first);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
          const bool high = (col % 2 == 0) == (first == FirstNibble::kHigh);
          const int pair = from[(row * cols + col) / 2];
          ASSERT_EQ(At(out, CeilDiv(rows, 2), 4, col, row), high ? pair >> 4 : pair & 15);
        }
      }
    }
  }
}

}  // namespace
}  // namespace awqd
