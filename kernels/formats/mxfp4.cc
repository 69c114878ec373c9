// Format "mxfp4", as gpt-oss has its experts: E2M1 codes, 32 along K to a scale that is a power of
// two. Suffixes follow their path after "_".
//
//   <path>_blocks U8 [N, K / 32, 16], two codes a byte, even k in the low half
//   <path>_scales U8 [N, K / 32] = exponent + 127    W[k, n] = e2m1 * 2^(scales[n, k / 32] - 127)
//   <path>_bias [N], optional
//
// A file's tensors hold all experts, in one more dimension. gate_up_proj has gate and up in turn,
// column by column, and is served as it is stored.
#include "kernels/base/status.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"blocks", "scales", "bias"};
constexpr absl::string_view kOptional[] = {"bias"};
constexpr absl::string_view kCodeTypes[] = {"U8"};
constexpr int64_t kGroup = 32, kGroupBytes = kGroup / 2;

absl::StatusOr<QuantConfig> Read(const Setting& config) { return OneRule(config, {}); }

absl::StatusOr<HostWeight> Decode(const Setting& /*settings*/, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* blocks,
                        NeedTensor(tensors, "blocks", "U8 [N, K/32, 16]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scales, NeedTensor(tensors, "scales", "U8 [N, K/32]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("blocks", *blocks, {"U8"}, 3));
  AWQD_RETURN_IF_ERROR(CheckByteScales("scales", *scales, DType::kE8m0, 2));
  const int64_t n = blocks->shape[0], groups = blocks->shape[1];
  AWQD_RETURN_IF_ERROR(CheckShape("blocks", *blocks, {n, groups, kGroupBytes},
                                  "[N, K/32, 16]: 32 codes to a block, two a byte"));
  AWQD_RETURN_IF_ERROR(CheckShape("scales", *scales, {n, groups}, "[N, K/32], as \"blocks\""));
  TensorView rows = *blocks;
  rows.shape = {n, groups * kGroupBytes};
  return DecodeE2m1({"blocks", "scales", DType::kE8m0, kGroup},
                    {{"blocks", rows}, {"scales", *scales}});
}

}  // namespace

const Format kMxfp4Format = {.name = "mxfp4",
                             .quant_method = "mxfp4",
                             .suffixes = kSuffixes,
                             .optional_suffixes = kOptional,
                             .code_dtypes = kCodeTypes,
                             .code_rank = 3,
                             .separator = "_",
                             .read = Read,
                             .decode_parts = Decode};

}  // namespace awqd
