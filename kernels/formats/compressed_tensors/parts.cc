// Reading and checking of the parts that formats share.
#include "kernels/formats/compressed_tensors/parts.h"

#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/compressed_tensors/config.h"
#include "kernels/formats/tensors.h"

namespace awqd {

absl::StatusOr<std::optional<ScaleStrategy>> ReadStrategy(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string strategy, ReadWord(object, "strategy"));
  if (strategy.empty()) return std::optional<ScaleStrategy>();
  if (strategy == "channel") return std::optional(ScaleStrategy::kChannel);
  if (strategy == "group") return std::optional(ScaleStrategy::kGroup);
  if (strategy == "tensor") return std::optional(ScaleStrategy::kTensor);
  return UnreadSetting("strategy", Quoted(strategy), "\"channel\", \"group\" or \"tensor\"");
}

absl::StatusOr<ActivationQuantization> ReadDeclaredActivations(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string how, ReadWord(object, "activations"));
  if (how.empty()) return ActivationQuantization::kNone;
  if (how == "dynamic") return ActivationQuantization::kPerToken;
  if (how == "static") return ActivationQuantization::kStatic;
  return UnreadSetting("activations", Quoted(how), "\"dynamic\" or \"static\"");
}

absl::StatusOr<DeclaredActivations> DecodeActivations(ActivationQuantization how,
                                                      const LinearTensors& tensors) {
  DeclaredActivations out = {.how = how};
  if (how != ActivationQuantization::kStatic) return out;
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, "input_scale", "F16, BF16 or F32 [1]"));
  AWQD_RETURN_IF_ERROR(CheckScales("input_scale", *scale, 1, true).status());
  AWQD_RETURN_IF_ERROR(CheckShape("input_scale", *scale, {1}, "one for all activations"));
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> values, ToFloats("input_scale", *scale));
  out.scale = values[0];
  if (!(out.scale > 0)) {
    return BadTensor("input_scale", absl::StrCat(out.scale), "a positive number");
  }
  const TensorView* const zero = FindTensor(tensors, "input_zero_point");
  if (zero == nullptr) return out;
  AWQD_RETURN_IF_ERROR(CheckTensor("input_zero_point", *zero, {"I8"}, 1));
  if (absl::c_all_of(zero->bytes, [](uint8_t byte) { return byte == 0; })) return out;
  return BadTensor("input_zero_point", "another value than 0", "0: INT8 activations are about 0");
}

absl::Status DecodeIntegerScales(ScaleStrategy strategy, int64_t group_size, int bits,
                                 const TensorView& scale, HostWeight* out) {
  const bool one = strategy == ScaleStrategy::kTensor;
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("weight_scale", scale, one ? 1 : 2, true));
  if (one) {
    AWQD_RETURN_IF_ERROR(CheckShape("weight_scale", scale, {1}, "strategy \"tensor\""));
    out->scheme = Symmetric(bits, 0, type);
    out->scheme.block_cols = 0;
    out->scales.assign(scale.bytes.begin(), scale.bytes.end());
    return absl::OkStatus();
  }
  const int64_t groups = scale.shape[1];
  const bool grouped = strategy == ScaleStrategy::kGroup;
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(grouped ? group_size : -1, out->k, groups, "weight_scale", true));
  AWQD_RETURN_IF_ERROR(
      CheckShape("weight_scale", scale, {out->n, groups}, grouped ? "[N, groups]" : "[N, 1]"));
  out->scheme = Symmetric(bits, BlockRows(rows, out->k), type);
  out->scales = Transposed(scale.bytes, out->n, groups, SizeOf(type));
  return absl::OkStatus();
}

absl::Status CheckFourBitFloats(const Setting& weights) {
  AWQD_RETURN_IF_ERROR(CheckWeightType(weights, "float"));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(weights, "num_bits", 1, 32));
  if (bits.value_or(8) != 4) return UnreadSetting("num_bits", absl::StrCat(bits.value_or(8)), "4");
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(weights, "symmetric"));
  if (!symmetric.value_or(true)) return UnreadSetting("symmetric", "false", "true");
  AWQD_ASSIGN_OR_RETURN(const std::string strategy, ReadWord(weights, "strategy"));
  if (strategy.empty() || strategy == "group" || strategy == "tensor_group") {
    return absl::OkStatus();
  }
  return UnreadSetting("strategy", Quoted(strategy), "\"tensor_group\" or \"group\"");
}

absl::Status CheckGroupSize(const Setting& object, int64_t size) {
  AWQD_ASSIGN_OR_RETURN(const int64_t said, ReadGroupSize(object));
  if (said == 0 || said == size) return absl::OkStatus();
  return UnreadSetting("group_size", absl::StrCat(said), absl::StrCat(size));
}

}  // namespace awqd
