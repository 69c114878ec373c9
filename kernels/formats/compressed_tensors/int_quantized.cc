// Format "int-quantized" of compressed-tensors: signed codes, one to a byte, by out-feature.
//
//   weight I8 [N, K], each in -2^(bits-1) .. 2^(bits-1)-1      W[k, n] = weight[n, k] * scale
//   weight_scale F16, BF16 or F32: [N, 1] per channel, [N, groups] per group, [1] per tensor
//   weight_zero_point I8 of the same shape: 0 everywhere, as the codes are symmetric
//   bias [N], optional
//   input_scale F16, BF16 or F32 [1]: what static activations are divided by (DeclaredActivations)
//   input_zero_point I8 [1]: 0
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/compressed_tensors/common.h"
#include "kernels/formats/format.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "weight_scale", "weight_zero_point",
                                           "bias",   "input_scale",  "input_zero_point"};
constexpr absl::string_view kOptional[] = {"weight_zero_point", "bias", "input_scale",
                                           "input_zero_point"};
constexpr absl::string_view kCodeTypes[] = {"I8"};
constexpr absl::string_view kSettings[] = {"activations", "group_size", kHadamardSize,
                                           "num_bits",    "strategy",   "symmetric"};

struct Settings {
  int bits = 8;
  ScaleStrategy strategy = ScaleStrategy::kChannel;
  int64_t group_size = 0;  // of kGroup
  ActivationQuantization activations = ActivationQuantization::kNone;
};

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "num_bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(object, "symmetric"));
  AWQD_ASSIGN_OR_RETURN(const std::optional<ScaleStrategy> strategy, ReadStrategy(object));
  AWQD_ASSIGN_OR_RETURN(out.activations, ReadDeclaredActivations(object));
  out.bits = static_cast<int>(bits.value_or(8));
  if (out.bits != 8 && out.bits != 4)
    return UnreadSetting("num_bits", absl::StrCat(out.bits), "8 or 4");
  if (!symmetric.value_or(true)) return UnreadSetting("symmetric", "false", "true");
  out.strategy =
      strategy.value_or(out.group_size > 0 ? ScaleStrategy::kGroup : ScaleStrategy::kChannel);
  if (out.strategy == ScaleStrategy::kGroup && out.group_size == 0) {
    return BadValue("group_size", "nothing", "at least 1 for strategy \"group\"");
  }
  return out;
}

// --- Tensors ---

// -2^(bits-1) .. 2^(bits-1)-1 -> 0 .. 2^bits-1, in place, of codes [K, N].
absl::Status MakeUnsigned(int bits, int64_t n, std::vector<uint8_t>* codes) {
  if (bits == 8) {  // all values of a byte
    for (uint8_t& code : *codes) code ^= 0x80;
    return absl::OkStatus();
  }
  const int zero = 1 << (bits - 1);
  for (size_t i = 0; i < codes->size(); ++i) {
    const int code = static_cast<int8_t>((*codes)[i]) + zero;
    if (code < 0 || code >= 2 * zero) {
      const auto index = static_cast<int64_t>(i);
      return BadTensor("weight",
                       absl::StrCat(code - zero, " at [", index % n, ", ", index / n, "]"),
                       absl::StrCat(-zero, " to ", zero - 1, " for ", bits, " bits"));
    }
    (*codes)[i] = static_cast<uint8_t>(code);
  }
  return absl::OkStatus();
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight, NeedTensor(tensors, "weight", "I8 [N, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, "weight_scale", "F16, BF16 or F32 [N, groups]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"I8"}, 2));
  HostWeight out;
  out.n = weight->shape[0];
  out.k = weight->shape[1];
  AWQD_RETURN_IF_ERROR(
      DecodeIntegerScales(settings.strategy, settings.group_size, settings.bits, *scale, &out));
  AWQD_RETURN_IF_ERROR(CheckNoZeroPoint(tensors, *scale, {"I8"}, "symmetric codes have none"));
  AWQD_ASSIGN_OR_RETURN(out.activations, DecodeActivations(settings.activations, tensors));
  if (weight->unread()) return out;
  std::vector<uint8_t> codes = Transposed(weight->bytes, out.n, out.k, 1);
  AWQD_RETURN_IF_ERROR(MakeUnsigned(settings.bits, out.n, &codes));
  out.codes = settings.bits == 8 ? std::move(codes) : PackCodes(codes, out.k, out.n, settings.bits);
  return out;
}

}  // namespace

absl::StatusOr<Setting> ReadIntQuantizedWeights(const Setting& weights, const Setting& /*config*/) {
  AWQD_RETURN_IF_ERROR(ReadSettings(weights).status());
  AWQD_RETURN_IF_ERROR(CheckWeightType(weights, "int"));
  AWQD_ASSIGN_OR_RETURN(const std::string order, ReadWord(weights, "actorder"));
  if (order == "group")
    return UnreadSetting("actorder", "\"group\"", "null, \"weight\" or \"static\"");
  return OnlySettings(weights, kSettings);
}

const Format kIntQuantizedFormat = {.name = "int-quantized",
                                    .quant_method = "compressed-tensors",
                                    .suffixes = kSuffixes,
                                    .optional_suffixes = kOptional,
                                    .code_dtypes = kCodeTypes,
                                    .spare_bytes_per_code = 1,
                                    .settings = kSettings,
                                    .read = ReadCompressedTensors<&kIntQuantizedFormat>,
                                    .decode_parts = Decode};

}  // namespace awqd
