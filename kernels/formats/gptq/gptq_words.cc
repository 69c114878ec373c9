// Words to codes. A row of codes comes from one to three rows of words with the same shifts in all
// columns, so that everything runs along N, on both sides: there is no transposing.
#include "kernels/formats/gptq/gptq_words.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/nibbles.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/stream.h"
#include "kernels/formats/codes.h"
#include "kernels/scheme.h"

namespace awqd {
namespace {

constexpr int kBlock = 32;       // codes that fill `bits` words
constexpr int64_t kTile = 1024;  // columns at a time: `bits` rows of words stay in a cache

// Bits of a code that lie together: (word >> shift & mask) << to.
struct Piece {
  int word = 0;
  int shift = 0;
  uint32_t mask = 0;
  int to = 0;
};
struct Pieces {
  std::array<Piece, 3> at;
  int count = 0;

  void AddPiece(int bit, int width, int to) {
    at[count++] = {bit / 32, bit % 32, (1u << width) - 1, to};
  }
};

Pieces DensePieces(int code, int bits) {
  Pieces out;
  const int bit = code * bits, low = std::min(bits, 32 - bit % 32);
  out.AddPiece(bit, low, 0);
  if (low < bits) out.AddPiece(bit + low, bits - low, low);
  return out;
}

Pieces PlanePieces(int code, int bits) {
  Pieces out;
  int done = 0;
  for (const int width : {8, 4, 2, 1}) {
    if ((bits & width) == 0) continue;
    // The planes of 3 bits are 2 and 1 wide, those of 7 bits 4, 2 and 1: the bits of the number.
    out.AddPiece(kBlock * done + code * width, width, done);
    done += width;
  }
  return out;
}

std::array<Pieces, kBlock> PiecesOfBlock(int bits, GptqWords order) {
  std::array<Pieces, kBlock> out;
  for (int code = 0; code < kBlock; ++code) {
    out[code] = order == GptqWords::kPlanes ? PlanePieces(code, bits) : DensePieces(code, bits);
  }
  return out;
}

// Sets a piece of the codes of `count` columns.
void SetPiece(const uint8_t* __restrict words, Piece piece, int64_t count,
              uint8_t* __restrict codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>((LoadWord(words, i) >> piece.shift & piece.mask) << piece.to);
  }
}
void AddPiece(const uint8_t* __restrict words, Piece piece, int64_t count,
              uint8_t* __restrict codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] |= static_cast<uint8_t>((LoadWord(words, i) >> piece.shift & piece.mask) << piece.to);
  }
}

// Codes of a byte each -> of `place` bits each. Past `count` codes are 0 up to a multiple of 4.
void PackRow(const uint8_t* __restrict codes, int64_t count, int place, uint8_t* __restrict to) {
  if (place == 8) {
    std::memcpy(to, codes, count);
  } else if (place == 4) {
    for (int64_t i = 0; i < CeilDiv(count, 2); ++i) {
      uint16_t pair;
      std::memcpy(&pair, codes + 2 * i, sizeof(pair));
      to[i] = static_cast<uint8_t>(pair | pair >> 4);
    }
  } else {
    for (int64_t i = 0; i < CeilDiv(count, 4); ++i) {
      uint32_t four = LoadWord(codes, i);
      four |= four >> 6;
      to[i] = static_cast<uint8_t>(four | four >> 12);
    }
  }
}

// Eight rows of 4-bit codes are one row of words. The bytes of 32 words are turned around: those
// with the same place in the words of every second column lie together, and a byte of two such
// vectors is one of two rows.
constexpr int64_t kColumns = 32;  // at a time

void UnpackNibbleRows(const uint8_t* words, int64_t count, uint8_t (*rows)[kTile / 2]) {
  for (int64_t col = 0; col < count; col += kColumns) {
    Bytes16 w[8];
    std::memcpy(w, words + 4 * col, sizeof(w));
    for (int round = 0; round < 4; ++round) {
      Bytes16 next[8];
      for (int i = 0; i < 4; ++i) Interleave<1>(w[i], w[i + 4], &next[2 * i], &next[2 * i + 1]);
      for (int i = 0; i < 8; ++i) w[i] = next[i];
    }
    for (int i = 0; i < 4; ++i) {  // w[i] of even columns, w[i + 4] of odd ones
      const Bytes16 lower = (w[i] & 0x0f) | w[i + 4] << 4, upper = w[i] >> 4 | (w[i + 4] & 0xf0);
      std::memcpy(rows[2 * i] + col / 2, &lower, sizeof(lower));
      std::memcpy(rows[2 * i + 1] + col / 2, &upper, sizeof(upper));
    }
  }
}

// Whole words of whole vectors.
void UnpackNibbles(const uint8_t* words, int64_t k, int64_t n, absl::Span<const int32_t> place,
                   uint8_t* out) {
  ForEachPart(k, 8, k * n / 2, [&](int64_t begin, int64_t end) {
    alignas(64) uint8_t rows[8][kTile / 2];
    for (int64_t row = begin; row < end; row += 8) {
      for (int64_t col = 0; col < n; col += kTile) {
        const int64_t count = std::min(kTile, n - col);
        UnpackNibbleRows(words + (row / 8 * n + col) * 4, count, rows);
        for (int i = 0; i < 8; ++i) {
          const int64_t to = place.empty() ? row + i : place[row + i];
          StreamBytes(rows[i], out + (to * n + col) / 2, count / 2);
        }
      }
    }
    FinishStreams();
  });
}

// Unpacks a row of `n` codes that fill words.
void UnpackWholeWords(const uint8_t* words, int64_t n, int bits, int plus, uint8_t* codes) {
  const uint32_t most = (1u << bits) - 1;
  const uint32_t to_all = 0xffffffffu / most * static_cast<uint32_t>(plus);
  const int in_word = 32 / bits;
  for (int64_t col = 0; col < n; col += in_word) {
    uint32_t word = LoadWord(words, col / in_word) + to_all;
    for (int64_t i = col; i < std::min(n, col + in_word); ++i) {
      codes[i] = static_cast<uint8_t>(word & most);
      word >>= bits;
    }
  }
}

void UnpackBlocks(const uint8_t* words, int64_t n, int bits, GptqWords order, int plus,
                  uint8_t* codes) {
  const std::array<Pieces, kBlock> pieces = PiecesOfBlock(bits, order);
  for (int64_t col = 0; col < n; ++col) {
    const Pieces& of = pieces[col % kBlock];
    uint32_t code = 0;
    for (int i = 0; i < of.count; ++i) {
      const Piece& piece = of.at[i];
      const uint32_t word = LoadWord(words, col / kBlock * bits + piece.word);
      code |= (word >> piece.shift & piece.mask) << piece.to;
    }
    codes[col] = static_cast<uint8_t>((code + static_cast<uint32_t>(plus)) & ((1u << bits) - 1));
  }
}

}  // namespace

std::string ExplainWords(absl::string_view tensor, int64_t count, int bits, int64_t words) {
  std::string out = absl::StrCat(count, " codes of ", bits, " bits in 32-bit words");
  for (int other = 2; other <= 8; ++other) {
    if (other == bits || count * other != words * 32) continue;
    absl::StrAppend(&out, "; ", tensor, " has the size of ", other,
                    "-bit codes, but the settings say ", bits, " bits");
    break;
  }
  return out;
}

std::vector<uint8_t> UnpackGptqRows(absl::Span<const uint8_t> words, int64_t k, int64_t n, int bits,
                                    GptqWords order, absl::Span<const int32_t> place) {
  const std::array<Pieces, kBlock> pieces = PiecesOfBlock(bits, order);
  const int bits_in_row = CodeBits(bits);
  const int64_t row_bytes = CeilDiv(n * bits_in_row, 8);
  std::vector<uint8_t> out = AllocateCodes(k * row_bytes);
  if (bits == 4 && k % 8 == 0 && n % kColumns == 0) {  // both orders are the same
    UnpackNibbles(words.data(), k, n, place, out.data());
    return out;
  }
  alignas(64) uint8_t codes[kTile + 4] = {};
  for (int64_t block = 0; block < k; block += kBlock) {
    const uint8_t* const first = words.data() + block / kBlock * bits * n * 4;
    for (int64_t col = 0; col < n; col += kTile) {
      const int64_t count = std::min(kTile, n - col);
      std::memset(codes + count, 0, 4);
      for (int64_t row = block; row < std::min(k, block + kBlock); ++row) {
        const Pieces& of = pieces[row - block];
        const auto from = [&](const Piece& piece) { return first + (piece.word * n + col) * 4; };
        SetPiece(from(of.at[0]), of.at[0], count, codes);
        for (int i = 1; i < of.count; ++i) AddPiece(from(of.at[i]), of.at[i], count, codes);
        const int64_t to = place.empty() ? row : place[row];
        PackRow(codes, count, bits_in_row, out.data() + to * row_bytes + col * bits_in_row / 8);
      }
    }
  }
  return out;
}

std::vector<uint8_t> UnpackGptqColumns(absl::Span<const uint8_t> words, int64_t rows, int64_t n,
                                       int bits, GptqWords order, int plus) {
  std::vector<uint8_t> out(rows * n);
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* const from = words.data() + row * WordsOfCodes(n, bits) * 4;
    uint8_t* const to = out.data() + row * n;
    if (32 % bits == 0) {
      UnpackWholeWords(from, n, bits, plus, to);
    } else {
      UnpackBlocks(from, n, bits, order, plus, to);
    }
  }
  return out;
}

}  // namespace awqd
