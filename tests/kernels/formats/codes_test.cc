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

// Rows of words may be longer than their codes, whose number may be odd. Those of the result may be
// in another order.
TEST(TransposedNibbles, BothOrdersAtTheEdgesOfBlocks) {
  for (const int64_t rows : {1, 5, 127, 128, 130, 300}) {
    for (const int64_t cols : {1, 2, 6, 8, 70, 127, 128, 131, 260}) {
      for (const int64_t row_bytes : {CeilDiv(cols, 2), RoundUp(cols, 8) / 2 + 4}) {
        std::vector<uint8_t> from(rows * row_bytes);
        for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 37 + i / 251);
        for (const FirstNibble first : {FirstNibble::kLow, FirstNibble::kHigh}) {
          std::vector<int32_t> place;  // back to front
          if (first == FirstNibble::kLow) {
            for (int64_t col = cols; col > 0; --col) place.push_back(static_cast<int32_t>(col - 1));
          }
          const std::vector<uint8_t> out = TransposedNibbles(from, rows, cols, first, place);
          const int64_t out_bytes = CeilDiv(rows, 2);
          ASSERT_EQ(static_cast<int64_t>(out.size()), cols * out_bytes);
          int wrong = 0;
          for (int64_t col = 0; col < cols; ++col) {
            for (int64_t row = 0; row < rows; ++row) {
              const bool high = (col % 2 == 0) == (first == FirstNibble::kHigh);
              const int pair = from[row * row_bytes + col / 2];
              const int64_t to = place.empty() ? col : place[col];
              wrong += At(out, out_bytes, 4, to, row) != (high ? pair >> 4 : pair & 15);
            }
            if (rows % 2 == 1) wrong += At(out, out_bytes, 4, col, rows) != 0;
          }
          EXPECT_EQ(wrong, 0) << rows << " x " << cols << " in rows of " << row_bytes << " bytes";
        }
      }
    }
  }
}

TEST(Transposed, EveryElementSizeAtTheEdgesOfBlocks) {
  for (const int64_t size : {1, 2, 4}) {
    for (const int64_t rows : {1, 15, 64, 67, 130}) {
      for (const int64_t cols : {1, 17, 63, 64, 129}) {
        std::vector<uint8_t> from(rows * cols * size);
        for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 37 + i / 251);
        const std::vector<uint8_t> out = Transposed(from, rows, cols, size);
        ASSERT_EQ(out.size(), from.size());
        int wrong = 0;
        for (int64_t i = 0; i < rows * cols * size; ++i) {
          const int64_t row = i / size / cols, col = i / size % cols;
          wrong += out[(col * rows + row) * size + i % size] != from[i];
        }
        EXPECT_EQ(wrong, 0) << rows << " x " << cols << " of " << size << " bytes";
      }
    }
  }
}

}  // namespace
}  // namespace awqd
