// Format "float-quantized" of compressed-tensors: FP8 codes, by out-feature.
//
//   weight F8_E4M3 [N, K]       W[k, n] = weight[n, k] * scale
//   weight_scale F32, BF16 or F16, by strategy: tensor [1] or []; channel [N, 1] or [N];
//       group [N, K / group_size], of mxfp8-quantized U8 = exponent + 127;
//       block [N / block_n, K / block_k], both rounded up
//   weight_zero_point, of the shape of weight_scale: 0 everywhere
//   bias [N], optional
//   input_scale F32, BF16 or F16 [1] or [], input_zero_point 0: of static activations
//   output_scale, output_zero_point: without effect
//
// In a request codes are U8. Settings: activations, strategy, group_size, and block_n and block_k, which
// config.json has as "block_structure": [rows, columns], or "128x128".
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/compressed_tensors/common.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight",       "weight_scale",     "weight_zero_point",
                                           "bias",         "input_scale",      "input_zero_point",
                                           "output_scale", "output_zero_point"};
constexpr absl::Span<const absl::string_view> kOptional = absl::MakeSpan(kSuffixes).subspan(2);
constexpr absl::string_view kCodeTypes[] = {"F8_E4M3"};
constexpr absl::string_view kSettings[] = {"activations", "block_k",     "block_n",
                                           "group_size",  kHadamardSize, "strategy"};
constexpr int64_t kMostBlock = int64_t{1} << 31;

enum class Strategy { kByShape, kTensor, kChannel, kGroup, kBlock };

struct Settings {
  Strategy strategy = Strategy::kByShape;
  int64_t group_size = 0;  // -1: all of K
  int64_t block_n = 0, block_k = 0;
  ActivationQuantization activations = ActivationQuantization::kNone;
};

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(const auto strategy, ReadChoice<Strategy>(object, "strategy",
                                                                  {{"tensor", Strategy::kTensor},
                                                                   {"channel", Strategy::kChannel},
                                                                   {"group", Strategy::kGroup},
                                                                   {"block", Strategy::kBlock}}));
  AWQD_ASSIGN_OR_RETURN(const auto group, ReadInteger(object, "group_size", -1, kMostBlock));
  AWQD_ASSIGN_OR_RETURN(const auto block_n, ReadInteger(object, "block_n", 1, kMostBlock));
  AWQD_ASSIGN_OR_RETURN(const auto block_k, ReadInteger(object, "block_k", 1, kMostBlock));
  AWQD_ASSIGN_OR_RETURN(out.activations, ReadDeclaredActivations(object));
  if (out.activations != ActivationQuantization::kNone && !IsFloat8(out.activations)) {
    return UnreadSetting("activations", "INT8", "one of FP8");
  }
  out.strategy = strategy.value_or(Strategy::kByShape);
  out.group_size = group.value_or(0);
  out.block_n = block_n.value_or(0);
  out.block_k = block_k.value_or(0);
  if (group == 0) return BadValue("group_size", 0, "-1 (all of K) or at least 1");
  if (out.strategy == Strategy::kByShape) {
    if (block_n || block_k)
      out.strategy = Strategy::kBlock;
    else if (out.group_size > 0)
      out.strategy = Strategy::kGroup;
  }
  if (out.strategy == Strategy::kGroup && !group) {
    return BadValue("group_size", "nothing", "at least 1 for strategy \"group\"");
  }
  if (out.strategy == Strategy::kBlock && !(block_n && block_k)) {
    return BadValue(block_n ? "block_k" : "block_n", "nothing",
                    "at least 1 for strategy \"block\"");
  }
  return out;
}

// "block_structure": the two numbers as block_n and block_k, which are checked later.
absl::Status ReadBlock(const Setting& weights, Setting* out) {
  const Setting* const block = FindSetting(weights, "block_structure");
  if (block == nullptr) return absl::OkStatus();
  std::vector<Setting> sides = block->list;
  if (block->kind == Setting::Kind::kString) {
    for (absl::string_view side : absl::StrSplit(block->text, 'x')) {
      sides.push_back({Setting::Kind::kLiteral, std::string(side)});
    }
  }
  if (sides.size() != 2) {
    return BadSetting("block_structure", *block, "null or a list of two numbers");
  }
  out->members["block_n"] = sides[0];
  out->members["block_k"] = sides[1];
  return absl::OkStatus();
}

// --- Tensors ---

absl::StatusOr<Fp8Scales> ScalesOf(const Settings& settings, const TensorView& scale,
                                   const TensorView& weight) {
  Fp8Scales out = {.name = "weight_scale"};
  const int64_t n = weight.shape[0];
  const bool one = scale.shape.empty() || scale.shape == std::vector<int64_t>{1};
  const auto bad_shape = [&](absl::string_view expected) {
    return BadTensor("weight_scale", absl::StrCat("shape ", ShapeText(scale.shape)), expected);
  };
  switch (settings.strategy) {
    case Strategy::kByShape:
      return out;
    case Strategy::kTensor:
      if (!one && !AreOfProjections(weight, scale)) {
        return bad_shape("[1], one for all, as strategy is \"tensor\"");
      }
      return out;
    case Strategy::kChannel:
      if (one && n != 1) {
        return bad_shape(absl::StrCat("[", n, ", 1] (N), as strategy is \"channel\""));
      }
      return out;
    case Strategy::kGroup:
      out.e8m0 = true;
      out.block_n = 1;
      out.block_k = settings.group_size == -1 ? kMostBlock : settings.group_size;
      return out;
    case Strategy::kBlock:
      out.block_n = settings.block_n;
      out.block_k = settings.block_k;
      return out;
  }
  return out;
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight, NeedTensor(tensors, "weight", "F8_E4M3 [N, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, "weight_scale", "F32, BF16 or F16 scales"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"F8_E4M3", "U8"}, 2));
  AWQD_ASSIGN_OR_RETURN(const Fp8Scales scales, ScalesOf(settings, *scale, *weight));
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeFp8(scales, tensors));
  AWQD_RETURN_IF_ERROR(CheckNoZeroPoint(
      tensors, *scale, {"F8_E4M3", "I8", "U8", "F16", "BF16", "F32"}, "FP8 codes have none"));
  AWQD_ASSIGN_OR_RETURN(out.activations, DecodeActivations(settings.activations, tensors));
  return out;
}

}  // namespace

absl::StatusOr<Setting> ReadFloatQuantizedWeights(const Setting& weights,
                                                  const Setting& /*config*/) {
  AWQD_RETURN_IF_ERROR(CheckWeightType(weights, "float"));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(weights, "num_bits", 1, 32));
  if (bits.value_or(8) != 8) return UnreadSetting("num_bits", absl::StrCat(*bits), "8");
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(weights, "symmetric"));
  if (!symmetric.value_or(true)) return UnreadSetting("symmetric", "false", "true");
  Setting out = OnlySettings(weights, kSettings);
  AWQD_RETURN_IF_ERROR(ReadBlock(weights, &out));
  AWQD_RETURN_IF_ERROR(ReadSettings(out).status());
  return out;
}

const Format kFloatQuantizedFormat = {.name = "float-quantized",
                                      .quant_method = "compressed-tensors",
                                      .suffixes = kSuffixes,
                                      .optional_suffixes = kOptional,
                                      .code_dtypes = kCodeTypes,
                                      .settings = kSettings,
                                      .read = ReadCompressedTensors<&kFloatQuantizedFormat>,
                                      .decode_parts = Decode};

}  // namespace awqd
