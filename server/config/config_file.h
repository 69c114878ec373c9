// Parses the file of --config, which is TOML with a value or a list of values for each flag.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd {

struct ConfigValue {
  std::string flag;                 // without its dashes
  std::vector<std::string> values;  // as on a command line
  int line = 0;                     // in the file, from 1
};

// Returns the values in the order of keys. INVALID_ARGUMENT "<path>:<line>: ..." for text that is
// not TOML, for tables, and for values other than strings, numbers, true, false and lists of these.
absl::StatusOr<std::vector<ConfigValue>> ParseConfigText(absl::string_view text,
                                                         absl::string_view path);

}  // namespace awqd
