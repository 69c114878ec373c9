// Differences of two folders: elements, codes, zeros, scales, biases and other tensors.
#include "client/tools/diff.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <string>

#include "kernels/base/half.h"
#include "tests/client/tools/quiet.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::tools {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class DiffTest : public ::testing::Test {
 protected:
  void Write(const std::string& model, const TestTensors& tensors,
             const std::string& config = AwqConfig()) const {
    folder_.Write(model + "/config.json", config);
    folder_.Write(model + "/model.safetensors", SafetensorsOf(tensors));
  }
  FolderDifference Run(const std::string& a = "a", const std::string& b = "b") const {
    auto out = Diff(folder_.At(a), folder_.At(b), 2, Quiet);
    EXPECT_TRUE(out.ok()) << out.status();
    return out.ok() ? *std::move(out) : FolderDifference();
  }
  TempDirectory folder_;
};

TEST_F(DiffTest, AFolderIsTheSameAsItself) {
  const std::string golden = DataPath("gptq/v2-act");
  const auto got = Diff(golden, golden, 3, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(got->same());
  ASSERT_FALSE(got->linears.empty());
  EXPECT_EQ(got->linears[0].different_codes, 0);
  EXPECT_EQ(got->linears[0].norms.relative(), 0);
}

TEST_F(DiffTest, ALinearThatCannotBeReadDiffers) {
  TestTensors tensors = AwqLinear("up", 64, 16, 32);
  for (auto& [name, tensor] : AwqLinear("down", 64, 16, 32)) tensors[name] = tensor;
  tensors.erase("down.qzeros");
  Write("a", tensors);
  Write("b", tensors);
  const FolderDifference got = Run();
  EXPECT_FALSE(got.same());
  ASSERT_EQ(got.linears.size(), 2u);
  EXPECT_THAT(got.linears[0].error, HasSubstr("weight \"down\": tensor \"qzeros\" is missing"));
  EXPECT_TRUE(got.linears[1].same());
}

TEST_F(DiffTest, CountsCodesZerosScales) {
  TestTensors b = AwqLinear("up", 64, 16, 32);
  Write("a", b);
  b["up.qweight"].bytes[0] = 0x22;  // codes of columns 0 and 2: 1 -> 2
  b["up.qzeros"].bytes[9] = 0x21;   // group 1, columns 4 and 6: 1 -> 2 of 6
  b["up.scales"].bytes.replace(2 * 15, 2, std::string("\x00\x3c", 2));  // 1.0 in column 15
  Write("b", b);
  const FolderDifference got = Run();
  ASSERT_EQ(got.linears.size(), 1u);
  const LinearDifference& up = got.linears[0];
  EXPECT_FALSE(up.same());
  EXPECT_EQ(up.different_codes, 1);
  EXPECT_EQ(up.different_zeros, 1);
  EXPECT_EQ(up.different_scales, 1);
  // Group 0 of column 15: 32 elements of (2 - 1) * s.
  const float s = HalfToFloat(0x2c2c);
  EXPECT_DOUBLE_EQ(up.largest, 1.0 - s);
  ASSERT_EQ(up.worst.size(), 2u);
  EXPECT_EQ(up.worst[0].n, 15);
  EXPECT_EQ(up.worst[0].a, s);
  EXPECT_EQ(up.worst[0].b, 1.0f);
  EXPECT_GT(up.norms.relative(), 0);
}

TEST_F(DiffTest, ComparesAQuantisedModelWithADenseOne) {
  // Every code 1, every zero 1: all elements 0.
  TestTensors tensors = AwqLinear("up", 64, 16, 32, 0x11);
  tensors["up.bias"] = {"F16", {16}, std::string(32, '\0')};
  Write("a", tensors);
  Write("b",
        {{"up.weight", {"F16", {16, 64}, std::string(2048, '\0')}},
         {"up.bias", {"F32", {16}, std::string(64, '\0')}}},
        "{}");
  FolderDifference got = Run();
  ASSERT_EQ(got.linears.size(), 1u);
  EXPECT_TRUE(got.same()) << ToJson(got).dump();
  EXPECT_EQ(got.linears[0].b, "F16");
  EXPECT_FALSE(got.linears[0].different_codes.has_value());
  std::string bytes(2048, '\0');
  bytes[2 * (3 * 64 + 7) + 1] = 0x3c;  // W[k = 7, n = 3] = 1
  Write("b", {{"up.weight", {"F16", {16, 64}, bytes}}}, "{}");
  got = Run();
  EXPECT_EQ(got.linears[0].different, 1);
  EXPECT_EQ(got.linears[0].worst[0].k, 7);
  EXPECT_EQ(got.linears[0].worst[0].n, 3);
  EXPECT_DOUBLE_EQ(got.linears[0].norms.relative(), 1.0);
  EXPECT_EQ(got.linears[0].different_bias, 16);  // one has a bias, the other none
}

TEST_F(DiffTest, TellsOfTensorsThatAreNoLinear) {
  TestTensors a = AwqLinear("up", 64, 16, 32), b = a;
  a["norm"] = b["norm"] = {"F32", {2}, std::string(8, '\1')};
  a["x"] = {"F32", {2}, std::string(8, '\1')};
  b["x"] = {"F32", {2}, std::string(8, '\2')};
  a["left"] = b["right"] = {"F32", {1}, std::string(4, '\0')};
  Write("a", a);
  Write("b", b);
  const FolderDifference got = Run();
  EXPECT_EQ(got.same_tensors, 1);
  EXPECT_THAT(got.different_tensors, ElementsAre("x"));
  EXPECT_THAT(got.only_in_a, ElementsAre("left"));
  EXPECT_THAT(got.only_in_b, ElementsAre("right"));
}

TEST_F(DiffTest, SaysWhatCannotBeCompared) {
  Write("a", AwqLinear("up", 64, 16, 32));
  Write("b", AwqLinear("up", 32, 16, 32));
  Write("c", AwqLinear("down", 64, 16, 32));
  EXPECT_THAT(Run("a", "b").linears[0].error, HasSubstr("shapes differ: [64, 16] and [32, 16]"));
  const FolderDifference got = Run("a", "c");
  ASSERT_EQ(got.linears.size(), 2u);
  EXPECT_THAT(got.linears[0].error, HasSubstr("no linear \"down\""));
  EXPECT_FALSE(got.same());
  EXPECT_FALSE(Diff(folder_.At("a"), folder_.At("absent"), 2, Quiet).ok());
}

TEST(Difference, OfNumbersThatAreNone) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  Difference got = {.keep = 1};
  got.AddElement(0, 0, nan, nan);
  got.AddElement(0, 1, inf, inf);
  EXPECT_EQ(got.different, 0);
  got.AddElement(0, 2, 0.0f, -0.0f);  // bits differ, the numbers do not
  EXPECT_EQ(got.different, 1);
  EXPECT_EQ(got.norms.relative(), 0);
  got.AddElement(0, 3, nan, 1.0f);
  EXPECT_TRUE(std::isinf(got.largest));
  EXPECT_EQ(got.worst[0].n, 3);
}

}  // namespace
}  // namespace awqd::tools
