// Fuzzes the parsers of config.json and of the side files.
#include <cstdint>
#include <cstdlib>

#include "server/model/quant_config.h"

namespace {

// What a caller may rely on after OK.
void Require(bool holds) {
  if (!holds) std::abort();
}

void CheckAccepted(const awqd::QuantConfig& config) {
  Require(!config.quant_method.empty());
  if (config.quant_method != "awq") return;
  Require(config.bits >= 1 && config.bits <= 32);
  Require(config.group_size == -1 || config.group_size >= 1);
  for (const std::string& module : config.modules_to_not_convert) Require(!module.empty());
  Require(!awqd::model::IsNotConverted(config, ""));
  const bool found = awqd::FindFormat(config).ok();
  Require(!found || config.bits == 4);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto config = awqd::model::ParseConfigJson(text);
  if (config.ok() && config->has_value()) CheckAccepted(**config);
  const auto side = awqd::model::ParseQuantConfigJson(text, "awq");
  if (side.ok()) CheckAccepted(*side);
  Require(config.ok() || config.status().code() == absl::StatusCode::kInvalidArgument);
  Require(side.ok() || side.status().code() == absl::StatusCode::kInvalidArgument);
  return 0;
}
