// Words to codes.
#include "kernels/formats/compressed_tensors/packed_words.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

// Where code `index` begins, in bits from the first word's lowest.
int64_t BitOf(PackedWords packed, int64_t index) {
  if (!packed.padded) return index * packed.bits;
  return index / packed.PerWord() * 32 + index % packed.PerWord() * packed.bits;
}

// Code `index` of words that are `stride` words apart.
uint8_t CodeAt(const uint8_t* words, int64_t stride, PackedWords packed, int64_t index) {
  const int64_t bit = BitOf(packed, index), word = bit / 32;
  const int shift = static_cast<int>(bit % 32);
  uint32_t code = LoadWord(words, word * stride) >> shift;
  if (shift + packed.bits > 32) code |= LoadWord(words, (word + 1) * stride) << (32 - shift);
  return static_cast<uint8_t>(code & ((1u << packed.bits) - 1));
}

// Words of so many codes, in both kinds.
std::string Either(int bits, int64_t count) {
  const int64_t few = PackedWords{bits, false}.Words(count);
  const int64_t many = PackedWords{bits, true}.Words(count);
  return few == many ? absl::StrCat(few) : absl::StrCat(few, " or ", many);
}

}  // namespace

absl::StatusOr<PackedWords> FindPacking(int bits, std::optional<bool> padded,
                                        const TensorView& packed, const TensorView* zeros,
                                        const HostWeight& weight) {
  const PackedWords kinds[] = {{bits, false}, {bits, true}};
  const auto fits = [&](const PackedWords& kind) {
    return packed.shape[1] == kind.Words(weight.k) &&
           (zeros == nullptr || zeros->shape[0] == kind.Words(weight.n));
  };
  const bool dense = fits(kinds[0]), gaps = fits(kinds[1]);
  if (dense && gaps) {
    const bool same =
        kinds[0].SameInBoth(weight.k) && (zeros == nullptr || kinds[0].SameInBoth(weight.n));
    if (same || padded) return kinds[padded.value_or(false) ? 1 : 0];
    return BadValue("packing", "nothing",
                    absl::StrCat("\"dense\" or \"padded\": ", packed.shape[1], " words of K = ",
                                 weight.k, " codes of ", bits, " bits may be either"));
  }
  if (dense || gaps) return kinds[gaps ? 1 : 0];
  for (const PackedWords& kind : kinds) {
    if (packed.shape[1] != kind.Words(weight.k)) continue;
    return BadTensor("weight_zero_point", absl::StrCat("shape ", ShapeText(zeros->shape)),
                     absl::StrCat(Either(bits, weight.n), " rows of words for N = ", weight.n,
                                  ", of ", bits, " bits each, packed as the codes are"));
  }
  return BadTensor("weight_packed", absl::StrCat("shape ", ShapeText(packed.shape)),
                   absl::StrCat(Either(bits, weight.k), " words a row: \"weight_shape\" says K = ",
                                weight.k, ", of ", bits, " bits each"));
}

std::vector<uint8_t> UnpackRowsOfWords(absl::Span<const uint8_t> words, int64_t n, int64_t k,
                                       PackedWords packed, absl::Span<const int32_t> order) {
  const int64_t row_bytes = packed.Words(k) * 4;
  if (packed.bits == 4) {
    std::vector<int32_t> place(order.size());
    for (size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<int32_t>(i);
    return TransposedNibbles(words, n, k, FirstNibble::kLow, place);
  }
  const bool stream = order.empty() && (!packed.padded || packed.SameInBoth(k));
  const auto read = [&](int64_t row, int64_t col, int64_t count, uint8_t* to) {
    const uint8_t* const from = words.data() + row * row_bytes;
    if (stream) {  // eight codes are whole bytes
      UnpackStream(from + col / 8 * packed.bits, count, packed.bits, to);
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      to[i] = CodeAt(from, 1, packed, order.empty() ? col + i : order[col + i]);
    }
  };
  return PackTransposed(n, k, packed.bits, read);
}

std::vector<uint8_t> UnpackColumnsOfWords(absl::Span<const uint8_t> words, int64_t n,
                                          int64_t groups, PackedWords packed) {
  std::vector<uint8_t> out(groups * n);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t col = 0; col < n; ++col) {
      out[group * n + col] = CodeAt(words.data() + 4 * group, groups, packed, col);
    }
  }
  return out;
}

int64_t RowWithMoreCodes(absl::Span<const uint8_t> words, int64_t n, int64_t k,
                         PackedWords packed) {
  // Codes behind the last one begin in the last word, if anywhere: a row has just the words it
  // needs.
  const int64_t width = packed.Words(k), end = BitOf(packed, k - 1) + packed.bits;
  if (end == width * 32) return -1;
  for (int64_t row = 0; row < n; ++row) {
    if (LoadWord(words.data(), row * width + width - 1) >> (end - (width - 1) * 32) != 0) {
      return row;
    }
  }
  return -1;
}

}  // namespace awqd
