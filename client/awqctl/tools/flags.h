// The command lines of the commands that look into model folders and need no server.
#pragma once

#include "CLI/CLI.hpp"
#include "client/awqctl/flags.h"

namespace awqd::awqctl {

// inspect, diff, quantize and convert. `app` must not outlive `flags`.
void AddToolCommands(CLI::App* app, Flags& flags);

}  // namespace awqd::awqctl
