// Format "modelopt", as NVIDIA's Model Optimizer exports its algorithms.
//
//   fp8, fp8_per_channel_per_token, fp8_pb_wo: weight F8_E4M3 [N, K]; weight_scale F32, BF16, F16:
//       [] or [1] for all, [N] per column, [N / 128, K / 128] for blocks
//   mxfp8: weight F8_E4M3 [N, K]; weight_scale U8 [N, K / 32] = exponent + 127
//   w8a16, w8a8_sq_per_channel: weight I8 [N, K]; weight_scale F32, BF16, F16 [N]
//   mxfp4, w4a8_mxfp4_fp8: weight U8 [N, K / 2] as nvfp4; weight_scale U8 [N, K / 32] as mxfp8
//   nvfp4, w4a16_nvfp4, nvfp4_awq, w4a8_nvfp4_fp8: weight U8 [N, K / 2], E2M1, even k in the low
//       half of a byte;
//       weight_scale F8_E4M3 [N, K / 16]; weight_scale_2 F32 [] or [1], which multiplies
//   w4a16_awq: weight U8 [N / 2, K], even n in the low half of a byte, two's complement;
//       weight_scale F32, BF16, F16 [N, K / group_size], [N] or [N, 1]
//   pre_quant_scale [K], optional: what activations are multiplied by
//   input_scale F32 [] or [1], optional: of static FP8 activations (fp8, w4a8_mxfp4_fp8,
//       w4a8_nvfp4_fp8); fp8_per_channel_per_token has dynamic ones
//   bias [N], optional
//
// In a request E4M3 is U8. Its settings, of config.json and of hf_quant_config.json:
//
//   {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.self_attn*"]}
//   {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
//
// With "MIXED_PRECISION", "quantized_layers" has a quant_algo and a group_size for each path.
#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight",          "weight_scale", "weight_scale_2",
                                           "pre_quant_scale", "input_scale",  "bias"};
constexpr absl::string_view kOptional[] = {"weight_scale_2", "pre_quant_scale", "input_scale",
                                           "bias"};
constexpr absl::string_view kCodeTypes[] = {"U8", "F8_E4M3", "I8"};
constexpr absl::string_view kSettings[] = {"quant_algo", "group_size"};
constexpr absl::string_view kMixed = "mixed_precision";
constexpr int64_t kMxGroup = 32;

enum class Codes { kFp8, kFp8Blocks, kMxfp8, kInt8, kMxfp4, kE2m1, kInt4 };
struct Algorithm {
  absl::string_view name;
  Codes codes;
};
constexpr Algorithm kAlgorithms[] = {{"fp8", Codes::kFp8},
                                     {"fp8_per_channel_per_token", Codes::kFp8},
                                     {"fp8_pb_wo", Codes::kFp8Blocks},
                                     {"mxfp8", Codes::kMxfp8},
                                     {"w8a16", Codes::kInt8},
                                     {"w8a8_sq_per_channel", Codes::kInt8},
                                     {"mxfp4", Codes::kMxfp4},
                                     {"w4a8_mxfp4_fp8", Codes::kMxfp4},
                                     {"w4a8_nvfp4_fp8", Codes::kE2m1},
                                     {"nvfp4", Codes::kE2m1},
                                     {"w4a16_nvfp4", Codes::kE2m1},
                                     {"nvfp4_awq", Codes::kE2m1},
                                     {"w4a16_awq", Codes::kInt4}};

// --- Settings ---

struct Settings {
  Codes codes;
  int64_t group_size = 0;  // -1: all of K; 0: not said
};

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "quant_algo"));
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, ReadGroupSize(object));
  const auto* const found =
      absl::c_find_if(kAlgorithms, [&](const Algorithm& known) { return known.name == name; });
  if (found != std::end(kAlgorithms)) return Settings{found->codes, group_size};
  const std::string expected = absl::StrJoin(
      kAlgorithms, ", ",
      [](std::string* out, const Algorithm& known) { absl::StrAppend(out, known.name); });
  if (name.empty()) return BadValue("quant_algo", "nothing", absl::StrCat("one of ", expected));
  return UnreadSetting("quant_algo", Quoted(name), expected);
}

// One rule for all paths of the same settings.
absl::StatusOr<std::vector<LinearRule>> ReadLayers(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const Setting* layers, ReadObject(object, "quantized_layers"));
  if (layers == nullptr || layers->members.empty()) {
    return BadValue("quantized_layers", "nothing", "at least one layer");
  }
  std::map<std::string, LinearRule> rules;
  for (const auto& [path, layer] : layers->members) {
    const absl::StatusOr<Settings> settings = ReadSettings(layer);
    const absl::StatusOr<std::string> name = ReadWord(layer, "quant_algo");
    LinearRule& rule = rules[settings.ok() ? absl::StrCat(*name, " ", settings->group_size)
                                           : settings.status().ToString()];
    rule.targets.push_back(WildcardPattern(path));
    if (settings.ok()) {
      rule.settings = OnlySettings(layer, kSettings);
    } else if (rule.unread.ok()) {
      rule.unread = Beneath(absl::StrCat("quantized_layers.", absl::CHexEscape(path.substr(0, 64))),
                            settings.status());
    }
    AWQD_RETURN_IF_ERROR(CheckRules(rules.size()));
  }
  std::vector<LinearRule> out;
  for (auto& [key, rule] : rules) out.push_back(std::move(rule));
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const Setting* inner, ReadObject(config, "quantization"));
  const Setting& object = inner == nullptr ? config : *inner;
  QuantConfig out;
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "quant_algo"));
  if (name == kMixed) {
    AWQD_ASSIGN_OR_RETURN(out.rules, ReadLayers(object));
  } else {
    AWQD_RETURN_IF_ERROR(ReadSettings(object).status());
    out.rules = {{.targets = {{}}, .settings = OnlySettings(object, kSettings)}};
  }
  for (const absl::string_view list : {"ignore", "exclude_modules"}) {
    AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> modules, ReadStrings(object, list));
    for (const std::string& module : modules) out.left_out.push_back(WildcardPattern(module));
  }
  return out;
}

// --- Tensors ---

absl::StatusOr<HostWeight> DecodeCodesOfEightBits(Codes codes, const LinearTensors& tensors) {
  constexpr int64_t kSide = 128;
  Fp8Scales scales = {.name = "weight_scale"};
  if (codes == Codes::kFp8Blocks) {
    scales = {"weight_scale", kSide, kSide};
  } else if (codes == Codes::kMxfp8) {
    scales = {"weight_scale", 1, kMxGroup, true};
  }
  return DecodeFp8(scales, tensors);
}

absl::StatusOr<HostWeight> DecodeNvfp4(int64_t group_size, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeE2m1({.group_size = group_size}, tensors));
  AWQD_ASSIGN_OR_RETURN(const TensorView* outer, NeedTensor(tensors, "weight_scale_2", "F32 []"));
  AWQD_ASSIGN_OR_RETURN(const float number, ReadNumber("weight_scale_2", *outer));
  out.scheme.outer = OuterKind::kOne;
  out.outer = {number};
  return out;
}

absl::StatusOr<HostWeight> DecodeInt4(int64_t group_size, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight, NeedTensor(tensors, "weight", "U8 [N/2, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, "weight_scale", "F32, BF16 or F16 [N, K/group_size]"));
  if (FindTensor(tensors, "weight_scale_2") != nullptr) {
    return BadTensor("weight_scale_2", "it", "none with quant_algo w4a16_awq");
  }
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"U8"}, 2));
  const size_t rank = scale->shape.size() == 1 ? 1 : 2;
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("weight_scale", *scale, rank, true));
  // At least 1 each, and as many bytes as they say: doubled they fit.
  const int64_t groups = rank == 1 ? 1 : scale->shape[1];
  HostWeight out;
  out.n = weight->shape[0] * 2;
  out.k = weight->shape[1];
  if (scale->shape[0] != out.n) {
    return BadTensor("weight_scale", absl::StrCat("shape ", ShapeText(scale->shape)),
                     absl::StrCat("[", out.n, ", groups]: \"weight\" has two rows a byte"));
  }
  AWQD_ASSIGN_OR_RETURN(const int64_t rows, GroupRows(rank == 1 ? -1 : group_size, out.k, groups,
                                                      "weight_scale", false));
  out.scheme = Symmetric(4, BlockRows(rows, out.k), type);
  out.scales = Transposed(scale->bytes, out.n, groups, SizeOf(type));
  if (weight->unread()) return out;
  out.codes = Transposed(weight->bytes, out.n / 2, out.k, 1);
  for (uint8_t& pair : out.codes) pair ^= 0x88;  // two's complement to 0 .. 15
  return out;
}

absl::Status DecodeFactor(const LinearTensors& tensors, HostWeight* out) {
  const TensorView* const factor = FindTensor(tensors, "pre_quant_scale");
  if (factor == nullptr) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckScales("pre_quant_scale", *factor, 1, true).status());
  AWQD_RETURN_IF_ERROR(CheckShape("pre_quant_scale", *factor, {out->k}, "K"));
  AWQD_ASSIGN_OR_RETURN(out->factor, ToFloats("pre_quant_scale", *factor));
  return absl::OkStatus();
}

absl::StatusOr<HostWeight> DecodeParts(const Settings& settings, const LinearTensors& tensors) {
  if (settings.codes == Codes::kE2m1) return DecodeNvfp4(settings.group_size, tensors);
  if (settings.codes == Codes::kMxfp4) {
    const int64_t group_size = settings.group_size == 0 ? kMxGroup : settings.group_size;
    return DecodeE2m1({.scale = DType::kE8m0, .group_size = group_size}, tensors);
  }
  if (settings.codes == Codes::kInt8) return DecodeInt8(tensors);
  if (settings.codes == Codes::kInt4) return DecodeInt4(settings.group_size, tensors);
  return DecodeCodesOfEightBits(settings.codes, tensors);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeParts(settings, tensors));
  AWQD_RETURN_IF_ERROR(DecodeFactor(tensors, &out));
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "quant_algo"));
  if (name == "fp8_per_channel_per_token") {
    out.activations.how = ActivationQuantization::kFloat8PerToken;
  } else if (name == "fp8" || absl::EndsWith(name, "_fp8")) {
    AWQD_ASSIGN_OR_RETURN(out.activations, DecodeStaticFp8("input_scale", tensors));
  }
  return out;
}

}  // namespace

const Format kModelOptFormat = {.name = "modelopt",
                                .quant_method = "modelopt",
                                .suffixes = kSuffixes,
                                .optional_suffixes = kOptional,
                                .code_dtypes = kCodeTypes,
                                .settings = kSettings,
                                .read = Read,
                                .decode_parts = Decode};

}  // namespace awqd
