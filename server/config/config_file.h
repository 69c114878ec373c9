// The file of --config: TOML, a value or a list of values for each flag.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd {

struct ConfigValue {
  std::string flag;                 // without its dashes
  std::vector<std::string> values;  // as they would stand on a command line
  int line = 0;                     // of the file, from 1 on
};

// INVALID_ARGUMENT "<path>:<line>: ..." for what is no TOML, for tables, and for values that are
// neither texts, numbers, true or false, nor lists of those.
absl::StatusOr<std::vector<ConfigValue>> ParseConfigText(absl::string_view text,
                                                         absl::string_view path);

}  // namespace awqd
