// Format "fp-quant", as FP-Quant and transformers write it: E2M1 codes of weights whose rows were
// multiplied by a Hadamard matrix, as activations have to be.
//
//   qweight U8 [N, K / 2], even k in the low half of a byte
//   scales U8 [N, K / 32] = exponent + 127, or U8 E4M3 [N, K / 16] with forward_dtype nvfp4
//   weight_global_scale [1], F32, F16 or BF16, which divides
//   forward_hadamard_matrix [size, size], F32, F16 or BF16, in the type of which it was rounded
//   bias [N], optional
//   act_global_scale, backward_hadamard_matrix: without effect
//
//   W[k, n] = e2m1 * scale * (1 / global), multiplied by the x that was transformed by the matrix
//
// "transform_init" says how the matrix was made; the tensor shows it.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kMatrix = "forward_hadamard_matrix";
constexpr absl::string_view kSuffixes[] = {
    "qweight", "scales",           "weight_global_scale",     kMatrix,
    "bias",    "act_global_scale", "backward_hadamard_matrix"};
constexpr auto kOptional = absl::MakeSpan(kSuffixes).subspan(4);
constexpr absl::string_view kCodeTypes[] = {"U8"};
constexpr absl::string_view kSettings[] = {"forward_dtype"};
constexpr int64_t kNvGroup = 16, kMxGroup = 32;

// Whether scales are those of NVFP4; the library's own default.
absl::StatusOr<bool> ReadNvfp4(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const auto nvfp4, ReadChoice<bool>(object, "forward_dtype",
                                                           {{"mxfp4", false}, {"nvfp4", true}}));
  return nvfp4.value_or(true);
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(ReadNvfp4(config).status());
  for (const absl::string_view stores_floats : {"pseudoquantization", "store_master_weights"}) {
    AWQD_ASSIGN_OR_RETURN(const auto floats, ReadBool(config, stores_floats));
    if (floats.value_or(false)) return UnreadSetting(stores_floats, "true", "false: codes");
  }
  return OneRule(config, OnlySettings(config, kSettings));
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const bool nvfp4, ReadNvfp4(object));
  AWQD_ASSIGN_OR_RETURN(HostWeight out,
                        DecodeE2m1({"qweight", "scales", nvfp4 ? DType::kE4m3 : DType::kE8m0,
                                    nvfp4 ? kNvGroup : kMxGroup},
                                   tensors));
  AWQD_ASSIGN_OR_RETURN(const TensorView* global,
                        NeedTensor(tensors, "weight_global_scale", "F32, F16 or BF16 [1]"));
  AWQD_ASSIGN_OR_RETURN(const float divisor, ReadNumber("weight_global_scale", *global));
  const float outer = 1.0f / divisor;
  if (!(divisor > 0) || !std::isfinite(divisor) || !std::isfinite(outer)) {
    return BadTensor("weight_global_scale", absl::StrCat(divisor),
                     "a positive number that has a reciprocal");
  }
  if (outer != 1) {
    out.scheme.outer = OuterKind::kOne;
    out.outer = {outer};
  }
  AWQD_ASSIGN_OR_RETURN(const TensorView* matrix,
                        NeedTensor(tensors, kMatrix, "F32, F16 or BF16 [size, size]"));
  AWQD_RETURN_IF_ERROR(DecodeHadamard(kMatrix, *matrix, &out));
  return out;
}

}  // namespace

const Format kFpQuantFormat = {.name = "fp-quant",
                               .quant_method = "fp_quant",
                               .suffixes = kSuffixes,
                               .optional_suffixes = kOptional,
                               .code_dtypes = kCodeTypes,
                               .settings = kSettings,
                               .read = Read,
                               .decode_parts = Decode};

}  // namespace awqd
