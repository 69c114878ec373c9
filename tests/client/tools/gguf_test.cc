// GGUF files that are written: blocks, names, the order of rows, metadata, experts, refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/tools/elements.h"
#include "client/tools/encode/blocks.h"
#include "client/tools/quantize.h"
#include "client/tools/rewrite.h"
#include "tests/client/tools/convert_fixture.h"
#include "tests/client/tools/dense_model.h"
#include "tests/client/tools/made_weight.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::tools {
namespace {

namespace fs = std::filesystem;
using ::awqd::testing::DenseTensor;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string HashOf(const std::vector<uint8_t>& bytes) {
  uint64_t value = 0xcbf29ce484222325;
  for (const uint8_t byte : bytes) value = (value ^ byte) * 0x100000001b3;
  return absl::StrFormat("%016x", value);
}

// As tests/data/gguf/make_rounded.py makes them, which printed the hashes below.
TEST(GgufBlocks, AreThoseOfThePackage) {
  constexpr int64_t kCount = 64 * 256;
  std::vector<float> numbers(kCount);
  uint32_t state = 1;
  for (int64_t i = 0; i < kCount; ++i) {
    state = state * 1664525 + 1013904223;
    numbers[i] = std::ldexp(static_cast<float>(static_cast<int>((state >> 8) % 8191) - 4095) / 4096,
                            static_cast<int>(i / 32 % 9 - 6));
  }
  std::fill_n(numbers.begin() + 96, 32, 0.0f);
  numbers[160 + 7] = -1;
  numbers[160 + 9] = 1;
  std::vector<uint8_t> wide(kCount / 32 * 34), narrow(kCount / 32 * 18);
  ASSERT_TRUE(QuantizeBlocks("Q8_0", numbers.data(), kCount, wide.data()));
  ASSERT_TRUE(QuantizeBlocks("Q4_0", numbers.data(), kCount, narrow.data()));
  EXPECT_EQ(HashOf(wide), "ada895931f2f0e3c");
  EXPECT_EQ(HashOf(narrow), "e9729af249ea008c");
}

TEST(GgufBlocks, NumbersThatNoBlockHolds) {
  std::vector<uint8_t> blocks(34);
  for (const float bad : {NAN, HUGE_VALF, -HUGE_VALF, 3e38f}) {
    std::vector<float> numbers(32, 1.0f);
    numbers[31] = bad;
    EXPECT_FALSE(QuantizeBlocks("Q8_0", numbers.data(), 32, blocks.data())) << bad;
    EXPECT_FALSE(QuantizeBlocks("Q4_0", numbers.data(), 32, blocks.data())) << bad;
  }
  // d is 0 in FP16, and 1 / d is past FP32.
  const std::vector<float> tiny(32, 1e-44f);
  ASSERT_TRUE(QuantizeBlocks("Q8_0", tiny.data(), 32, blocks.data()));
  EXPECT_EQ(blocks, std::vector<uint8_t>(34));
}

TEST(GgufBlocks, TheTypeOfTheFewestBits) {
  const auto type = [](const QuantizationScheme& scheme, int64_t k = 64) {
    return ExactBlockType(MakeWeight({.k = k, .scheme = scheme}));
  };
  EXPECT_EQ(type(Symmetric(4, 32)), "Q4_0");
  EXPECT_EQ(type(Symmetric(3, 64)), "Q4_0");
  EXPECT_EQ(type(Symmetric(8, 0)), "Q8_0");
  EXPECT_EQ(type(Symmetric(5, 32)), "Q8_0");
  EXPECT_EQ(type(Asymmetric(4, 32)), "Q8_0");  // codes less their zeros are -15 to 15
  EXPECT_EQ(type(Symmetric(4, 32, DType::kBf16)), "Q4_0");
  EXPECT_EQ(type(Symmetric(4, 16)), "");
  EXPECT_EQ(type(Symmetric(4, 0), 48), "");
  EXPECT_EQ(type(Asymmetric(8, 32)), "");
  EXPECT_EQ(ExactBlockType(MakeWeight({.scheme = Symmetric(4, 32), .order = true})), "");
  QuantizationScheme mxfp4 = {.code = CodeKind::kE2m1,
                              .block_rows = 32,
                              .zero_kind = ZeroKind::kConstant,
                              .scale_dtype = DType::kE8m0};
  HostWeight weight = {.k = 64, .n = 1, .scheme = mxfp4, .scales = {127, 254}};
  EXPECT_EQ(ExactBlockType(weight), "MXFP4");
  weight.scales[1] = 255;
  EXPECT_EQ(ExactBlockType(weight), "");
  mxfp4.block_rows = 16;
  mxfp4.scale_dtype = DType::kE4m3;
  weight = {.k = 64, .n = 1, .scheme = mxfp4, .scales = {0, 1, 0x7e, 3}};
  EXPECT_EQ(ExactBlockType(weight), "NVFP4");
  weight.scales[0] = 0x81;  // negative
  EXPECT_EQ(ExactBlockType(weight), "");
}

// --- Models ---

constexpr char kLlama[] =
    R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128,
        "vocab_size": 40, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16")";

TestTensors LlamaTensors(const std::string& dtype) {
  const std::string layer = "model.layers.0.";
  TestTensors out = {{layer + "self_attn.q_proj.weight", DenseTensor(dtype, 64, 64, 1)},
                     {layer + "self_attn.k_proj.weight", DenseTensor(dtype, 32, 64, 2)},
                     {layer + "self_attn.k_proj.bias", DenseTensor(dtype, 1, 32, 3)},
                     {layer + "mlp.down_proj.weight", DenseTensor(dtype, 64, 96, 4)},
                     {layer + "input_layernorm.weight", DenseTensor(dtype, 1, 64, 5)},
                     {layer + "self_attn.rotary_emb.inv_freq", DenseTensor("F32", 1, 8, 6)},
                     {"model.embed_tokens.weight", DenseTensor(dtype, 40, 64, 7)}};
  for (auto& [name, tensor] : out) {
    if (tensor.shape[0] == 1) tensor.shape.erase(tensor.shape.begin());
  }
  return out;
}

class GgufTest : public ConvertFixture {
 protected:
  void WriteModel(const TestTensors& tensors, const std::string& more = "") const {
    folder_.Write("m/config.json", absl::StrCat(kLlama, more, "}"));
    folder_.Write("m/model.safetensors", SafetensorsOf(tensors));
  }
  std::vector<float> Floats(const Model& model, const std::string& name) const {
    const model::TensorLocation* const place = model.tensors().Find(name);
    if (place == nullptr) return {};
    std::vector<float> out(place->info->bytes() / SizeOf(FloatTypeNamed(place->info->dtype)));
    EXPECT_TRUE(RowsOfTensor(*place, 1)(0, static_cast<int64_t>(out.size()), out.data()).ok());
    return out;
  }
};

TEST_F(GgufTest, ADenseModelHasTheNamesAndRowsOfLlamaCpp) {
  WriteModel(LlamaTensors("BF16"),
             R"(,"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
                 "high_freq_factor": 4, "original_max_position_embeddings": 64})");
  folder_.Write("m/tokenizer.json", "tokens");
  const auto got = Convert(To(kGgufTarget, folder_.At("m")), Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->verified->rounded, 0);
  EXPECT_EQ(got->verified->elements, 64 * 64 + 32 * 64 + 64 * 96 + 40 * 64);
  EXPECT_THAT(got->carried.files, ElementsAre("tokenizer.json"));
  ASSERT_EQ(got->carried.left_out.size(), 1u);
  EXPECT_THAT(got->carried.left_out[0], HasSubstr("inv_freq"));

  const auto source = Model::Open(folder_.At("m")), out = Model::Open(folder_.At("out"));
  ASSERT_TRUE(source.ok() && out.ok()) << out.status();
  std::map<std::string, std::string> types;
  for (const auto& [name, place] : out->tensors().all()) {
    types[std::string(name)] = place.info->dtype;
  }
  EXPECT_EQ(types, (std::map<std::string, std::string>{{"blk.0.attn_q.weight", "BF16"},
                                                       {"blk.0.attn_k.weight", "BF16"},
                                                       {"blk.0.attn_k.bias", "F32"},
                                                       {"blk.0.ffn_down.weight", "BF16"},
                                                       {"blk.0.attn_norm.weight", "F32"},
                                                       {"token_embd.weight", "BF16"},
                                                       {"rope_freqs.weight", "F32"}}));
  // Two heads of 16: rows 0, 8, 1, 9, ... of each.
  const auto bias = Floats(*out, "blk.0.attn_k.bias");
  const auto rows = Floats(*out, "blk.0.attn_k.weight");
  const auto own_bias = Floats(*source, "model.layers.0.self_attn.k_proj.bias");
  const auto own_rows = Floats(*source, "model.layers.0.self_attn.k_proj.weight");
  ASSERT_EQ(rows.size(), own_rows.size());
  for (int row = 0; row < 32; ++row) {
    const int from = row / 16 * 16 + row % 2 * 8 + row % 16 / 2;
    EXPECT_EQ(bias[row], own_bias[from]);
    EXPECT_EQ(std::memcmp(&rows[row * 64], &own_rows[from * 64], 64 * sizeof(float)), 0) << row;
  }
  // Waves of 2 pi * 10000^(i / 16): the first two are short, from the fifth on long.
  const auto factors = Floats(*out, "rope_freqs.weight");
  ASSERT_EQ(factors.size(), 8u);
  EXPECT_EQ(factors[0], 1);
  EXPECT_EQ(factors[7], 8);
  const auto config = ReadConfig(*out);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->at("model_type"), "llama");
  EXPECT_EQ(config->at("hidden_size"), 64);
  EXPECT_EQ(config->at("rms_norm_eps"), 1e-5);
  EXPECT_EQ(config->at("gguf").at("llama.rope.dimension_count"), 16);
  EXPECT_EQ(config->at("gguf").at("tokenizer.ggml.model"), "none");
}

TEST_F(GgufTest, AFileOfItsOwn) {
  WriteModel(LlamaTensors("F16"));
  ConvertOptions options = To(kGgufTarget, folder_.At("m"));
  options.output = folder_.At("new.gguf");
  options.dtype = "Q8_0";
  const auto got = Convert(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(fs::is_regular_file(options.output));
  EXPECT_FALSE(fs::exists(options.output + ".partial"));
  const auto out = Model::Open(options.output);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(out->tensors().Find("blk.0.ffn_down.weight")->info->dtype, "Q8_0");
  EXPECT_EQ(out->tensors().Find("token_embd.weight")->info->dtype, "F16");
  EXPECT_EQ(Convert(options, Quiet).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(GgufTest, QuantizeSaysWhatItLoses) {
  WriteModel(LlamaTensors("F32"));
  QuantizeOptions options = {.folder = folder_.At("m"),
                             .output = folder_.At("out"),
                             .target = &kGgufTarget,
                             .rtn = {.bits = 4, .group_size = 32, .symmetric = true}};
  const auto got = Quantize(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  ASSERT_EQ(got->linears.size(), 3u);
  for (const QuantizedLinear& linear : got->linears) {
    EXPECT_EQ(linear.scheme, "Q4_0");
    EXPECT_GT(linear.norms.relative(), 0.05);
    EXPECT_LT(linear.norms.relative(), 0.12);
  }
  const auto same = Diff(folder_.At("out"), folder_.At("out"), 1, Quiet);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->linears.size(), 3u);
  options.rtn.group_size = 64;
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("group_size: got 64"));
  options.rtn = {.bits = 4, .group_size = 32, .symmetric = true, .search = true};
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("search: got true"));
}

// gpt-oss: codes as they are; gate and up, which are columns in turn, become two.
TEST_F(GgufTest, ExpertsOfOneTensor) {
  constexpr int kExperts = 2, kGate = 8;
  TestTensors tensors;
  std::string blocks, scales, bias;
  for (int i = 0; i < kExperts * 2 * kGate; ++i) {
    blocks += std::string(32, static_cast<char>(0x11 * (i % 7 + 1)));
    scales += std::string(2, static_cast<char>(120 + i % 5));
    bias += std::string("\0", 1) + static_cast<char>(i);
  }
  const std::string path = "model.layers.0.mlp.experts.gate_up_proj";
  tensors[path + "_blocks"] = {"U8", {kExperts, 2 * kGate, 2, 16}, blocks};
  tensors[path + "_scales"] = {"U8", {kExperts, 2 * kGate, 2}, scales};
  tensors[path + "_bias"] = {"BF16", {kExperts, 2 * kGate}, bias};
  tensors["model.layers.0.self_attn.sinks"] = {"BF16", {4}, std::string(8, '\x3f')};
  std::string config = absl::StrCat(kLlama, R"(, "num_local_experts": 2,
      "quantization_config": {"quant_method": "mxfp4"}})");
  config.replace(config.find("llama"), 5, "gpt_oss");
  folder_.Write("m/config.json", config);
  folder_.Write("m/model.safetensors", SafetensorsOf(tensors));
  const auto got = Convert(To(kGgufTarget, folder_.At("m")), Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->verified->rounded, 0);
  EXPECT_EQ(got->verified->elements, kExperts * 2 * kGate * 64);
  const auto source = Model::Open(folder_.At("m")), out = Model::Open(folder_.At("out"));
  ASSERT_TRUE(source.ok() && out.ok()) << out.status();
  EXPECT_THAT(out->tensors().Find("blk.0.ffn_up_exps.weight")->info->shape, ElementsAre(2, 8, 64));
  EXPECT_EQ(out->tensors().Find("blk.0.ffn_up_exps.weight")->info->dtype, "MXFP4");
  EXPECT_EQ(Floats(*out, "blk.0.attn_sinks.weight").size(), 4u);
  const auto gate_up = ReadElements(*source, "model.layers.0.mlp.experts.1.gate_up_proj");
  const auto up = ReadElements(*out, "blk.0.ffn_up_exps.experts.1");
  ASSERT_TRUE(gate_up.ok() && up.ok()) << up.status();
  std::vector<float> want(64 * 16), have(64 * 8);
  ASSERT_TRUE(gate_up->Read(0, 16, want.data()).ok() && up->Read(0, 8, have.data()).ok());
  for (int col = 0; col < 8; ++col) {
    EXPECT_EQ(up->bias()[col], gate_up->bias()[2 * col + 1]);
    for (int row = 0; row < 64; ++row) {
      EXPECT_EQ(have[row * 8 + col], want[row * 16 + 2 * col + 1]) << row << " " << col;
    }
  }
}

TEST_F(GgufTest, Refuses) {
  TestTensors tensors = LlamaTensors("F16");
  tensors["model.layers.0.mlp.other.weight"] = DenseTensor("F16", 4, 64, 1);
  WriteModel(tensors);
  EXPECT_THAT(Refusal(To(kGgufTarget, folder_.At("m"))),
              HasSubstr("tensor \"model.layers.0.mlp.other.weight\": got a path that llama.cpp has "
                        "no name for"));
  WriteModel(LlamaTensors("F16"), R"(,"rope_scaling": {"type": "longrope"})");
  EXPECT_THAT(Refusal(To(kGgufTarget, folder_.At("m"))),
              HasSubstr("rope_type: got \"longrope\", expected default, linear, llama3 or yarn"));
  folder_.Write("m/config.json", R"({"model_type": "qwen3"})");
  EXPECT_THAT(Refusal(To(kGgufTarget, folder_.At("m"))),
              HasSubstr("config.json: hidden_size: got nothing, expected a number"));
  EXPECT_THAT(Refusal(To(kGgufTarget, DataPath("gguf/super-blocks.gguf"))),
              HasSubstr("got a GGUF file"));
  tensors = {{"a.weight", {"F32", {1, 32}, std::string(124, '\0') + "\xff\xff\x7f\x7f"}}};
  folder_.Write("m/config.json", "{}");
  folder_.Write("m/model.safetensors", SafetensorsOf(tensors));
  for (const char* dtype : {"F16", "Q8_0"}) {
    ConvertOptions options = To(kGgufTarget, folder_.At("m"));
    options.dtype = dtype;
    EXPECT_THAT(Refusal(options), HasSubstr("tensor \"a.weight\": elements: got one in row 0"));
  }
  tensors = {{"a", {"U8", {2}, "ab"}}, {"b.weight", DenseTensor("F32", 2, 32, 1)}};
  folder_.Write("m/model.safetensors", SafetensorsOf(tensors));
  EXPECT_THAT(Refusal(To(kGgufTarget, folder_.At("m"))), HasSubstr("tensor \"a\": got \"U8\""));
}

}  // namespace
}  // namespace awqd::tools
