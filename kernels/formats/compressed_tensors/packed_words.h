// Codes in 32-bit words as compressed-tensors packs them: along K in weight_packed, along N in
// weight_zero_point.
//
// Until 0.17 a word has floor(32 / bits) codes from its low bits on and the rest of it is 0. From
// 0.18 on codes follow one another without gaps and may go on in the next word. Of 1, 2, 4 and 8
// bits both are the same.
// Facts: compressed-tensors 0.17.1 and 0.20.0, compressors/pack_quantized/helpers.py.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/formats/format.h"

namespace awqd {

struct PackedWords {
  int bits = 4;         // 1 to 8
  bool padded = false;  // as until 0.17

  int64_t PerWord() const { return 32 / bits; }  // of those that are padded
  // Words that so many codes take.
  int64_t Words(int64_t count) const {
    return padded ? (count + PerWord() - 1) / PerWord() : (count * bits + 31) / 32;
  }
  // Whether so many codes lie alike in both kinds.
  bool SameInBoth(int64_t count) const { return 32 % bits == 0 || count <= PerWord(); }
};

// How the tensors "weight_packed" I32 [n, words] and, unless it is null, "weight_zero_point"
// I32 [words, groups] are packed, by their widths; by `padded` where those are alike. `weight` has
// its n and k. INVALID_ARGUMENT where neither fits, or either and nothing is said.
absl::StatusOr<PackedWords> FindPacking(int bits, std::optional<bool> padded,
                                        const TensorView& packed, const TensorView* zeros,
                                        const HostWeight& weight);

// Words I32 [n, Words(k)] -> HostWeight::codes [k, n]. Row i is in-feature order[i], or i without
// `order`.
std::vector<uint8_t> UnpackRowsOfWords(absl::Span<const uint8_t> words, int64_t n, int64_t k,
                                       PackedWords packed, absl::Span<const int32_t> order);

// Words I32 [Words(n), groups] -> codes [groups, n], one to a byte.
std::vector<uint8_t> UnpackColumnsOfWords(absl::Span<const uint8_t> words, int64_t n,
                                          int64_t groups, PackedWords packed);

// The first of the rows I32 [n, Words(k)] whose bits behind k codes are not all 0, or -1.
int64_t RowWithMoreCodes(absl::Span<const uint8_t> words, int64_t n, int64_t k, PackedWords packed);

}  // namespace awqd
