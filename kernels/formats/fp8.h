// FP8 and E2M1 codes with their scales, which several formats share.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd {

// Which elements of W share a scale.
struct Fp8Scales {
  enum class Kind {
    kTensorOrColumn,  // [] or [1]: one for all; [N] or [N, 1]: one per out feature
    kBlocks,          // [N / block_n, K / block_k], rounded up
  };
  absl::string_view name;  // of the tensor
  Kind kind = Kind::kTensorOrColumn;
  int64_t block_n = 0;
  int64_t block_k = 0;
  bool e8m0 = false;  // whether they may be powers of two of one byte
};

// The tensors "weight" E4M3 [N, K], `scales` and "bias". Every scale multiplies.
absl::StatusOr<HostWeight> DecodeFp8(const Fp8Scales& scales, const LinearTensors& tensors);

struct E2m1Tensors {
  absl::string_view codes;     // U8 [N, K/2], even k in the low half of a byte
  absl::string_view scales;    // one byte each, [N, K/group_size]
  DType scale = DType::kE4m3;  // or kE8m0
  int64_t group_size = 0;      // -1: all of K; 0: not said
};

// Codes, scales and their scheme, without what formats have besides. INVALID_ARGUMENT as
// Format::decode has it. Sets no HostWeight::format.
absl::StatusOr<HostWeight> DecodeE2m1(const E2m1Tensors& names, const LinearTensors& tensors);

}  // namespace awqd
