// awqctl inspect: its table, its JSON, its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "tests/client/awqctl_command.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::awqctl {
namespace {

namespace fs = std::filesystem;

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(AwqctlInspect, PrintsAGolden) {
  const CommandResult got = RunCommand({"inspect", DataPath("gptq/v2-act")});
  EXPECT_EQ(got.code, kOk) << got.err;
  EXPECT_THAT(got.out,
              AllOf(HasSubstr("format gptq"), HasSubstr("BITS/WEIGHT"), HasSubstr("order")));
  EXPECT_EQ(got.err, "");
}

TEST(AwqctlInspect, PrintsJson) {
  const CommandResult got =
      RunCommand({"--json", "inspect", DataPath("awq/all-MiniLM-L6-v2-awq")}, /*terminal=*/true);
  EXPECT_EQ(got.code, kOk) << got.err;
  const nlohmann::json json = nlohmann::json::parse(got.out);
  EXPECT_EQ(json.at("format"), "awq");
  EXPECT_EQ(json.at("loads"), true);
  EXPECT_EQ(json.at("linears").at(0).at("description"), "w4g128z");
  EXPECT_GT(json.at("not_quantised").size(), 0u);
  EXPECT_THAT(got.err, HasSubstr(kClearLine));  // the progress line appeared and was erased
}

TEST(AwqctlInspect, NamesTheModelsOfAFolder) {
  CommandResult got = RunCommand({"inspect", DataPath("awq")});
  EXPECT_EQ(got.code, kFileFailed);
  EXPECT_THAT(got.err, HasSubstr("/awq\": got a folder of models, expected one of them: "
                                 "all-MiniLM-L6-v2-awq\n"));
  const awqd::testing::TempDirectory folder;
  for (int i = 10; i < 35; ++i) folder.Write(absl::StrCat("m", i, "/config.json"), "{}");
  folder.Write("models--a--b/snapshots/0123/config.json", "{}");
  folder.Write("else/readme", "");
  got = RunCommand({"inspect", folder.path()});
  EXPECT_THAT(got.err, HasSubstr("one of them: m10, m11, m12, "));
  EXPECT_THAT(got.err, HasSubstr(", m29 and 6 more\n"));
  EXPECT_THAT(
      RunCommand({"quantize", folder.At("models--a--b/snapshots"), "-o", folder.At("out")}).err,
      HasSubstr("expected one of them: 0123\n"));
  EXPECT_THAT(RunCommand({"inspect", folder.At("else")}).err, HasSubstr("got no *.safetensors"));
}

// By the folder of a Hub cache, and by its name in the user's.
TEST(AwqctlInspect, FindsTheSnapshotOfAHubCache) {
  const awqd::testing::TempDirectory cache;
  const std::string hash(40, 'a'), model = cache.At("models--org--name");
  fs::create_directories(model + "/snapshots");
  fs::copy(DataPath("plain/w4-bf16"), model + "/snapshots/" + hash);
  fs::create_directories(model + "/snapshots/" + std::string(40, 'b'));
  cache.Write("models--org--name/refs/main", hash);
  const std::string before = std::getenv("HF_HUB_CACHE") ? std::getenv("HF_HUB_CACHE") : "";
  setenv("HF_HUB_CACHE", cache.path().c_str(), 1);
  for (const std::string& path : {model, model + "/", std::string("org/name")}) {
    const CommandResult got = RunCommand({"inspect", path});
    EXPECT_EQ(got.code, kOk) << got.err;
    EXPECT_THAT(got.out, HasSubstr("format plain, 1 linears"));
  }
  EXPECT_THAT(RunCommand({"inspect", "org/other"}).err, HasSubstr("\"org/other\": No such file"));
  setenv("HF_HUB_CACHE", before.c_str(), 1);
}

TEST(AwqctlInspect, ExitCodesTellWhatIsWrong) {
  const awqd::testing::TempDirectory folder;
  EXPECT_EQ(RunCommand({"inspect"}).code, kBadArguments);
  EXPECT_EQ(RunCommand({"inspect", folder.At("absent")}).code, kFileFailed);
  folder.Write("m/config.json", R"({"quantization_config":{"quant_method":"\u001b[31m"}})");
  folder.Write("m/model.safetensors",
               awqd::testing::SafetensorsOf({{"a", {"F16", {1}, std::string(2, '\0')}}}));
  const CommandResult got = RunCommand({"inspect", folder.At("m")});
  EXPECT_EQ(got.code, kDoesNotLoad);
  EXPECT_THAT(got.err, HasSubstr("does not load as a whole"));
  // Names in a file must not control the terminal.
  EXPECT_EQ(got.out.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace awqd::awqctl
