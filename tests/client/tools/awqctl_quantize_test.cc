// awqctl quantize: its output, its JSON, its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/client/awqctl_command.h"
#include "tests/client/tools/dense_model.h"

namespace awqd::awqctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(AwqctlQuantize, ThenInspectAndDiff) {
  const awqd::testing::TempDirectory folder;
  awqd::testing::WriteDenseModel(folder, "dense");
  CommandResult got = RunCommand({"quantize", folder.At("dense"), "-o", folder.At("out"),
                                  "--group_size", "32", "--search", "--to", "awq"});
  EXPECT_EQ(got.code, kOk) << got.err;
  EXPECT_THAT(
      got.out,
      AllOf(HasSubstr("RELATIVE ERROR"), HasSubstr("w4g32z"), HasSubstr("\nall "),
            HasSubstr("\nw4g32z: 4-bit codes, "), HasSubstr("stays dense: l.1.gate: a router"),
            HasSubstr("not copied: pytorch_model.bin"), HasSubstr("copied: 4 tensors")));
  got = RunCommand({"--json", "quantize", folder.At("dense"), "-o", folder.At("ft"), "--to", "ft",
                    "--group_size", "64"});
  EXPECT_EQ(got.code, kOk) << got.err;
  EXPECT_EQ(nlohmann::json::parse(got.out).at("linears").at(0).at("description"), "w4g64s");
  EXPECT_EQ(RunCommand({"inspect", folder.At("out")}).code, kOk);
  EXPECT_EQ(RunCommand({"diff", folder.At("out"), folder.At("dense")}).code, kDiffers);
}

TEST(AwqctlQuantize, Refuses) {
  const awqd::testing::TempDirectory folder;
  awqd::testing::WriteDenseModel(folder, "dense");
  const std::string dense = folder.At("dense"), out = folder.At("out");
  EXPECT_EQ(RunCommand({"quantize", dense}).code, kBadArguments);
  EXPECT_EQ(RunCommand({"quantize", dense, "-o", out, "--bits", "9"}).code, kBadArguments);
  EXPECT_EQ(RunCommand({"quantize", dense, "-o", out, "--to", "dense"}).code, kBadArguments);
  CommandResult got = RunCommand({"quantize", dense, "-o", out, "--bits", "3", "--to", "awq"});
  EXPECT_EQ(got.code, kBadArguments);
  EXPECT_THAT(got.err, HasSubstr("bits: got 3, expected 4 (format awq)"));
  EXPECT_EQ(RunCommand({"quantize", dense, "-o", out, "--group_size", "0"}).code, kBadArguments);
  // Where nothing can be quantised, every reason is told.
  got = RunCommand({"quantize", dense, "-o", out, "--group_size", "100"});
  EXPECT_EQ(got.code, kFileFailed);
  EXPECT_THAT(
      got.err,
      AllOf(HasSubstr("got no linear to quantise"), HasSubstr("\"embed\" is left out (1 linear); "),
            HasSubstr("K = 128 is no multiple of the group size 100 (2 linears); "),
            HasSubstr("K = 96 is no multiple of the group size 100 (1 linear)")));
  EXPECT_FALSE(std::filesystem::exists(out));
  EXPECT_THAT(RunCommand({"quantize", dense, "-o", dense}).err, HasSubstr(dense + " exists"));
}

}  // namespace
}  // namespace awqd::awqctl
