// The settings of a checkpoint of compressed-tensors, which its formats share: each group of
// linears may name a format of its own.
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
// class; of two groups with one target, the later one has it.
// Facts: compressed-tensors 0.17.1 and 0.20.0, quantization/lifecycle/apply.py, utils/match.py.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd {

// Format::read of its formats. UNIMPLEMENTED when the first group that quantises weights is of
// another one than `self`, and for what none of them reads. The rules have their formats.
absl::StatusOr<QuantConfig> ReadCompressedTensors(const Setting& config, const Format& self);

// Of each format, the settings of a linear from a group's "weights" and all of the checkpoint's.
absl::StatusOr<Setting> ReadIntQuantizedWeights(const Setting& weights, const Setting& config);
absl::StatusOr<Setting> ReadPackQuantizedWeights(const Setting& weights, const Setting& config);
absl::StatusOr<Setting> ReadFloatQuantizedWeights(const Setting& weights, const Setting& config);
absl::StatusOr<Setting> ReadNvfp4PackQuantizedWeights(const Setting& weights,
                                                      const Setting& config);
absl::StatusOr<Setting> ReadMxfp4PackQuantizedWeights(const Setting& weights,
                                                      const Setting& config);

// That a group's "weights" are of that type, "int" or "float" (nothing is "int"), and have scales
// of their own. UNIMPLEMENTED else.
absl::Status CheckWeightType(const Setting& weights, absl::string_view type);

}  // namespace awqd
