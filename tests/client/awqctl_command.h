// Runs awqctl's commands in the test's own process, with files in a folder of the test.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "client/awqctl/commands.h"
#include "client/files/npy.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::awqctl {

struct CommandResult {
  int code = -1;
  std::string out, err;
};

// `terminal`: whether both streams are taken for one.
inline CommandResult RunCommand(const std::vector<std::string>& args, bool terminal = false) {
  std::ostringstream out, err;
  Console console{.out = out, .err = err, .terminal = terminal, .out_terminal = terminal};
  CommandResult result;
  result.code = RunAwqctl(args, console);
  result.out = out.str();
  result.err = err.str();
  return result;
}

class AwqctlFixture : public ::testing::Test {
 protected:
  // Runs awqctl; out_ and err_ have its output.
  int RunAlone(const std::vector<std::string>& args) {
    const CommandResult result = RunCommand(args, terminal_);
    out_ = result.out;
    err_ = result.err;
    return result.code;
  }

  std::string Path(const std::string& name) const { return directory_.At(name); }
  // Writes a .npy file of one dimension; its path.
  template <typename T>
  std::string Npy(const std::string& name, client::NpyType type,
                  const std::vector<T>& values) const {
    std::ofstream(Path(name), std::ios::binary)
        << client::MakeNpyHeader(type, {static_cast<int64_t>(values.size())})
        << std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    return Path(name);
  }
  std::string Floats(const std::string& name, const std::vector<float>& values) const {
    return Npy(name, client::NpyType::kF4, values);
  }
  std::string Doubles(const std::string& name, const std::vector<double>& values) const {
    return Npy(name, client::NpyType::kF8, values);
  }

  const testing::TempDirectory directory_;
  bool terminal_ = false;
  std::string out_, err_;
};

}  // namespace awqd::awqctl
