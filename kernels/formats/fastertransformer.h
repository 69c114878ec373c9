// The way back into the format "fastertransformer".
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/format.h"

namespace awqd {

// The tensors of one linear as FasterTransformer's kernels of Turing and Ampere read them.
struct FasterTransformerWeight {
  int64_t k = 0;
  int64_t n = 0;
  int bits = 0;                 // 8 or 4
  int64_t group_rows = 0;       // that share a scale; K: a scale per column
  std::vector<uint8_t> weight;  // K * N * bits / 8 bytes
  DType scale_dtype = DType::kFp16;
  std::vector<uint8_t> scales;  // FP16 or BF16 [K / group_rows, N]
  std::vector<float> bias;      // [N] or empty
};

// The inverse of the format's decode. INVALID_ARGUMENT, naming the part, for a weight that
// FasterTransformer cannot hold: other codes than symmetric ones of 8 or 4 bits, other scales than
// FP16 or BF16 ones per column or group, an order, a factor, or a shape that is no multiple of 64.
absl::StatusOr<FasterTransformerWeight> ToFasterTransformer(const HostWeight& weight);

}  // namespace awqd
