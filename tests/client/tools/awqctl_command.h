// Runs awqctl's commands in the test's own process.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "client/awqctl/commands.h"

namespace awqd::awqctl {

struct CommandResult {
  int code = -1;
  std::string out, err;
};

inline CommandResult RunCommand(const std::vector<std::string>& args, bool terminal = false) {
  std::ostringstream out, err;
  Console console{out, err, terminal};
  CommandResult result;
  result.code = RunAwqctl(args, console);
  result.out = out.str();
  result.err = err.str();
  return result;
}

}  // namespace awqd::awqctl
