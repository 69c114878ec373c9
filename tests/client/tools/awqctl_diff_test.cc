// awqctl diff: its table, its JSON, its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/client/tools/awqctl_command.h"
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

}  // namespace
}  // namespace awqd::awqctl
