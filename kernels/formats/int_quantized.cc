// Format "int-quantized" of compressed-tensors: signed codes, one to a byte, by out-feature.
//
//   weight I8 [N, K], each in -2^(bits-1) .. 2^(bits-1)-1      W[k, n] = weight[n, k] * scale
//   weight_scale F16, BF16 or F32: [N, 1] per channel, [N, groups] per group, [1] per tensor
//   weight_zero_point I8 of the same shape: 0 everywhere, as the codes are symmetric
//   bias [N], optional
//   input_scale F16, BF16 or F32 [1]: what static activations are divided by (DeclaredActivations)
//   input_zero_point I8 [1]: 0
//
// Its settings:
//
//   {"quant_method": "compressed-tensors", "format": "int-quantized",
//    "config_groups": {"group_0": {"targets": ["Linear", "re:.*mlp.*"],
//                                  "weights": {"num_bits": 8, "strategy": "channel", ...},
//                                  "input_activations": {"num_bits": 8, "dynamic": true, ...}}},
//    "ignore": ["lm_head", "re:.*gate$"]}
#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "weight_scale", "weight_zero_point",
                                           "bias",   "input_scale",  "input_zero_point"};
constexpr absl::string_view kOptional[] = {"weight_zero_point", "bias", "input_scale",
                                           "input_zero_point"};
constexpr absl::string_view kCodeTypes[] = {"I8"};
constexpr absl::string_view kSettings[] = {"activations", "group_size", "num_bits", "strategy",
                                           "symmetric"};

enum class Strategy { kChannel, kGroup, kTensor };

struct Settings {
  int bits = 8;
  Strategy strategy = Strategy::kChannel;
  int64_t group_size = 0;  // of kGroup
  ActivationQuantization activations = ActivationQuantization::kNone;
};

absl::StatusOr<ActivationQuantization> ReadActivations(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string how, ReadWord(object, "activations"));
  if (how.empty()) return ActivationQuantization::kNone;
  if (how == "dynamic") return ActivationQuantization::kPerToken;
  if (how == "static") return ActivationQuantization::kStatic;
  return UnreadSetting("activations", absl::StrCat("\"", absl::CHexEscape(how), "\""),
                       "\"dynamic\" or \"static\"");
}

absl::StatusOr<Strategy> ReadStrategy(const Setting& object, int64_t group_size) {
  AWQD_ASSIGN_OR_RETURN(const std::string strategy, ReadWord(object, "strategy"));
  // Without it the library takes it from group_size.
  if (strategy.empty()) return group_size > 0 ? Strategy::kGroup : Strategy::kChannel;
  if (strategy == "channel") return Strategy::kChannel;
  if (strategy == "group") return Strategy::kGroup;
  if (strategy == "tensor") return Strategy::kTensor;
  return UnreadSetting("strategy", absl::StrCat("\"", absl::CHexEscape(strategy), "\""),
                       "\"channel\", \"group\" or \"tensor\"");
}

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "num_bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(object, "symmetric"));
  AWQD_ASSIGN_OR_RETURN(out.strategy, ReadStrategy(object, out.group_size));
  AWQD_ASSIGN_OR_RETURN(out.activations, ReadActivations(object));
  out.bits = static_cast<int>(bits.value_or(8));
  if (out.bits != 8 && out.bits != 4)
    return UnreadSetting("num_bits", absl::StrCat(out.bits), "8 or 4");
  if (!symmetric.value_or(true)) return UnreadSetting("symmetric", "false", "true");
  if (out.strategy == Strategy::kGroup && out.group_size == 0) {
    return BadValue("group_size", "nothing", "at least 1 for strategy \"group\"");
  }
  return out;
}

// A group's "weights" of config.json.
absl::StatusOr<Setting> ReadWeights(const Setting& weights) {
  AWQD_RETURN_IF_ERROR(ReadSettings(weights).status());
  AWQD_ASSIGN_OR_RETURN(const std::string type, ReadWord(weights, "type"));
  if (!type.empty() && type != "int") {
    return UnreadSetting("type", absl::StrCat("\"", absl::CHexEscape(type), "\""), "\"int\"");
  }
  AWQD_ASSIGN_OR_RETURN(const auto dynamic, ReadBool(weights, "dynamic"));
  if (dynamic.value_or(false)) return UnreadSetting("dynamic", "true", "false");
  AWQD_ASSIGN_OR_RETURN(const std::string order, ReadWord(weights, "actorder"));
  if (order == "group")
    return UnreadSetting("actorder", "\"group\"", "null, \"weight\" or \"static\"");
  return OnlySettings(weights, kSettings);
}

// The setting "activations" of a group's "input_activations": INT8 about 0, a scale for each token
// or one for all. Empty for what is not done here: then only weights are quantised.
absl::StatusOr<std::string> ReadInput(const Setting& input) {
  if (input.kind != Setting::Kind::kObject)
    return BadSetting("input_activations", input, "an object");
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(input, "num_bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(const std::string type, ReadWord(input, "type"));
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(input, "symmetric"));
  AWQD_ASSIGN_OR_RETURN(const std::string strategy, ReadWord(input, "strategy"));
  if (bits.value_or(8) != 8 || (!type.empty() && type != "int") || !symmetric.value_or(true)) {
    return "";
  }
  // Elsewhere it may be "local", for scales of groups.
  const absl::StatusOr<std::optional<bool>> dynamic = ReadBool(input, "dynamic");
  if (!dynamic.ok()) return "";
  if (dynamic->value_or(false)) return strategy.empty() || strategy == "token" ? "dynamic" : "";
  return strategy.empty() || strategy == "tensor" ? "static" : "";
}

// A target is "re:" and a regular expression, the class of a module, or the path of one. A
// checkpoint names no classes. "Linear" is every linear, and what it leaves out shows in the
// tensors; other classes match no path, as their layers are not linears.
ModulePattern Pattern(absl::string_view target) {
  using Kind = ModulePattern::Kind;
  if (absl::ConsumePrefix(&target, "re:")) return {Kind::kRegex, std::string(target)};
  if (target == "Linear") return {Kind::kEvery, ""};
  return {Kind::kExact, std::string(target)};
}

absl::StatusOr<std::vector<ModulePattern>> Patterns(const Setting& object, absl::string_view name) {
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> targets, ReadStrings(object, name));
  std::vector<ModulePattern> out;
  for (const std::string& target : targets) out.push_back(Pattern(target));
  return out;
}

// `format` is that of the checkpoint, which a group may override. `note`: of what has no effect.
absl::StatusOr<LinearRule> ReadGroup(const Setting& group, std::string format, std::string* note) {
  if (group.kind != Setting::Kind::kObject) return BadSetting("group", group, "an object");
  AWQD_ASSIGN_OR_RETURN(const std::string own, ReadWord(group, "format"));
  if (!own.empty()) format = own;
  if (format != kIntQuantizedFormat.name) {
    return UnreadSetting("format", absl::StrCat("\"", absl::CHexEscape(format), "\""),
                         "\"int-quantized\"");
  }
  LinearRule out;
  AWQD_ASSIGN_OR_RETURN(out.targets, Patterns(group, "targets"));
  AWQD_ASSIGN_OR_RETURN(const Setting* weights, ReadObject(group, "weights"));
  if (weights == nullptr) return UnreadSetting("weights", "nothing", "their quantisation");
  AWQD_ASSIGN_OR_RETURN(out.settings, ReadWeights(*weights));
  const Setting* const input = FindSetting(group, "input_activations");
  if (input == nullptr) return out;
  AWQD_ASSIGN_OR_RETURN(const std::string how, ReadInput(*input));
  if (how.empty()) {
    *note = "input_activations has no effect: it is not symmetric int8, by tokens or of one scale";
  } else {
    out.settings.members["activations"] = Setting::String(how);
  }
  return out;
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const std::string format, ReadWord(config, "format"));
  AWQD_ASSIGN_OR_RETURN(const Setting* groups, ReadObject(config, "config_groups"));
  if (groups == nullptr || groups->members.empty()) {
    return BadValue("config_groups", "nothing", "at least one group");
  }
  QuantConfig out;
  for (const auto& [name, group] : groups->members) {
    absl::StatusOr<LinearRule> rule = ReadGroup(group, format, &out.note);
    if (!rule.ok()) {
      return absl::Status(rule.status().code(),
                          absl::StrCat("config_groups.", absl::CHexEscape(name.substr(0, 64)), ".",
                                       rule.status().message()));
    }
    out.rules.push_back(*std::move(rule));
  }
  AWQD_ASSIGN_OR_RETURN(out.left_out, Patterns(config, "ignore"));
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

absl::Status CheckZeroPoint(const LinearTensors& tensors, const TensorView& scale) {
  const TensorView* zero = FindTensor(tensors, "weight_zero_point");
  if (zero == nullptr) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckTensor("weight_zero_point", *zero, {"I8"}, scale.shape.size()));
  if (zero->shape != scale.shape) {
    return BadTensor("weight_zero_point", absl::StrCat("shape ", ShapeText(zero->shape)),
                     absl::StrCat(ShapeText(scale.shape), ", as weight_scale"));
  }
  if (absl::c_all_of(zero->bytes, [](uint8_t byte) { return byte == 0; })) return absl::OkStatus();
  return BadTensor("weight_zero_point", "other values than 0", "0: symmetric codes have none");
}

// Sets the description and the scales, which lie by out-feature in the file.
absl::Status DecodeScales(const Settings& settings, const TensorView& scale, HostWeight* out) {
  const bool one = settings.strategy == Strategy::kTensor;
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("weight_scale", scale, one ? 1 : 2, true));
  if (one) {
    AWQD_RETURN_IF_ERROR(CheckShape("weight_scale", scale, {1}, "strategy \"tensor\""));
    out->description = Symmetric(settings.bits, 0, type);
    out->description.block_cols = 0;
    out->scales.assign(scale.bytes.begin(), scale.bytes.end());
    return absl::OkStatus();
  }
  const int64_t groups = scale.shape[1];
  const bool grouped = settings.strategy == Strategy::kGroup;
  AWQD_ASSIGN_OR_RETURN(const int64_t rows, GroupRows(grouped ? settings.group_size : -1, out->k,
                                                      groups, "weight_scale", true));
  AWQD_RETURN_IF_ERROR(
      CheckShape("weight_scale", scale, {out->n, groups}, grouped ? "[N, groups]" : "[N, 1]"));
  out->description = Symmetric(settings.bits, BlockRows(rows, out->k), type);
  out->scales = Transposed(scale.bytes, out->n, groups, SizeOf(type));
  return absl::OkStatus();
}

absl::StatusOr<DeclaredActivations> DecodeActivations(const Settings& settings,
                                                      const LinearTensors& tensors) {
  DeclaredActivations out = {.how = settings.activations};
  if (out.how != ActivationQuantization::kStatic) return out;
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

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  const absl::StatusOr<Settings> settings = ReadSettings(object);
  if (!settings.ok()) return absl::InvalidArgumentError(settings.status().message());
  AWQD_ASSIGN_OR_RETURN(const TensorView* weight, NeedTensor(tensors, "weight", "I8 [N, K]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, "weight_scale", "F16, BF16 or F32 [N, groups]"));
  AWQD_RETURN_IF_ERROR(CheckTensor("weight", *weight, {"I8"}, 2));
  HostWeight out;
  out.format = std::string(kIntQuantizedFormat.name);
  out.n = weight->shape[0];
  out.k = weight->shape[1];
  AWQD_RETURN_IF_ERROR(DecodeScales(*settings, *scale, &out));
  AWQD_RETURN_IF_ERROR(CheckZeroPoint(tensors, *scale));
  AWQD_ASSIGN_OR_RETURN(out.bias, DecodeBias(tensors, out.n));
  AWQD_ASSIGN_OR_RETURN(out.activations, DecodeActivations(*settings, tensors));
  std::vector<uint8_t> codes = Transposed(weight->bytes, out.n, out.k, 1);
  AWQD_RETURN_IF_ERROR(MakeUnsigned(settings->bits, out.n, &codes));
  out.codes =
      settings->bits == 8 ? std::move(codes) : PackCodes(codes, out.k, out.n, settings->bits);
  return out;
}

}  // namespace

const Format kIntQuantizedFormat = {.name = "int-quantized",
                                    .quant_method = "compressed-tensors",
                                    .suffixes = kSuffixes,
                                    .optional_suffixes = kOptional,
                                    .code_dtypes = kCodeTypes,
                                    .settings = kSettings,
                                    .read = Read,
                                    .decode = Decode};

}  // namespace awqd
