// Formats "nvfp4-pack-quantized" and "mxfp4-pack-quantized" of compressed-tensors: E2M1 codes in
// groups of 16 with two levels of scales, and in groups of 32 whose scales are powers of two.
//
//   weight_packed U8 [N, K / 2], even k in the low half of a byte
//   weight_scale F8_E4M3 [N, K / 16] (U8 in a request), or U8 or F8_E8M0 [N, K / 32], which is
//       exponent + 127
//   weight_global_scale F32 [1], of the first, which divides
//   bias [N], optional
//   input_global_scale, input_scale, output_scale, output_zero_point: without effect
//
//   nvfp4    W[k, n] = e2m1 * weight_scale * (1 / global)
//   mxfp4    W[k, n] = e2m1 * 2^(scale - 127)
//
// 1 / global is one FP32 rounding, as in the kernels of its other readers; the library divides each
// weight_scale instead, which may differ in the last bits of FP32.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/compressed_tensors/common.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kNvSuffixes[] = {
    "weight_packed",      "weight_scale", "weight_global_scale", "bias",
    "input_global_scale", "input_scale",  "output_scale",        "output_zero_point"};
constexpr absl::string_view kMxSuffixes[] = {"weight_packed",      "weight_scale", "bias",
                                             "input_global_scale", "input_scale",  "output_scale",
                                             "output_zero_point"};
constexpr auto kNvOptional = absl::MakeSpan(kNvSuffixes).subspan(3);
constexpr auto kMxOptional = absl::MakeSpan(kMxSuffixes).subspan(2);
constexpr absl::string_view kCodeTypes[] = {"U8"};
constexpr absl::string_view kSettings[] = {"group_size", kHadamardSize};
constexpr int64_t kNvGroup = 16, kMxGroup = 32;

absl::StatusOr<HostWeight> DecodeGroups(const Setting& object, DType scale, int64_t group,
                                        const LinearTensors& tensors) {
  AWQD_RETURN_IF_ERROR(CheckGroupSize(object, group));
  return DecodeE2m1({"weight_packed", "weight_scale", scale, group}, tensors);
}

absl::StatusOr<HostWeight> DecodeMx(const Setting& object, const LinearTensors& tensors) {
  return DecodeGroups(object, DType::kE8m0, kMxGroup, tensors);
}

absl::StatusOr<HostWeight> DecodeNv(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeGroups(object, DType::kE4m3, kNvGroup, tensors));
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
  return out;
}

absl::StatusOr<Setting> ReadWeights(const Setting& weights, int64_t group) {
  AWQD_RETURN_IF_ERROR(CheckFourBitFloats(weights));
  AWQD_RETURN_IF_ERROR(CheckGroupSize(weights, group));
  return OnlySettings(weights, kSettings);
}

}  // namespace

absl::StatusOr<Setting> ReadNvfp4PackQuantizedWeights(const Setting& weights,
                                                      const Setting& /*config*/) {
  return ReadWeights(weights, kNvGroup);
}

absl::StatusOr<Setting> ReadMxfp4PackQuantizedWeights(const Setting& weights,
                                                      const Setting& /*config*/) {
  return ReadWeights(weights, kMxGroup);
}

const Format kNvfp4PackQuantizedFormat = {.name = "nvfp4-pack-quantized",
                                          .quant_method = "compressed-tensors",
                                          .suffixes = kNvSuffixes,
                                          .optional_suffixes = kNvOptional,
                                          .code_dtypes = kCodeTypes,
                                          .settings = kSettings,
                                          .read = ReadCompressedTensors<&kNvfp4PackQuantizedFormat>,
                                          .decode_parts = DecodeNv};

const Format kMxfp4PackQuantizedFormat = {.name = "mxfp4-pack-quantized",
                                          .quant_method = "compressed-tensors",
                                          .suffixes = kMxSuffixes,
                                          .optional_suffixes = kMxOptional,
                                          .code_dtypes = kCodeTypes,
                                          .settings = kSettings,
                                          .read = ReadCompressedTensors<&kMxfp4PackQuantizedFormat>,
                                          .decode_parts = DecodeMx};

}  // namespace awqd
