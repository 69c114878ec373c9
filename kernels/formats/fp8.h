// FP8, INT8 and E2M1 codes with their scales, which several formats share.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"

namespace awqd {

// The scales of FP8 codes, and which elements of W share one.
struct Fp8Scales {
  absl::string_view name;  // of the tensor
  // Those of blocks are [N / block_n, K / block_k], rounded up; of fused projections also by each.
  // 0: [] or [1] for all, [N] or [N, 1] per out feature; of fused projections also one for each,
  // [3] or [3, 1].
  int64_t block_n = 0;
  int64_t block_k = 0;
  bool e8m0 = false;  // whether they may be powers of two of one byte
  absl::string_view codes = "weight";
};

// The activations that a linear declares by the tensor `name`, of one element: the scale of static
// E4M3. Nothing without the tensor, and where it has an element for each fused projection.
absl::StatusOr<DeclaredActivations> DecodeStaticFp8(absl::string_view name,
                                                    const LinearTensors& tensors);

// Whether there is a scale for each of the projections that the codes [N, K] are fused of, rather
// than one for all or one per out feature.
bool AreOfProjections(const TensorView& codes, const TensorView& scales);

// Codes E4M3 [N, K] and their scales. Every scale multiplies.
absl::StatusOr<HostWeight> DecodeFp8(const Fp8Scales& scales, const LinearTensors& tensors);

// The same of codes I8 [N, K]; without `scales` those of "weight" and "weight_scale".
absl::StatusOr<HostWeight> DecodeInt8(const Fp8Scales& scales, const LinearTensors& tensors);
absl::StatusOr<HostWeight> DecodeInt8(const LinearTensors& tensors);

struct E2m1Tensors {
  absl::string_view codes = "weight";         // U8 [N, K/2]
  absl::string_view scales = "weight_scale";  // [N, K/group_size]
  DType scale = DType::kE4m3;                 // or kE8m0; kFp32: F16, BF16 or F32
  int64_t group_size = 0;                     // -1: all of K; 0: not said
  absl::string_view code_dtype = "U8";
  FirstNibble first = FirstNibble::kLow;  // of the two k of a byte
};

// Codes, scales and their scheme, without what formats have besides. INVALID_ARGUMENT as
// Format::Decode has it.
absl::StatusOr<HostWeight> DecodeE2m1(const E2m1Tensors& names, const LinearTensors& tensors);

}  // namespace awqd
