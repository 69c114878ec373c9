// The file of --config, which is TOML with a value or a list of values for each flag: parses one,
// and prints the settings in effect as one.
#pragma once

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
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

// For --print_config: returns a TOML file with every flag that a config file may have, group by
// group, each with its source as a comment: default, file:line, environment or flag. Flags without
// a value are commented out. Reading the file gives the same values. `app` has parsed `args` and
// `file`, which is at `path`.
std::string PrintedConfig(const CLI::App& app, const std::vector<std::string>& args,
                          const std::vector<ConfigValue>& file, const std::string& path);

}  // namespace awqd
