// The table of formats, in the order they are tried: the first that accepts wins.
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/formats/awq.h"
#include "kernels/formats/format.h"

namespace awqd {

absl::Span<const Format* const> AllFormats() {
  static const Format* const formats[] = {
      &kAwqFormat,
  };
  return formats;
}

absl::StatusOr<const Format*> FindFormat(const QuantConfig& config) {
  std::string tried;
  for (const Format* format : AllFormats()) {
    const std::string why = format->refuses(config);
    if (why.empty()) return format;
    absl::StrAppend(&tried, tried.empty() ? "" : "; ", format->name, ": ", why);
  }
  return absl::UnimplementedError(absl::StrCat(
      "quantization_config: got quant_method \"", absl::CHexEscape(config.quant_method),
      "\", version \"", absl::CHexEscape(config.version), "\", bits ", config.bits,
      ", expected a format that this server reads (", tried, ")"));
}

}  // namespace awqd
