// Format "quark", as AMD Quark exports its data types.
//
//   fp4: weight U8 [N, K / 2], E2M1, even k in the low half of a byte;
//       weight_scale U8 or F8_E8M0 [N, K / 32] = exponent + 127
//   fp8_e4m3: weight F8_E4M3 [N, K]; weight_scale F32, BF16, F16: [] or [1] for all, [N] or [N, 1]
//   int8: weight I8 [N, K]; weight_scale as fp8_e4m3
//   int4, uint4: weight I32 [K, N / 8] in AutoAWQ's order, int4 in two's complement;
//       weight_scale F16 or BF16 [K / group_size, N]
//   weight_zero_point: of uint4, and where it exists of int4, I32 [K / group_size, N / 8] as the
//       codes; of int8 and fp8_e4m3 0 everywhere or none
//   input_rotation [size, size], optional: the Hadamard matrix that blocks of activations are
//       multiplied by, I8 of 1 and -1
//   input_prescale F16, BF16 or F32 [K], optional: multiplies activations before that
//   bias [N], optional
//
// In a request E4M3 is U8. Its settings of a checkpoint:
//
//   {"quant_method": "quark", "exclude": ["lm_head"], "export": {"pack_method": "reorder"},
//    "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
//    "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", ...}}}}
//
// "algo_config" lists the algorithms that made the weights. The tensors show what they did. A
// rotation may also be one of activations (r4, online_r1_rotation): linears whose activations are
// rotated need "input_rotation", and "input_prescale" where online_config says so.
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/awq/awq.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/format.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

constexpr absl::string_view kSuffixes[] = {"weight", "weight_scale",   "weight_zero_point",
                                           "bias",   "input_rotation", "input_prescale"};
constexpr auto kOptional = absl::MakeSpan(kSuffixes).subspan(2);
constexpr absl::string_view kCodeTypes[] = {"U8", "F8_E4M3", "I8", "I32"};
constexpr absl::string_view kSettings[] = {"dtype",          "group_size",  "input_prescale",
                                           "input_rotation", "pack_method", "qscheme",
                                           "scale_format",   "symmetric"};
constexpr int64_t kMxGroup = 32;

enum class Codes { kE2m1, kE4m3, kInt8, kInt4, kUint4 };
struct DataType {
  absl::string_view name;
  Codes codes;
  bool grouped;  // scales of groups of K, or else one for all or one for each out feature
};
constexpr DataType kDataTypes[] = {{"fp4", Codes::kE2m1, true},
                                   {"fp8_e4m3", Codes::kE4m3, false},
                                   {"int8", Codes::kInt8, false},
                                   {"int4", Codes::kInt4, true},
                                   {"uint4", Codes::kUint4, true}};

// --- Settings ---

struct Settings {
  Codes codes;
  int64_t group_size = 0;  // -1: all of K; 0: not said
};

absl::StatusOr<const DataType*> ReadDataType(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "dtype"));
  const auto* const found =
      absl::c_find_if(kDataTypes, [&](const DataType& known) { return known.name == name; });
  if (found != std::end(kDataTypes)) return found;
  const std::string expected = absl::StrJoin(
      kDataTypes, ", ",
      [](std::string* out, const DataType& known) { absl::StrAppend(out, known.name); });
  if (name.empty()) return BadValue("dtype", "nothing", absl::StrCat("one of ", expected));
  return UnreadSetting("dtype", Quoted(name), expected);
}

absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const DataType* type, ReadDataType(object));
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(object, "symmetric"));
  AWQD_RETURN_IF_ERROR(type->grouped ? CheckWord(object, "qscheme", {"per_group"})
                                     : CheckWord(object, "qscheme", {"per_tensor", "per_channel"}));
  if (type->codes == Codes::kE2m1) {
    AWQD_RETURN_IF_ERROR(CheckWord(object, "scale_format", {"e8m0"}));
    if (group_size != 0 && group_size != kMxGroup) {
      return UnreadSetting("group_size", absl::StrCat(group_size), absl::StrCat(kMxGroup));
    }
  } else if (type->grouped) {
    AWQD_RETURN_IF_ERROR(CheckWord(object, "pack_method", {"reorder"}));
  } else if (!symmetric.value_or(true)) {
    return UnreadSetting("symmetric", "false", "true");
  }
  return Settings{type->codes, group_size};
}

// Scales are those of out features, or of groups along in features.
absl::Status CheckAxis(const Setting& weight) {
  AWQD_ASSIGN_OR_RETURN(const std::string qscheme, ReadWord(weight, "qscheme"));
  AWQD_ASSIGN_OR_RETURN(const auto axis, ReadInteger(weight, "ch_axis", -2, 1));
  const bool out_features = axis == 0 || axis == -2;
  if (!axis || (qscheme != "per_channel" && qscheme != "per_group") ||
      out_features == (qscheme == "per_channel")) {
    return absl::OkStatus();
  }
  return UnreadSetting("ch_axis", absl::StrCat(*axis), out_features ? "-1" : "0");
}

// The settings of the weights of some linears: those of "weight", and how their codes are packed.
absl::StatusOr<Setting> ReadWeights(const Setting& layer, const std::string& pack_method) {
  const Setting* const weight = FindSetting(layer, "weight");
  if (weight->kind == Setting::Kind::kList) {
    return UnreadSetting("weight", "a list", "one quantisation");
  }
  if (weight->kind != Setting::Kind::kObject) return BadSetting("weight", *weight, "an object");
  AWQD_RETURN_IF_ERROR(CheckAxis(*weight));
  Setting out = OnlySettings(*weight, kSettings);
  if (!pack_method.empty()) out.members["pack_method"] = Setting::String(pack_method);
  AWQD_RETURN_IF_ERROR(ReadSettings(out).status());
  return out;
}

// "re:" begins a regular expression.
ModulePattern Pattern(absl::string_view text) {
  constexpr absl::string_view kRegex = "re:";
  if (!absl::StartsWith(text, kRegex)) return WildcardPattern(text);
  return {ModulePattern::Kind::kRegex, std::string(text.substr(kRegex.size()))};
}

class ConfigReader {
 public:
  explicit ConfigReader(std::string pack_method) : pack_method_(std::move(pack_method)) {}

  // Additions for the linears whose activations an algorithm rotates.
  absl::Status AddAlgorithms(const Setting& config) {
    for (const absl::string_view key : {"algo_config", "pre_quant_opt_config"}) {
      const Setting* const found = FindSetting(config, key);
      if (found == nullptr) continue;
      const bool one = found->kind == Setting::Kind::kObject;  // as old versions have it
      for (const Setting& algorithm : one ? std::vector<Setting>{*found} : found->list) {
        AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(algorithm, "name"));
        if (name == "svdquant") {
          return UnreadSetting(absl::StrCat(key, ".name"), Quoted(name),
                               "an algorithm without a product of low rank beside the weights");
        }
        if (name == "rotation" || name == "quarot") AWQD_RETURN_IF_ERROR(AddRotation(algorithm));
      }
    }
    return absl::OkStatus();
  }

  // The linears of single names first, then those of wildcards, as they follow one another.
  absl::Status AddLayers(const Setting& config) {
    AWQD_ASSIGN_OR_RETURN(const Setting* layers, ReadObject(config, "layer_quant_config"));
    if (layers == nullptr) return absl::OkStatus();
    for (const bool wildcards : {false, true}) {
      for (const auto& [name, layer] : MembersInOrder(*layers)) {
        ModulePattern pattern = Pattern(name);
        if ((pattern.kind == ModulePattern::Kind::kRegex) != wildcards) continue;
        AWQD_RETURN_IF_ERROR(
            Add(std::move(pattern), *layer,
                absl::StrCat("layer_quant_config.", absl::CHexEscape(name.substr(0, 64)))));
      }
      rule_of_.clear();
    }
    return absl::OkStatus();
  }

  // The settings of every linear that no name above matches.
  absl::Status AddOthers(const Setting& config) {
    AWQD_ASSIGN_OR_RETURN(const Setting* types, ReadObject(config, "layer_type_quant_config"));
    AWQD_ASSIGN_OR_RETURN(const Setting* global, ReadObject(config, "global_quant_config"));
    const Setting* const linear = types == nullptr ? nullptr : FindSetting(*types, "Linear");
    if (linear != nullptr) return Add({}, *linear, "layer_type_quant_config.Linear");
    return global == nullptr ? absl::OkStatus() : Add({}, *global, "global_quant_config");
  }

  QuantConfig Finish() && { return std::move(out_); }

 private:
  absl::Status AddRotation(const Setting& rotation) {
    AWQD_ASSIGN_OR_RETURN(const auto r4, ReadBool(rotation, "r4"));
    AWQD_ASSIGN_OR_RETURN(const auto online_r1, ReadBool(rotation, "online_r1_rotation"));
    Setting rotated;
    rotated.members["input_rotation"] = Setting::Literal(true);
    AWQD_ASSIGN_OR_RETURN(const Setting* online, ReadObject(rotation, "online_config"));
    if (online != nullptr) {
      AWQD_ASSIGN_OR_RETURN(const auto prescale, ReadBool(*online, "use_input_prescale"));
      if (prescale.value_or(false)) rotated.members["input_prescale"] = Setting::Literal(true);
    }
    if (r4.value_or(false)) {
      out_.additions.push_back({{.targets = {WildcardPattern("*down_proj")}, .settings = rotated}});
    }
    if (!online_r1.value_or(false)) return absl::OkStatus();
    LinearRule rule = {.settings = rotated};
    AWQD_ASSIGN_OR_RETURN(const Setting* layers, ReadObject(rotation, "scaling_layers"));
    const Setting none;
    for (const auto& [place, list] : (layers == nullptr ? none : *layers).members) {
      for (const Setting& modules : list.list) {
        const bool narrowed = FindSetting(modules, "target_modules") != nullptr;
        AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                              ReadStrings(modules, narrowed ? "target_modules" : "next_modules"));
        for (const std::string& name : names) {
          rule.targets.push_back(WildcardPattern(
              absl::StrReplaceAll(name, {{"pre_layer_id", "*"}, {"layer_id", "*"}})));
        }
      }
    }
    if (rule.targets.empty()) {
      return UnreadSetting("algo_config.scaling_layers", "nothing",
                           "the linears of online_r1_rotation");
    }
    out_.additions.push_back({std::move(rule)});
    return CheckRules(out_.additions.size());
  }

  // One rule for all patterns of the same settings; of wildcards only where they are neighbours,
  // as the first that matches counts.
  absl::Status Add(ModulePattern pattern, const Setting& layer, const std::string& where) {
    if (layer.kind != Setting::Kind::kObject) {
      return BadSetting(where, layer, "an object");
    }
    if (FindSetting(layer, "weight") == nullptr) {
      out_.left_out.push_back(std::move(pattern));
      return absl::OkStatus();
    }
    LinearRule rule;
    std::string key;
    absl::StatusOr<Setting> settings = ReadWeights(layer, pack_method_);
    if (settings.ok()) {
      for (const auto& [name, value] : settings->members) {
        absl::StrAppend(&key, name, " ", value.text, " ");
      }
      rule.settings = *std::move(settings);
    } else {
      key = settings.status().ToString();
      rule.unread = Beneath(absl::StrCat(where, ".weight"), settings.status());
    }
    if (pattern.kind == ModulePattern::Kind::kRegex && !rule_of_.contains(key)) rule_of_.clear();
    const auto [found, is_new] = rule_of_.emplace(std::move(key), out_.rules.size());
    if (is_new) out_.rules.push_back(std::move(rule));
    out_.rules[found->second].targets.push_back(std::move(pattern));
    return CheckRules(out_.rules.size());
  }

  std::string pack_method_;
  std::map<std::string, size_t> rule_of_;  // indices of rules that may take more patterns
  QuantConfig out_;
};

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const Setting* exported, ReadObject(config, "export"));
  std::string pack_method;
  if (exported != nullptr) {
    AWQD_ASSIGN_OR_RETURN(pack_method, ReadWord(*exported, "pack_method"));
  }
  ConfigReader reader(std::move(pack_method));
  AWQD_RETURN_IF_ERROR(reader.AddAlgorithms(config));
  AWQD_RETURN_IF_ERROR(reader.AddLayers(config));
  AWQD_RETURN_IF_ERROR(reader.AddOthers(config));
  QuantConfig out = std::move(reader).Finish();
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> excluded, ReadStrings(config, "exclude"));
  for (const std::string& module : excluded) out.left_out.push_back(Pattern(module));
  if (out.rules.empty()) {
    return BadValue("global_quant_config", "no quantisation of weights, nor in layer_quant_config",
                    "one");
  }
  return out;
}

// --- Tensors ---

absl::Status CheckNoZeroPoint(const LinearTensors& tensors) {
  const TensorView* const zero = FindTensor(tensors, "weight_zero_point");
  if (zero == nullptr || absl::c_all_of(zero->bytes, [](uint8_t byte) { return byte == 0; })) {
    return absl::OkStatus();
  }
  return BadTensor("weight_zero_point", "other values than 0", "0: symmetric codes have none");
}

absl::StatusOr<HostWeight> DecodeFourBits(const Settings& settings, const LinearTensors& tensors) {
  const bool is_signed = settings.codes == Codes::kInt4;
  AwqLinear linear = {.group_size = settings.group_size};
  if (is_signed) linear.zero_point = FindTensor(tensors, "weight_zero_point") != nullptr;
  AWQD_ASSIGN_OR_RETURN(
      HostWeight out, DecodeAwq(linear, {"weight", "weight_zero_point", "weight_scale"}, tensors));
  if (!is_signed) return out;
  for (uint8_t& pair : out.codes) pair ^= 0x88;  // two's complement to 0 .. 15
  for (uint8_t& zero : out.zeros) zero ^= 0x08;
  if (absl::c_all_of(out.zeros, [&](uint8_t zero) { return zero == linear.middle(); })) {
    out.zeros.clear();  // what symmetric codes have where their zero points are stored
    out.scheme = Symmetric(linear.bits, out.scheme.block_rows, *out.scheme.scale_dtype);
  }
  return out;
}

absl::StatusOr<HostWeight> DecodeStored(const Settings& settings, const LinearTensors& tensors) {
  if (settings.codes == Codes::kInt4 || settings.codes == Codes::kUint4) {
    return DecodeFourBits(settings, tensors);
  }
  AWQD_RETURN_IF_ERROR(CheckNoZeroPoint(tensors));
  if (settings.codes == Codes::kInt8) return DecodeInt8(tensors);
  if (settings.codes == Codes::kE2m1) {
    return DecodeE2m1({.scale = DType::kE8m0, .group_size = kMxGroup}, tensors);
  }
  return DecodeFp8({.name = "weight_scale"}, tensors);
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeStored(settings, tensors));
  if (const TensorView* const scale = FindTensor(tensors, "input_prescale"); scale != nullptr) {
    AWQD_RETURN_IF_ERROR(CheckScales("input_prescale", *scale, 1, true).status());
    AWQD_RETURN_IF_ERROR(CheckShape("input_prescale", *scale, {out.k}, "K"));
    AWQD_ASSIGN_OR_RETURN(out.factor, ToFloats("input_prescale", *scale));
  }
  if (const TensorView* const matrix = FindTensor(tensors, "input_rotation"); matrix != nullptr) {
    AWQD_RETURN_IF_ERROR(DecodeHadamard("input_rotation", *matrix, &out));
  }
  return out;
}

absl::string_view Lacks(const Setting& settings, HasTensor has) {
  for (const absl::string_view suffix : {"input_rotation", "input_prescale"}) {
    const absl::StatusOr<std::optional<bool>> said = ReadBool(settings, suffix);
    if (said.ok() && said->value_or(false) && !has(suffix)) return suffix;
  }
  const absl::StatusOr<const DataType*> type = ReadDataType(settings);
  const absl::StatusOr<std::optional<bool>> symmetric = ReadBool(settings, "symmetric");
  const bool asymmetric = symmetric.ok() && !symmetric->value_or(true);
  const bool needed = type.ok() && (*type)->grouped && (*type)->codes != Codes::kE2m1 &&
                      (asymmetric || (*type)->codes == Codes::kUint4);
  return needed && !has("weight_zero_point") ? "weight_zero_point" : "";
}

}  // namespace

const Format kQuarkFormat = {.name = "quark",
                             .quant_method = "quark",
                             .suffixes = kSuffixes,
                             .optional_suffixes = kOptional,
                             .lacks = Lacks,
                             .code_dtypes = kCodeTypes,
                             .settings = kSettings,
                             .read = Read,
                             .decode_parts = Decode};

}  // namespace awqd
