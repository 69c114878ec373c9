// Packing and transposing, a few cache lines at a time.
#include "kernels/formats/codes.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/host_memory.h"
#include "kernels/base/math.h"
#include "kernels/base/nibbles.h"
#include "kernels/scheme.h"

namespace awqd {
namespace {

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

// Eight codes, one to a byte, next to one another: kPlace bits each.
template <int kPlace>
uint64_t Pack8(uint64_t bytes) {
  if (kPlace == 4) {
    bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffu;
    bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
    return (bytes | bytes >> 16) & 0xffffffffu;
  }
  if (kPlace == 8) return bytes;
  bytes = (bytes | bytes >> 6) & 0x000f000f000f000fu;
  bytes = (bytes | bytes >> 12) & 0x000000ff000000ffu;
  return (bytes | bytes >> 24) & 0xffffu;
}

constexpr int64_t kBlock = 64;  // codes of a side: two lie in the first cache

// Writes codes [height, width] of `block` as columns to rows of `to`, `bytes` of which are left.
template <int kPlace>
void PackBlock(const uint8_t* block, int64_t height, int64_t width, int64_t row_bytes,
               int64_t bytes, uint8_t* to) {
  for (int64_t col = 0; col < width; col += 8) {
    for (int64_t row = 0; row < height; row += 8) {
      uint64_t eight[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&eight[i], block + (row + i) * kBlock + col, 8);
      TransposeBytes(eight);
      const int64_t at = row * kPlace / 8;
      const bool whole = bytes - at >= kPlace;
      for (int64_t i = 0; i < 8 && col + i < width; ++i) {
        const uint64_t packed = Pack8<kPlace>(eight[i]);
        uint8_t* const out = to + (col + i) * row_bytes + at;
        if (whole) {
          std::memcpy(out, &packed, kPlace);
        } else {
          std::memcpy(out, &packed, bytes - at);
        }
      }
    }
  }
}

// Two codes of each byte, one to a byte.
void UnpackNibbles(const uint8_t* from, int64_t count, FirstNibble first, uint8_t* to) {
  int64_t at = 0;
  for (; at + 8 <= count; at += 8) {
    uint32_t word = LoadWord(from + at / 2);
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

// Eight codes fill kBits bytes.
template <int kBits>
void UnpackEights(const uint8_t* from, int64_t count, uint8_t* to) {
  constexpr uint64_t kMask = (1u << kBits) - 1;
  int64_t at = 0;
  for (; at + 8 <= count; at += 8, from += kBits) {
    uint64_t eight = 0;
    std::memcpy(&eight, from, kBits);
    for (int i = 0; i < 8; ++i) to[at + i] = static_cast<uint8_t>(eight >> i * kBits & kMask);
  }
  uint64_t rest = 0;
  std::memcpy(&rest, from, CeilDiv((count - at) * kBits, 8));
  for (int i = 0; at < count; ++i, ++at) to[at] = static_cast<uint8_t>(rest >> i * kBits & kMask);
}

}  // namespace

std::vector<uint8_t> AllocateCodes(int64_t bytes) {
  std::vector<uint8_t> out;
  out.reserve(bytes);
  AdviseHugePages(out.data(), bytes);
  out.resize(bytes);
  return out;
}

void UnpackStream(const uint8_t* from, int64_t count, int bits, uint8_t* to) {
  using Unpack = void (*)(const uint8_t* from, int64_t count, uint8_t* to);
  constexpr Unpack kUnpack[] = {UnpackEights<1>, UnpackEights<2>, UnpackEights<3>, nullptr,
                                UnpackEights<5>, UnpackEights<6>, UnpackEights<7>, UnpackEights<8>};
  if (bits == 4) {
    UnpackNibbles(from, count, FirstNibble::kLow, to);
  } else {
    kUnpack[bits - 1](from, count, to);
  }
}

std::vector<uint8_t> PackCodes(absl::Span<const uint8_t> codes, int64_t rows, int64_t cols,
                               int bits) {
  const int place = CodeBits(bits);
  if (place == 8) return {codes.begin(), codes.end()};
  const int64_t row_bytes = CeilDiv(cols * place, 8);
  std::vector<uint8_t> out = AllocateCodes(rows * row_bytes);
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* from = codes.data() + row * cols;
    uint8_t* to = out.data() + row * row_bytes;
    for (int64_t col = 0; col < cols; ++col) {
      to[col * place / 8] |= static_cast<uint8_t>(from[col] << (col * place % 8));
    }
  }
  return out;
}

void PackNibbles(const uint8_t* codes, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count / 2; ++i) {
    to[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
}

std::vector<uint8_t> Transposed(absl::Span<const uint8_t> from, int64_t rows, int64_t cols,
                                int64_t element_bytes) {
  std::vector<uint8_t> out = AllocateCodes(static_cast<int64_t>(from.size()));
  if (element_bytes == 1) Transpose<1>(from.data(), rows, cols, out.data());
  if (element_bytes == 2) Transpose<2>(from.data(), rows, cols, out.data());
  if (element_bytes == 4) Transpose<4>(from.data(), rows, cols, out.data());
  return out;
}

std::vector<uint8_t> PackTransposed(int64_t rows, int64_t cols, int bits, ReadCodes read) {
  const int place = CodeBits(bits);
  const auto pack = place == 2 ? PackBlock<2> : place == 4 ? PackBlock<4> : PackBlock<8>;
  const int64_t row_bytes = CeilDiv(rows * place, 8);
  std::vector<uint8_t> out = AllocateCodes(cols * row_bytes);
  uint8_t block[kBlock * kBlock] = {};  // one code to a byte
  for (int64_t col0 = 0; col0 < cols; col0 += kBlock) {
    const int64_t width = std::min(kBlock, cols - col0);
    for (int64_t row0 = 0; row0 < rows; row0 += kBlock) {
      const int64_t height = std::min(kBlock, rows - row0);
      if (height < kBlock) std::memset(block, 0, sizeof(block));
      for (int64_t row = 0; row < height; ++row) {
        read(row0 + row, col0, width, block + row * kBlock);
      }
      const int64_t at = row0 * place / 8;
      pack(block, height, width, row_bytes, row_bytes - at, out.data() + col0 * row_bytes + at);
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
