// Prints the value of every flag and its source, for --print_config.
#pragma once

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "server/config/config_file.h"

namespace awqd {

// Returns a TOML file with every flag that a config file may have, group by group, each with its
// source as a comment: default, file:line, environment or flag. Flags without a value are commented
// out. Reading the file gives the same values. `app` has parsed `args` and `file`, which is at
// `path`.
std::string PrintedConfig(const CLI::App& app, const std::vector<std::string>& args,
                          const std::vector<ConfigValue>& file, const std::string& path);

}  // namespace awqd
