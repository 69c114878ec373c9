// Checkpoints of compressed-tensors: linears of several formats in one checkpoint, all experts in
// one tensor, and settings that must not be ignored.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/checkpoint.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/reasons.h"

namespace awqd::model {
namespace {

using ::awqd::testing::FirstReason;
using ::awqd::testing::LittleEndian64;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr absl::string_view kPacked =
    R"("weights": {"num_bits": 4, "strategy": "channel"}, "format": "pack-quantized")";
constexpr absl::string_view kFp8 =
    R"("weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
       "format": "float-quantized")";
constexpr absl::string_view kFp8Channel =
    R"("weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
       "format": "float-quantized")";
constexpr absl::string_view kNvfp4 =
    R"("weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
       "format": "nvfp4-pack-quantized")";
constexpr absl::string_view kMxfp4 =
    R"("weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
       "format": "mxfp4-pack-quantized")";

// Groups with one target each.
std::string Config(const std::vector<std::pair<std::string, absl::string_view>>& groups) {
  std::string all;
  for (const auto& [target, group] : groups) {
    absl::StrAppend(&all, all.empty() ? "" : ",", "\"of ", target, "\": {\"targets\": [\"", target,
                    "\"],", group, "}");
  }
  return absl::StrCat(R"({"quantization_config": {"quant_method": "compressed-tensors",
      "format": "mixed-precision", "ignore": ["lm_head"], "config_groups": {)",
                      all, "}}}");
}

std::string Mixed() {
  return Config({{"Linear", kPacked}, {"re:.*fp8$", kFp8}, {"l.nv", kNvfp4}, {"l.mx", kMxfp4}});
}

// N = 1 and K = 32 each.
TestTensors Packed(const std::string& path) {
  return {{path + ".weight_packed", {"I32", {1, 4}, std::string(16, '\x21')}},
          {path + ".weight_scale", {"BF16", {1, 1}, std::string("\x80\x3f", 2)}},
          {path + ".weight_shape", {"I64", {2}, LittleEndian64(1) + LittleEndian64(32)}}};
}
TestTensors Fp8(const std::string& path) {
  return {{path + ".weight", {"F8_E4M3", {1, 32}, std::string(32, '\x38')}},
          {path + ".weight_scale", {"F32", {1}, std::string("\0\0\x80\x3f", 4)}}};
}
TestTensors Nvfp4(const std::string& path) {
  return {{path + ".weight_packed", {"U8", {1, 16}, std::string(16, '\x22')}},
          {path + ".weight_scale", {"F8_E4M3", {1, 2}, std::string(2, '\x38')}},
          {path + ".weight_global_scale", {"F32", {1}, std::string("\0\0\x80\x3f", 4)}}};
}
TestTensors Mxfp4(const std::string& path) {
  return {{path + ".weight_packed", {"U8", {1, 16}, std::string(16, '\x22')}},
          {path + ".weight_scale", {"U8", {1, 1}, "\x7f"}}};
}

// One linear of each format, and one that is not quantised.
TestTensors OneOfEach() {
  TestTensors out = Merge(Merge(Packed("l.up"), Fp8("l.fp8")), Merge(Nvfp4("l.nv"), Mxfp4("l.mx")));
  out["lm_head.weight"] = {"BF16", {1, 1}, "ab"};
  out["norm.weight"] = {"BF16", {1}, "ab"};
  return out;
}

class CompressedTensorsTest : public ::testing::Test {
 protected:
  absl::StatusOr<Checkpoint> Open(const TestTensors& tensors, absl::string_view config) {
    directory_.Write("m/config.json", config);
    directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
    root_ = *RepositoryRoot::Open(directory_.path());
    return Checkpoint::Open(root_, "m");
  }
  void ExpectRefused(const TestTensors& tensors, absl::string_view config,
                     const std::string& says) {
    const absl::Status reason = FirstReason(Open(tensors, config));
    EXPECT_FALSE(reason.ok()) << says;
    EXPECT_THAT(std::string(reason.message()), HasSubstr(says));
  }
  // The scheme of each linear, by its path.
  static std::map<std::string, std::string> Read(const Checkpoint& checkpoint) {
    std::map<std::string, std::string> out;
    std::vector<uint8_t> scratch;
    for (const LinearLocation& linear : checkpoint.linears()) {
      const auto weight = checkpoint.Read(linear, &scratch);
      out[linear.path] = weight.ok() ? absl::StrCat(weight->format, " ", ToString(weight->scheme))
                                     : std::string(weight.status().message());
    }
    return out;
  }

  TempDirectory directory_;
  RepositoryRoot root_ = *RepositoryRoot::Open(directory_.path());
};

TEST_F(CompressedTensorsTest, LinearsOfSeveralFormats) {
  const auto checkpoint = Open(OneOfEach(), Mixed());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->format().name, "pack-quantized");
  EXPECT_EQ(checkpoint->ignored_tensors(), 2);
  EXPECT_THAT(Read(*checkpoint), ElementsAre(Pair("l.fp8", "float-quantized e4m3t+fp32"),
                                             Pair("l.mx", "mxfp4-pack-quantized e2m1c+e8m0"),
                                             Pair("l.nv", "nvfp4-pack-quantized e2m1g16+e4m3*t"),
                                             Pair("l.up", "pack-quantized w4cs+bf16")));
}

// All tensors of one format exist, but the linear's group names another format.
TEST_F(CompressedTensorsTest, TensorsOfAnotherFormatThanTheGroups) {
  ExpectRefused(Merge(Packed("l.up"), Nvfp4("l.nv")), Config({{"Linear", kPacked}}),
                "\"weight_packed\" is \"U8\", not I32, but \"weight_scale\" exists");
  ExpectRefused(
      Merge(Packed("l.up"), Fp8("l.down")), Config({{"Linear", kPacked}}),
      "weight \"l.down\": tensor \"weight_packed\" is missing, but \"weight_scale\" exists");
  ExpectRefused(Merge(Packed("l.up"), Fp8("l.down")), Config({{"l.up", kFp8}, {"Linear", kFp8}}),
                "weight \"l.up\": tensor \"weight\" is missing, but \"weight_scale\" exists");
  ExpectRefused(Mxfp4("l.mx"), Config({{"Linear", kNvfp4}}),
                "weight \"l.mx\": tensor \"weight_global_scale\" is missing");
  ExpectRefused(Nvfp4("l.nv"), Config({{"Linear", kMxfp4}}),
                "tensor \"l.nv.weight_global_scale\": format mxfp4-pack-quantized has no such "
                "tensor, expected \"<path>.\" and one of weight_packed, ");
}

TEST_F(CompressedTensorsTest, WhatIsLostIsNamed) {
  for (const std::string suffix : {"weight_packed", "weight_scale"}) {
    TestTensors tensors = OneOfEach();
    tensors.erase("l.up." + suffix);
    ExpectRefused(tensors, Mixed(), "weight \"l.up\": tensor \"" + suffix + "\" is missing");
    tensors = OneOfEach();
    tensors.erase("l.nv." + suffix);
    ExpectRefused(tensors, Mixed(), "weight \"l.nv\": tensor \"" + suffix + "\" is missing");
  }
  TestTensors tensors = OneOfEach();
  tensors.erase("l.up.weight_shape");
  ExpectRefused(tensors, Mixed(), "weight \"l.up\": tensor \"weight_shape\" is missing");
}

TEST_F(CompressedTensorsTest, NothingBesideCodesGoesUnread) {
  TestTensors tensors = OneOfEach();
  tensors["l.up.weight_other"] = {"U8", {1}, "a"};
  ExpectRefused(tensors, Mixed(), "tensor \"l.up.weight_other\": format");
  tensors = OneOfEach();
  tensors["l.other"] = {"U8", {1}, "a"};
  tensors["l.up.norm.weight"] = {"BF16", {1}, "ab"};
  tensors["l.router.fp8.weight"] = {"BF16", {1, 1}, "ab"};  // matches a group, but is not quantised
  tensors["l.router.fp8.score_bias"] = {"F32", {1}, "abcd"};
  const auto checkpoint = Open(tensors, Mixed());
  EXPECT_TRUE(checkpoint.ok()) << "of other modules: " << checkpoint.status();
  tensors["l.experts.gate_up_proj_packed"] = {"I32", {1, 1, 1}, "abcd"};
  ExpectRefused(tensors, Mixed(),
                "tensor \"l.experts.gate_up_proj_packed\" of \"I32\" is quantised, but format "
                "pack-quantized expects codes in \"l.experts.gate_up_proj.weight_packed\"");
}

// Codes and scales of a linear that the settings leave out, or do not name, are read by the one
// group that fits.
TEST_F(CompressedTensorsTest, CodesThatNoGroupIsFor) {
  TestTensors tensors = OneOfEach();
  tensors.erase("lm_head.weight");
  const auto left_out = Open(Merge(tensors, Packed("lm_head")), Mixed());
  ASSERT_TRUE(left_out.ok()) << left_out.status();
  EXPECT_EQ(Read(*left_out).at("lm_head"), "pack-quantized w4cs+bf16");
  EXPECT_THAT(left_out->note(), HasSubstr("though the settings leave them out: 1 linears"));
  const std::string paths =
      Config({{"l.up", kPacked}, {"l.nv", kNvfp4}, {"l.mx", kMxfp4}, {"l.x", kFp8}});
  const auto unnamed = Open(OneOfEach(), paths);
  ASSERT_TRUE(unnamed.ok()) << unnamed.status();
  EXPECT_EQ(Read(*unnamed).at("l.fp8"), "float-quantized e4m3t+fp32");
  EXPECT_THAT(unnamed->note(), HasSubstr("as the settings have no group for them: 1 linears"));
  const std::string two = Config({{"l.up", kPacked}, {"l.x", kFp8}, {"l.y", kFp8Channel}});
  ExpectRefused(Merge(Packed("l.up"), Fp8("l.fp8")), two,
                "weight \"l.fp8\": the settings have no group for it, and several fit");
  ExpectRefused(Merge(Packed("l.up"), Nvfp4("l.nv")), Config({{"l.up", kPacked}}),
                "weight \"l.nv\": the settings have no group for it");
}

// A group of another format than the tensors gives way to the next that matches.
TEST_F(CompressedTensorsTest, GroupsThatOverlap) {
  const auto checkpoint = Open(Merge(Fp8("l.1.down"), Nvfp4("l.5.down")),
                               Config({{"re:.*l.*", kNvfp4}, {"re:.*l\\\\.(1|2).*", kFp8}}));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(Read(*checkpoint),
              ElementsAre(Pair("l.1.down", "float-quantized e4m3t+fp32"),
                          Pair("l.5.down", "nvfp4-pack-quantized e2m1g16+e4m3*t")));
}

// One that is not read takes its linears with it, and no others.
TEST_F(CompressedTensorsTest, AGroupThatIsNotRead) {
  constexpr absl::string_view kOther =
      R"("weights": {"num_bits": 4, "group_size": 128}, "format": "marlin-24")";
  const auto checkpoint = Open(Merge(Fp8("l.1.down"), Nvfp4("l.5.down")),
                               Config({{"re:.*1.*", kOther}, {"Linear", kNvfp4}}));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(Read(*checkpoint),
              ElementsAre(Pair("l.5.down", "nvfp4-pack-quantized e2m1g16+e4m3*t")));
  EXPECT_TRUE(absl::IsUnimplemented(FirstReason(checkpoint)));
  EXPECT_THAT(FirstReason(checkpoint).ToString(), HasSubstr("\"marlin-24\""));
}

TEST_F(CompressedTensorsTest, EmbeddingsHaveAGroupOfTheirOwn) {
  constexpr absl::string_view kEight =
      R"("weights": {"num_bits": 8, "strategy": "channel"}, "format": "pack-quantized")";
  TestTensors embedding = Packed("model.embed_tokens");
  embedding["model.embed_tokens.weight_packed"] = {"I32", {1, 8}, std::string(32, '\x21')};
  const auto checkpoint =
      Open(Merge(Packed("l.up"), embedding), Config({{"Linear", kPacked}, {"Embedding", kEight}}));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(Read(*checkpoint),
              ElementsAre(Pair("l.up", "pack-quantized w4cs+bf16"),
                          Pair("model.embed_tokens", "pack-quantized w8cs+bf16")));
}

// Transforms of inputs are those of the linears that they name, whatever the group of these is.
TEST_F(CompressedTensorsTest, TransformsOfInputs) {
  std::string config = Config({{"Linear", kNvfp4}, {"re:.*down$", kFp8}});
  config.insert(config.find("\"ignore\""), R"("transform_config": {"config_groups": {
      "R4": {"type": "hadamard", "head_dim": 16, "apply": [
          {"targets": ["re:.*(down|up)$"], "location": "input", "ignore": ["re:l.2.*", "l.3.up"]},
          {"targets": ["Linear"], "location": "weight_input", "inverse": true}]},
      "V": {"type": "random-hadamard", "apply": [{"targets": ["re:.*o$"], "location": "input"}]},
      "U": {"type": "hadamard", "apply": [{"targets": ["l.4"], "location": "output"}]},
      "W": {"type": "hadamard", "head_dim": 8, "apply": [
          {"targets": ["l.5.up"], "location": "input"}]}}}, )");
  TestTensors tensors = Merge(Nvfp4("l.1.up"), Fp8("l.1.down"));
  tensors["l.1.up.R4_input.weight"] = {"F32", {1, 1}, "abcd"};  // as the library stores it
  for (const char* path : {"l.1.q", "l.1.o", "l.2.up", "l.3.up", "l.4", "l.5.up"}) {
    tensors = Merge(tensors, Nvfp4(path));
  }
  const auto checkpoint = Open(tensors, config);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::map<std::string, int64_t> sizes;
  std::vector<uint8_t> scratch;
  for (const LinearLocation& linear : checkpoint->linears()) {
    const auto weight = checkpoint->Read(linear, &scratch);
    ASSERT_TRUE(weight.ok()) << weight.status();
    sizes[linear.path] = weight->hadamard.size;
  }
  EXPECT_THAT(sizes, ElementsAre(Pair("l.1.down", 16), Pair("l.1.q", 0), Pair("l.1.up", 16),
                                 Pair("l.2.up", 0), Pair("l.3.up", 0)));
  std::string reasons;
  for (const auto& [path, reason] : checkpoint->unserved()) {
    EXPECT_TRUE(absl::IsUnimplemented(reason)) << reason;
    absl::StrAppend(&reasons, reason.message(), "; ");
  }
  EXPECT_THAT(reasons, HasSubstr("weight \"l.1.o\": transform_config.config_groups.V.type: got "
                                 "\"random-hadamard\", expected \"hadamard\""));
  EXPECT_THAT(reasons, HasSubstr("weight \"l.4\": transform_config.config_groups.U.location"));
  EXPECT_THAT(reasons, HasSubstr("weight \"l.5.up\": hadamard_size: got several for one linear"));
}

// Scales of the cache stand beside codes and change nothing.
TEST_F(CompressedTensorsTest, ScalesOfTheCacheHaveNoEffect) {
  TestTensors tensors = Fp8("l.self_attn.qkv_proj");
  tensors["l.self_attn.qkv_proj.k_scale"] = {"BF16", {1}, "ab"};
  tensors["l.self_attn.qkv_proj.k_bias"] = {"BF16", {1}, "ab"};  // ModelOpt's, of the cache too
  tensors["l.self_attn.qkv_proj.input_global_scale"] = {
      "F32", {1}, {"\0\0\x80\x7f", 4}};  // infinite
  tensors["l.self_attn.k_scale"] = {"BF16", {1}, "ab"};
  const auto checkpoint = Open(tensors, Config({{"Linear", kFp8}}));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears().size(), 1u);
  EXPECT_EQ(checkpoint->ignored_tensors(), 4);
}

TEST_F(CompressedTensorsTest, AllExpertsInOneTensorHaveOneShape) {
  const std::string path = "l.mlp.experts.up_proj";
  TestTensors tensors = {
      {path + ".weight_packed",
       {"I32", {2, 1, 4}, std::string(16, '\x21') + std::string(16, '\x43')}},
      {path + ".weight_scale", {"BF16", {2, 1, 1}, std::string("\x80\x3f\x80\x3f", 4)}},
      {path + ".weight_shape",
       {"I64", {3}, LittleEndian64(2) + LittleEndian64(1) + LittleEndian64(32)}}};
  const auto checkpoint = Open(tensors, Config({{"Linear", kPacked}}));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->ignored_tensors(), 0);
  ASSERT_EQ(checkpoint->linears().size(), 2u);
  std::vector<uint8_t> scratch;
  for (int expert = 0; expert < 2; ++expert) {
    const LinearLocation& linear = checkpoint->linears()[expert];
    EXPECT_EQ(linear.path, absl::StrCat("l.mlp.experts.", expert, ".up_proj"));
    const auto weight = checkpoint->Read(linear, &scratch);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->k, 32);
    EXPECT_EQ(weight->Code(0, 0), 1 + 2 * expert);
  }
  // All experts share one tensor for the shape, so only its first number can be wrong about their
  // count.
  TestTensors lying = tensors;
  lying[path + ".weight_shape"].bytes = LittleEndian64(3) + LittleEndian64(1) + LittleEndian64(32);
  const auto of_three = Open(lying, Config({{"Linear", kPacked}}));
  ASSERT_TRUE(of_three.ok()) << of_three.status();
  EXPECT_THAT(std::string(of_three->Read(of_three->linears()[0], &scratch).status().message()),
              HasSubstr("\"weight_shape\": got 3 experts, expected 2"));
  tensors[path + ".weight_scale"] = {"BF16", {1, 1, 1}, std::string("\x80\x3f", 2)};
  ExpectRefused(tensors, Config({{"Linear", kPacked}}), "\"weight_scale\": shape: got [1, 1, 1]");
  tensors.erase(path + ".weight_scale");
  ExpectRefused(tensors, Config({{"Linear", kPacked}}), "tensor \"weight_scale\" is missing");
}

}  // namespace
}  // namespace awqd::model
