// Packing and transposing, a few cache lines at a time.
#include "kernels/formats/codes.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/host_memory.h"
#include "kernels/base/math.h"
#include "kernels/base/nibbles.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/stream.h"
#include "kernels/scheme.h"

namespace awqd {
namespace {

constexpr int64_t kLine = 64;  // bytes of a cache line, and of a row of a block

// A block of bytes of a matrix: lines of some rows. It stays in the first cache.
template <int64_t kRows>
struct Block {
  // Copies the part of [rows, row_bytes] that begins at a row and a byte; zeros beyond.
  void Load(const uint8_t* from, int64_t rows, int64_t row_bytes, int64_t row0, int64_t byte0) {
    const int64_t height = std::min(kRows, rows - row0);
    const int64_t width = std::min(kLine, row_bytes - byte0);
    from += row0 * row_bytes + byte0;
    if (height == kRows && width == kLine) {
      for (int64_t row = 0; row < kRows; ++row) {
        std::memcpy(line[row], from + row * row_bytes, kLine);
        __builtin_prefetch(from + row * row_bytes + kLine, 0, 2);  // of the next block
      }
      return;
    }
    std::memset(line, 0, sizeof(line));
    for (int64_t row = 0; row < height; ++row) {
      std::memcpy(line[row], from + row * row_bytes, width);
    }
  }

  // Writes column c to row c of `to`.
  void Transpose(uint8_t (*to)[kRows]) const {
    for (int64_t row = 0; row < kRows; row += 16) {
      for (int64_t col = 0; col < kLine; col += 16) {
        Bytes16 w[16];
        for (int i = 0; i < 16; ++i) std::memcpy(&w[i], &line[row + i][col], 16);
        TransposeBytes(w);
        for (int i = 0; i < 16; ++i) std::memcpy(&to[col + i][row], &w[i], 16);
      }
    }
  }

  alignas(64) uint8_t line[kRows][kLine];
};

void TransposeByteMatrix(const uint8_t* from, int64_t rows, int64_t cols, uint8_t* to) {
  constexpr int64_t kRows = 4 * kLine;  // a fifth faster than one line or two of the result
  ForEachPart(cols, kLine, rows * cols, [&](int64_t begin, int64_t end) {
    Block<kRows> block;
    alignas(64) uint8_t turned[kLine][kRows];
    for (int64_t row = 0; row < rows; row += kRows) {
      for (int64_t col = begin; col < end; col += kLine) {
        block.Load(from, rows, cols, row, col);
        block.Transpose(turned);
        for (int64_t i = 0; i < std::min(kLine, cols - col); ++i) {
          StreamBytes(turned[i], to + (col + i) * rows + row, std::min(kRows, rows - row));
        }
      }
    }
    FinishStreams();
  });
}

// Turns 128 rows of 64 bytes, of two codes each, into 128 lines: the low codes of every byte, then
// the high ones. Even and odd rows are transposed apart, and a byte of both is one of two lines.
void TransposeNibbles(const Block<2 * kLine>& block, uint8_t (*turned)[kLine][kLine]) {
  for (int64_t at = 0; at < kLine; at += 16) {
    for (int64_t col = 0; col < kLine; col += 16) {
      Bytes16 even[16], odd[16];
      for (int64_t i = 0; i < 16; ++i) {
        std::memcpy(&even[i], &block.line[2 * (at + i)][col], 16);
        std::memcpy(&odd[i], &block.line[2 * (at + i) + 1][col], 16);
      }
      TransposeBytes(even);
      TransposeBytes(odd);
      for (int64_t i = 0; i < 16; ++i) {
        const Bytes16 low = (even[i] & 0x0f) | odd[i] << 4;
        const Bytes16 high = even[i] >> 4 | (odd[i] & 0xf0);
        std::memcpy(&turned[0][col + i][at], &low, 16);
        std::memcpy(&turned[1][col + i][at], &high, 16);
      }
    }
  }
}

// Blocks of 64 x 64: the lines of both sides stay in the first cache.
template <int kBytes>
void Transpose(const uint8_t* from, int64_t rows, int64_t cols, uint8_t* to) {
  for (int64_t row0 = 0; row0 < rows; row0 += kLine) {
    for (int64_t col0 = 0; col0 < cols; col0 += kLine) {
      const int64_t row_end = std::min(rows, row0 + kLine);
      const int64_t col_end = std::min(cols, col0 + kLine);
      for (int64_t col = col0; col < col_end; ++col) {
        for (int64_t row = row0; row < row_end; ++row) {
          std::memcpy(to + (col * rows + row) * kBytes, from + (row * cols + col) * kBytes, kBytes);
        }
      }
    }
  }
}

// Bytes 0, 2, 4, ... of two vectors.
Bytes16 EvenBytes(Bytes16 a, Bytes16 b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

using Pairs = uint16_t __attribute__((vector_size(16)));  // of bytes

// Calls merge(pairs of 16 bytes) for each of `line`, and writes the lower bytes of what it returns.
template <typename Merge>
void MergePairs(const uint8_t* line, int64_t bytes, uint8_t* to, Merge merge) {
  for (int64_t at = 0; at < bytes; at += 32) {
    Pairs pairs[2];
    std::memcpy(pairs, line + at, sizeof(pairs));
    const Bytes16 out = EvenBytes((Bytes16)merge(pairs[0]), (Bytes16)merge(pairs[1]));
    std::memcpy(to + at / 2, &out, sizeof(out));
  }
}

// Packs 64 codes of a byte each to kPlace bits each, in place.
template <int kPlace>
void PackLine(uint8_t* line) {
  if (kPlace == 8) return;
  MergePairs(line, kLine, line, [](Pairs x) { return x | x >> (8 - kPlace); });
  if (kPlace == 4) return;
  MergePairs(line, kLine / 2, line, [](Pairs x) { return x | x >> (8 - 2 * kPlace); });
}

// Two codes of each byte, the lower first, one to a byte.
void UnpackNibbles(const uint8_t* from, int64_t count, uint8_t* to) {
  int64_t at = 0;
  for (; at + 8 <= count; at += 8) {
    uint64_t codes = LoadWord(from + at / 2);
    codes = (codes | codes << 16) & 0x0000ffff0000ffffu;
    codes = (codes | codes << 8) & 0x00ff00ff00ff00ffu;
    codes = (codes | codes << 4) & 0x0f0f0f0f0f0f0f0fu;
    std::memcpy(to + at, &codes, sizeof(codes));
  }
  for (; at < count; ++at) to[at] = at % 2 == 1 ? from[at / 2] >> 4 : from[at / 2] & 15;
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
    UnpackNibbles(from, count, to);
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
  if (element_bytes == 1) TransposeByteMatrix(from.data(), rows, cols, out.data());
  if (element_bytes == 2) Transpose<2>(from.data(), rows, cols, out.data());
  if (element_bytes == 4) Transpose<4>(from.data(), rows, cols, out.data());
  return out;
}

std::vector<uint8_t> PackTransposed(int64_t rows, int64_t cols, int bits, ReadCodes read) {
  const int place = CodeBits(bits);
  const auto pack = place == 2 ? PackLine<2> : place == 4 ? PackLine<4> : PackLine<8>;
  const int64_t row_bytes = CeilDiv(rows * place, 8);
  std::vector<uint8_t> out = AllocateCodes(cols * row_bytes);
  Block<kLine> block = {};  // one code to a byte
  alignas(64) uint8_t turned[kLine][kLine];
  for (int64_t col = 0; col < cols; col += kLine) {
    const int64_t width = std::min(kLine, cols - col);
    for (int64_t row = 0; row < rows; row += kLine) {
      const int64_t height = std::min(kLine, rows - row);
      if (height < kLine) block = {};
      for (int64_t i = 0; i < height; ++i) read(row + i, col, width, block.line[i]);
      block.Transpose(turned);
      for (int64_t i = 0; i < width; ++i) {
        pack(turned[i]);
        std::memcpy(out.data() + (col + i) * row_bytes + row * place / 8, turned[i],
                    CeilDiv(height * place, 8));
      }
    }
  }
  return out;
}

std::vector<uint8_t> TransposedNibbles(absl::Span<const uint8_t> from, int64_t rows, int64_t cols,
                                       FirstNibble first, absl::Span<const int32_t> place) {
  constexpr int64_t kRows = 2 * kLine;  // a line of the result
  const int64_t from_bytes = static_cast<int64_t>(from.size()) / std::max<int64_t>(1, rows);
  const int64_t row_bytes = CeilDiv(rows, 2), low = first == FirstNibble::kLow ? 0 : 1;
  std::vector<uint8_t> out = AllocateCodes(cols * row_bytes);
  ForEachPart(CeilDiv(cols, 2), kLine, cols * row_bytes, [&](int64_t begin, int64_t end) {
    Block<kRows> block;
    alignas(64) uint8_t turned[2][kLine][kLine];
    for (int64_t row = 0; row < rows; row += kRows) {
      for (int64_t byte = begin; byte < end; byte += kLine) {
        block.Load(from.data(), rows, from_bytes, row, byte);
        TransposeNibbles(block, turned);
        for (int64_t col = 2 * byte; col < std::min(cols, 2 * (byte + kLine)); ++col) {
          const int64_t to = place.empty() ? col : place[col];
          StreamBytes(turned[col % 2 ^ low][col / 2 - byte], out.data() + to * row_bytes + row / 2,
                      std::min(kLine, row_bytes - row / 2));
        }
      }
    }
    FinishStreams();
  });
  return out;
}

}  // namespace awqd
