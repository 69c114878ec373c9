// The common parts of the formats of compressed-tensors: the settings of a checkpoint, where each
// group of linears may name a format of its own; strategies of scales, the declared quantisation of
// activations, and 4-bit floating-point numbers.
//
//   {"quant_method": "compressed-tensors", "format": "mixed-precision",
//    "config_groups": {"group_0": {"targets": ["Linear", "re:.*mlp.*"], "format": "pack-quantized",
//                                  "weights": {"num_bits": 4, "strategy": "group", ...},
//                                  "input_activations": {"num_bits": 8, "dynamic": true, ...}}},
//    "ignore": ["lm_head", "re:.*gate$"]}
//
// A target is a path, "re:" and a regular expression that the beginning of a path matches, or the
// class of a module. As in the library, a linear belongs to the group that has its path, else to
// the one with the first expression that matches, in the order of the alphabet, else to that of its
// class; of two groups with one target, the later one has it. Of several groups that match, it
// belongs to the first whose format has its tensors.
//
//   "transform_config": {"config_groups": {"R4": {"type": "hadamard", "head_dim": null,
//       "apply": [{"targets": ["re:.*down_proj$"], "location": "input", "ignore": []}, ...]}}}
//
// Transforms of weights are in these already. One of inputs is the setting "hadamard_size" of its
// targets, whatever their group: "head_dim", or -1 for all of K. Its matrix is symmetric, so
// "inverse" means nothing, and so does the copy that the library stores beside the weight.
// Facts: compressed-tensors 0.17.1 and 0.20.0, quantization/lifecycle/apply.py, utils/match.py,
// transform/.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd {

// Format::read of its formats. UNIMPLEMENTED when the first group that can be read is of another
// one than `self`. The reason of the first group where none can be read; a group that cannot be
// read beside others is a rule without a format. The others have their formats.
absl::StatusOr<QuantConfig> ReadCompressedTensors(const Setting& config, const Format& self);
template <const Format* self>
absl::StatusOr<QuantConfig> ReadCompressedTensors(const Setting& config) {
  return ReadCompressedTensors(config, *self);
}

// These read, for each format, the settings of a linear from a group's "weights" and all of the
// checkpoint's.
absl::StatusOr<Setting> ReadIntQuantizedWeights(const Setting& weights, const Setting& config);
absl::StatusOr<Setting> ReadPackQuantizedWeights(const Setting& weights, const Setting& config);
absl::StatusOr<Setting> ReadFloatQuantizedWeights(const Setting& weights, const Setting& config);
absl::StatusOr<Setting> ReadNvfp4PackQuantizedWeights(const Setting& weights,
                                                      const Setting& config);
absl::StatusOr<Setting> ReadMxfp4PackQuantizedWeights(const Setting& weights,
                                                      const Setting& config);

// Checks that a group's "weights" are of that type, "int" or "float" (nothing is "int"), and have
// scales of their own. UNIMPLEMENTED else.
absl::Status CheckWeightType(const Setting& weights, absl::string_view type);

enum class ScaleStrategy { kChannel, kGroup, kTensor };

// "strategy"; nothing without. UNIMPLEMENTED for others.
absl::StatusOr<std::optional<ScaleStrategy>> ReadStrategy(const Setting& object);

// "activations" of a linear: "dynamic", "static", "fp8_dynamic", "fp8_blocks", "fp8_static" or
// nothing. UNIMPLEMENTED for others.
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

// Checks that "weight_zero_point", of the shape of the scales and one of these types, is 0
// everywhere, or missing. `why`: "symmetric codes have none".
absl::Status CheckNoZeroPoint(const LinearTensors& tensors, const TensorView& scale,
                              std::initializer_list<absl::string_view> dtypes,
                              absl::string_view why);

// Checks that a group's "weights" are of 4-bit floating-point numbers, symmetric. UNIMPLEMENTED
// else.
absl::Status CheckFourBitFloats(const Setting& weights);

// Checks that "group_size" is `size` or not said. UNIMPLEMENTED else.
absl::Status CheckGroupSize(const Setting& object, int64_t size);

}  // namespace awqd
