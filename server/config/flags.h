// The server's flags.
#pragma once

#include "CLI/CLI.hpp"
#include "server/config/options.h"

namespace awqd {

// Registers every flag with its group, help and environment variable. Parsing writes values, which
// are then in range, to `options`, which must outlive `app`.
void AddFlags(CLI::App* app, Options* options);

}  // namespace awqd
