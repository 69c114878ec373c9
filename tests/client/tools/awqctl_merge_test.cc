// awqctl merge: its output and exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "client/awqctl/commands.h"
#include "tests/client/awqctl_command.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::awqctl {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(AwqctlMerge, MergesAndSaysWhatRoundingLost) {
  const awqd::testing::TempDirectory folder;
  const std::string base = DataPath("lora/base"), adapter = DataPath("lora/plain");
  CommandResult got =
      RunCommand({"merge", base, adapter, "-o", folder.At("bf16"), "--dtype", "bf16"});
  EXPECT_EQ(got.code, kOk) << got.err;
  EXPECT_THAT(got.out, AllOf(HasSubstr("net.up"), HasSubstr("BF16"),
                             HasSubstr("2 modules merged in FP32, 1 tensors replaced")));
  got = RunCommand({"--json", "merge", base, adapter, "-o", folder.At("merged.gguf"), "--to",
                    "gguf", "--dtype", "fp16"});
  EXPECT_EQ(got.code, kOk) << got.err;
  const auto json = nlohmann::json::parse(got.out);
  EXPECT_EQ(json.at("modules"), 2);
  EXPECT_GT(json.at("linears").at(0).at("relative_error"), 0);
  EXPECT_TRUE(fs::is_regular_file(folder.At("merged.gguf")));
}

TEST(AwqctlMerge, Refuses) {
  const awqd::testing::TempDirectory folder;
  const std::string base = DataPath("lora/base"), out = folder.At("out");
  EXPECT_EQ(RunCommand({"merge", base, "-o", out}).code, kBadArguments);
  const std::string adapter = DataPath("lora/plain");
  CommandResult got = RunCommand({"merge", base, adapter, "-o", out, "--dtype", "q8_0"});
  EXPECT_EQ(got.code, kBadArguments);
  EXPECT_THAT(got.err, HasSubstr("dtype: got Q8_0"));
  got = RunCommand({"merge", base, adapter, "-o", out, "--to", "awq", "--bits", "3"});
  EXPECT_EQ(got.code, kBadArguments);
  EXPECT_THAT(got.err, HasSubstr("bits: got 3"));
  got = RunCommand({"merge", adapter, base, "-o", out});
  EXPECT_EQ(got.code, kFileFailed);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace
}  // namespace awqd::awqctl
