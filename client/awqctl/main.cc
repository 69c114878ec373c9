// awqctl: the command-line client of awqd.
#include <unistd.h>

#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "client/awqctl/commands.h"
#include "client/remove_on_signal.h"

int main(int argc, char** argv) try {
  awqd::client::RemoveFilesOnSignals();
  awqd::awqctl::Console console{std::cout, std::cerr, isatty(STDERR_FILENO) == 1};
  return awqd::awqctl::RunAwqctl(std::vector<std::string>(argv + 1, argv + argc), console);
} catch (const std::exception& error) {
  // Memory that an answer asked for and the machine does not have.
  std::cerr << "awqctl: " << error.what() << "\n";
  return awqd::awqctl::kCallFailed;
}
