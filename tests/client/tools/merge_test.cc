// Merge: peft's own results, quantised bases and targets, refusals.
#include "client/tools/merge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>

#include "absl/strings/str_replace.h"
#include "client/tools/adapter.h"
#include "client/tools/diff.h"
#include "tests/client/tools/convert_fixture.h"
#include "tests/client/tools/dense_model.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::tools {
namespace {

namespace fs = std::filesystem;
using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::DenseTensor;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TestTensors;
using ::testing::HasSubstr;

class MergeTest : public ConvertFixture {
 protected:
  MergeOptions Options(const std::string& base, const std::string& adapter,
                       const Target& target = kDenseTarget) const {
    return {.quantize = {.folder = base, .output = folder_.At("out"), .target = &target},
            .adapter = adapter};
  }
  std::string RefusalOf(const MergeOptions& options) const {
    const auto got = Merge(options, Quiet);
    EXPECT_FALSE(got.ok());
    EXPECT_FALSE(fs::exists(folder_.At("out")));
    EXPECT_FALSE(fs::exists(folder_.At("out.partial")));
    return std::string(got.status().message());
  }
  // An adapter of rank 2 for the linear "a.up" [16, 64].
  void WriteAdapter(const std::string& config = "", TestTensors more = {}) const {
    folder_.Write("lora/adapter_config.json",
                  absl::StrCat(R"({"peft_type": "LORA", "r": 2, "lora_alpha": 4)", config, "}"));
    more.insert({"base_model.model.a.up.lora_A.weight", DenseTensor("BF16", 2, 64, 1)});
    more.insert({"base_model.model.a.up.lora_B.weight", DenseTensor("F32", 16, 2, 2)});
    folder_.Write("lora/adapter_model.safetensors", SafetensorsOf(more));
  }
  void WriteAwq(const std::string& name) const {
    folder_.Write(name + "/config.json", AwqConfig());
    auto tensors = testing::Merge(AwqLinear("a.up", 64, 16, 32), AwqLinear("b.up", 64, 16, 32));
    folder_.Write(name + "/model.safetensors", SafetensorsOf(tensors));
  }
};

// FP32 sums in another order than torch's: of up to 16 products, and DoRA's norm.
TEST_F(MergeTest, IsPeftsWithinTheLastPlaces) {
  for (const char* name : {"plain", "dora", "whole", "bias"}) {
    const std::string adapter = DataPath(std::string("lora/") + name);
    const auto got = Merge(Options(DataPath("lora/base"), adapter), Quiet);
    ASSERT_TRUE(got.ok()) << name << ": " << got.status();
    fs::create_directories(folder_.At("want"));
    fs::copy_file(adapter + "/merged.golden", folder_.At("want/model.safetensors"),
                  fs::copy_options::overwrite_existing);
    const auto want = Model::Open(folder_.At("want")), out = Model::Open(folder_.At("out")),
               base = Model::Open(DataPath("lora/base"));
    ASSERT_TRUE(want.ok() && out.ok() && base.ok());
    ASSERT_EQ(want->tensors().all().size(), out->tensors().all().size());
    int changed = 0;
    for (const auto& [tensor, place] : want->tensors().all()) {
      const std::string what(tensor);
      const auto left = ReadFloats(what, *out->tensors().Find(tensor));
      const auto right = ReadFloats(what, place);
      ASSERT_TRUE(left.ok() && right.ok());
      Difference difference;
      difference.AddNorms(left->data(), right->data(), static_cast<int64_t>(left->size()));
      EXPECT_LT(difference.norms.relative(), 2e-7) << name << " " << what;
      changed += *SameBytes(*base->tensors().Find(tensor), *out->tensors().Find(tensor)) ? 0 : 1;
    }
    EXPECT_EQ(changed, std::string(name) == "dora" ? 2 : std::string(name) == "bias" ? 2 : 3);
    EXPECT_EQ(got->modules + got->replaced, changed - (std::string(name) == "bias" ? 1 : 0));
    for (const QuantizedLinear& linear : got->linears) EXPECT_EQ(linear.norms.relative(), 0);
    fs::remove_all(folder_.At("out"));
  }
}

// A quantised base, its dense copy, and that copy as GGUF, give the same elements.
TEST_F(MergeTest, AQuantisedBase) {
  WriteAwq("base");
  WriteAdapter();
  MergeOptions options = Options(folder_.At("base"), folder_.At("lora"));
  options.dtype = "F32";
  auto got = Merge(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->linears.size(), 2u);
  fs::rename(folder_.At("out"), folder_.At("one"));

  ConvertOptions dense = To(kDenseTarget, folder_.At("base"));
  dense.dtype = "F32";
  ASSERT_TRUE(Convert(dense, Quiet).ok());
  fs::rename(folder_.At("out"), folder_.At("dense"));
  got = Merge(Options(folder_.At("dense"), folder_.At("lora")), Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  auto same = Diff(folder_.At("one"), folder_.At("out"), 1, Quiet);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_TRUE(same->same()) << ToJson(*same).dump();
  fs::rename(folder_.At("out"), folder_.At("two"));
  same = Diff(folder_.At("two"), folder_.At("dense"), 1, Quiet);
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(same->linears[0].different, 64 * 16);
  EXPECT_EQ(same->linears[1].different, 0);

  options = Options(folder_.At("base"), folder_.At("lora"), kGgufTarget);
  options.dtype = "F32";
  got = Merge(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  const auto file = Model::Open(folder_.At("out")), two = Model::Open(folder_.At("two"));
  ASSERT_TRUE(file.ok() && two.ok());
  // b.up is as it was, in blocks.
  EXPECT_EQ(file->tensors().Find("b.up.weight")->info->dtype, "Q8_0");
  EXPECT_TRUE(
      *SameBytes(*file->tensors().Find("a.up.weight"), *two->tensors().Find("a.up.weight")));
}

// A file of the inner model, whose paths lack the wrapper's name.
TEST_F(MergeTest, PathsWithoutTheirFirstComponent) {
  WriteAdapter();
  folder_.Write("base/config.json", "{}");
  folder_.Write("base/model.safetensors",
                SafetensorsOf({{"up.weight", DenseTensor("BF16", 16, 64, 3)}}));
  const auto got = Merge(Options(folder_.At("base"), folder_.At("lora")), Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->linears[0].path, "up");
}

// The names in a GGUF file, and the rows of q, are those of llama.cpp.
TEST_F(MergeTest, ABaseOfGguf) {
  folder_.Write("base/config.json",
                R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
                    "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 8,
                    "max_position_embeddings": 8, "rms_norm_eps": 1e-5})");
  const std::string path = "model.layers.0.self_attn.q_proj";
  folder_.Write("base/model.safetensors",
                SafetensorsOf({{path + ".weight", DenseTensor("F32", 16, 64, 3)},
                               {"model.embed_tokens.weight", DenseTensor("F32", 8, 64, 4)}}));
  folder_.Write("lora/adapter_config.json", R"({"peft_type": "LORA", "r": 2, "lora_alpha": 4})");
  const std::string module = "base_model.model." + path;
  folder_.Write("lora/adapter_model.safetensors",
                SafetensorsOf({{module + ".lora_A.weight", DenseTensor("F32", 2, 64, 1)},
                               {module + ".lora_B.weight", DenseTensor("F32", 16, 2, 2)}}));
  ConvertOptions to_gguf = To(kGgufTarget, folder_.At("base"));
  to_gguf.dtype = "Q8_0";  // the linear; the embedding stays
  to_gguf.output = folder_.At("base.gguf");
  ASSERT_TRUE(Convert(to_gguf, Quiet).ok());
  // Merged into what the file holds, in its order.
  const auto got = Merge(Options(folder_.At("base.gguf"), folder_.At("lora")), Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  const auto base = Model::Open(folder_.At("base.gguf")), out = Model::Open(folder_.At("out"));
  ASSERT_TRUE(base.ok() && out.ok()) << out.status();
  const auto before = ReadElements(*base, "blk.0.attn_q"),
             after = ReadElements(*out, "blk.0.attn_q");
  const auto adapter = Adapter::Open(folder_.At("lora"));
  ASSERT_TRUE(before.ok() && after.ok() && adapter.ok()) << after.status();
  const auto low = adapter->Read(path, 16, 64);
  ASSERT_TRUE(low.ok()) << low.status();
  std::vector<float> was(64 * 16), is(64 * 16);
  ASSERT_TRUE(before->Read(0, 16, was.data()).ok() && after->Read(0, 16, is.data()).ok());
  for (int row = 0; row < 16; ++row) {
    const int from = row / 8 * 8 + row % 2 * 4 + row % 8 / 2;
    for (int k = 0; k < 64; ++k) {
      const float sum = low->b[from * 2] * low->a[k] + low->b[from * 2 + 1] * low->a[64 + k];
      EXPECT_EQ(is[k * 16 + row], HalfToFloat(FloatToHalf(was[k * 16 + row] + 2 * sum)));
    }
  }
}

// Rounding to BF16 loses what the report says, and quantising what quantize loses of FP32.
TEST_F(MergeTest, SaysWhatRoundingLost) {
  folder_.Write("base/config.json", "{}");
  folder_.Write("base/model.safetensors",
                SafetensorsOf({{"a.up.weight", DenseTensor("F32", 16, 64, 3)}}));
  WriteAdapter();
  ASSERT_TRUE(Merge(Options(folder_.At("base"), folder_.At("lora")), Quiet).ok());
  fs::rename(folder_.At("out"), folder_.At("fp32"));
  MergeOptions options = Options(folder_.At("base"), folder_.At("lora"));
  options.dtype = "BF16";
  auto got = Merge(options, Quiet);
  ASSERT_TRUE(got.ok()) << got.status();
  auto difference = Diff(folder_.At("out"), folder_.At("fp32"), 1, Quiet);
  ASSERT_TRUE(difference.ok()) << difference.status();
  EXPECT_GT(got->linears[0].norms.relative(), 0);
  EXPECT_DOUBLE_EQ(got->linears[0].norms.relative(), difference->linears[0].norms.relative());
  EXPECT_EQ(got->linears[0].largest, difference->linears[0].largest);
  fs::remove_all(folder_.At("out"));
  for (const Target* target : {&kGptqTarget, &kMlxTarget}) {
    options = Options(folder_.At("base"), folder_.At("lora"), *target);
    options.quantize.rtn.group_size = 32;
    got = Merge(options, Quiet);
    ASSERT_TRUE(got.ok()) << got.status();
    difference = Diff(folder_.At("out"), folder_.At("fp32"), 1, Quiet);
    ASSERT_TRUE(difference.ok()) << difference.status();
    EXPECT_DOUBLE_EQ(got->linears[0].norms.relative(), difference->linears[0].norms.relative());
    fs::remove_all(folder_.At("out"));
  }
}

TEST_F(MergeTest, RefusesAdaptersThatItDoesNotKnow) {
  WriteAwq("base");
  const MergeOptions options = Options(folder_.At("base"), folder_.At("lora"));
  const auto refused = [&](const std::string& config, const TestTensors& more = {}) {
    WriteAdapter(config, more);
    return RefusalOf(options);
  };
  EXPECT_THAT(refused(R"(, "use_qalora": true)"), HasSubstr("\"use_qalora\": got \"true\""));
  EXPECT_THAT(refused(R"(, "new_thing": {"a": 1})"), HasSubstr("expected nothing"));
  EXPECT_THAT(refused(R"(, "init_lora_weights": "pissa")"), HasSubstr("init_lora_weights"));
  EXPECT_THAT(refused(R"(, "rank_pattern": {"up": 3})"),
              HasSubstr("module \"a.up\": lora_A: got a rank of 2, expected 3"));
  EXPECT_THAT(refused(R"(, "alpha_pattern": {"u(p": 3})"), HasSubstr("a regular expression"));
  EXPECT_THAT(refused(R"(, "alpha_pattern": {"x": -1})"), HasSubstr("a number above 0"));
  EXPECT_THAT(refused(R"(, "use_dora": true)"), HasSubstr("no lora_magnitude_vector"));
  EXPECT_THAT(refused("", {{"base_model.model.c.lora_A.weight", DenseTensor("F32", 2, 64, 1)}}),
              HasSubstr("module \"c\": tensor \"lora_B\" is missing"));
  EXPECT_THAT(refused("", {{"base_model.model.c.lora_A.weight", DenseTensor("F32", 2, 64, 1)},
                           {"base_model.model.c.lora_B.weight", DenseTensor("F32", 16, 2, 1)}}),
              HasSubstr("module \"c\": the base model has no linear or embedding of that path"));
  EXPECT_THAT(refused("", {{"base_model.model.a.up.lora_B.weight", DenseTensor("F32", 8, 2, 1)}}),
              HasSubstr("\"lora_B\": got shape [8, 2], expected [16, 2]"));
  EXPECT_THAT(refused("", {{"base_model.model.a.up.lora_A.weight", DenseTensor("F32", 2, 8, 1)}}),
              HasSubstr("\"lora_A\": got shape [2, 8], expected [r, 64]"));
  EXPECT_THAT(refused("", {{"base_model.model.x.weight", DenseTensor("F32", 2, 8, 1)}}),
              HasSubstr("\"x.weight\": the base model has none of that name"));
  EXPECT_THAT(refused("", {{"base_model.model.b.up.weight", DenseTensor("F32", 2, 8, 1)}}),
              HasSubstr("got shape [2, 8], expected [16, 64] as of the base"));
  EXPECT_THAT(refused("", {{"other", DenseTensor("F32", 2, 8, 1)}}),
              HasSubstr("\"base_model.model.\""));
  EXPECT_THAT(
      refused("", {{"base_model.model.a.token_adapter.delta", DenseTensor("F32", 2, 8, 1)}}),
      HasSubstr("it is not known how to merge"));
  folder_.Write("lora/adapter_config.json", R"({"peft_type": "IA3"})");
  EXPECT_THAT(RefusalOf(options), HasSubstr("peft_type"));
  fs::remove(folder_.At("lora/adapter_config.json"));
  EXPECT_THAT(RefusalOf(options), HasSubstr("adapter_config.json"));
}

}  // namespace
}  // namespace awqd::tools
