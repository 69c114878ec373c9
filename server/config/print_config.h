// What --print_config prints: the value of every flag, and where it came from.
#pragma once

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "server/config/config_file.h"

namespace awqd {

// A TOML file of every flag that a config file may have, group by group, each with a comment:
// default, file:line, environment, flag. Flags without a value are commented out. Read back it says
// the same. `args` and `file` (of `path`) are what `app` has parsed.
std::string PrintedConfig(const CLI::App& app, const std::vector<std::string>& args,
                          const std::vector<ConfigValue>& file, const std::string& path);

}  // namespace awqd
