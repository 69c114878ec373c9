// Fuzzes the file of --config: from TOML to the words of a command line.
#include <cstdint>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "server/config/config_file.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using awqd::fuzz::Require;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto values = awqd::ParseConfigText(text, "awqd.toml");
  if (!values.ok()) {
    Require(absl::IsInvalidArgument(values.status()));
    Require(absl::StartsWith(values.status().message(), "awqd.toml:"));
    return 0;
  }
  const int64_t lines = absl::c_count(text, '\n') + 1;
  for (const awqd::ConfigValue& value : *values) {
    Require(value.line >= 1 && value.line <= lines);
    Require(static_cast<int64_t>(value.flag.size()) <= static_cast<int64_t>(size));
  }
  return 0;
}
