// The fixture of Convert's tests: a folder for the output, and a check that refusals leave nothing
// behind.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "client/tools/convert.h"
#include "tests/client/tools/quiet.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::tools {

inline std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class ConvertFixture : public ::testing::Test {
 protected:
  ConvertOptions To(const Target& target, const std::string& from) const {
    return {.folder = from, .output = folder_.At("out"), .target = &target, .verify = true};
  }
  // The message of a conversion that fails and leaves no output.
  std::string Refusal(const ConvertOptions& options) const {
    const auto got = Convert(options, Quiet);
    EXPECT_FALSE(got.ok());
    EXPECT_FALSE(std::filesystem::exists(folder_.At("out")));
    EXPECT_FALSE(std::filesystem::exists(folder_.At("out.partial")));
    return std::string(got.status().message());
  }
  testing::TempDirectory folder_;
};

}  // namespace awqd::tools
