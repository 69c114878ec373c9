// Fuzzes the parsers of config.json and of the side files, and the formats that read them.
#include <cstdint>

#include "kernels/checkpoint/linear_rules.h"
#include "kernels/checkpoint/quant_settings.h"
#include "tests/fuzz/require.h"

namespace {

using awqd::fuzz::Require;

bool IsInvalid(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInvalidArgument;
}

bool HasName(const awqd::Format& format, absl::string_view quant_method) {
  return format.quant_method == quant_method || format.other_quant_method == quant_method;
}

void CheckParsed(const awqd::Setting& settings) {
  const auto found = awqd::FindFormat(settings);
  if (!found.ok()) {
    Require(IsInvalid(found.status()) || absl::IsUnimplemented(found.status()));
    return;
  }
  Require(HasName(*found->format, found->quant_method));
  const auto rules = awqd::model::LinearRules::Make(found->config);
  Require(rules.ok() || IsInvalid(rules.status()));
  for (const awqd::LinearRule& rule : found->config.rules) {
    Require(HasName(*rule.format, found->quant_method));
    for (const auto& [name, value] : rule.settings.members) {
      bool known = false;
      for (absl::string_view setting : rule.format->settings) known |= setting == name;
      Require(known);
    }
    // A format can decode with the settings that it read: only the tensors are missing.
    Require(IsInvalid(rule.format->Decode(rule.settings, {}).status()));
  }
  for (const awqd::QuantConfig::Addition& addition : found->config.additions) {
    Require(addition.rule.unread.ok() != addition.rule.settings.members.empty());
  }
  if (!rules.ok()) return;
  Require(rules->RuleOf("model.layers.0.mlp.up_proj").ok());
  Require(rules->FindAdditions("model.layers.0.mlp.down_proj").ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto config = awqd::model::ParseConfigJson(text);
  if (config.ok() && config->has_value()) CheckParsed((*config)->settings);
  const auto side = awqd::model::ParseQuantConfigJson(text, "awq");
  if (side.ok()) CheckParsed(*side);
  Require(config.ok() || IsInvalid(config.status()));
  Require(side.ok() || IsInvalid(side.status()));
  return 0;
}
