// awqctl diff: its table, its JSON, its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "client/tools/diff.h"
#include "tests/client/awqctl_command.h"
#include "tests/client/tools/dense_model.h"
#include "tests/testing/places.h"

namespace awqd::awqctl {
namespace {

using ::testing::HasSubstr;

TEST(AwqctlDiff, OfTwoFormatsOfDifferentModels) {
  const std::string a = DataPath("gptq/v1"), b = DataPath("gptq/v1-w8-columns");
  CommandResult got = RunCommand({"diff", a, a});
  EXPECT_EQ(got.code, kOk) << got.err;
  EXPECT_THAT(got.out, HasSubstr("RELATIVE"));
  got = RunCommand({"--json", "diff", a, b, "--worst", "1"});
  EXPECT_EQ(got.code, kDiffers);
  EXPECT_EQ(nlohmann::json::parse(got.out).at("same"), false);
  EXPECT_THAT(got.err, HasSubstr("differs from"));
  EXPECT_EQ(RunCommand({"diff", a, "/absent"}).code, kFileFailed);
  EXPECT_EQ(RunCommand({"diff", a, b, "--worst", "-1"}).code, kBadArguments);
}

TEST(AwqctlDiff, SumsUp) {
  const awqd::testing::TempDirectory folder;
  awqd::testing::WriteDenseModel(folder, "dense");
  ASSERT_EQ(
      RunCommand({"quantize", folder.At("dense"), "-o", folder.At("out"), "--group_size", "32"})
          .code,
      kOk);
  const std::string text = RunCommand({"diff", folder.At("out"), folder.At("dense")}).out;
  // 64 x 128, 128 x 64, 64 x 128 and 64 x 96.
  EXPECT_THAT(text, ::testing::ContainsRegex("\nall\n +0[.]0[0-9]+ +0[.][0-9]+ +[0-9]+ of 30720 "));
  EXPECT_THAT(text, HasSubstr("\nw4g32z: 4-bit codes, "));
  tools::SquaredNorms norms;
  norms.Add({.difference = 9, .b = 25});
  norms.Add({.difference = 7, .b = 39});
  EXPECT_DOUBLE_EQ(norms.relative(), 0.5);
}

}  // namespace
}  // namespace awqd::awqctl
