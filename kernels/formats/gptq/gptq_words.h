// Codes in streams of 32-bit words: along K as GPTQ's qweight holds them, along N as its qzeros.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace awqd {

// How 32 codes of b bits lie in the b words that they fill. Of 2, 4 and 8 bits both are the same.
enum class GptqWords : uint8_t {
  kDense,   // one code after the other from the low bits on; it may go on in the next word
  kPlanes,  // the low 4 bits of all (of 3-bit codes the low 2), then the next 2, then the next 1
};

// Words that so many codes take.
constexpr int64_t WordsOfCodes(int64_t count, int bits) { return (count * bits + 31) / 32; }

// Explains for an error why `count` codes along one axis take WordsOfCodes(count, bits) words.
// Names another width of 2 to 8 bits where its codes fill `words` exactly: "384 codes of 3 bits in
// 32-bit words; qweight has the size of 4-bit codes, but the settings say 3 bits".
std::string ExplainWords(absl::string_view tensor, int64_t count, int bits, int64_t words);

// Words I32 [WordsOfCodes(k), n] -> HostWeight::codes. The row of in-feature i goes to place[i], or
// stays where it is without `place`. k of kPlanes is a multiple of 32.
std::vector<uint8_t> UnpackGptqRows(absl::Span<const uint8_t> words, int64_t k, int64_t n, int bits,
                                    GptqWords order, absl::Span<const int32_t> place);

// Words I32 [rows, WordsOfCodes(n)] -> codes [rows, n], one to a byte, each `plus` more than
// stored. 2, 4 and 8 bits: it is added to every field of a word at once, with carries from one to
// the next, as it was subtracted. Other widths: to each field by itself, modulo 2^bits.
std::vector<uint8_t> UnpackGptqColumns(absl::Span<const uint8_t> words, int64_t rows, int64_t n,
                                       int bits, GptqWords order, int plus);

}  // namespace awqd
