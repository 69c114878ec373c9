// Format "mxfp4-pack-quantized" of compressed-tensors: E2M1 codes in groups of 32, whose scales are
// powers of two.
//
//   weight_packed U8 [N, K / 2], even k in the low half of a byte
//   weight_scale U8 or F8_E8M0 [N, K / 32] = exponent + 127     W[k, n] = e2m1 * 2^(scale - 127)
//   bias [N], optional
//   input_global_scale, input_scale, output_scale, output_zero_point: without effect
#include <string>

#include "kernels/base/status.h"
#include "kernels/formats/compressed_tensors/config.h"
#include "kernels/formats/compressed_tensors/parts.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight_packed",      "weight_scale", "bias",
                                           "input_global_scale", "input_scale",  "output_scale",
                                           "output_zero_point"};
constexpr absl::Span<const absl::string_view> kOptional = absl::MakeSpan(kSuffixes).subspan(2);
constexpr absl::string_view kCodeTypes[] = {"U8"};
constexpr absl::string_view kSettings[] = {"group_size"};
constexpr int64_t kGroup = 32;

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  return ReadCompressedTensors(config, kMxfp4PackQuantizedFormat);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  const absl::Status settings = CheckGroupSize(object, kGroup);
  if (!settings.ok()) return absl::InvalidArgumentError(settings.message());
  const E2m1Tensors names = {"weight_packed", "weight_scale", DType::kE8m0, kGroup};
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeE2m1(names, tensors));
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  out.format = std::string(kMxfp4PackQuantizedFormat.name);
  return out;
}

}  // namespace

absl::StatusOr<Setting> ReadMxfp4PackQuantizedWeights(const Setting& weights,
                                                      const Setting& /*config*/) {
  AWQD_RETURN_IF_ERROR(CheckFourBitFloats(weights));
  AWQD_RETURN_IF_ERROR(CheckGroupSize(weights, kGroup));
  return OnlySettings(weights, kSettings);
}

const Format kMxfp4PackQuantizedFormat = {.name = "mxfp4-pack-quantized",
                                          .quant_method = "compressed-tensors",
                                          .suffixes = kSuffixes,
                                          .optional_suffixes = kOptional,
                                          .code_dtypes = kCodeTypes,
                                          .strict = true,
                                          .foreign_ending = "_packed",
                                          .settings = kSettings,
                                          .read = Read,
                                          .decode = Decode};

}  // namespace awqd
