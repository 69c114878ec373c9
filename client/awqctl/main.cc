// awqctl: the command-line client of awqd.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/awqctl/commands.h"
#include "client/remove_on_signal.h"
#include "kernels/base/process_limits.h"

int main(int argc, char** argv) {
  awqd::OpenStandardDescriptors();
  awqd::client::RemoveFilesOnSignals();
  const char* const kind = std::getenv("TERM");
  const bool dumb = kind == nullptr || absl::string_view(kind) == "dumb";
  awqd::awqctl::Console console{.out = std::cout,
                                .err = std::cerr,
                                .terminal = isatty(STDERR_FILENO) == 1,
                                .out_terminal = isatty(STDOUT_FILENO) == 1 && !dumb};
  return awqd::awqctl::RunAwqctl(std::vector<std::string>(argv + 1, argv + argc), console);
}
