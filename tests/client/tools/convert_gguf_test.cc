// Convert: GGUF files, every type of block into every target, their metadata, refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "client/tools/convert.h"
#include "tests/client/tools/convert_fixture.h"
#include "tests/kernels/checkpoint/gguf_bytes.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::tools {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using ConvertGgufTest = ConvertFixture;

struct BlockType {
  absl::string_view name;
  uint32_t number;
  int64_t codes, bytes;              // of one block
  std::vector<const Target*> holds;  // targets besides dense
  absl::string_view refusal;         // gptq's refusal, if it cannot hold the type
};

const std::vector<BlockType>& BlockTypes() {
  static const std::vector<BlockType> types = {
      {"Q4_0",
       2,
       32,
       18,
       {&kAwqTarget, &kGptqTarget, &kCompressedTensorsTarget, &kGemliteTarget,
        &kFasterTransformerTarget}},
      {"Q4_1", 3, 32, 20, {}, "zeros: got real ones after the scale"},
      // Types of 5 and 6 bits become codes of 8 bits.
      {"Q5_0", 6, 32, 22, {&kGptqTarget, &kCompressedTensorsTarget, &kGemliteTarget}},
      {"Q5_1", 7, 32, 24, {}, "zeros: got real ones after the scale"},
      {"Q8_0",
       8,
       32,
       34,
       {&kGptqTarget, &kCompressedTensorsTarget, &kGemliteTarget, &kFasterTransformerTarget}},
      {"Q2_K", 10, 256, 84, {}, "zeros: got real ones after the scale"},
      {"Q3_K", 11, 256, 110, {&kCompressedTensorsTarget, &kGemliteTarget}, "scales: got "},
      {"Q4_K", 12, 256, 144, {}, "zeros: got real ones after the scale"},
      {"Q5_K", 13, 256, 176, {}, "zeros: got real ones after the scale"},
      {"Q6_K", 14, 256, 210, {&kCompressedTensorsTarget, &kGemliteTarget}, "scales: got "},
      {"IQ4_NL", 20, 32, 18, {}, "codes: got "},
      {"IQ4_XS", 23, 256, 136, {}, "codes: got "},
      {"TQ1_0", 34, 256, 54, {&kGptqTarget, &kCompressedTensorsTarget, &kGemliteTarget}},
      {"TQ2_0", 35, 256, 66, {&kGptqTarget, &kCompressedTensorsTarget, &kGemliteTarget}},
      {"MXFP4", 39, 32, 17, {}, "codes: got e2m1"},
      {"NVFP4", 40, 64, 36, {}, "codes: got e2m1"},
      {"Q1_0", 41, 128, 18, {&kGemliteTarget}, "zeros: got 0.5"},
      {"Q2_0", 42, 64, 18, {&kGptqTarget, &kCompressedTensorsTarget, &kGemliteTarget}},
      {"IQ2_XXS", 16, 256, 66, {}, "codes: got iq2_xxs"},
      {"IQ2_XS", 17, 256, 74, {}, "codes: got iq2_xs"},
      {"IQ2_S", 22, 256, 82, {}, "codes: got iq2_s"},
      {"IQ3_XXS", 18, 256, 98, {}, "codes: got iq3_xxs"},
      {"IQ3_S", 21, 256, 110, {}, "codes: got iq3_s"},
      {"IQ1_S", 19, 256, 50, {}, "codes: got iq1_s"},
      {"IQ1_M", 29, 256, 56, {}, "codes: got iq1_m"}};
  return types;
}

constexpr int64_t kGgufK = 512, kGgufN = 64;

// "a.weight" [64, 512] of the type, with a bias, and a tensor of plain numbers.
std::string GgufOf(const BlockType& type) {
  const int64_t bytes = kGgufK / type.codes * type.bytes * kGgufN;
  testing::GgufBytes file;
  file.keys = {
      testing::GgufKey("general.architecture", 8, testing::GgufText("llama")),
      testing::GgufKey("llama.block_count", 4, testing::LittleEndian(7, 4)),
      testing::GgufKey("llama.attention.layer_norm_rms_epsilon", 6,
                       std::string("\xac\xc5\x27\x37", 4)),
      testing::GgufKey("llama.some", 9, testing::GgufArray(0, 3, "\1\2\3")),
      testing::GgufKey("tokenizer.ggml.eos_token_id", 4, testing::LittleEndian(2, 4)),
      testing::GgufKey("tokenizer.ggml.tokens", 9,
                       testing::GgufArray(8, 2, testing::GgufText("a") + testing::GgufText("b")))};
  file.tensors = {{"a.weight", {kGgufK, kGgufN}, type.number, 0},
                  {"a.bias", {kGgufN}, 0, static_cast<uint64_t>(bytes)},
                  {"norm.weight", {3}, 0, static_cast<uint64_t>(bytes + kGgufN * 4)}};
  file.data.resize(bytes);
  // No byte makes a scale infinite.
  for (int64_t i = 0; i < bytes; ++i) file.data[i] = static_cast<char>((i * 37 + i / 61) & 0x3f);
  file.data += std::string(kGgufN * 4, '\x3c') + std::string(12, '\x3d');
  return file.File();
}

TEST_F(ConvertGgufTest, EveryTypeOfGgufIntoEveryTargetThatHoldsIt) {
  for (const BlockType& type : BlockTypes()) {
    folder_.Write("a.gguf", GgufOf(type));
    for (const Target* target : AllTargets()) {
      const std::string what = std::string(type.name) + " to " + std::string(target->name);
      ConvertOptions options = To(*target, folder_.At("a.gguf"));
      if (target == &kGgufTarget) continue;
      const bool every = target == &kDenseTarget || target == &kMlxTarget;
      if (every) options.dtype = "F32";
      const auto got = Convert(options, Quiet);
      const bool holds = every || absl::c_linear_search(type.holds, target);
      EXPECT_EQ(got.ok(), holds) << what << ": " << got.status();
      if (!got.ok()) {
        EXPECT_THAT(std::string(got.status().message()), HasSubstr("linear \"a\": ")) << what;
        if (target == &kGptqTarget) {
          EXPECT_THAT(std::string(got.status().message()), HasSubstr(type.refusal));
        }
        EXPECT_FALSE(fs::exists(folder_.At("out.partial"))) << what;
        continue;
      }
      EXPECT_EQ(got->verified->elements, kGgufK * kGgufN) << what;
      EXPECT_EQ(got->verified->rounded, 0) << what;
      EXPECT_EQ(got->verified->biases, kGgufN) << what;
      EXPECT_EQ(got->verified->tensors, 1) << what;
      fs::remove_all(folder_.At("out"));
    }
  }
}

TEST_F(ConvertGgufTest, ConfigOfAGgufFileIsItsMetadata) {
  folder_.Write("m/a.gguf", GgufOf(BlockTypes()[0]));
  folder_.Write("m/README.md", "words");
  const auto got = Convert(To(kGptqTarget, folder_.At("m")), Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  const auto config = nlohmann::json::parse(TextOf(folder_.At("out/config.json")));
  EXPECT_EQ(config.at("model_type"), "llama");
  EXPECT_EQ(config.at("num_hidden_layers"), 7);
  EXPECT_EQ(config.at("rms_norm_eps").dump(), "1e-05");
  EXPECT_EQ(config.at("eos_token_id"), 2);
  EXPECT_EQ(config.at("vocab_size"), 2);
  EXPECT_EQ(config.at("gguf").at("llama.some").dump(), "[1,2,3]");
  EXPECT_EQ(config.at("quantization_config").at("quant_method"), "gptq");
  EXPECT_THAT(got->carried.left_out,
              Contains("metadata \"tokenizer.ggml.tokens\" (2 values): no tokenizer is "
                       "made of it"));
  EXPECT_THAT(got->carried.files, ElementsAre("README.md"));
  const auto model = Model::Open(folder_.At("out"));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(model->tensors().FileNames(), ElementsAre("model.safetensors"));
  EXPECT_NE(model->tensors().Find("a.qweight"), nullptr);
  EXPECT_NE(model->tensors().Find("norm.weight"), nullptr);
}

TEST_F(ConvertGgufTest, GoldensOfGgufBecomeDense) {
  for (const auto& [name, linears] :
       {std::pair("experts", 3), {"super-blocks.gguf", 3}, {"parts", 14}, {"vectors", 16}}) {
    ConvertOptions options = To(kDenseTarget, DataPath(std::string("gguf/") + name));
    options.dtype = "F32";
    const auto got = Convert(options, Quiet);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->verified->linears, linears);
    fs::remove_all(folder_.At("out"));
  }
}

TEST_F(ConvertGgufTest, RefusesTensorsOfGgufThatAreNotRead) {
  EXPECT_THAT(
      Refusal(To(kDenseTarget, DataPath("gguf/blocks"))),
      HasSubstr(
          "tensor \"blk.0.ffn_up.weight\" of \"Q8_1\" is quantised, but format gguf expects"));
  testing::GgufBytes file;
  file.tensors.push_back({"b", {32}, 2, 64});
  file.data.resize(64 + 18);
  folder_.Write("a.gguf", file.File());
  EXPECT_THAT(
      Refusal(To(kDenseTarget, folder_.At("a.gguf"))),
      HasSubstr(
          "tensor \"b\" of \"Q4_0\" is quantised, but format gguf expects codes in \"b.weight\""));
}

}  // namespace
}  // namespace awqd::tools
