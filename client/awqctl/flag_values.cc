// Bounds and words.
#include "client/awqctl/flag_values.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace awqd::awqctl {
CLI::Validator NumberFrom(double min, double max) {
  const auto check = [min, max](const std::string& text) -> std::string {
    double value = 0;
    if (absl::SimpleAtod(text, &value) && value >= min && value <= max) return "";
    return absl::StrCat("got '", text, "', expected a number from ", min, " to ", max);
  };
  return CLI::Validator(check, absl::StrCat("FLOAT in [", min, " - ", max, "]"));
}

std::string OneOf(const std::vector<std::string>& words) {
  if (words.size() < 2) return absl::StrJoin(words, "");
  return absl::StrCat(absl::StrJoin(words.begin(), words.end() - 1, ", "), " or ", words.back());
}

CLI::Option* AddDType(CLI::App* app, const std::string& flag, v1::DType& target,
                      const std::string& help) {
  const Words<v1::DType> words = {{"fp16", v1::FP16}, {"bf16", v1::BF16}, {"fp32", v1::FP32}};
  return AddWord(app, flag, target, words, help)->type_name("DTYPE");
}

CLI::Option* AddPath(CLI::App* app, v1::Path& target) {
  const Words<v1::Path> words = {
      {"auto", v1::AUTO}, {"fused", v1::FUSED}, {"dequantize", v1::DEQUANTIZE}};
  return AddWord(app, "--path", target, words, "auto (default), fused or dequantize")
      ->type_name("PATH");
}

}  // namespace awqd::awqctl
