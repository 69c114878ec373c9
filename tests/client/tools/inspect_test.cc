// inspect of every golden checkpoint, of folders that do not load, and of dense ones.
#include "client/tools/inspect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "kernels/formats/format.h"
#include "tests/client/tools/quiet.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::tools {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::testing::HasSubstr;

const InspectedLinear* Find(const Inspection& inspection, const std::string& path) {
  for (const InspectedLinear& linear : inspection.linears) {
    if (linear.path == path) return &linear;
  }
  return nullptr;
}

TEST(Inspect, DescribesEveryGolden) {
  int checked = 0;
  for (const Format* format : AllFormats()) {
    const std::string folder = DataPath(std::string(format->name));
    std::ifstream file(folder + "/goldens/cases.json");
    const nlohmann::json goldens = nlohmann::json::parse(file);
    for (const auto& golden : goldens.at("cases")) {
      const std::string model = golden.at("model");
      const auto inspection = Inspect(folder + "/" + model, Quiet);
      ASSERT_TRUE(inspection.ok()) << inspection.status();
      // One file of GGUF has a tensor of a type that is not read.
      const bool all = format != &kGgufFormat || model != "blocks";
      EXPECT_EQ(inspection->loads(), all) << model << ": " << inspection->error;
      EXPECT_EQ(inspection->unserved.empty(), all);
      // Folders of quanto's have the name of their first format.
      EXPECT_EQ(inspection->format, format == &kQuantoPackedFormat ? "quanto" : format->name);
      const InspectedLinear* const linear = Find(*inspection, golden.at("weight"));
      ASSERT_NE(linear, nullptr) << golden.dump();
      EXPECT_EQ(linear->scheme, golden.at("description"));
      EXPECT_EQ(linear->k, golden.at("k"));
      EXPECT_EQ(linear->n, golden.at("n"));
      ++checked;
    }
  }
  EXPECT_GT(checked, 20);
}

class InspectFolder : public ::testing::Test {
 protected:
  Inspection Look() const {
    auto out = Inspect(folder_.At("m"), Quiet);
    EXPECT_TRUE(out.ok()) << out.status();
    return out.ok() ? *std::move(out) : Inspection();
  }
  TempDirectory folder_;
};

TEST_F(InspectFolder, SaysBitsAndWhatIsNotQuantised) {
  folder_.Write("m/config.json", AwqConfig(32, R"(,"modules_to_not_convert":["lm_head"])"));
  auto tensors = AwqLinear("a.up", 64, 16, 32);
  tensors["a.up.bias"] = {"F16", {16}, std::string(32, '\0')};
  tensors["lm_head.weight"] = {"BF16", {8, 4}, std::string(64, '\0')};
  tensors["a.down.weight"] = {"F16", {4, 4}, std::string(32, '\0')};
  tensors["a.norm.weight"] = {"F32", {4}, std::string(16, '\0')};
  folder_.Write("m/model.safetensors", SafetensorsOf(tensors));
  const Inspection got = Look();
  ASSERT_EQ(got.linears.size(), 1u);
  // Codes 512, zeros 16, scales 64, bias 32 bytes.
  EXPECT_EQ(got.linears[0].bytes, 624);
  EXPECT_DOUBLE_EQ(got.linears[0].bits_per_weight(), 4.875);
  EXPECT_TRUE(got.linears[0].bias);
  EXPECT_FALSE(got.linears[0].order);
  ASSERT_EQ(got.not_quantised.size(), 2u);
  EXPECT_EQ(got.not_quantised[0].name, "a.down.weight");
  EXPECT_THAT(got.not_quantised[0].why, HasSubstr("dense (F16)"));
  EXPECT_EQ(got.not_quantised[1].why, "left out by the settings");
  EXPECT_EQ(got.other_tensors, 1);
  EXPECT_EQ(got.other_bytes, 16);
  EXPECT_EQ(got.total_bytes, 624 + 64 + 32 + 16);
}

TEST_F(InspectFolder, NamesTheLinearThatDoesNotLoad) {
  folder_.Write("m/config.json", AwqConfig());
  auto bad = AwqLinear("b.up", 64, 16, 32);
  bad["b.up.scales"].bytes.replace(0, 2, "\x01\x7e");  // NaN
  folder_.Write("m/model.safetensors", SafetensorsOf(Merge(AwqLinear("a.up", 64, 16, 32), bad)));
  const Inspection got = Look();
  EXPECT_FALSE(got.loads());
  EXPECT_EQ(got.error, "");
  EXPECT_EQ(Find(got, "a.up")->error, "");
  EXPECT_THAT(Find(got, "b.up")->error, HasSubstr("tensor \"scales\": got NaN"));
  EXPECT_EQ(Find(got, "b.up")->bits_per_weight(), 0);
}

TEST_F(InspectFolder, NamesTheLinearThatLostATensor) {
  folder_.Write("m/config.json", AwqConfig());
  auto bad = AwqLinear("b.up", 64, 16, 32);
  bad.erase("b.up.qzeros");
  folder_.Write("m/model.safetensors", SafetensorsOf(Merge(AwqLinear("a.up", 64, 16, 32), bad)));
  const Inspection got = Look();
  EXPECT_FALSE(got.loads());
  EXPECT_EQ(got.error, "");
  EXPECT_EQ(got.linears.size(), 1u);
  ASSERT_EQ(got.unserved.size(), 1u);
  EXPECT_THAT(got.unserved.at("b.up").ToString(), HasSubstr("\"qzeros\" is missing"));
  EXPECT_EQ(got.not_quantised.size(), 0u) << "its codes are not passed over";
  EXPECT_EQ(ToJson(got)["not_served"][0]["path"], "b.up");
}

TEST_F(InspectFolder, TellsWhyAFolderDoesNotLoad) {
  const std::string tensors = SafetensorsOf({{"a.weight", {"F16", {2, 2}, std::string(8, '\0')}}});
  folder_.Write("m/model.safetensors", tensors);
  folder_.Write("m/config.json", R"({"quantization_config":{"quant_method":"unheard_of"}})");
  Inspection got = Look();
  EXPECT_FALSE(got.loads());
  EXPECT_THAT(got.error, HasSubstr("unheard_of"));
  ASSERT_EQ(got.not_quantised.size(), 1u);
  EXPECT_EQ(got.not_quantised[0].why, "the checkpoint does not load");
  folder_.Write("m/config.json", "{}");
  got = Look();
  EXPECT_THAT(got.error, HasSubstr("the model is not quantised"));
  EXPECT_EQ(got.not_quantised[0].why, "a dense model");
}

TEST_F(InspectFolder, RefusesWhatIsNoModel) {
  EXPECT_THAT(std::string(Inspect(folder_.At("absent"), Quiet).status().message()),
              HasSubstr("No such file"));
  folder_.Write("m/config.json", "{");
  folder_.Write("m/model.safetensors", "no");
  EXPECT_THAT(std::string(Inspect(folder_.At("m"), Quiet).status().message()),
              HasSubstr("m/config.json"));
  EXPECT_THAT(std::string(Inspect(folder_.At("m/config.json"), Quiet).status().message()),
              HasSubstr("expected a model's directory"));
}

TEST_F(InspectFolder, NamesTheFamilyOfALoneFile) {
  auto tensors = AwqLinear("a.up", 64, 16, 32);
  tensors["a.up.scale_weight"] = {"F32", {}, "abcd"};
  folder_.Write("m/one.safetensors", SafetensorsOf(tensors));
  for (const char* path : {"m", "m/one.safetensors"}) {
    const auto inspection = Inspect(folder_.At(path), Quiet);
    ASSERT_TRUE(inspection.ok()) << inspection.status();
    EXPECT_FALSE(inspection->loads());
    EXPECT_THAT(inspection->error,
                HasSubstr("a quantisation of ComfyUI, which is read from a file"));
    ASSERT_EQ(inspection->not_quantised.size(), 3u);
    EXPECT_EQ(inspection->not_quantised[0].why, "codes that are not read");
  }
}

TEST_F(InspectFolder, FollowsTheLinksOfAHubCache) {
  folder_.Write("c/blobs/1", AwqConfig());
  folder_.Write("c/blobs/2", SafetensorsOf(AwqLinear("a.up", 64, 16, 32)));
  std::filesystem::create_directories(folder_.At("c/snapshots/rev"));
  std::filesystem::create_symlink("../../blobs/1", folder_.At("c/snapshots/rev/config.json"));
  std::filesystem::create_symlink("../../blobs/2", folder_.At("c/snapshots/rev/model.safetensors"));
  const auto got = Inspect(folder_.At("c/snapshots/rev/"), Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(got->loads()) << got->error;
  EXPECT_EQ(got->linears.size(), 1u);
}

}  // namespace
}  // namespace awqd::tools
