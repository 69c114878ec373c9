// Packing and transposing, a few cache lines at a time.
#include "kernels/formats/codes.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/huge_pages.h"
#include "kernels/base/math.h"
#include "kernels/description.h"

namespace awqd {
namespace {

// Of zeros.
std::vector<uint8_t> Allocate(int64_t bytes) {
  std::vector<uint8_t> out;
  out.reserve(bytes);
  AdviseHugePages(out.data(), bytes);
  out.resize(bytes);
  return out;
}

// Blocks of 64 x 64: the lines of both sides stay in the first cache.
template <int kBytes>
void Transpose(const uint8_t* from, int64_t rows, int64_t cols, uint8_t* to) {
  constexpr int64_t kBlock = 64;
  for (int64_t row0 = 0; row0 < rows; row0 += kBlock) {
    for (int64_t col0 = 0; col0 < cols; col0 += kBlock) {
      const int64_t row_end = std::min(rows, row0 + kBlock);
      const int64_t col_end = std::min(cols, col0 + kBlock);
      for (int64_t col = col0; col < col_end; ++col) {
        for (int64_t row = row0; row < row_end; ++row) {
          std::memcpy(to + (col * rows + row) * kBytes, from + (row * cols + col) * kBytes, kBytes);
        }
      }
    }
  }
}

}  // namespace

std::vector<uint8_t> PackCodes(absl::Span<const uint8_t> codes, int64_t rows, int64_t cols,
                               int bits) {
  const int place = CodeBits(bits);
  if (place == 8) return {codes.begin(), codes.end()};
  const int64_t row_bytes = CeilDiv(cols * place, 8);
  std::vector<uint8_t> out = Allocate(rows * row_bytes);
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* from = codes.data() + row * cols;
    uint8_t* to = out.data() + row * row_bytes;
    for (int64_t col = 0; col < cols; ++col) {
      to[col * place / 8] |= static_cast<uint8_t>(from[col] << (col * place % 8));
    }
  }
  return out;
}

std::vector<uint8_t> Transposed(absl::Span<const uint8_t> from, int64_t rows, int64_t cols,
                                int64_t element_bytes) {
  std::vector<uint8_t> out = Allocate(static_cast<int64_t>(from.size()));
  if (element_bytes == 1) Transpose<1>(from.data(), rows, cols, out.data());
  if (element_bytes == 2) Transpose<2>(from.data(), rows, cols, out.data());
  if (element_bytes == 4) Transpose<4>(from.data(), rows, cols, out.data());
  return out;
}

}  // namespace awqd
