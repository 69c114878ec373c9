// Groups of linears to rules.
#include "kernels/formats/compressed_tensors/config.h"

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

namespace awqd {
namespace {

struct Member {
  const Format* format;
  absl::StatusOr<Setting> (*read)(const Setting& weights, const Setting& config);
  bool integers;  // which quantised activations can multiply
};
constexpr Member kMembers[] = {{&kIntQuantizedFormat, ReadIntQuantizedWeights, true},
                               {&kPackQuantizedFormat, ReadPackQuantizedWeights, true},
                               {&kFloatQuantizedFormat, ReadFloatQuantizedWeights, false},
                               {&kNvfp4PackQuantizedFormat, ReadNvfp4PackQuantizedWeights, false},
                               {&kMxfp4PackQuantizedFormat, ReadMxfp4PackQuantizedWeights, false}};

absl::Status InGroup(absl::string_view name, const absl::Status& status) {
  return absl::Status(
      status.code(),
      absl::StrCat("config_groups.", absl::CHexEscape(name.substr(0, 64)), ".", status.message()));
}

// Each once.
void AddNote(absl::string_view text, std::string* note) {
  if (absl::StrContains(*note, text)) return;
  absl::StrAppend(note, note->empty() ? "" : "; ", text);
}

// --- A group ---

// What a group, or else the checkpoint, calls its format. "naive-quantized" is one of two.
absl::StatusOr<std::string> ReadFormat(const Setting& group, const Setting& weights,
                                       const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(std::string name, ReadWord(group, "format"));
  if (name.empty()) {
    AWQD_ASSIGN_OR_RETURN(name, ReadWord(config, "format"));
  }
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

absl::Status ReadActivations(const Setting& group, const Member& member, Setting* settings,
                             std::string* note) {
  if (FindSetting(group, "output_activations") != nullptr) {
    AddNote("output_activations has no effect", note);
  }
  const Setting* const input = FindSetting(group, "input_activations");
  if (input == nullptr) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const std::string how, ReadInput(*input));
  if (how.empty()) {
    AddNote("input_activations has no effect: it is not symmetric int8, by tokens or of one scale",
            note);
  } else if (!member.integers) {
    AddNote("input_activations has no effect: weights are no integers", note);
  } else {
    settings->members["activations"] = Setting::String(how);
  }
  return absl::OkStatus();
}

struct Group {
  const Format* format = nullptr;  // null: it quantises no weights
  Setting settings;
  std::vector<std::string> targets;
};

// `first`: the format that it must have, or null for any.
absl::StatusOr<Group> ReadGroup(const Setting& group, const Setting& config, const Format* first,
                                std::string* note) {
  if (group.kind != Setting::Kind::kObject) return BadSetting("group", group, "an object");
  AWQD_ASSIGN_OR_RETURN(const Setting* weights, ReadObject(group, "weights"));
  if (weights == nullptr) return Group();
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadFormat(group, *weights, config));
  if (first != nullptr && name != first->name) {
    return UnreadSetting("format", Quoted(name, 64), Quoted(first->name, 64));
  }
  AWQD_ASSIGN_OR_RETURN(const Member* member, MemberNamed(name));
  Group out = {.format = member->format};
  AWQD_ASSIGN_OR_RETURN(out.targets, ReadStrings(group, "targets"));
  if (out.targets.empty()) return BadValue("targets", "nothing", "at least one");
  AWQD_ASSIGN_OR_RETURN(out.settings, member->read(*weights, config));
  AWQD_RETURN_IF_ERROR(ReadActivations(group, *member, &out.settings, note));
  return out;
}

absl::StatusOr<std::vector<Group>> ReadGroups(const Setting& groups, const Setting& config,
                                              const Format& self, std::string* note) {
  std::vector<Group> out;
  for (const auto& [name, group] : MembersInOrder(groups)) {
    absl::StatusOr<Group> read = ReadGroup(*group, config, out.empty() ? &self : nullptr, note);
    if (!read.ok()) return InGroup(name, read.status());
    if (read->format != nullptr) {
      out.push_back(*std::move(read));
      AWQD_RETURN_IF_ERROR(CheckRules(out.size()));
    } else {
      AddNote(absl::StrCat("config_groups.", absl::CHexEscape(name.substr(0, 64)),
                           " has no effect: it quantises no weights"),
              note);
    }
  }
  if (!out.empty()) return out;
  const absl::string_view name = MembersInOrder(groups).front().first;
  return InGroup(name, UnreadSetting("weights", "nothing", "their quantisation"));
}

// --- Targets ---

// A checkpoint names no classes. "Linear" is every linear, and what it leaves out shows in the
// tensors; other classes match no path, as their layers are not linears.
ModulePattern Pattern(absl::string_view target) {
  using Kind = ModulePattern::Kind;
  if (absl::ConsumePrefix(&target, "re:")) return {Kind::kRegex, std::string(target)};
  if (target == "Linear") return {Kind::kEvery, ""};
  return {Kind::kExact, std::string(target)};
}

// The most particular targets first: one rule for all paths of a group, of which there may be one
// for each linear, and one for each run of other targets of a group.
absl::StatusOr<std::vector<LinearRule>> MakeRules(const std::vector<Group>& groups) {
  std::map<std::string, size_t> group_of;  // by target
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const std::string& target : groups[i].targets) group_of[target] = i;
  }
  std::vector<LinearRule> out;
  using Kind = ModulePattern::Kind;
  for (const Kind kind : {Kind::kExact, Kind::kRegex, Kind::kEvery}) {
    std::map<size_t, size_t> rule_of;  // by group
    for (const auto& [target, group] : group_of) {
      ModulePattern pattern = Pattern(target);
      if (pattern.kind != kind) continue;
      if (kind != Kind::kExact && !rule_of.contains(group)) rule_of.clear();
      const auto [rule, fresh] = rule_of.emplace(group, out.size());
      if (fresh) out.push_back({{}, groups[group].settings, groups[group].format});
      out[rule->second].targets.push_back(std::move(pattern));
      AWQD_RETURN_IF_ERROR(CheckRules(out.size()));
    }
  }
  return out;
}

// --- What is besides ---

// Rotations of weights are in their tensors; those of activations would have to be done.
absl::Status CheckTransforms(const Setting& config) {
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
      return UnreadSetting("transform_config", absl::StrCat("a transform of each ", location),
                           "transforms of weights alone");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBesides(const Setting& config, std::string* note) {
  AWQD_RETURN_IF_ERROR(CheckTransforms(config));
  AWQD_ASSIGN_OR_RETURN(const Setting* sparsity, ReadObject(config, "sparsity_config"));
  if (sparsity != nullptr) {
    AWQD_ASSIGN_OR_RETURN(const std::string format, ReadWord(*sparsity, "format"));
    if (!format.empty() && format != "dense") {
      return UnreadSetting("sparsity_config.format", Quoted(format, 64), "\"dense\"");
    }
  }
  if (FindSetting(config, "kv_cache_scheme") != nullptr) {
    AddNote("kv_cache_scheme has no effect: no cache of keys and values is kept here", note);
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
  AWQD_ASSIGN_OR_RETURN(const std::vector<Group> read,
                        ReadGroups(*groups, config, self, &out.note));
  AWQD_RETURN_IF_ERROR(CheckBesides(config, &out.note));
  AWQD_ASSIGN_OR_RETURN(out.rules, MakeRules(read));
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> ignored, ReadStrings(config, "ignore"));
  for (const std::string& target : ignored) out.left_out.push_back(Pattern(target));
  return out;
}

}  // namespace awqd
