// Format "auto-round": what AutoRound writes under its own name. `packing_format` tells how:
//
//   auto_round:auto_gptq (also auto_round:gptq, auto)  GPTQ's tensors, qzeros holds z - 1
//   auto_round, auto_round:gptqmodel                   GPTQ's tensors, qzeros holds z
//   auto_round:auto_awq (also auto_round:awq)          AutoAWQ's tensors, 4 bits
//
// gptq.h says GPTQ's tensors; 2 to 8 bits, dense words. `extra_config` has settings of
// linears, by their paths or by regular expressions that are searched for in them, and those of 16
// bits are not quantised. Which linears are quantised shows in their tensors besides, so that
// `block_name_to_quantize`, whose names may be those of another class of the model, has no effect.
// Facts: auto-round 0.16.1, export/export_to_autoround, inference/convert_model.py,
// auto_round_extension/torch.
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/awq/awq.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gptq/gptq.h"

namespace awqd {
namespace {

constexpr absl::string_view kSettings[] = {"bits", "group_size", "packing_format", "sym"};

enum class Packing { kGptqLessOne, kGptq, kAwq };

absl::StatusOr<Packing> ReadPacking(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string packing, ReadWord(object, "packing_format"));
  if (packing.empty() || packing == "auto") return Packing::kGptqLessOne;
  if (packing == "auto_round:auto_gptq" || packing == "auto_round:gptq") {
    return Packing::kGptqLessOne;
  }
  if (packing == "auto_round" || packing == "auto_round:gptqmodel") return Packing::kGptq;
  if (packing == "auto_round:auto_awq" || packing == "auto_round:awq") return Packing::kAwq;
  const absl::string_view why = packing == "auto_round:llm_compressor"
                                    ? " (\"auto_round:llm_compressor\" holds FP4 and FP8 codes)"
                                    : "";
  return UnreadSetting(
      "packing_format", Quoted(packing, 64),
      absl::StrCat("\"auto_round:auto_gptq\", \"auto_round\", \"auto_round:gptqmodel\" or "
                   "\"auto_round:auto_awq\"",
                   why));
}

struct Settings {
  Packing packing = Packing::kGptqLessOne;
  GptqLinear linear;
};

// UNIMPLEMENTED for other packings and widths.
absl::StatusOr<Settings> ReadSettings(const Setting& object) {
  Settings out;
  GptqLinear& linear = out.linear;
  AWQD_ASSIGN_OR_RETURN(out.packing, ReadPacking(object));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(linear.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(linear.sym, ReadBool(object, "sym"));
  const bool awq = out.packing == Packing::kAwq;
  const absl::string_view expected = awq ? "4 in packing_format \"auto_round:auto_awq\"" : "2 to 8";
  if (!bits) return BadValue("bits", "nothing", expected);
  if (*bits < 2 || *bits > 8 || (awq && *bits != 4)) {
    return UnreadSetting("bits", absl::StrCat(*bits), expected);
  }
  linear.bits = static_cast<int>(*bits);
  linear.desc_act = false;
  linear.zeros_less_one = out.packing == Packing::kGptqLessOne;
  return out;
}

// --- A checkpoint's settings ---

// Checks that a config, or an entry of extra_config, has integer codes and unquantised activations.
absl::Status CheckTypes(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string type, ReadWord(object, "data_type"));
  if (!type.empty() && type != "int" && type != "int_sym" && type != "int_asym") {
    return UnreadSetting("data_type", Quoted(type, 64), "\"int\"");
  }
  AWQD_ASSIGN_OR_RETURN(const auto activations, ReadInteger(object, "act_bits", 1, 64));
  if (activations.value_or(16) < 16) {
    return UnreadSetting("act_bits", absl::StrCat(*activations), "16 (only weights quantised)");
  }
  return absl::OkStatus();
}

// Its reader takes what is no path of a linear for a regular expression. Paths have none of these.
bool IsRegex(absl::string_view name) { return name.find_first_of("*+?^$|()[]{}\\") != name.npos; }

ModulePattern Pattern(absl::string_view name) {
  if (!IsRegex(name)) return {ModulePattern::Kind::kPath, std::string(name)};
  return {ModulePattern::Kind::kRegex, absl::StrCat(".*(?:", name, ")")};
}

// One rule for all paths of the same settings, by KeyOf: there may be one for each linear.
using ByKey = std::map<std::string, LinearRule>;

std::string KeyOf(const Setting& settings) {
  std::string out;
  for (const auto& [name, value] : settings.members)
    absl::StrAppend(&out, name, "=", value.text, ";");
  return out;
}

absl::Status ReadEntry(absl::string_view name, const Setting& entry, const Setting& all,
                       ByKey* of_paths, QuantConfig* out) {
  // An expression without settings lets others have the linear.
  if (entry.members.empty() && IsRegex(name)) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(entry, "bits", 1, 64));
  LinearRule rule = {.targets = {Pattern(name)}, .settings = OnlySettings(entry, kSettings)};
  if (bits.value_or(0) >= 16) {
    // A path that has settings of its own is quantised even where such an expression matches it, so
    // an expression is a rule, whose Decode refuses a linear that is quantised after all.
    if (!IsRegex(name)) {
      out->left_out.push_back(rule.targets[0]);
    } else {
      out->rules.push_back(std::move(rule));
    }
    return absl::OkStatus();
  }
  AWQD_RETURN_IF_ERROR(CheckTypes(entry));
  rule.settings.members["packing_format"] = all.members.at("packing_format");
  rule.settings.members.insert(all.members.begin(), all.members.end());
  AWQD_RETURN_IF_ERROR(ReadSettings(rule.settings).status());
  if (IsRegex(name)) {
    out->rules.push_back(std::move(rule));
    return absl::OkStatus();
  }
  const auto [at, fresh] = of_paths->try_emplace(KeyOf(rule.settings), std::move(rule));
  if (!fresh) at->second.targets.push_back(std::move(rule.targets[0]));
  return absl::OkStatus();
}

// Paths before expressions, and those as they follow one another.
absl::Status ReadExtra(const Setting& extra, const Setting& all, QuantConfig* out) {
  ByKey of_paths;
  for (const bool regexes : {false, true}) {
    for (const auto& [name, entry] : MembersInOrder(extra)) {
      if (IsRegex(name) != regexes) continue;
      const std::string where = absl::StrCat("extra_config.", Quoted(name, 64));
      if (entry->kind != Setting::Kind::kObject) return BadSetting(where, *entry, "an object");
      const absl::Status status = ReadEntry(name, *entry, all, &of_paths, out);
      if (!status.ok()) {
        out->rules.push_back({.targets = {Pattern(name)}, .unread = Beneath(where, status)});
      }
      AWQD_RETURN_IF_ERROR(CheckRules(of_paths.size() + out->rules.size()));
    }
    for (auto& [key, rule] : of_paths) out->rules.push_back(std::move(rule));
    of_paths.clear();
  }
  return absl::OkStatus();
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_RETURN_IF_ERROR(CheckTypes(config));
  AWQD_RETURN_IF_ERROR(ReadSettings(config).status());
  Setting all = OnlySettings(config, kSettings);
  all.members.try_emplace("packing_format", Setting::String("auto_round:auto_gptq"));
  return ReadGptqRules(config, all, "extra_config", [&](const Setting& extra, QuantConfig* out) {
    return ReadExtra(extra, all, out);
  });
}

// --- Tensors ---

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(object));
  const GptqLinear& linear = settings.linear;
  if (settings.packing != Packing::kAwq) return DecodeGptqLinear(linear, tensors);
  return DecodeAwq({.bits = linear.bits, .group_size = linear.group_size}, {}, tensors);
}

std::string Remark(const Setting& object, const LinearTensors& tensors) {
  const absl::StatusOr<Settings> settings = ReadSettings(object);
  return !settings.ok() || settings->packing == Packing::kAwq
             ? ""
             : RemarkOnZeros(settings->linear, tensors);
}

}  // namespace

const Format kAutoRoundFormat = {.name = "auto-round",
                                 .quant_method = "auto-round",
                                 .suffixes = kGptqSuffixes,
                                 .optional_suffixes = kGptqOptional,
                                 .code_dtypes = kGptqCodeTypes,
                                 .settings = kSettings,
                                 .read = Read,
                                 .decode_parts = Decode,
                                 .remark = Remark};

}  // namespace awqd
