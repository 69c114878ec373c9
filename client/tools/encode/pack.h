// Codes and small tensors as several targets spell them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/tools/encode/target.h"

namespace awqd::tools {

// [rows, ceil(cols * bits / 32)] words of [rows, cols] codes, one to a byte: dense from the low
// bits on, so that a code of 3, 5, 6 or 7 bits may go on in the next word. Every row fills its own
// words.
std::vector<uint32_t> DenseWords(absl::Span<const uint8_t> codes, int64_t rows, int64_t cols,
                                 int bits);

// Words I32 [ceil(K * bits / 32), N], codes along K.
std::vector<uint8_t> WordsAlongRows(const HostWeight& weight);
// The same as [N, ceil(K * bits / 32)].
std::vector<uint8_t> WordsAlongRowsTransposed(const HostWeight& weight);

std::vector<uint8_t> BytesOf(absl::Span<const uint32_t> words);

// "F16", "BF16", "F32".
std::string TypeName(DType dtype);

// The tensor "bias" [N], or nothing without one.
std::vector<NewTensor> BiasOf(const HostWeight& weight, const EncodeOptions& options);

// The settings' group_size for a format that has one for all linears: -1 where all have one group.
// INVALID_ARGUMENT naming two linears that differ.
absl::StatusOr<int64_t> OneGroupSize(const FolderFacts& facts);
// Likewise the bits of a code.
absl::StatusOr<int> OneWidth(const FolderFacts& facts);

// What is said of how the codes were made, where a format has a place for it; else null.
nlohmann::ordered_json Quantizer(const FolderFacts& facts);

}  // namespace awqd::tools
