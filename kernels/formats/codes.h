// Codes and scales between the orders that checkpoints store and those of HostWeight.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace awqd {

// Word `index` of a tensor. Neither safetensors files nor messages align their tensors.
inline uint32_t LoadWord(const uint8_t* words, int64_t index = 0) {
  uint32_t word;
  std::memcpy(&word, words + index * 4, sizeof(word));
  return word;
}

// Allocates zeros for codes.
std::vector<uint8_t> AllocateCodes(int64_t bytes);

// Codes [rows, cols], one to a byte and each below 2^bits, as HostWeight::codes holds them.
std::vector<uint8_t> PackCodes(absl::Span<const uint8_t> codes, int64_t rows, int64_t cols,
                               int bits);

// An even number of codes below 16, one to a byte, two to a byte.
void PackNibbles(const uint8_t* codes, int64_t count, uint8_t* to);

// [rows, cols] -> [cols, rows] of elements of 1, 2 or 4 bytes.
std::vector<uint8_t> Transposed(absl::Span<const uint8_t> from, int64_t rows, int64_t cols,
                                int64_t element_bytes);

// `count` codes of `bits` bits, 1 to 8, one after the other from the low bits of the first byte on,
// to one a byte. Reads no byte that holds none of them.
void UnpackStream(const uint8_t* from, int64_t count, int bits, uint8_t* to);

// Codes [cols, rows] as HostWeight::codes holds them, of codes [rows, cols] that `read` unpacks:
// those of `row` from `col` on, a multiple of 8, to `to`, one to a byte and each below 2^bits.
using ReadCodes = absl::FunctionRef<void(int64_t row, int64_t col, int64_t count, uint8_t* to)>;
std::vector<uint8_t> PackTransposed(int64_t rows, int64_t cols, int bits, ReadCodes read);

// The same of codes of 4 bits [rows, cols], two to a byte along `cols`. The rows are equally long:
// bytes behind their codes are left out. Column i becomes row place[i], or row i without `place`.
enum class FirstNibble { kLow, kHigh };
std::vector<uint8_t> TransposedNibbles(absl::Span<const uint8_t> from, int64_t rows, int64_t cols,
                                       FirstNibble first, absl::Span<const int32_t> place = {});

}  // namespace awqd
