// Folders in the form of the Hub, and invalid folders.
#include "kernels/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <set>

#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"
#include "tests/testing/reasons.h"

namespace awqd::model {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::FirstReason;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::TestTensors;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class CheckpointTest : public ::testing::Test {
 protected:
  absl::StatusOr<Checkpoint> Open() {
    root_ = *RepositoryRoot::Open(directory_.path());
    return Checkpoint::Open(root_, "m");
  }
  void Expect(absl::StatusCode code, const std::string& says) {
    const absl::Status reason = FirstReason(Open());
    EXPECT_EQ(reason.code(), code);
    EXPECT_THAT(std::string(reason.message()), HasSubstr(says));
  }
  void ExpectRefused(const std::string& says) { Expect(absl::StatusCode::kInvalidArgument, says); }
  void WriteIndex(const std::string& weight_map) {
    directory_.Write("m/model.safetensors.index.json", "{\"weight_map\":" + weight_map + "}");
  }

  TempDirectory directory_;
  RepositoryRoot root_;
  const TestTensors linear_ = AwqLinear("l.up", 64, 16, 32);
};

TEST_F(CheckpointTest, OneFileWithoutIndex) {
  directory_.Write("m/config.json", AwqConfig());
  TestTensors tensors = Merge(linear_, AwqLinear("l.down", 32, 8, 32));
  tensors["l.up.bias"] = {"F32", {16}, std::string(64, '\0')};
  tensors["norm.weight"] = {"BF16", {4}, std::string(8, '\0')};
  tensors["norm.bias"] = {"BF16", {4}, std::string(8, '\0')};
  tensors["rotary.scales"] = {"F16", {4}, std::string(8, '\0')};  // a name that is also a suffix
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->format().name, "awq");
  EXPECT_EQ(checkpoint->ignored_tensors(), 3);
  ASSERT_EQ(checkpoint->linears().size(), 2u);
  std::vector<uint8_t> scratch;
  for (const LinearLocation& linear : checkpoint->linears()) {
    const auto weight = checkpoint->Read(linear, &scratch);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->k, linear.path == "l.up" ? 64 : 32);
    EXPECT_EQ(weight->bias.size(), linear.path == "l.up" ? 16u : 0u);
    EXPECT_TRUE(Validate(*weight).ok());
  }
  EXPECT_TRUE(checkpoint->CheckUnchanged(root_).ok());
}

TEST_F(CheckpointTest, TensorsOfOneLayerInDifferentShards) {
  directory_.Write("m/config.json", AwqConfig());
  for (const auto& [name, tensor] : linear_) {
    directory_.Write("m/" + name + ".safetensors", SafetensorsOf({{name, tensor}}));
  }
  for (const bool with_index : {false, true}) {
    if (with_index) {
      WriteIndex(
          "{\"l.up.qweight\":\"l.up.qweight.safetensors\",\"l.up.qzeros\":\"l.up.qzeros."
          "safetensors\","
          "\"l.up.scales\":\"l.up.scales.safetensors\"}");
    }
    const auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ASSERT_EQ(checkpoint->linears().size(), 1u);
    std::vector<uint8_t> scratch;
    EXPECT_TRUE(checkpoint->Read(checkpoint->linears()[0], &scratch).ok());
  }
}

TEST_F(CheckpointTest, OnlyFilesOfTheIndexAreRead) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/a.safetensors", SafetensorsOf(linear_));
  directory_.Write("m/broken.safetensors", "not this one");
  WriteIndex("{\"l.up.qweight\":\"a.safetensors\"}");
  EXPECT_TRUE(Open().ok()) << Open().status();
}

// Tensors decide which linears are quantised, whatever a list says.
TEST_F(CheckpointTest, ModulesNotConvertedThatAreQuantised) {
  directory_.Write("m/config.json", AwqConfig(32, ",\"modules_to_not_convert\":[\"vision\"]"));
  TestTensors tensors = Merge(linear_, AwqLinear("model.vision.3.fc", 32, 8, 32));
  tensors["model.vision.4.fc.weight"] = {"BF16", {1, 1}, "ab"};
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears().size(), 2u);
  EXPECT_EQ(checkpoint->ignored_tensors(), 1);
  EXPECT_THAT(checkpoint->note(), HasSubstr("though the settings leave them out: 1 linears"));
  tensors.erase("model.vision.3.fc.qzeros");
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  ExpectRefused("weight \"model.vision.3.fc\": tensor \"qzeros\" is missing");
  EXPECT_EQ(Open()->linears().size(), 1u);
  EXPECT_EQ(Open()->ignored_tensors(), 1);
}

// --- Formats whose codes have the name of any weight ---

std::string IntQuantizedConfig(absl::string_view activations = "null") {
  return absl::StrCat(
      "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
      "\"int-quantized\",\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":{"
      "\"num_bits\":8,\"strategy\":\"channel\"},\"input_activations\":",
      activations, "}},\"ignore\":[\"lm_head\",\"re:.*gate$\"]}}");
}

TestTensors IntQuantizedLinear(const std::string& path) {
  return {{path + ".weight", {"I8", {3, 4}, std::string(12, '\1')}},
          {path + ".weight_scale", {"F32", {3, 1}, std::string(12, '\0')}}};
}

TEST_F(CheckpointTest, LinearsThatAreNotQuantisedAreLeftOut) {
  directory_.Write("m/config.json", IntQuantizedConfig("{\"num_bits\":4}"));
  TestTensors tensors = IntQuantizedLinear("l.up");
  tensors["norm.weight"] = {"BF16", {4}, std::string(8, '\0')};
  tensors["l.plain.weight"] = {"BF16", {3, 4}, std::string(24, '\0')};
  tensors["l.plain.bias"] = {"BF16", {3}, std::string(6, '\0')};
  tensors["lm_head.weight"] = {"I8", {3, 4}, std::string(12, '\0')};
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->format().name, "int-quantized");
  EXPECT_EQ(checkpoint->quant_method(), "compressed-tensors");
  EXPECT_THAT(checkpoint->note(), HasSubstr("input_activations has no effect"));
  ASSERT_EQ(checkpoint->linears().size(), 1u);
  EXPECT_EQ(checkpoint->linears()[0].path, "l.up");
  EXPECT_EQ(checkpoint->ignored_tensors(), 3);
  // Codes are never passed over, though a list leaves them out and they have no scales.
  EXPECT_THAT(FirstReason(checkpoint).ToString(),
              HasSubstr("weight \"lm_head\": tensor \"weight_scale\" is missing"));
  std::vector<uint8_t> scratch;
  const auto weight = checkpoint->Read(checkpoint->linears()[0], &scratch);
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w8cs+fp32");
}

TEST_F(CheckpointTest, AScaleWithoutCodesIsNoSilentLoss) {
  directory_.Write("m/config.json", IntQuantizedConfig());
  TestTensors tensors = Merge(IntQuantizedLinear("l.up"), IntQuantizedLinear("l.down"));
  tensors["l.down.weight"] = {"F16", {3, 4}, std::string(24, '\0')};
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  ExpectRefused(
      "weight \"l.down\": tensor \"weight\" is \"F16\", not I8, but \"weight_scale\" exists");
  tensors.erase("l.down.weight_scale");
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  EXPECT_TRUE(Open().ok()) << Open().status();
  tensors.erase("l.up.weight_scale");
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  ExpectRefused("weight \"l.up\": tensor \"weight_scale\" is missing");
}

TEST_F(CheckpointTest, APatternThatCannotBeReadMatchesNothing) {
  std::string config = IntQuantizedConfig();
  config.replace(config.find("re:.*gate$"), 10, "re:(?!gate)");
  directory_.Write("m/config.json", config);
  directory_.Write("m/model.safetensors", SafetensorsOf(IntQuantizedLinear("l.up")));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears().size(), 1u);
  EXPECT_THAT(checkpoint->note(), HasSubstr("pattern of modules: got \"(?!gate)\""));
}

TEST_F(CheckpointTest, SideFiles) {
  directory_.Write("m/config.json", "{}");
  directory_.Write("m/model.safetensors", SafetensorsOf(linear_));
  ExpectRefused("m/config.json: quantization_config: got nothing");
  directory_.Write("m/quantize_config.json", "{\"bits\":1,\"group_size\":32,\"desc_act\":false}");
  Expect(absl::StatusCode::kUnimplemented, "quant_method \"gptq\"");
  directory_.Write(
      "m/quantize_config.json",
      "{\"quant_method\":\"awq\",\"bits\":4,\"group_size\":32,\"checkpoint_format\":\"gemm\"}");
  EXPECT_TRUE(Open().ok()) << Open().status();
  directory_.Write("m/quant_config.json", "{\"w_bit\":4,\"version\":\"GEMM\"}");
  ExpectRefused("m/quant_config.json: group_size (or q_group_size): got nothing");
  directory_.Write("m/quant_config.json",
                   "{\"zero_point\":true,\"q_group_size\":32,\"w_bit\":4,\"version\":\"GEMM\"}");
  EXPECT_TRUE(Open().ok()) << Open().status();
}

// Names of tensors tell of families where there are no settings, and no config.json.
TEST_F(CheckpointTest, FamiliesWithoutSettingsAreNamed) {
  for (const bool config : {true, false}) {
    if (!config) fs::remove(directory_.At("m/config.json"));
    if (config) directory_.Write("m/config.json", "{}");
    for (const auto& [marker, family] : {std::pair{"scaled_fp8", "ComfyUI"},
                                         {"l.up.scale_weight", "ComfyUI"},
                                         {"l.up.Qidxs", "QuIP#"}}) {
      TestTensors tensors = linear_;
      tensors[marker] = {"U8", {2}, "{}"};
      directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
      Expect(absl::StatusCode::kUnimplemented,
             absl::StrCat("tensor \"", marker, "\" marks a quantisation of ", family));
    }
    for (const auto& [marker, family] : {std::pair{"l.up.qweight", "AWQ, GPTQ or AutoRound"},
                                         {"l.up.trellis", "ExLlamaV3"},
                                         {"l.up.weight._data", "Optimum Quanto"},
                                         {"l.up.weight._data._data", "Optimum Quanto"},
                                         {"l.up._weight_qdata", "PyTorch's torchao"}}) {
      TestTensors tensors = linear_;
      tensors[marker] = linear_.at("l.up.qweight");
      directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
      Expect(config ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kNotFound,
             absl::StrCat("tensor \"", marker, "\" marks a quantisation of ", family,
                          ", which needs its settings"));
    }
  }
  TestTensors alone = linear_;
  alone["l.up.scale_weight"] = {"F32", {1}, "abcd"};
  directory_.Write("one.safetensors", SafetensorsOf(alone));
  const absl::Status lone = Checkpoint::Open(root_, "one.safetensors").status();
  EXPECT_EQ(lone.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(lone.message()), HasSubstr("a quantisation of ComfyUI"));
}

TEST_F(CheckpointTest, MissingThings) {
  Expect(absl::StatusCode::kNotFound, "m/config.json");
  directory_.Write("m/config.json", AwqConfig());
  ExpectRefused("m: got no *.safetensors file");
  directory_.Write("m/pytorch_model.bin", "");
  ExpectRefused(".bin and .pt files are not read");
  directory_.Write("m/model.safetensors", SafetensorsOf({{"norm.weight", {"F16", {1}, "ab"}}}));
  ExpectRefused("m: got no quantised linear among 1 tensors");
}

TEST_F(CheckpointTest, FormatsThatAreNotRead) {
  directory_.Write("m/config.json",
                   "{\"quantization_config\":{\"quant_method\":\"quip\",\"bits\":4}}");
  Expect(absl::StatusCode::kUnimplemented,
         "m/config.json: quantization_config: got quant_method \"quip\"");
  directory_.Write(
      "m/config.json",
      "{\"quantization_config\":{\"quant_method\":\"awq\",\"bits\":9,\"group_size\":32}}");
  Expect(absl::StatusCode::kUnimplemented, "bits: got 9, expected 2 to 8");
}

TEST_F(CheckpointTest, LinearWithoutOneOfItsTensors) {
  directory_.Write("m/config.json", AwqConfig());
  for (const std::string suffix : {"qweight", "scales"}) {
    TestTensors tensors = linear_;
    tensors.erase("l.up." + suffix);
    directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
    ExpectRefused("m: weight \"l.up\": tensor \"" + suffix + "\" is missing");
  }
}

// The settings say whether zero points may be missing.
TEST_F(CheckpointTest, LinearWithoutZeroPoints) {
  directory_.Write("m/config.json", AwqConfig());
  TestTensors tensors = linear_;
  tensors.erase("l.up.qzeros");
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  ExpectRefused("m: weight \"l.up\": tensor \"qzeros\" is missing; the settings say");
  directory_.Write(
      "m/config.json",
      "{\"quantization_config\":{\"quant_method\":\"awq\",\"bits\":4,\"group_size\":32,"
      "\"zero_point\":false,\"version\":\"gemm\"}}");
  EXPECT_TRUE(Open().ok());
}

// "scales" without codes is no linear that lost them where other modules have such a tensor too.
TEST_F(CheckpointTest, ScalesOfAnActivationFunctionAreNoLinear) {
  directory_.Write("m/config.json", AwqConfig());
  TestTensors tensors = linear_;
  tensors["l.activation_fn.scales"] = {"BF16", {2}, "abcd"};
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->ignored_tensors(), 1);
  EXPECT_TRUE(checkpoint->unserved().empty());
}

// An adapter adds to the product of the codes, which would lack it.
TEST_F(CheckpointTest, AnAdapterInTheModelsFilesRefusesItsLinear) {
  directory_.Write("m/config.json", AwqConfig());
  TestTensors tensors = Merge(linear_, AwqLinear("l.down", 64, 16, 32));
  tensors["l.up.lora_A.weight"] = {"F16", {1, 1}, "ab"};
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  Expect(absl::StatusCode::kUnimplemented,
         "weight \"l.up\": tensor \"l.up.lora_A.weight\": an adapter of low rank");
  EXPECT_EQ(Open()->linears().size(), 1u);
}

TEST_F(CheckpointTest, LinearWithoutAPath) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/model.safetensors", SafetensorsOf({{"qweight", {"I32", {1}, "abcd"}}}));
  ExpectRefused("m/model.safetensors: tensor \"qweight\": got no module path");
}

TEST_F(CheckpointTest, SameTensorInTwoFiles) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/a.safetensors", SafetensorsOf(linear_));
  directory_.Write("m/b.safetensors", SafetensorsOf({*linear_.begin()}));
  ExpectRefused(
      "weight \"l.up\": tensor \"qweight\" is in two files, m/a.safetensors and m/b.safetensors");
  // It refuses no other linear.
  TestTensors others = AwqLinear("l.down", 64, 16, 32);
  others["norm"] = {"F16", {1}, "ab"};
  directory_.Write("m/a.safetensors", SafetensorsOf(Merge(linear_, others)));
  directory_.Write("m/b.safetensors",
                   SafetensorsOf({*linear_.begin(), {"norm", {"F16", {1}, "cd"}}}));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->linears().size(), 1u);
  EXPECT_EQ(checkpoint->linears()[0].path, "l.down");
  EXPECT_EQ(checkpoint->unserved().size(), 1u);
  EXPECT_THAT(checkpoint->note(), HasSubstr("2 tensors are in two files"));
}

TEST_F(CheckpointTest, BadIndex) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/a.safetensors", SafetensorsOf(linear_));
  const std::string index = "m/model.safetensors.index.json: ";
  WriteIndex("{\"l.up.qweight\":\"missing.safetensors\"}");
  ExpectRefused("m: shard \"missing.safetensors\" is missing");
  WriteIndex("{\"l.up.nothing\":\"a.safetensors\"}");
  ExpectRefused(index +
                "tensor \"l.up.nothing\": expected in \"a.safetensors\", which does not hold it");
  directory_.Write("m/b.safetensors", SafetensorsOf({{"x", {"U8", {1}, "a"}}}));
  WriteIndex("{\"l.up.qweight\":\"b.safetensors\",\"l.up.scales\":\"a.safetensors\"}");
  ExpectRefused(index +
                "tensor \"l.up.qweight\": expected in \"b.safetensors\", found in m/a.safetensors");
  for (const std::string name :
       {"../m/a.safetensors", "/etc/passwd", "a.bin", "", "..", "sub/a.safetensors"}) {
    WriteIndex("{\"l.up.qweight\":\"" + name + "\"}");
    ExpectRefused(index + "weight_map: tensor \"l.up.qweight\": got \"" + name + "\"");
  }
  WriteIndex("{\"a\\u0000b\":\"x\\u0000.safetensors\"}");
  ExpectRefused("expected the name of a .safetensors file");
  WriteIndex("{\"l.up.qweight\":3}");
  ExpectRefused("got a number, expected a file name");
  WriteIndex("[]");
  ExpectRefused(index + "weight_map: expected an object");
  WriteIndex("{}");
  ExpectRefused(index + "weight_map: got no tensor");
  directory_.Write("m/model.safetensors.index.json", "{");
  ExpectRefused(index + "not valid JSON");
}

// Settings and index of the model before it was quantised were copied along.
TEST_F(CheckpointTest, AnIndexOfAnotherModelIsIgnored) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/model.safetensors", SafetensorsOf(linear_));
  WriteIndex(
      "{\"l.up.weight\":\"model-00001-of-00002.safetensors\",\"lm_head.weight\":"
      "\"model-00002-of-00002.safetensors\"}");
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears().size(), 1u);
  EXPECT_THAT(checkpoint->note(), HasSubstr("model.safetensors.index.json has no effect"));
  // One of its files is here: then the other one is missing.
  directory_.Write("m/model-00001-of-00002.safetensors",
                   SafetensorsOf({{"l.up.weight", {"U8", {1}, "a"}}}));
  ExpectRefused("shard \"model-00002-of-00002.safetensors\" is missing");
}

TEST_F(CheckpointTest, TheIndexDecidesWhichCopyOfATensorCounts) {
  directory_.Write("m/config.json", AwqConfig());
  const awqd::testing::TestTensors newer = awqd::testing::AwqExpert("l.up", 3);
  directory_.Write("m/a.safetensors", SafetensorsOf(linear_));
  directory_.Write("m/overlay.safetensors", SafetensorsOf(newer));
  directory_.Write("m/stray.safetensors", SafetensorsOf(linear_));
  for (const std::string file : {"overlay", "a"}) {
    const std::string name = absl::StrCat("\"", file, ".safetensors\"");
    const std::string other = file == "a" ? "overlay" : "a";
    WriteIndex(absl::StrCat("{\"l.up.qweight\":", name, ",\"l.up.qzeros\":", name,
                            ",\"l.up.scales\":", name, "}"));
    auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->files().size(), 1u);
    // With both files in the index.
    directory_.Write("m/b.safetensors", SafetensorsOf({{"x", {"U8", {1}, "a"}}}));
    awqd::testing::TestTensors with_copies = file == "a" ? newer : linear_;
    with_copies["y"] = {"U8", {1}, "a"};
    directory_.Write("m/copies.safetensors", SafetensorsOf(with_copies));
    WriteIndex(absl::StrCat("{\"l.up.qweight\":", name, ",\"l.up.qzeros\":", name,
                            ",\"l.up.scales\":", name, ",\"y\":\"copies.safetensors\"}"));
    checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ASSERT_EQ(checkpoint->linears().size(), 1u);
    for (const auto& [suffix, place] : checkpoint->linears()[0].tensors) {
      EXPECT_EQ(place.file->file().name(), absl::StrCat("m/", file, ".safetensors")) << suffix;
    }
    EXPECT_THAT(checkpoint->note(), HasSubstr("3 tensors have no effect"));
  }
}

TEST_F(CheckpointTest, ATensorOfTwoFilesThatNoIndexNames) {
  directory_.Write("m/config.json", AwqConfig());
  awqd::testing::TestTensors more = linear_;
  more["x"] = {"U8", {1}, "a"};
  directory_.Write("m/a.safetensors", SafetensorsOf(more));
  directory_.Write("m/b.safetensors",
                   SafetensorsOf({{"x", {"U8", {1}, "b"}}, {"y", {"U8", {1}, "a"}}}));
  WriteIndex("{\"l.up.qweight\":\"a.safetensors\",\"y\":\"b.safetensors\"}");
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->tensors().at("x").also_in->file().shown_name(), "m/b.safetensors");
  EXPECT_THAT(checkpoint->note(), HasSubstr("1 tensors are in two files"));
}

constexpr char kPointer[] =
    "version https://git-lfs.github.com/spec/v1\noid sha256:"
    "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4995584848\n";

TEST_F(CheckpointTest, PointersOfGitLfsAreNamed) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/model.safetensors", kPointer);
  ExpectRefused("m/model.safetensors: got a pointer of Git LFS, expected the file itself");
  directory_.Write("m/model.safetensors", SafetensorsOf(linear_));
  directory_.Write("m/model.safetensors.index.json", kPointer);
  ExpectRefused("m/model.safetensors.index.json: got a pointer of Git LFS");
  directory_.Write("m/config.json", kPointer);
  ExpectRefused("m/config.json: got a pointer of Git LFS");
  fs::remove(directory_.At("m/config.json"));
  fs::remove(directory_.At("m/model.safetensors"));
  directory_.Write("m/a.gguf", kPointer);
  ExpectRefused("m/a.gguf: got a pointer of Git LFS");
}

// ModelOpt leaves the config.json of the model that it was given.
TEST_F(CheckpointTest, SettingsOfTheBaseModelGiveWay) {
  const std::string fp8 =
      R"({"quantization_config":{"quant_method":"fp8","activation_scheme":"dynamic"}})";
  const awqd::testing::TestTensors e2m1 = {
      {"l.up.weight", {"U8", {16, 8}, std::string(128, '\x21')}},
      {"l.up.weight_scale", {"F8_E4M3", {16, 1}, std::string(16, '\x38')}},
      {"l.up.weight_scale_2", {"F32", {}, std::string("\0\0\x80\x3f", 4)}},
      {"l.down.weight", {"U8", {16, 8}, std::string(128, '\x21')}},
      {"l.down.weight_scale", {"F8_E4M3", {16, 1}, std::string(16, '\x38')}},
      {"l.down.weight_scale_2", {"F32", {}, std::string("\0\0\x80\x3f", 4)}}};
  const awqd::testing::TestTensors e4m3 = {
      {"a.q.weight", {"F8_E4M3", {16, 16}, std::string(256, '\x21')}},
      {"a.q.weight_scale", {"F32", {}, std::string("\0\0\x80\x3f", 4)}}};
  directory_.Write("m/config.json", fp8);
  directory_.Write("m/hf_quant_config.json",
                   R"({"producer":{"name":"modelopt"},"quantization":{"quant_algo":"NVFP4",)"
                   R"("group_size":16,"exclude_modules":["lm_head","a*"]}})");
  // In the second checkpoint one linear is as the base had it.
  const awqd::testing::TestTensors mixed = awqd::testing::Merge(e2m1, e4m3);
  for (const awqd::testing::TestTensors& tensors : {e2m1, mixed}) {
    directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
    const auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->format().name, "modelopt");
    EXPECT_EQ(checkpoint->linears().size(), tensors.contains("a.q.weight") ? 3u : 2u);
    EXPECT_TRUE(checkpoint->unserved().empty());
    EXPECT_THAT(checkpoint->note(), AllOf(HasSubstr("m/config.json: quantization_config has no "),
                                          HasSubstr("m/hf_quant_config.json")));
  }
  // A file beside it that fits nothing changes nothing.
  directory_.Write("m/model.safetensors", SafetensorsOf(e4m3));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->format().name, "fp8");
  EXPECT_THAT(checkpoint->note(), Not(HasSubstr("config.json")));
  // Settings that read every linear, but by its tensors alone, are those of another model.
  directory_.Write("m/hf_quant_config.json",
                   R"({"producer":{"name":"modelopt"},"quantization":{"quant_algo":)"
                   R"("MIXED_PRECISION","quantized_layers":{"x":{"quant_algo":"FP8"},)"
                   R"("y":{"quant_algo":"NVFP4","group_size":16}}}})");
  directory_.Write("m/model.safetensors", SafetensorsOf(mixed));
  const auto other = Open();
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->format().name, "fp8");
  EXPECT_EQ(other->linears().size(), 1u);
  EXPECT_EQ(other->unserved().size(), 2u);
}

TEST_F(CheckpointTest, ErrorsOfDecodingNameFileWeightAndTensor) {
  directory_.Write("m/config.json", AwqConfig(48));
  directory_.Write("m/model.safetensors", SafetensorsOf(linear_));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<uint8_t> scratch;
  const auto weight = checkpoint->Read(checkpoint->linears()[0], &scratch);
  EXPECT_EQ(weight.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(weight.status().message()),
      AllOf(HasSubstr("m/model.safetensors: weight \"l.up\": "), HasSubstr("group_size: got 48")));
}

TEST_F(CheckpointTest, BrokenFileIsNamed) {
  directory_.Write("m/config.json", AwqConfig());
  std::string bytes = SafetensorsOf(linear_);
  bytes.resize(bytes.size() - 1);
  directory_.Write("m/model.safetensors", bytes);
  ExpectRefused("m/model.safetensors: ");
}

TEST_F(CheckpointTest, SpecialFilesAreRefusedAtOnce) {
  directory_.Write("m/config.json", AwqConfig());
  ASSERT_EQ(mkfifo(directory_.At("m/model.safetensors").c_str(), 0600), 0);
  ExpectRefused("got a FIFO, expected a regular file");
  fs::remove(directory_.At("m/model.safetensors"));
  fs::create_directory(directory_.At("m/model.safetensors"));
  ExpectRefused("got a directory, expected a regular file");
  fs::remove(directory_.At("m/model.safetensors"));
  fs::create_symlink("/dev/zero", directory_.At("m/model.safetensors"));
  ExpectRefused("leads out of the model repository");
}

TEST_F(CheckpointTest, ReplacedWhileLoading) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/model.safetensors", SafetensorsOf(linear_));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  directory_.Write("m/new", SafetensorsOf(linear_));
  fs::rename(directory_.At("m/new"), directory_.At("m/model.safetensors"));
  EXPECT_THAT(std::string(checkpoint->CheckUnchanged(root_).message()),
              HasSubstr("replaced while"));
  fs::remove(directory_.At("m/model.safetensors"));
  EXPECT_THAT(std::string(checkpoint->CheckUnchanged(root_).message()),
              HasSubstr("replaced while"));
}

TEST_F(CheckpointTest, SettingsAndIndexAreComparedToo) {
  const std::string index = "{\"l.up.qweight\":\"model.safetensors\"}";
  const auto write = [&] {
    directory_.Write("m/config.json", "{}");
    directory_.Write("m/quant_config.json",
                     "{\"w_bit\":4,\"q_group_size\":32,\"zero_point\":true,\"version\":\"GEMM\"}");
    directory_.Write("m/model.safetensors", SafetensorsOf(linear_));
    WriteIndex(index);
  };
  for (const std::string name :
       {"config.json", "quant_config.json", "model.safetensors.index.json", "model.safetensors"}) {
    write();
    const auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_TRUE(checkpoint->CheckUnchanged(root_).ok());
    fs::copy_file(directory_.At("m/" + name), directory_.At("m/new"));
    fs::rename(directory_.At("m/new"), directory_.At("m/" + name));
    EXPECT_THAT(std::string(checkpoint->CheckUnchanged(root_).message()),
                HasSubstr("m/" + name + ": the file was replaced"));
  }
}

TEST_F(CheckpointTest, FilesThatComeWhileLoading) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/a.safetensors", SafetensorsOf(linear_));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  directory_.Write("m/notes.txt", "of no matter");
  EXPECT_TRUE(checkpoint->CheckUnchanged(root_).ok());
  directory_.Write("m/b.safetensors", SafetensorsOf(AwqLinear("l.down", 64, 16, 32)));
  EXPECT_THAT(std::string(checkpoint->CheckUnchanged(root_).message()),
              HasSubstr("m: tensor files were added or removed"));
  fs::remove(directory_.At("m/b.safetensors"));
  EXPECT_TRUE(checkpoint->CheckUnchanged(root_).ok());
  WriteIndex("{}");
  EXPECT_THAT(std::string(checkpoint->CheckUnchanged(root_).message()),
              HasSubstr("model.safetensors.index.json: the file was written while"));
}

TEST_F(CheckpointTest, AFolderThatAnotherOneTookThePlaceOf) {
  for (const std::string folder : {"one", "two"}) {
    directory_.Write(folder + "/config.json", AwqConfig());
    directory_.Write(folder + "/model.safetensors", SafetensorsOf(linear_));
  }
  fs::create_directory_symlink("one", directory_.At("m"));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE(checkpoint->CheckUnchanged(root_).ok());
  fs::remove(directory_.At("m"));
  fs::create_directory_symlink("two", directory_.At("m"));
  EXPECT_THAT(std::string(checkpoint->CheckUnchanged(root_).message()),
              HasSubstr("m/config.json: the file was replaced"));
}

// Each name of the same file would need memory for its header.
TEST_F(CheckpointTest, OneFileUnderTwoNames) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/a.safetensors", SafetensorsOf(linear_));
  fs::create_symlink("a.safetensors", directory_.At("m/b.safetensors"));
  ExpectRefused("m/a.safetensors: got the same file as m/b.safetensors, expected each shard once");
}

// The limit for one file is also the limit for all files of a model together.
TEST_F(CheckpointTest, HeadersOfAllFilesTogetherAreBounded) {
  directory_.Write("m/config.json", AwqConfig());
  const auto empty = [](const std::string& name) {
    return absl::StrCat("{\"", name, "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
  };
  directory_.Write("m/a.safetensors", awqd::testing::Safetensors(empty("a"), ""));
  // The length alone is refused, so the rest may be a hole in the file.
  const uint64_t length = 100'000'000 - 8;
  const std::string begin = awqd::testing::LittleEndian64(length);
  directory_.Write("m/b.safetensors", begin + empty("b"));
  std::filesystem::resize_file(directory_.path() + "/m/b.safetensors", begin.size() + length);
  ExpectRefused("(the headers of a model may have 100000000 in all)");
}

TEST_F(CheckpointTest, OpeningIsCancelled) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/a.safetensors", SafetensorsOf(linear_));
  root_ = *RepositoryRoot::Open(directory_.path());
  const std::atomic<bool> cancelled = true;
  EXPECT_EQ(Checkpoint::Open(root_, "m", &cancelled).status().code(),
            absl::StatusCode::kUnavailable);
  const std::atomic<bool> running = false;
  EXPECT_TRUE(Checkpoint::Open(root_, "m", &running).ok());
}

TEST_F(CheckpointTest, RealCheckpoint) {
  const auto root = RepositoryRoot::Open(DataPath("awq"));
  ASSERT_TRUE(root.ok()) << root.status();
  const auto checkpoint = Checkpoint::Open(*root, "all-MiniLM-L6-v2-awq");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears().size(), 6u);
  EXPECT_EQ(checkpoint->ignored_tensors(), 5);
  bool split = false;
  for (const LinearLocation& linear : checkpoint->linears()) {
    std::set<const TensorFile*> files;
    for (const auto& [suffix, location] : linear.tensors) files.insert(location.file);
    split |= files.size() == 2;
    EXPECT_EQ(linear.tensors.count("bias"), 1u) << linear.path;
  }
  EXPECT_TRUE(split);  // one linear has tensors in both shards
}

}  // namespace
}  // namespace awqd::model
