// Codes and scales between the orders that checkpoints store and those of HostWeight.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace awqd {

// Codes [rows, cols], one to a byte and each below 2^bits, as HostWeight::codes holds them.
std::vector<uint8_t> PackCodes(absl::Span<const uint8_t> codes, int64_t rows, int64_t cols,
                               int bits);

// [rows, cols] -> [cols, rows] of elements of 1, 2 or 4 bytes.
std::vector<uint8_t> Transposed(absl::Span<const uint8_t> from, int64_t rows, int64_t cols,
                                int64_t element_bytes);

}  // namespace awqd
