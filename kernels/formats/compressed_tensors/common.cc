// Groups of linears to rules, and the parts that formats share.
#include "kernels/formats/compressed_tensors/common.h"

#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {
namespace {

struct Member {
  const Format* format;
  absl::StatusOr<Setting> (*read)(const Setting& weights, const Setting& config);
  bool integers;  // which INT8 activations can multiply
};
constexpr Member kMembers[] = {{&kIntQuantizedFormat, ReadIntQuantizedWeights, true},
                               {&kPackQuantizedFormat, ReadPackQuantizedWeights, true},
                               {&kFloatQuantizedFormat, ReadFloatQuantizedWeights, false},
                               {&kNvfp4PackQuantizedFormat, ReadNvfp4PackQuantizedWeights, false},
                               {&kMxfp4PackQuantizedFormat, ReadMxfp4PackQuantizedWeights, false}};

std::string GroupNamed(absl::string_view name) {
  return absl::StrCat("config_groups.", absl::CHexEscape(name.substr(0, 64)));
}

void AddNoteOnce(absl::string_view text, std::string* note) {
  if (!absl::StrContains(*note, text)) AddNote(text, note);
}

// --- A group ---

// The format that a group, or else the checkpoint, names. "naive-quantized" is one of
// two, and "mxfp8-quantized" is FP8 in groups whose scales are powers of two.
absl::StatusOr<std::string> ReadFormat(const Setting& group, const Setting& weights,
                                       const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(std::string name, ReadWord(group, "format"));
  if (name.empty()) {
    AWQD_ASSIGN_OR_RETURN(name, ReadWord(config, "format"));
  }
  if (name == "mxfp8-quantized") return std::string(kFloatQuantizedFormat.name);
  if (name != "naive-quantized") return name;
  AWQD_ASSIGN_OR_RETURN(const std::string type, ReadWord(weights, "type"));
  return std::string(type == "float" ? kFloatQuantizedFormat.name : kIntQuantizedFormat.name);
}

absl::StatusOr<const Member*> MemberNamed(absl::string_view name) {
  for (const Member& member : kMembers) {
    if (member.format->name == name) return &member;
  }
  return UnreadSetting("format", Quoted(name, 64),
                       absl::StrJoin(kMembers, ", ", [](std::string* out, const Member& member) {
                         absl::StrAppend(out, Quoted(member.format->name, 64));
                       }));
}

// The setting "activations" of a group's "input_activations": INT8 or E4M3 about 0, a scale for each
// token or one for all, of E4M3 also one for each 128 of a token. Empty for what is not done here:
// then only weights are quantised.
absl::StatusOr<std::string> ReadInput(const Setting& input) {
  if (input.kind != Setting::Kind::kObject)
    return BadSetting("input_activations", input, "an object");
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(input, "num_bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(const std::string type, ReadWord(input, "type"));
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(input, "symmetric"));
  AWQD_ASSIGN_OR_RETURN(const std::string strategy, ReadWord(input, "strategy"));
  const bool float8 = type == "float";
  if (bits.value_or(8) != 8 || !(type.empty() || type == "int" || float8) ||
      !symmetric.value_or(true)) {
    return "";
  }
  // Elsewhere it may be "local", for scales of groups.
  const absl::StatusOr<std::optional<bool>> dynamic = ReadBool(input, "dynamic");
  if (!dynamic.ok()) return "";
  if (!dynamic->value_or(false)) {
    if (!strategy.empty() && strategy != "tensor") return "";
    return float8 ? "fp8_static" : "static";
  }
  if (strategy.empty() || strategy == "token") return float8 ? "fp8_dynamic" : "dynamic";
  if (!float8 || strategy != "group") return "";
  AWQD_ASSIGN_OR_RETURN(const auto size, ReadInteger(input, "group_size", 1, 1 << 20));
  return size == 128 ? "fp8_blocks" : "";
}

absl::Status ReadActivations(const Setting& group, const Member& member, Setting* settings,
                             std::string* note) {
  if (FindSetting(group, "output_activations") != nullptr) {
    AddNoteOnce("output_activations has no effect", note);
  }
  const Setting* const input = FindSetting(group, "input_activations");
  if (input == nullptr) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const std::string how, ReadInput(*input));
  if (how.empty()) {
    AddNoteOnce(
        "input_activations has no effect: it is not symmetric int8 or float8, by tokens or of one "
        "scale",
        note);
  } else if (!absl::c_linear_search(member.format->settings, "activations")) {
    AddNoteOnce(absl::StrCat("input_activations has no effect with ", member.format->name), note);
  } else if (!member.integers && !absl::StartsWith(how, "fp8_")) {
    AddNoteOnce("input_activations has no effect: weights are no integers", note);
  } else {
    settings->members["activations"] = Setting::String(how);
  }
  return absl::OkStatus();
}

struct Group {
  const Format* format = nullptr;  // null: it quantises no weights, or it is not read
  Setting settings;
  std::vector<std::string> targets;
  absl::Status unread = absl::OkStatus();  // the reason that it is not read
};

absl::Status ReadGroup(const Setting& group, const Setting& config, Group* out, std::string* note) {
  if (group.kind != Setting::Kind::kObject) return BadSetting("group", group, "an object");
  AWQD_ASSIGN_OR_RETURN(const Setting* weights, ReadObject(group, "weights"));
  if (weights == nullptr) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(out->targets, ReadStrings(group, "targets"));
  if (out->targets.empty()) return BadValue("targets", "nothing", "at least one");
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadFormat(group, *weights, config));
  AWQD_ASSIGN_OR_RETURN(const Member* member, MemberNamed(name));
  AWQD_ASSIGN_OR_RETURN(out->settings, member->read(*weights, config));
  AWQD_RETURN_IF_ERROR(ReadActivations(group, *member, &out->settings, note));
  out->format = member->format;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Group>> ReadGroups(const Setting& groups, const Setting& config,
                                              std::string* note) {
  std::vector<Group> out;
  for (const auto& [name, group] : MembersInOrder(groups)) {
    Group read;
    const absl::Status status = ReadGroup(*group, config, &read, note);
    if (!status.ok()) read.unread = Beneath(GroupNamed(name), status);
    if (read.format == nullptr && status.ok()) {
      AddNoteOnce(absl::StrCat(GroupNamed(name), " has no effect: it quantises no weights"), note);
      continue;
    }
    out.push_back(std::move(read));
    AWQD_RETURN_IF_ERROR(CheckRules(out.size()));
  }
  if (!out.empty()) return out;
  return Beneath(GroupNamed(MembersInOrder(groups).front().first),
                 UnreadSetting("weights", "nothing", "their quantisation"));
}

// --- Targets ---

// A checkpoint names no classes. "Linear" is every linear, and the tensors show which it leaves
// out. "Embedding" is told by the name of a module. Other classes match no path.
ModulePattern Pattern(absl::string_view target) {
  using Kind = ModulePattern::Kind;
  if (absl::ConsumePrefix(&target, "re:")) return {Kind::kRegex, std::string(target)};
  if (target == "Linear") return {Kind::kEvery, ""};
  if (target == "Embedding") return {Kind::kRegex, "(.*\\.)?([^.]*embed[^.]*|wte|wpe)$"};
  return {Kind::kPath, std::string(target)};
}

// The most particular targets first: one rule for all paths of a group, of which there may be one
// for each linear, and one for each run of other targets of a group.
absl::StatusOr<std::vector<LinearRule>> MakeRules(const std::vector<Group>& groups) {
  std::map<std::string, size_t> group_of;  // by target
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const std::string& target : groups[i].targets) group_of[target] = i;
    // Its targets are not known, so it may be the group of any linear that no other has.
    if (groups[i].targets.empty()) group_of.emplace("Linear", i);
  }
  std::vector<LinearRule> out;
  using Kind = ModulePattern::Kind;
  for (const Kind kind : {Kind::kPath, Kind::kRegex, Kind::kEvery}) {
    std::map<size_t, size_t> rule_of;  // by group
    for (const auto& [target, group] : group_of) {
      ModulePattern pattern = Pattern(target);
      if (pattern.kind != kind) continue;
      if (kind != Kind::kPath && !rule_of.contains(group)) rule_of.clear();
      const auto [rule, fresh] = rule_of.emplace(group, out.size());
      if (fresh) {
        out.push_back({{}, groups[group].settings, groups[group].format, groups[group].unread});
      }
      out[rule->second].targets.push_back(std::move(pattern));
      AWQD_RETURN_IF_ERROR(CheckRules(out.size()));
    }
  }
  return out;
}

// --- What is besides ---

// The transform of activations that a group of transforms is: its hadamard_size.
absl::StatusOr<Setting> ReadTransform(const Setting& group) {
  AWQD_ASSIGN_OR_RETURN(const std::string type, ReadWord(group, "type"));
  if (type != "hadamard") return UnreadSetting("type", Quoted(type, 64), "\"hadamard\"");
  AWQD_ASSIGN_OR_RETURN(const auto randomize, ReadBool(group, "randomize"));
  if (randomize.value_or(false)) return UnreadSetting("randomize", "true", "false");
  AWQD_ASSIGN_OR_RETURN(const auto size, ReadInteger(group, "head_dim", 1, INT32_MAX));
  if (size && (*size < 2 || *size > Hadamard::kMostRows || (*size & (*size - 1)) != 0)) {
    return UnreadSetting("head_dim", absl::StrCat(*size),
                         absl::StrCat("a power of two from 2 to ", Hadamard::kMostRows));
  }
  Setting out;
  out.members[std::string(kHadamardSize)] = Setting::Literal(size.value_or(-1));
  return out;
}

// Transforms of weights are in their tensors. Those of inputs become additions; those of outputs
// are not read, so neither are the linears that have one.
absl::Status ReadTransforms(const Setting& config, std::vector<QuantConfig::Addition>* out) {
  AWQD_ASSIGN_OR_RETURN(const Setting* transforms, ReadObject(config, "transform_config"));
  if (transforms == nullptr) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const Setting* groups, ReadObject(*transforms, "config_groups"));
  if (groups == nullptr) return absl::OkStatus();
  for (const auto& [name, group] : groups->members) {
    const Setting* const apply = FindSetting(group, "apply");
    if (apply == nullptr) continue;
    for (const Setting& one : apply->list) {
      AWQD_ASSIGN_OR_RETURN(const std::string location, ReadWord(one, "location"));
      if (location != "input" && location != "output") continue;
      QuantConfig::Addition& addition = out->emplace_back();
      LinearRule& rule = addition.rule;
      absl::StatusOr<Setting> settings =
          location == "input" ? ReadTransform(group)
                              : UnreadSetting("location", "\"output\"", "\"input\", or of weights");
      if (settings.ok()) {
        rule.settings = *std::move(settings);
      } else {
        rule.unread =
            Beneath(absl::StrCat("transform_config.", GroupNamed(name)), settings.status());
      }
      AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> targets, ReadStrings(one, "targets"));
      for (const std::string& target : targets) {
        rule.targets.push_back(Pattern(target));
        if (rule.targets.back().kind == ModulePattern::Kind::kEvery && !rule.unread.ok()) {
          return rule.unread;
        }
      }
      if (targets.empty()) return BadValue("targets", "nothing", "at least one");
      AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> ignored, ReadStrings(one, "ignore"));
      for (const std::string& target : ignored) addition.left_out.push_back(Pattern(target));
      AWQD_RETURN_IF_ERROR(CheckRules(out->size()));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBesides(const Setting& config, std::string* note) {
  AWQD_ASSIGN_OR_RETURN(const Setting* sparsity, ReadObject(config, "sparsity_config"));
  if (sparsity != nullptr) {
    AWQD_ASSIGN_OR_RETURN(const std::string format, ReadWord(*sparsity, "format"));
    if (!format.empty() && format != "dense") {
      return UnreadSetting("sparsity_config.format", Quoted(format, 64), "\"dense\"");
    }
  }
  if (FindSetting(config, "kv_cache_scheme") != nullptr) {
    AddNoteOnce("kv_cache_scheme has no effect: no cache of keys and values is kept here", note);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckWeightType(const Setting& weights, absl::string_view type) {
  AWQD_ASSIGN_OR_RETURN(const std::string got, ReadWord(weights, "type"));
  if (got != type && !(got.empty() && type == "int")) {
    return UnreadSetting("type", Quoted(got, 64), Quoted(type, 64));
  }
  AWQD_ASSIGN_OR_RETURN(const auto dynamic, ReadBool(weights, "dynamic"));
  if (dynamic.value_or(false)) return UnreadSetting("dynamic", "true", "false");
  return absl::OkStatus();
}

absl::StatusOr<QuantConfig> ReadCompressedTensors(const Setting& config, const Format& self) {
  AWQD_ASSIGN_OR_RETURN(const Setting* groups, ReadObject(config, "config_groups"));
  if (groups == nullptr || MembersInOrder(*groups).empty()) {
    return BadValue("config_groups", "nothing", "at least one group");
  }
  QuantConfig out;
  AWQD_ASSIGN_OR_RETURN(const std::vector<Group> read, ReadGroups(*groups, config, &out.note));
  AWQD_RETURN_IF_ERROR(CheckBesides(config, &out.note));
  const auto first =
      absl::c_find_if(read, [](const Group& group) { return group.format != nullptr; });
  if (first == read.end()) return read.front().unread;
  if (first->format != &self) {
    return UnreadSetting("format", Quoted(first->format->name), Quoted(self.name));
  }
  AWQD_RETURN_IF_ERROR(ReadTransforms(config, &out.additions));
  AWQD_ASSIGN_OR_RETURN(out.rules, MakeRules(read));
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> ignored, ReadStrings(config, "ignore"));
  for (const std::string& target : ignored) out.left_out.push_back(Pattern(target));
  return out;
}

absl::StatusOr<std::optional<ScaleStrategy>> ReadStrategy(const Setting& object) {
  return ReadChoice<ScaleStrategy>(object, "strategy",
                                   {{"channel", ScaleStrategy::kChannel},
                                    {"group", ScaleStrategy::kGroup},
                                    {"tensor", ScaleStrategy::kTensor}});
}

absl::StatusOr<ActivationQuantization> ReadDeclaredActivations(const Setting& object) {
  using How = ActivationQuantization;
  AWQD_ASSIGN_OR_RETURN(const auto how, ReadChoice<How>(object, "activations",
                                                        {{"dynamic", How::kPerToken},
                                                         {"static", How::kStatic},
                                                         {"fp8_dynamic", How::kFloat8PerToken},
                                                         {"fp8_blocks", How::kFloat8PerBlock},
                                                         {"fp8_static", How::kFloat8Static}}));
  return how.value_or(How::kNone);
}

absl::StatusOr<DeclaredActivations> DecodeActivations(ActivationQuantization how,
                                                      const LinearTensors& tensors) {
  DeclaredActivations out = {.how = how};
  if (!HasGivenScales(how)) return out;
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, "input_scale", "F16, BF16 or F32 [1]"));
  const size_t rank = IsFloat8(how) ? scale->shape.size() : 1;
  AWQD_RETURN_IF_ERROR(CheckScales("input_scale", *scale, rank, true).status());
  if (rank > 0) {
    AWQD_RETURN_IF_ERROR(CheckShape("input_scale", *scale, {1}, "one for all activations"));
  }
  AWQD_ASSIGN_OR_RETURN(const std::vector<float> values, ToFloats("input_scale", *scale));
  out.scale = values[0];
  if (!(out.scale > 0)) {
    return BadTensor("input_scale", absl::StrCat(out.scale), "a positive number");
  }
  const TensorView* const zero = FindTensor(tensors, "input_zero_point");
  if (zero == nullptr) return out;
  if (IsFloat8(how)) {
    AWQD_RETURN_IF_ERROR(
        CheckTensor("input_zero_point", *zero, {"F8_E4M3", "I8", "U8"}, zero->shape.size()));
  } else {
    AWQD_RETURN_IF_ERROR(CheckTensor("input_zero_point", *zero, {"I8"}, 1));
  }
  if (absl::c_all_of(zero->bytes, [](uint8_t byte) { return byte == 0; })) return out;
  return BadTensor("input_zero_point", "another value than 0", "0: activations are about 0");
}

absl::Status DecodeIntegerScales(ScaleStrategy strategy, int64_t group_size, int bits,
                                 const TensorView& scale, HostWeight* out) {
  const bool one = strategy == ScaleStrategy::kTensor;
  AWQD_ASSIGN_OR_RETURN(const DType type, CheckScales("weight_scale", scale, one ? 1 : 2, true));
  if (one) {
    AWQD_RETURN_IF_ERROR(CheckShape("weight_scale", scale, {1}, "strategy \"tensor\""));
    out->scheme = Symmetric(bits, 0, type);
    out->scheme.block_cols = 0;
    out->scales.assign(scale.bytes.begin(), scale.bytes.end());
    return absl::OkStatus();
  }
  const int64_t groups = scale.shape[1];
  const bool grouped = strategy == ScaleStrategy::kGroup;
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(grouped ? group_size : -1, out->k, groups, "weight_scale", true));
  AWQD_RETURN_IF_ERROR(
      CheckShape("weight_scale", scale, {out->n, groups}, grouped ? "[N, groups]" : "[N, 1]"));
  out->scheme = Symmetric(bits, BlockRows(rows, out->k), type);
  out->scales = Transposed(scale.bytes, out->n, groups, SizeOf(type));
  return absl::OkStatus();
}

absl::Status CheckNoZeroPoint(const LinearTensors& tensors, const TensorView& scale,
                              std::initializer_list<absl::string_view> dtypes,
                              absl::string_view why) {
  const TensorView* const zero = FindTensor(tensors, "weight_zero_point");
  if (zero == nullptr) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckTensor("weight_zero_point", *zero, dtypes, scale.shape.size()));
  if (zero->shape != scale.shape) {
    return BadTensor("weight_zero_point", absl::StrCat("shape ", ShapeText(zero->shape)),
                     absl::StrCat(ShapeText(scale.shape), ", as weight_scale"));
  }
  if (absl::c_all_of(zero->bytes, [](uint8_t byte) { return byte == 0; })) return absl::OkStatus();
  return BadTensor("weight_zero_point", "other values than 0", absl::StrCat("0: ", why));
}

absl::Status CheckFourBitFloats(const Setting& weights) {
  AWQD_RETURN_IF_ERROR(CheckWeightType(weights, "float"));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(weights, "num_bits", 1, 32));
  if (bits.value_or(8) != 4) return UnreadSetting("num_bits", absl::StrCat(bits.value_or(8)), "4");
  AWQD_ASSIGN_OR_RETURN(const auto symmetric, ReadBool(weights, "symmetric"));
  if (!symmetric.value_or(true)) return UnreadSetting("symmetric", "false", "true");
  return CheckWord(weights, "strategy", {"tensor_group", "group"});
}

absl::Status CheckGroupSize(const Setting& object, int64_t size) {
  AWQD_ASSIGN_OR_RETURN(const int64_t said, ReadGroupSize(object));
  if (said == 0 || said == size) return absl::OkStatus();
  return UnreadSetting("group_size", absl::StrCat(said), absl::StrCat(size));
}

}  // namespace awqd
