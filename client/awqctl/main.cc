// awqctl: the command-line client of awqd.
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "client/awqctl/commands.h"
#include "client/files/tensor_file.h"

int main(int argc, char** argv) {
  awqd::client::RemovePartialFilesOnSignals();
  awqd::awqctl::Console console{std::cout, std::cerr, isatty(STDERR_FILENO) == 1};
  return awqd::awqctl::RunAwqctl(std::vector<std::string>(argv + 1, argv + argc), console);
}
