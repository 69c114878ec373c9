// Format "nvfp4-pack-quantized" of compressed-tensors: E2M1 codes in groups of 16, and two levels
// of scales.
//
//   weight_packed U8 [N, K / 2], even k in the low half of a byte
//   weight_scale F8_E4M3 [N, K / 16] (U8 in a request)
//   weight_global_scale F32 [1], which divides     W[k, n] = e2m1 * weight_scale * (1 / global)
//   bias [N], optional
//   input_global_scale, input_scale, output_scale, output_zero_point: without effect
//
// 1 / global is one FP32 rounding, as in the kernels of its other readers; the library divides each
// weight_scale instead, which may differ in the last bits of FP32.
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/compressed_tensors/config.h"
#include "kernels/formats/compressed_tensors/parts.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {
    "weight_packed",      "weight_scale", "weight_global_scale", "bias",
    "input_global_scale", "input_scale",  "output_scale",        "output_zero_point"};
constexpr absl::Span<const absl::string_view> kOptional = absl::MakeSpan(kSuffixes).subspan(3);
constexpr absl::string_view kCodeTypes[] = {"U8"};
constexpr absl::string_view kSettings[] = {"group_size"};
constexpr int64_t kGroup = 16;

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  return ReadCompressedTensors(config, kNvfp4PackQuantizedFormat);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  const absl::Status settings = CheckGroupSize(object, kGroup);
  if (!settings.ok()) return absl::InvalidArgumentError(settings.message());
  const E2m1Tensors names = {"weight_packed", "weight_scale", DType::kE4m3, kGroup};
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeE2m1(names, tensors));
  AWQD_ASSIGN_OR_RETURN(const TensorView* global,
                        NeedTensor(tensors, "weight_global_scale", "F32 [1]"));
  AWQD_ASSIGN_OR_RETURN(const float divisor, ReadNumber("weight_global_scale", *global));
  const float outer = 1.0f / divisor;
  if (!(divisor > 0) || !std::isfinite(divisor) || !std::isfinite(outer)) {
    return BadTensor("weight_global_scale", absl::StrCat(divisor),
                     "a positive number that has a reciprocal");
  }
  out.scheme.outer = OuterKind::kOne;
  out.outer = {outer};
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  out.format = std::string(kNvfp4PackQuantizedFormat.name);
  return out;
}

}  // namespace

absl::StatusOr<Setting> ReadNvfp4PackQuantizedWeights(const Setting& weights,
                                                      const Setting& /*config*/) {
  AWQD_RETURN_IF_ERROR(CheckFourBitFloats(weights));
  AWQD_RETURN_IF_ERROR(CheckGroupSize(weights, kGroup));
  return OnlySettings(weights, kSettings);
}

const Format kNvfp4PackQuantizedFormat = {.name = "nvfp4-pack-quantized",
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
