// Format "bitsandbytes-int8": LLM.int8() of bitsandbytes, load_in_8bit.
//
//   weight I8 [N, K]
//   SCB F32 [N], the largest magnitudes of the rows        W[k, n] = weight[n, k] * (SCB[n] / 127)
//   weight_format U8 [], 0: rows as they are
//   bias [N], optional
//
// Which linears are quantised shows in the type of "weight".
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "SCB", "weight_format", "bias"};
constexpr absl::string_view kOptional[] = {"weight_format", "bias"};
constexpr absl::string_view kCodeTypes[] = {"I8"};

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const auto eight, ReadBool(config, "load_in_8bit"));
  if (!eight.value_or(false)) {
    return UnreadSetting("load_in_8bit", eight ? "false" : "nothing", "true");
  }
  QuantConfig out;
  out.rules = {{.targets = {{}}, .settings = {}}};
  return out;
}

// Other kinds are orders of tiles of older GPUs.
absl::Status CheckWeightFormat(const LinearTensors& tensors) {
  const TensorView* const kind = FindTensor(tensors, "weight_format");
  if (kind == nullptr) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckTensor("weight_format", *kind, {"U8"}, 0));
  if (kind->bytes[0] == 0) return absl::OkStatus();
  return BadTensor("weight_format", absl::StrCat(kind->bytes[0]), "0 (rows)");
}

absl::StatusOr<HostWeight> Decode(const Setting& /*settings*/, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight, NeedTensor(tensors, "weight", "I8 [N, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* largest, NeedTensor(tensors, "SCB", "F32 [N]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"I8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckTensor("SCB", *largest, {"F32"}, 1));
  AWQD_RETURN_IF_ERROR(CheckWeightFormat(tensors));
  HostWeight out;
  out.format = std::string(kBitsAndBytesInt8Format.name);
  out.n = weight->shape[0];
  out.k = weight->shape[1];
  AWQD_RETURN_IF_ERROR(CheckShape("SCB", *largest, {out.n}, "N"));
  AWQD_RETURN_IF_ERROR(CheckScales("SCB", *largest, 1, true).status());
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  out.scheme = Symmetric(8, 0, DType::kFp32);
  out.scales.resize(out.n * sizeof(float));
  for (int64_t n = 0; n < out.n; ++n) {
    const float scale = LoadElement(largest->bytes.data(), DType::kFp32, n) / 127.0f;
    std::memcpy(out.scales.data() + n * sizeof(float), &scale, sizeof(scale));
  }
  if (weight->unread()) return out;
  out.codes = Transposed(weight->bytes, out.n, out.k, 1);
  for (uint8_t& code : out.codes) code ^= 0x80;
  return out;
}

}  // namespace

const Format kBitsAndBytesInt8Format = {.name = "bitsandbytes-int8",
                                        .quant_method = "bitsandbytes",
                                        .suffixes = kSuffixes,
                                        .optional_suffixes = kOptional,
                                        .code_dtypes = kCodeTypes,
                                        .read = Read,
                                        .decode = Decode};

}  // namespace awqd
