// Folders in the form of the Hub, and invalid folders.
#include "kernels/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <set>

#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/places.h"

namespace awqd::model {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
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
    const auto checkpoint = Open();
    EXPECT_EQ(checkpoint.status().code(), code);
    EXPECT_THAT(std::string(checkpoint.status().message()), HasSubstr(says));
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

TEST_F(CheckpointTest, ModulesNotConvertedAreIgnored) {
  directory_.Write("m/config.json", AwqConfig(32, ",\"modules_to_not_convert\":[\"vision\"]"));
  TestTensors tensors = Merge(linear_, AwqLinear("model.vision.3.fc", 32, 8, 32));
  tensors.erase("model.vision.3.fc.qzeros");  // would be an error anywhere else
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->linears().size(), 1u);
  EXPECT_EQ(checkpoint->ignored_tensors(), 2);
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
  TestTensors tensors = Merge(IntQuantizedLinear("l.up"), IntQuantizedLinear("l.gate"));
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
  EXPECT_EQ(checkpoint->ignored_tensors(), 6);
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

TEST_F(CheckpointTest, APatternThatCannotBeReadNamesTheFile) {
  std::string config = IntQuantizedConfig();
  config.replace(config.find("re:.*gate$"), 10, "re:(?!gate)");
  directory_.Write("m/config.json", config);
  directory_.Write("m/model.safetensors", SafetensorsOf(IntQuantizedLinear("l.up")));
  ExpectRefused("m/config.json: quantization_config: pattern of modules: got \"(?!gate)\"");
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

TEST_F(CheckpointTest, LinearWithoutAPath) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/model.safetensors", SafetensorsOf({{"qweight", {"I32", {1}, "abcd"}}}));
  ExpectRefused("m/model.safetensors: tensor \"qweight\": got no module path");
}

TEST_F(CheckpointTest, SameTensorInTwoFiles) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/a.safetensors", SafetensorsOf(linear_));
  directory_.Write("m/b.safetensors", SafetensorsOf({*linear_.begin()}));
  ExpectRefused("tensor \"l.up.qweight\": is in two files, m/a.safetensors and m/b.safetensors");
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
