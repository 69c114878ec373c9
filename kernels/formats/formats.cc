// The table of formats, in the order they are tried: the first that accepts wins.
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/format.h"

namespace awqd {

absl::Status CheckRules(size_t rules) {
  constexpr size_t kMaxRules = 10'000;
  if (rules <= kMaxRules) return absl::OkStatus();
  return BadValue("groups of linears", absl::StrCat("more than ", kMaxRules), "fewer");
}

absl::StatusOr<QuantConfig> OneRule(const Setting& config, Setting settings) {
  QuantConfig out;
  out.rules = {{.targets = {{}}, .settings = std::move(settings)}};
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> modules,
                        ReadStrings(config, "modules_to_not_convert"));
  for (const std::string& module : modules) {
    out.left_out.push_back({ModulePattern::Kind::kContains, module});
  }
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
  };
  return formats;
}

const Format* FormatNamed(absl::string_view name) {
  for (const Format* format : AllFormats()) {
    if (format->name == name) return format;
  }
  return nullptr;
}

absl::StatusOr<FoundFormat> FindFormat(const Setting& config) {
  AWQD_ASSIGN_OR_RETURN(const std::string method, ReadWord(config, "quant_method"));
  if (method.empty()) {
    return BadValue("quant_method", "nothing", "for example \"awq\"");
  }
  std::string missed;
  for (const Format* format : AllFormats()) {
    absl::StrAppend(&missed, missed.empty() ? "" : "; ", format->name, ": ");
    if (format->quant_method != method && format->other_quant_method != method) {
      absl::StrAppend(&missed, "quant_method is not \"", format->quant_method, "\"");
      if (!format->other_quant_method.empty()) {
        absl::StrAppend(&missed, " or \"", format->other_quant_method, "\"");
      }
      continue;
    }
    absl::StatusOr<QuantConfig> read = format->read(config);
    if (read.ok()) {
      for (LinearRule& rule : read->rules) {
        if (rule.format == nullptr) rule.format = format;
      }
      return FoundFormat{format, method, *std::move(read)};
    }
    if (!absl::IsUnimplemented(read.status())) return read.status();
    absl::StrAppend(&missed, read.status().message());
  }
  return absl::UnimplementedError(absl::StrCat("got quant_method \"", absl::CHexEscape(method),
                                               "\", expected a format that this server reads (",
                                               missed, ")"));
}

}  // namespace awqd
