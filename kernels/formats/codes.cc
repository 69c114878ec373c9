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

// Eight codes, one to a byte, next to one another: `place` bits each.
uint64_t Pack8(uint64_t bytes, int place) {
  if (place == 4) {
    bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffu;
    bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
    return (bytes | bytes >> 16) & 0xffffffffu;
  }
  if (place == 8) return bytes;
  bytes = (bytes | bytes >> 6) & 0x000f000f000f000fu;
  bytes = (bytes | bytes >> 12) & 0x000000ff000000ffu;
  return (bytes | bytes >> 24) & 0xffffu;
}

// `from` has a multiple of eight bytes, zeros past `count`.
void PackRow(const uint8_t* from, int64_t count, int place, uint8_t* to) {
  const int64_t bytes = CeilDiv(count * place, 8);
  for (int64_t at = 0; at < bytes; at += place) {
    uint64_t codes;
    std::memcpy(&codes, from + at / place * 8, sizeof(codes));
    codes = Pack8(codes, place);
    std::memcpy(to + at, &codes, std::min<int64_t>(place, bytes - at));
  }
}

// Two codes of each byte, one to a byte.
void UnpackNibbles(const uint8_t* from, int64_t count, FirstNibble first, uint8_t* to) {
  int64_t at = 0;
  for (; at + 8 <= count; at += 8) {
    uint32_t word;
    std::memcpy(&word, from + at / 2, sizeof(word));
    if (first == FirstNibble::kHigh) word = (word & 0x0f0f0f0fu) << 4 | (word >> 4 & 0x0f0f0f0fu);
    uint64_t codes = word;
    codes = (codes | codes << 16) & 0x0000ffff0000ffffu;
    codes = (codes | codes << 8) & 0x00ff00ff00ff00ffu;
    codes = (codes | codes << 4) & 0x0f0f0f0f0f0f0f0fu;
    std::memcpy(to + at, &codes, sizeof(codes));
  }
  for (; at < count; ++at) {
    const bool high = (at % 2 == 1) == (first == FirstNibble::kLow);
    to[at] = high ? from[at / 2] >> 4 : from[at / 2] & 15;
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

std::vector<uint8_t> PackTransposed(int64_t rows, int64_t cols, int bits, ReadCodes read) {
  constexpr int64_t kBlock = 64;
  const int place = CodeBits(bits);
  const int64_t row_bytes = CeilDiv(rows * place, 8);
  std::vector<uint8_t> out = Allocate(cols * row_bytes);
  const int64_t line = RoundUp(rows, kBlock);
  std::vector<uint8_t> lines(kBlock * line);  // kBlock columns, one code to a byte
  uint8_t block[kBlock * kBlock];
  for (int64_t col0 = 0; col0 < cols; col0 += kBlock) {
    const int64_t count = std::min(kBlock, cols - col0);
    for (int64_t row0 = 0; row0 < rows; row0 += kBlock) {
      const int64_t height = std::min(kBlock, rows - row0);
      for (int64_t row = 0; row < height; ++row) {
        read(row0 + row, col0, count, block + row * kBlock);
      }
      for (int64_t col = 0; col < count; ++col) {
        for (int64_t row = 0; row < height; ++row) {
          lines[col * line + row0 + row] = block[row * kBlock + col];
        }
      }
    }
    for (int64_t col = 0; col < count; ++col) {
      PackRow(lines.data() + col * line, rows, place, out.data() + (col0 + col) * row_bytes);
    }
  }
  return out;
}

std::vector<uint8_t> TransposedNibbles(absl::Span<const uint8_t> from, int64_t rows, int64_t cols,
                                       FirstNibble first) {
  return PackTransposed(rows, cols, 4, [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    UnpackNibbles(from.data() + (row * cols + col) / 2, count, first, to);
  });
}

}  // namespace awqd
