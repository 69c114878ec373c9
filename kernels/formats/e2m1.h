// E2M1 codes and the scales of their groups, which the formats "modelopt" and those of
// compressed-tensors share.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd {

struct E2m1Tensors {
  absl::string_view codes;     // U8 [N, K/2], even k in the low half of a byte
  absl::string_view scales;    // one byte each, [N, K/group_size]
  DType scale = DType::kE4m3;  // or kE8m0
  int64_t group_size = 0;      // -1: all of K; 0: not said
};

// Codes, scales and their description, without what formats have besides. INVALID_ARGUMENT as
// Format::decode has it. Sets no HostWeight::format.
absl::StatusOr<HostWeight> DecodeE2m1(const E2m1Tensors& names, const LinearTensors& tensors);

}  // namespace awqd
