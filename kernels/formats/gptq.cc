// Format "gptq": what AutoGPTQ and GPTQModel write (gptq_linear.h says the tensors). Its settings
// `checkpoint_format` (else `format`) and `bits` tell how words and zero points are to be read:
//
//   gptq     2, 3, 4, 8 bits; qzeros holds z - 1, subtracted from whole words (3 bits: from fields)
//   gptq_v2  the same words; qzeros holds z
//   gptq_p   2 to 8 bits, of which 3, 5, 6 and 7 are bit planes; qzeros holds z
//
// `dynamic` is an object of regular expressions that the beginning of a path matches: "-:..." are
// linears that are not quantised, "+:..." and others have settings of their own, of which the first
// that matches counts.
// Facts: GPTQModel 7.7.0, quantization/config.py, utils/planar_packing.py, utils/model_dequant.py.
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gptq_linear.h"

namespace awqd {
namespace {

constexpr absl::string_view kSettings[] = {"bits", "checkpoint_format", "desc_act", "group_size",
                                           "sym"};
// What an entry of `dynamic` may change.
constexpr absl::string_view kOwn[] = {"bits", "desc_act", "group_size", "sym"};

// New writers have both names for the same.
absl::StatusOr<std::string> ReadCheckpointFormat(const Setting& object) {
  AWQD_ASSIGN_OR_RETURN(const std::string name, ReadWord(object, "checkpoint_format"));
  AWQD_ASSIGN_OR_RETURN(const std::string other, ReadWord(object, "format"));
  if (!name.empty() && !other.empty() && name != other) {
    return BadValue("format", Quoted(other, 64),
                    absl::StrCat("checkpoint_format's ", Quoted(name, 64)));
  }
  AWQD_ASSIGN_OR_RETURN(const auto marlin, ReadBool(object, "is_marlin_format"));
  if (marlin.value_or(false)) return std::string("marlin");
  if (name.empty() && other.empty()) return std::string("gptq");
  return name.empty() ? other : name;
}

absl::Status CheckBits(int64_t bits, bool planes) {
  if (bits >= 2 && bits <= 8 && (planes || bits <= 4 || bits == 8)) return absl::OkStatus();
  if (bits > 4 && bits < 8) {
    return UnreadSetting("bits", absl::StrCat(bits),
                         "2, 3, 4 or 8, or checkpoint_format \"gptq_p\"");
  }
  return UnreadSetting("bits", absl::StrCat(bits), planes ? "2 to 8" : "2, 3, 4 or 8");
}

// UNIMPLEMENTED for other formats and widths.
absl::StatusOr<GptqLinear> ReadSettings(const Setting& object) {
  GptqLinear out;
  AWQD_ASSIGN_OR_RETURN(const std::string format, ReadCheckpointFormat(object));
  AWQD_ASSIGN_OR_RETURN(const auto bits, ReadInteger(object, "bits", 1, 32));
  AWQD_ASSIGN_OR_RETURN(out.group_size, ReadGroupSize(object));
  AWQD_ASSIGN_OR_RETURN(out.sym, ReadBool(object, "sym"));
  AWQD_ASSIGN_OR_RETURN(out.desc_act, ReadBool(object, "desc_act"));
  if (format != "gptq" && format != "gptq_v2" && format != "gptq_p") {
    const absl::string_view why =
        format == "marlin" ? " (\"marlin\" stores codes in a kernel's order)" : "";
    return UnreadSetting("checkpoint_format", Quoted(format, 64),
                         absl::StrCat("\"gptq\", \"gptq_v2\" or \"gptq_p\"", why));
  }
  if (!bits) return BadValue("bits", "nothing", "2 to 8");
  const bool planes = format == "gptq_p";
  AWQD_RETURN_IF_ERROR(CheckBits(*bits, planes));
  out.bits = static_cast<int>(*bits);
  out.words = planes ? GptqWords::kPlanes : GptqWords::kDense;
  out.zeros_less_one = format == "gptq";
  return out;
}

// --- A checkpoint's settings ---

absl::Status InEntry(absl::string_view pattern, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("dynamic.", Quoted(pattern, 64), ".", status.message()));
}

absl::Status ReadDynamic(const Setting& dynamic, const Setting& all, QuantConfig* out) {
  for (const auto& [pattern, entry] : MembersInOrder(dynamic)) {
    absl::string_view regex = pattern;
    if (entry->kind != Setting::Kind::kObject) {
      return BadSetting(absl::StrCat("dynamic.", Quoted(pattern, 64)), *entry, "an object");
    }
    // These come first in whatever order the file has them: its writer's reader sorts them so.
    if (absl::ConsumePrefix(&regex, "-:")) {
      out->left_out.push_back({ModulePattern::Kind::kRegex, std::string(regex)});
      continue;
    }
    absl::ConsumePrefix(&regex, "+:");
    LinearRule rule = {.targets = {{ModulePattern::Kind::kRegex, std::string(regex)}},
                       .settings = OnlySettings(*entry, kOwn)};
    rule.settings.members.insert(all.members.begin(), all.members.end());
    const absl::Status status = ReadSettings(rule.settings).status();
    if (!status.ok()) return InEntry(pattern, status);
    out->rules.push_back(std::move(rule));
    AWQD_RETURN_IF_ERROR(CheckRules(out->rules.size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<QuantConfig> Read(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const GptqLinear settings, ReadSettings(config));
  AWQD_ASSIGN_OR_RETURN(const std::string format, ReadCheckpointFormat(config));
  AWQD_ASSIGN_OR_RETURN(const std::string words, ReadWord(config, "pack_dtype"));
  if (!words.empty() && words != "int32") {
    return UnreadSetting("pack_dtype", Quoted(words, 64), "\"int32\"");
  }
  if (settings.group_size == 0) {
    return BadValue("group_size", "nothing", "-1 (all of K) or at least 1");
  }
  Setting all = OnlySettings(config, kSettings);
  all.members["checkpoint_format"] = Setting::String(format);
  AWQD_ASSIGN_OR_RETURN(QuantConfig out, OneRule(config, all));
  AWQD_ASSIGN_OR_RETURN(const Setting* dynamic, ReadObject(config, "dynamic"));
  if (dynamic == nullptr) return out;
  const LinearRule last = std::move(out.rules[0]);
  out.rules.clear();
  AWQD_RETURN_IF_ERROR(ReadDynamic(*dynamic, all, &out));
  out.rules.push_back(last);
  return out;
}

absl::StatusOr<HostWeight> Decode(const Setting& object, const LinearTensors& tensors) {
  const absl::StatusOr<GptqLinear> settings = ReadSettings(object);
  if (!settings.ok()) return absl::InvalidArgumentError(settings.status().message());
  AWQD_ASSIGN_OR_RETURN(HostWeight out, DecodeGptqLinear(*settings, tensors));
  out.format = std::string(kGptqFormat.name);
  return out;
}

}  // namespace

const Format kGptqFormat = {.name = "gptq",
                            .quant_method = "gptq",
                            .suffixes = kGptqSuffixes,
                            .optional_suffixes = kGptqOptional,
                            .code_dtypes = kGptqCodeTypes,
                            .settings = kSettings,
                            .read = Read,
                            .decode = Decode};

}  // namespace awqd
