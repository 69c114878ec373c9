// The table of formats, in the order they are tried: the first that accepts wins.
#include <iterator>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/formats/format.h"
#include "kernels/formats/hadamard.h"
#include "kernels/formats/tensors.h"

namespace awqd {

ModulePattern WildcardPattern(absl::string_view text) {
  using Kind = ModulePattern::Kind;
  if (!absl::c_any_of(text, [](char c) { return c == '*' || c == '?'; })) {
    return {Kind::kPath, std::string(text)};
  }
  std::string regex;
  for (const char c : text) {
    if (c == '*') {
      regex += ".*";
    } else if (c == '?') {
      regex += '.';
    } else {
      if (absl::string_view("\\^$.|+()[]{}").find(c) != absl::string_view::npos) regex += '\\';
      regex += c;
    }
  }
  return {Kind::kRegex, regex + "$"};
}

absl::Status CheckRules(size_t rules) {
  constexpr size_t kMaxRules = 10'000;
  if (rules <= kMaxRules) return absl::OkStatus();
  return BadValue("groups of linears", absl::StrCat("more than ", kMaxRules), "fewer");
}

absl::StatusOr<QuantConfig> OneRule(const Setting& config, Setting settings,
                                    std::initializer_list<absl::string_view> left_out) {
  QuantConfig out;
  out.rules = {{.targets = {{}}, .settings = std::move(settings)}};
  for (absl::string_view list : left_out) {
    AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> modules, ReadStrings(config, list));
    for (const std::string& module : modules) {
      out.left_out.push_back({ModulePattern::Kind::kContains, module});
    }
  }
  return out;
}

absl::StatusOr<HostWeight> Format::Decode(const Setting& object,
                                          const LinearTensors& tensors) const {
  absl::StatusOr<HostWeight> out = decode_parts(object, tensors);
  if (!out.ok()) return absl::InvalidArgumentError(out.status().message());
  out->format = std::string(name);
  AWQD_RETURN_IF_ERROR(ReadHadamard(object, &*out));
  AWQD_ASSIGN_OR_RETURN(out->bias, DecodeBias(tensors, out->n));
  return out;
}

absl::Span<const Format* const> AllFormats() {
  static const Format* const formats[] = {
      &kAwqFormat,
      &kIntQuantizedFormat,
      &kPlainFormat,
      &kFasterTransformerFormat,
      &kGemliteFormat,
      &kFp8Format,
      &kModelOptFormat,
      &kMxfp4Format,
      &kBitsAndBytesFormat,
      &kBitsAndBytesInt8Format,
      &kHqqFormat,
      &kGptqFormat,
      &kAutoRoundFormat,
      &kPackQuantizedFormat,
      &kFloatQuantizedFormat,
      &kNvfp4PackQuantizedFormat,
      &kMxfp4PackQuantizedFormat,
      &kQServeFormat,
      &kAwqGemvFormat,
      &kAwqGemvFastFormat,
      &kAwqMarlinFormat,
      &kGptqMarlinFormat,
      &kGgufFormat,
      &kQuarkFormat,
      &kMlxFormat,
      &kFpQuantFormat,
      &kComfyFormat,
      &kBlockwiseInt8Format,
      &kTorchAoFormat,
      &kQuantoFormat,
      &kQuantoPackedFormat,
      &kExl3Format,
  };
  return formats;
}

const Format* FormatNamed(absl::string_view name) {
  for (const Format* format : AllFormats()) {
    if (format->name == name) return format;
  }
  return nullptr;
}

namespace {

// A quant_method that is known and not read, and the name of its writer.
struct Family {
  absl::string_view quant_method, name;
};
constexpr Family kUnreadFamilies[] = {
    {"aqlm", "AQLM"},      {"vptq", "Microsoft's VPTQ"},
    {"eetq", "EETQ"},      {"higgs", "HIGGS"},
    {"spqr", "SpQR"},      {"quip", "QuIP#"},
    {"exl2", "ExLlamaV2"}, {"bitnet", "Microsoft's BitNet"},
    {"sinq", "SINQ"},      {"intel/auto-round", "AutoRound of before 0.3"}};

bool HasMethod(const Format& format, absl::string_view method) {
  return format.quant_method == method || format.other_quant_method == method;
}

absl::Status UnreadMethod(absl::string_view method) {
  std::vector<absl::string_view> methods;
  for (const Format* format : AllFormats()) {
    if (!absl::c_linear_search(methods, format->quant_method)) {
      methods.push_back(format->quant_method);
    }
  }
  const auto* const family =
      absl::c_find_if(kUnreadFamilies, [&](const Family& f) { return f.quant_method == method; });
  return absl::UnimplementedError(
      absl::StrCat("got quant_method \"", absl::CHexEscape(method), "\"",
                   family == std::end(kUnreadFamilies) ? "" : absl::StrCat(" (", family->name, ")"),
                   ", which is not read, expected one of ", absl::StrJoin(methods, ", ")));
}

// Whether a format refused the settings for the name of another format or version, rather than for
// something that it might have read.
bool NamesAnother(absl::string_view reason) {
  for (absl::string_view name : {"version", "format", "checkpoint_format", "load_in_"}) {
    if (absl::StartsWith(reason, name)) return true;
  }
  return false;
}

// The reason of a format that does not read the settings.
struct Refusal {
  const Format* format = nullptr;  // null: several have it
  std::string reason;
};

// The first rule's reason where no rule can be read.
absl::Status CheckSomeRead(const QuantConfig& config) {
  if (config.rules.empty()) return absl::OkStatus();
  for (const LinearRule& rule : config.rules) {
    if (rule.unread.ok()) return absl::OkStatus();
  }
  return config.rules.front().unread;
}

}  // namespace

absl::StatusOr<FoundFormat> FindFormat(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(std::string method, ReadWord(config, "quant_method"));
  if (method.empty()) {
    if (FindSetting(config, "group_size") == nullptr || FindSetting(config, "bits") == nullptr) {
      return BadValue("quant_method", "nothing", "for example \"awq\"");
    }
    method = std::string(kMlxFormat.quant_method);  // which names none
  }
  std::vector<Refusal> near, far;
  for (const Format* format : AllFormats()) {
    if (!HasMethod(*format, method)) continue;
    absl::StatusOr<QuantConfig> read = format->read(config);
    if (read.ok()) {
      if (const absl::Status some = CheckSomeRead(*read); !some.ok()) read = some;
    }
    if (read.ok()) {
      for (LinearRule& rule : read->rules) {
        if (rule.format == nullptr) rule.format = format;
      }
      return FoundFormat{format, method, *std::move(read)};
    }
    if (!absl::IsUnimplemented(read.status())) return read.status();
    const std::string reason(read.status().message());
    std::vector<Refusal>& refusals = NamesAnother(reason) ? far : near;
    const auto same =
        absl::c_find_if(refusals, [&](const Refusal& other) { return other.reason == reason; });
    if (same == refusals.end()) {
      refusals.push_back({format, reason});
    } else {
      same->format = nullptr;
    }
  }
  absl::c_move(far, std::back_inserter(near));
  if (near.empty()) return UnreadMethod(method);
  const auto append = [](std::string* out, const Refusal& refusal) {
    if (refusal.format != nullptr) absl::StrAppend(out, refusal.format->name, ": ");
    absl::StrAppend(out, refusal.reason);
  };
  return absl::UnimplementedError(absl::StrCat(
      absl::StrJoin(near, "; ", append), " (quant_method \"", absl::CHexEscape(method), "\")"));
}

}  // namespace awqd
