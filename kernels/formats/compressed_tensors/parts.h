// What formats of compressed-tensors spell alike: whose scales they are, how activations are
// declared to be quantised, and what 4-bit floating-point numbers have to be.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/formats/format.h"

namespace awqd {

enum class ScaleStrategy { kChannel, kGroup, kTensor };

// "strategy"; nothing without. UNIMPLEMENTED for others.
absl::StatusOr<std::optional<ScaleStrategy>> ReadStrategy(const Setting& object);

// "activations" of a linear: "dynamic", "static" or nothing. UNIMPLEMENTED for others.
absl::StatusOr<ActivationQuantization> ReadDeclaredActivations(const Setting& object);

// The tensors "input_scale" F16, BF16 or F32 [1], needed for kStatic, what activations are divided
// by, and "input_zero_point" I8 [1], 0 or none. INVALID_ARGUMENT for others.
absl::StatusOr<DeclaredActivations> DecodeActivations(ActivationQuantization how,
                                                      const LinearTensors& tensors);

// Scales of `strategy` in the tensor "weight_scale", F16, BF16 or F32 by out-feature: [N, 1] per
// channel, [N, groups] per group, [1] per tensor. Sets them in `out`, whose k and n are set, and
// its scheme, codes of `bits` bits and symmetric. INVALID_ARGUMENT for others.
absl::Status DecodeIntegerScales(ScaleStrategy strategy, int64_t group_size, int bits,
                                 const TensorView& scale, HostWeight* out);

// That a group's "weights" are of 4-bit floating-point numbers, symmetric. UNIMPLEMENTED else.
absl::Status CheckFourBitFloats(const Setting& weights);

// That "group_size" is `size` or not said. UNIMPLEMENTED else.
absl::Status CheckGroupSize(const Setting& object, int64_t size);

}  // namespace awqd
