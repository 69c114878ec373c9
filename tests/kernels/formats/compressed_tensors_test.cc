// The settings of a checkpoint of compressed-tensors: formats by group, targets, and settings
// without effect or refused.
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/checkpoint/quant_settings.h"
#include "kernels/formats/format.h"

namespace awqd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

// `groups` and `more`: JSON, members of config_groups and of the settings.
absl::StatusOr<FoundFormat> Read(const std::string& groups, const std::string& more = "",
                                 const std::string& format = "pack-quantized") {
  const auto settings = model::ParseConfigJson(
      R"({"quantization_config": {"quant_method": "compressed-tensors", "format": ")" + format +
      R"(", "config_groups": {)" + groups + "}" + more + "}}");
  EXPECT_TRUE(settings.ok() && settings->has_value()) << settings.status();
  return FindFormat((*settings)->settings);
}

std::string Group(const std::string& name, const std::string& targets, const std::string& weights,
                  const std::string& more = "") {
  return "\"" + name + R"(": {"targets": [)" + targets + R"(], "weights": {)" + weights + "}" +
         more + "}";
}

const char kFourBits[] = R"("num_bits": 4, "strategy": "group", "group_size": 32)";
const char kFp8[] = R"("num_bits": 8, "type": "float", "strategy": "channel")";
const char kFp4[] = R"("num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": )";

std::string Text(const LinearRule& rule, absl::string_view name) {
  const Setting* const setting = FindSetting(rule.settings, name);
  return setting == nullptr ? "nothing" : setting->text;
}

void ExpectRefused(const absl::StatusOr<FoundFormat>& found, const std::string& says) {
  EXPECT_FALSE(found.ok());
  EXPECT_THAT(std::string(found.status().message()), HasSubstr(says));
}

TEST(CompressedTensors, EachGroupHasAFormat) {
  const auto found = Read(
      Group("a", "\"Linear\"", kFourBits) + "," +
      Group("b", "\"x.y\"", kFp8, R"(, "format": "float-quantized")") + "," +
      Group("c", "\"re:.*z\"", kFp8, R"(, "format": "naive-quantized")") + "," +
      Group("d", "\"re:.*v\"", R"("num_bits": 8)", R"(, "format": "naive-quantized")") + "," +
      Group("e", "\"re:.*n\"", std::string(kFp4) + "16", R"(, "format": "nvfp4-pack-quantized")") +
      "," +
      Group("f", "\"re:.*m\"", R"("num_bits": 4, "type": "float", "group_size": 32)",
            R"(, "format": "mxfp4-pack-quantized")"));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kPackQuantizedFormat);
  std::vector<absl::string_view> formats;
  for (const LinearRule& rule : found->config.rules) formats.push_back(rule.format->name);
  EXPECT_THAT(formats,
              ElementsAre("float-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized",
                          "int-quantized", "float-quantized", "pack-quantized"));
  EXPECT_EQ(found->config.note, "");
}

// The most specific target wins; of two expressions the first in the alphabet, of two groups with
// one target the later.
TEST(CompressedTensors, TargetsInTheOrderOfTheLibrary) {
  const auto rule = [](int bits, const std::string& name, const std::string& targets) {
    return Group(name, targets, "\"num_bits\": " + std::to_string(bits));
  };
  const auto found = Read(rule(1, "z", R"("Linear", "re:b.*", "a.b")") + "," +
                          rule(2, "y", R"("re:a.*", "a.c", "re:b.c")") + "," +
                          rule(3, "x", R"("a.b", "LlamaMLP")"));
  ASSERT_TRUE(found.ok()) << found.status();
  const std::vector<LinearRule>& rules = found->config.rules;
  ASSERT_EQ(rules.size(), 6u);
  const auto expect = [&](int index, const char* bits, const std::vector<ModulePattern>& targets) {
    EXPECT_EQ(Text(rules[index], "num_bits"), bits);
    EXPECT_EQ(rules[index].targets, targets);
  };
  expect(0, "3", {{Kind::kPath, "LlamaMLP"}, {Kind::kPath, "a.b"}});
  expect(1, "2", {{Kind::kPath, "a.c"}});
  expect(2, "2", {{Kind::kRegex, "a.*"}});
  expect(3, "1", {{Kind::kRegex, "b.*"}});
  expect(4, "2", {{Kind::kRegex, "b.c"}});
  expect(5, "1", {{Kind::kEvery, ""}});
}

TEST(CompressedTensors, SettingsOfPackedLinears) {
  const auto rule = [](const std::string& weights, const std::string& more = "") {
    const auto found = Read(Group("g", "\"Linear\"", weights), more);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->config.rules.at(0) : LinearRule();
  };
  EXPECT_EQ(Text(rule(kFourBits), "actorder"), "weight");
  EXPECT_EQ(Text(rule(kFourBits), "packing"), "nothing");
  EXPECT_EQ(Text(rule(kFourBits), "symmetric"), "true");
  EXPECT_EQ(Text(rule(kFourBits, R"(, "version": "0.17.1")"), "packing"), "padded");
  EXPECT_EQ(Text(rule(kFourBits, R"(, "version": "0.18.0.a20260101")"), "packing"), "dense");
  EXPECT_EQ(Text(rule(kFourBits, R"(, "version": "1.2")"), "packing"), "dense");
  EXPECT_EQ(Text(rule(kFourBits, R"(, "version": "main")"), "packing"), "nothing");
  const std::string bits = R"("num_bits": 4, "actorder": )";
  for (const char* word : {"\"group\"", "\"dynamic\"", "true"}) {
    EXPECT_EQ(Text(rule(bits + word), "actorder"), "group") << word;
  }
  for (const char* word : {"\"weight\"", "\"static\"", "false", "null"}) {
    EXPECT_EQ(Text(rule(bits + word), "actorder"), "weight") << word;
  }
  EXPECT_EQ(Text(rule(""), "num_bits"), "8");
  EXPECT_EQ(Text(rule(""), "strategy"), "tensor");
  EXPECT_EQ(Text(rule(R"("group_size": -1)"), "strategy"), "channel");
  EXPECT_EQ(Text(rule(R"("group_size": 64)"), "strategy"), "group");
}

TEST(CompressedTensors, SizesOfBlocks) {
  for (const char* block : {"[32, 64]", "\"32x64\""}) {
    const auto found = Read(
        Group("g", "\"Linear\"",
              R"("type": "float", "strategy": "block", "block_structure": )" + std::string(block)),
        "", "float-quantized");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(Text(found->config.rules[0], "block_n"), "32");
    EXPECT_EQ(Text(found->config.rules[0], "block_k"), "64");
  }
}

TEST(CompressedTensors, Float8ActivationsAreDeclared) {
  const auto declared = [](const std::string& weights, const std::string& input) {
    const auto found =
        Read(Group("g", "\"Linear\"", weights,
                   R"(, "input_activations": {"num_bits": 8, "type": "float", )" + input + "}"),
             "", weights == kFp8 ? "float-quantized" : "pack-quantized");
    EXPECT_TRUE(found.ok()) << found.status();
    if (!found.ok()) return std::string();
    const auto& members = found->config.rules[0].settings.members;
    const auto how = members.find("activations");
    return how == members.end() ? found->config.note : how->second.text;
  };
  EXPECT_EQ(declared(kFp8, R"("dynamic": true, "strategy": "token")"), "fp8_dynamic");
  EXPECT_EQ(declared(kFp8, R"("dynamic": false, "strategy": "tensor")"), "fp8_static");
  EXPECT_EQ(declared(kFp8, R"("dynamic": true, "strategy": "group", "group_size": 128)"),
            "fp8_blocks");
  EXPECT_EQ(declared(kFourBits, R"("dynamic": true, "strategy": "token")"), "fp8_dynamic");
  EXPECT_THAT(declared(kFp8, R"("dynamic": true, "strategy": "group", "group_size": 64)"),
              HasSubstr("input_activations has no effect: it is not symmetric int8 or float8"));
}

TEST(CompressedTensors, WhatHasNoEffectIsNoted) {
  const std::string token =
      R"(, "input_activations": {"num_bits": 4, "type": "float", "dynamic": true})";
  const std::string int8 = R"(, "input_activations": {"num_bits": 8, "dynamic": true})";
  const auto note = [](const std::string& groups, const std::string& more = "") {
    const auto found = Read(groups, more);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->config.note : "";
  };
  EXPECT_THAT(note(Group("g", "\"Linear\"", kFourBits, token)),
              HasSubstr("input_activations has no effect: it is not symmetric int8"));
  EXPECT_EQ(note(Group("g", "\"Linear\"", kFourBits, int8)), "");
  EXPECT_THAT(note(Group("g", "\"Linear\"", kFourBits) + "," +
                   Group("h", "\"x\"", kFp8, R"(, "format": "float-quantized")" + int8)),
              HasSubstr("input_activations has no effect: weights are no integers"));
  EXPECT_THAT(note(Group("g", "\"Linear\"", kFourBits, R"(, "output_activations": {})")),
              HasSubstr("output_activations has no effect"));
  const std::string two = note(Group("g", "\"Linear\"", kFourBits, token) +
                                   R"(, "h": {"targets": ["LlamaAttention"], "weights": null})",
                               R"(, "kv_cache_scheme": {"num_bits": 8})");
  EXPECT_THAT(two, HasSubstr("config_groups.h has no effect: it quantises no weights; "));
  EXPECT_THAT(two, HasSubstr("kv_cache_scheme has no effect"));
}

TEST(CompressedTensors, RefusedFormats) {
  ExpectRefused(Read(Group("g", "\"Linear\"", kFourBits), "", "marlin-24"),
                "config_groups.g.format: got \"marlin-24\", expected \"int-quantized\", ");
  ExpectRefused(Read(Group("g", "\"Linear\"", kFourBits), "", "mxfp8-quantized"),
                "config_groups.g.type: got \"\", expected \"float\"");
  const auto one_of_two = Read(Group("g", "\"Linear\"", kFourBits) + "," +
                               Group("h", "\"x\"", kFourBits, R"(, "format": "dense")"));
  ASSERT_TRUE(one_of_two.ok()) << one_of_two.status();
  ASSERT_EQ(one_of_two->config.rules.size(), 2u);
  EXPECT_THAT(std::string(one_of_two->config.rules[0].unread.message()),
              HasSubstr("config_groups.h.format: got \"dense\", expected \"int-quantized\", "));
  EXPECT_TRUE(one_of_two->config.rules[1].unread.ok());
  ExpectRefused(Read("\"W4A16\": [\"Linear\"]"), "config_groups.W4A16.group: got a list");
  ExpectRefused(Read(Group("g", "", kFourBits)), "config_groups.g.targets: got nothing");
  ExpectRefused(Read("\"g\": {\"targets\": [\"Linear\"]}"), "config_groups.g.weights: got nothing");
  ExpectRefused(Read(""), "config_groups: got nothing");
}

TEST(CompressedTensors, RefusedWeights) {
  const auto refused = [](const std::string& format, const std::string& weights,
                          const std::string& says) {
    ExpectRefused(Read(Group("g", "\"Linear\"", weights), "", format), "config_groups.g." + says);
  };
  refused("pack-quantized", kFp8, "type: got \"float\", expected \"int\"");
  refused("pack-quantized", R"("num_bits": 9)", "num_bits: got 9, expected 1 to 8");
  refused("pack-quantized", R"("num_bits": 4, "dynamic": true)", "dynamic: got true");
  refused("pack-quantized", R"("num_bits": 4, "actorder": "x")", "actorder: got \"x\"");
  refused("pack-quantized", R"("num_bits": 4, "strategy": "group")", "group_size: got nothing");
  refused("float-quantized", kFourBits, "type: got \"\", expected \"float\"");
  refused("float-quantized", R"("type": "float", "num_bits": 4)", "num_bits: got 4, expected 8");
  refused("float-quantized", R"("type": "float", "symmetric": false)", "symmetric: got false");
  refused("float-quantized", R"("type": "float", "strategy": "block")", "block_n: got nothing");
  refused("float-quantized", R"("type": "float", "block_structure": [1])", "block_structure: got");
  refused("float-quantized", R"("type": "float", "block_structure": "axb")", "block_n: got a");
  refused("nvfp4-pack-quantized", kFp8, "num_bits: got 8, expected 4");
  refused("nvfp4-pack-quantized", std::string(kFp4) + "32", "group_size: got 32, expected 16");
  refused("mxfp4-pack-quantized", std::string(kFp4) + "16", "group_size: got 16, expected 32");
  refused("mxfp4-pack-quantized", R"("num_bits": 4, "type": "float", "strategy": "channel")",
          "strategy: got \"channel\"");
}

TEST(CompressedTensors, TransformsAndSparsity) {
  const auto with = [](const std::string& more) {
    return Read(Group("g", "\"Linear\"", kFourBits), more);
  };
  const auto transform = [](const std::string& location) {
    return R"(, "transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": [)"
           R"({"targets": ["Linear"], "location": ")" +
           location + "\"}]}}}";
  };
  EXPECT_TRUE(with(transform("weight_input")).ok());
  EXPECT_TRUE(with(R"(, "transform_config": {}, "sparsity_config": {})").ok());
  EXPECT_TRUE(with(R"(, "sparsity_config": {"format": "dense"})").ok());
  const auto read = with(transform("input"));
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->config.additions.size(), 1u);
  EXPECT_EQ(Text(read->config.additions[0].rule, "hadamard_size"), "-1");
  ExpectRefused(with(transform("output")),
                "transform_config.config_groups.R.location: got \"output\", expected \"input\"");
  ExpectRefused(with(R"(, "sparsity_config": {"format": "sparse-24-bitmask"})"),
                "sparsity_config.format: got \"sparse-24-bitmask\"");
  const auto group = [&](const std::string& settings) {
    return with(
        R"(, "transform_config": {"config_groups": {"R": {"apply": [{"targets": ["Linear"],)"
        R"("location": "input"}], )" +
        settings + "}}}");
  };
  const std::string where = "transform_config.config_groups.R.";
  ExpectRefused(group(R"("type": "random-hadamard")"),
                where + "type: got \"random-hadamard\", expected \"hadamard\"");
  ExpectRefused(group(R"("type": "hadamard", "randomize": true)"), where + "randomize: got true");
  ExpectRefused(group(R"("type": "hadamard", "head_dim": 48)"),
                where + "head_dim: got 48, expected a power of two from 2 to 16384");
  // A reason that all formats share is said once, in the name of none.
  EXPECT_THAT(std::string(with(R"(, "sparsity_config": {"format": "x"})").status().message()),
              ::testing::StartsWith("sparsity_config.format: got \"x\""));
}

}  // namespace
}  // namespace awqd
