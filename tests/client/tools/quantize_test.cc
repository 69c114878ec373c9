// Quantize, and the results of inspect and diff.
#include "client/tools/quantize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "client/tools/diff.h"
#include "client/tools/inspect.h"
#include "tests/client/tools/dense_model.h"
#include "tests/client/tools/quiet.h"

namespace awqd::tools {
namespace {

namespace fs = std::filesystem;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::WriteDenseModel;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class QuantizeTest : public ::testing::Test {
 protected:
  QuantizeTest() { WriteDenseModel(folder_, "dense"); }
  QuantizeOptions Options(const Target& target) const {
    return {.folder = folder_.At("dense"),
            .output = folder_.At("out"),
            .target = &target,
            .rtn = {.bits = 4, .group_size = 64}};
  }
  std::string Refusal(const QuantizeOptions& options) const {
    const auto got = Quantize(options, Quiet);
    EXPECT_FALSE(got.ok());
    EXPECT_FALSE(fs::exists(folder_.At("out")));
    EXPECT_FALSE(fs::exists(folder_.At("out.partial")));
    return std::string(got.status().message());
  }
  TempDirectory folder_;
};

// Codes without settings are no dense weights.
TEST_F(QuantizeTest, AFolderWithCodesIsNotDense) {
  folder_.Write("dense/codes.safetensors",
                testing::SafetensorsOf({{"l.2.up.weight", {"F8_E4M3", {1, 2}, "ab"}}}));
  std::filesystem::remove(folder_.At("dense/model.safetensors.index.json"));
  EXPECT_THAT(Refusal(Options(kAwqTarget)),
              ::testing::HasSubstr("tensor \"l.2.up.weight\" of \"F8_E4M3\" is quantised"));
}

TEST_F(QuantizeTest, QuantizeInspectDiff) {
  for (const Target* target :
       {&kAwqTarget, &kGptqTarget, &kGemliteTarget, &kFasterTransformerTarget}) {
    QuantizeOptions options = Options(*target);
    options.output = folder_.At(std::string(target->name));
    options.rtn.symmetric = !target->asymmetric;
    const auto made = Quantize(options, Quiet);
    ASSERT_TRUE(made.ok()) << target->name << ": " << made.status();
    ASSERT_EQ(made->linears.size(), 3u);

    const auto seen = Inspect(options.output, Quiet);
    ASSERT_TRUE(seen.ok()) << seen.status();
    EXPECT_TRUE(seen->loads()) << seen->error;
    EXPECT_EQ(seen->format, target->format);
    ASSERT_EQ(seen->linears.size(), 3u);
    for (const InspectedLinear& linear : seen->linears) {
      EXPECT_EQ(linear.bias, linear.path == "l.0.up") << linear.path;
    }

    const auto difference = Diff(options.output, options.folder, 1, Quiet);
    ASSERT_TRUE(difference.ok()) << difference.status();
    ASSERT_EQ(difference->linears.size(), 3u);
    for (const LinearDifference& linear : difference->linears) {
      EXPECT_EQ(linear.error, "");
      EXPECT_EQ(linear.different_bias, 0);
      const auto same = [&](const QuantizedLinear& one) { return one.path == linear.path; };
      const auto told = std::find_if(made->linears.begin(), made->linears.end(), same);
      ASSERT_NE(told, made->linears.end());
      EXPECT_DOUBLE_EQ(linear.norms.relative(), told->norms.relative());
      EXPECT_DOUBLE_EQ(linear.largest, told->largest);
      // 4 bits of a normal distribution in groups of 64 have an error of about a tenth.
      EXPECT_GT(linear.norms.relative(), 0.05);
      EXPECT_LT(linear.norms.relative(), 0.15);
    }
    EXPECT_EQ(difference->same_tensors, 4);
    EXPECT_TRUE(difference->different_tensors.empty());
    EXPECT_TRUE(difference->only_in_a.empty()) << difference->only_in_a[0];
  }
}

TEST_F(QuantizeTest, CarriesTheRestOfTheFolder) {
  const auto made = Quantize(Options(kGptqTarget), Quiet);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(TextOf(folder_.At("out/tokenizer.json")), "tokens");
  EXPECT_FALSE(fs::exists(folder_.At("out/pytorch_model.bin")));
  EXPECT_THAT(made->carried.files, ElementsAre("tokenizer.json"));
  EXPECT_THAT(made->carried.left_out,
              ElementsAre("extra: a directory", "pytorch_model.bin: another form of the weights"));
  const std::string config = TextOf(folder_.At("out/config.json"));
  EXPECT_LT(config.find("z_first"), config.find("a_last"));  // the order of keys is kept
  EXPECT_THAT(config, HasSubstr("awqd:rtn\""));
  const auto index = nlohmann::json::parse(TextOf(folder_.At("out/model.safetensors.index.json")));
  EXPECT_EQ(index.at("weight_map").at("l.0.up.qweight"), "one.safetensors");
  EXPECT_EQ(index.at("weight_map").at("l.1.gate.weight"), "two.safetensors");
  EXPECT_EQ(index.at("metadata").at("total_size"), made->bytes_after);
}

TEST_F(QuantizeTest, SaysWhatStaysDense) {
  QuantizeOptions options = Options(kGptqTarget);
  options.leave_out = {"0.down"};
  const auto made = Quantize(options, Quiet);
  ASSERT_TRUE(made.ok()) << made.status();
  std::vector<std::string> dense;
  for (const DenseLinear& linear : made->dense) dense.push_back(linear.path + ": " + linear.why);
  EXPECT_THAT(dense,
              ElementsAre("embed_tokens: \"embed\" is left out", "l.0.down: \"0.down\" is left out",
                          "l.1.gate: a router is left out",
                          "l.1.odd: K = 96 is no multiple of the group size 64"));
}

TEST_F(QuantizeTest, TheSearchLosesLess) {
  QuantizeOptions options = Options(kGptqTarget);
  options.rtn.bits = 3;
  const auto plain = Quantize(options, Quiet);
  options.rtn.search = true;
  options.output = folder_.At("searched");
  const auto searched = Quantize(options, Quiet);
  ASSERT_TRUE(plain.ok() && searched.ok()) << plain.status() << searched.status();
  for (size_t i = 0; i < plain->linears.size(); ++i) {
    EXPECT_LT(searched->linears[i].norms.relative(), plain->linears[i].norms.relative());
  }
  EXPECT_THAT(TextOf(folder_.At("searched/config.json")), HasSubstr("awqd:rtn-search"));
}

TEST_F(QuantizeTest, RefusesOptionsThatDoNotFit) {
  QuantizeOptions options = Options(kAwqTarget);
  options.rtn.bits = 8;
  EXPECT_THAT(Refusal(options), HasSubstr("bits: got 8, expected 4 (format awq)"));
  options = Options(kFasterTransformerTarget);
  EXPECT_THAT(Refusal(options), HasSubstr("symmetric: got false"));
  EXPECT_THAT(Refusal(Options(kDenseTarget)), HasSubstr("to: got dense"));
  options = Options(kGptqTarget);
  options.rtn.group_size = 0;
  EXPECT_THAT(Refusal(options), HasSubstr("group_size: got 0"));
  options.rtn.group_size = 7;
  EXPECT_THAT(Refusal(options), HasSubstr("got no linear to quantise"));
}

TEST_F(QuantizeTest, RefusesByNameAndLeavesNothing) {
  auto tensors =
      awqd::testing::TestTensors{{"a.weight", awqd::testing::DenseTensor("F16", 8, 64, 1)},
                                 {"b.weight", awqd::testing::DenseTensor("F16", 8, 64, 2)}};
  tensors["b.weight"].bytes.replace(2 * 70, 2, std::string("\x00\x7e", 2));  // NaN at [1, 6]
  folder_.Write("nan/config.json", "{}");
  folder_.Write("nan/model.safetensors", awqd::testing::SafetensorsOf(tensors));
  QuantizeOptions options = Options(kGptqTarget);
  options.folder = folder_.At("nan");
  EXPECT_THAT(Refusal(options), HasSubstr("linear \"b\": weight: got nan at [1, 6]"));
  folder_.Write("nan/config.json", awqd::testing::AwqConfig());
  EXPECT_THAT(Refusal(options), HasSubstr("got a model that is quantised"));
  options.folder = folder_.At("absent");
  EXPECT_THAT(Refusal(options), HasSubstr("No such file"));
}

}  // namespace
}  // namespace awqd::tools
