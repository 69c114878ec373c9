// Entries of a repository that are GGUF files, or hold one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/containers/gguf.h"
#include "tests/kernels/checkpoint/gguf_bytes.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::model {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::GgufBytes;
using ::awqd::testing::GgufKey;
using ::awqd::testing::GgufText;
using ::awqd::testing::LittleEndian;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::testing::AllOf;
using ::testing::HasSubstr;

class GgufModelTest : public ::testing::Test {
 protected:
  absl::StatusOr<Checkpoint> Open(const std::string& name) {
    root_ = *RepositoryRoot::Open(directory_.path());
    return Checkpoint::Open(root_, name);
  }
  absl::Status Find(const std::string& name) {
    return FindModel(*RepositoryRoot::Open(directory_.path()), name);
  }
  void ExpectOneLinear(const std::string& name) {
    const auto checkpoint = Open(name);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_TRUE(Find(name).ok());
    EXPECT_EQ(checkpoint->format().name, "gguf");
    EXPECT_EQ(checkpoint->quant_method(), "gguf");
    ASSERT_EQ(checkpoint->linears().size(), 1u);
    EXPECT_EQ(checkpoint->linears()[0].path, "a");
    std::vector<uint8_t> scratch;
    const auto weight = checkpoint->Read(checkpoint->linears()[0], &scratch);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->k, 32);
    EXPECT_EQ(weight->n, 2);
    EXPECT_TRUE(checkpoint->CheckUnchanged(root_).ok());
  }
  void ExpectRefused(const std::string& name, absl::StatusCode code, const std::string& says) {
    const absl::Status status = Open(name).status();
    EXPECT_EQ(status.code(), code);
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  }

  TempDirectory directory_;
  RepositoryRoot root_;
};

TEST_F(GgufModelTest, AFileAFolderAndAFolderNamedLikeAFile) {
  directory_.Write("one.gguf", GgufBytes().File());
  directory_.Write("folder/any name.gguf", GgufBytes().File());
  directory_.Write("folder/README.md", "");
  directory_.Write("folder/.hidden.gguf", "");
  directory_.Write("folder.gguf/m.gguf", GgufBytes().File());
  for (const char* name : {"one.gguf", "folder", "folder.gguf"}) {
    SCOPED_TRACE(name);
    ExpectOneLinear(name);
  }
}

TEST_F(GgufModelTest, AConfigComesFirst) {
  directory_.Write("m/config.json", AwqConfig());
  directory_.Write("m/model.safetensors", SafetensorsOf(AwqLinear("l.up", 64, 16, 32)));
  directory_.Write("m/a.gguf", GgufBytes().File());
  const auto checkpoint = Open("m");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->format().name, "awq");
  EXPECT_TRUE(Find("m").ok());
}

// A GGUF file that came with the config.json of its model, and no other tensors.
TEST_F(GgufModelTest, AConfigBesideAFileIsNoOtherModel) {
  directory_.Write("m/config.json", "{\"model_type\":\"llama\"}");
  directory_.Write("m/a.gguf", GgufBytes().File());
  ExpectOneLinear("m");
}

TEST_F(GgufModelTest, AProjectorDoesNotCountBesideAModel) {
  GgufBytes projector;
  projector.keys = {GgufKey("general.alignment", 4, LittleEndian(32, 4)),
                    GgufKey("general.architecture", 8, GgufText("clip"))};
  projector.tensors = {{"v.blk.0.attn_q.weight"}};
  directory_.Write("m/mmproj-F16.gguf", projector.File());
  directory_.Write("m/tiny-Q4_0.gguf", GgufBytes().File());
  directory_.Write("m/z-second-projector.gguf", projector.File());
  ExpectOneLinear("m");
  directory_.Write("alone/mmproj-F16.gguf", projector.File());
  const auto alone = Open("alone");
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->linears()[0].path, "v.blk.0.attn_q");
  directory_.Write("m/tiny-Q8_0.gguf", GgufBytes().File());
  ExpectRefused("m", absl::StatusCode::kInvalidArgument,
                "got 2 *.gguf files, such as \"tiny-Q4_0.gguf\" and \"tiny-Q8_0.gguf\"");
}

class GgufPartsTest : public GgufModelTest {
 protected:
  // Part `number` from 0 on of `count`, with one linear of its own. Later parts say nothing of the
  // model.
  static std::string Part(int number, int count) {
    GgufBytes bytes;
    if (number > 0) bytes.keys.clear();
    bytes.keys.push_back(GgufKey("split.no", 2, LittleEndian(number, 2)));
    bytes.keys.push_back(GgufKey("split.count", 2, LittleEndian(count, 2)));
    bytes.keys.push_back(GgufKey("split.tensors.count", 5, LittleEndian(count, 4)));
    bytes.tensors = {{absl::StrCat("blk.", number, ".ffn_up.weight")}};
    bytes.data[1] = static_cast<char>(0x3c + 4 * number);  // FP16 1, 2, 4 ...
    return bytes.File();
  }
  static std::string NameOf(int number, int count) {
    return absl::StrCat("tiny-0000", number + 1, "-of-0000", count, ".gguf");
  }
  void WriteParts(const std::string& folder, int count) {
    for (int i = 0; i < count; ++i) {
      directory_.Write(absl::StrCat(folder, NameOf(i, count)), Part(i, count));
    }
  }
};

TEST_F(GgufPartsTest, AFolderOfPartsIsOneModel) {
  WriteParts("m/", 3);
  WriteParts("", 3);
  for (const std::string& name : {std::string("m"), NameOf(0, 3)}) {
    SCOPED_TRACE(name);
    EXPECT_TRUE(Find(name).ok()) << Find(name);
    const auto checkpoint = Open(name);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ASSERT_EQ(checkpoint->linears().size(), 3u);
    EXPECT_EQ(checkpoint->files().size(), 3u);
    EXPECT_EQ(checkpoint->note(), "GGUF of \"llama\"");
    for (int i = 0; i < 3; ++i) {
      const LinearLocation& linear = checkpoint->linears()[i];
      EXPECT_EQ(linear.path, absl::StrCat("blk.", i, ".ffn_up"));
      std::vector<uint8_t> scratch;
      const auto weight = checkpoint->Read(linear, &scratch);
      ASSERT_TRUE(weight.ok()) << weight.status();
      EXPECT_EQ(weight->Scale(0, 0), 1 << i);
    }
    EXPECT_TRUE(checkpoint->CheckUnchanged(root_).ok());
  }
  EXPECT_EQ(Find(NameOf(1, 3)).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(Find(NameOf(1, 3)).message()),
              AllOf(HasSubstr(NameOf(1, 3)), HasSubstr("is a part of the model")));
}

TEST_F(GgufPartsTest, PartsThatAreMissingOrOfAnotherModel) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  WriteParts("m/", 3);
  std::filesystem::remove(directory_.At("m/" + NameOf(1, 3)));
  ExpectRefused("m", kInvalid, "part \"tiny-00002-of-00003.gguf\" is missing");
  directory_.Write("m/" + NameOf(1, 3), Part(1, 2));
  ExpectRefused("m", kInvalid, "got one of 2 files, expected one of 3");
  directory_.Write("m/" + NameOf(1, 3), Part(2, 3));
  ExpectRefused("m", kInvalid, "metadata \"split.no\": got 2, expected 1");
  directory_.Write("m/" + NameOf(1, 3), "GGUX");
  ExpectRefused("m", kInvalid, "m/tiny-00002-of-00003.gguf: got no \"GGUF\"");
  directory_.Write("one/whatever.gguf", Part(0, 3));
  ExpectRefused("one", kInvalid, "got one of 3 files, expected a whole model");
  WriteParts("", 2);
  std::filesystem::remove(directory_.At(NameOf(1, 2)));
  ExpectRefused(NameOf(0, 2), kInvalid, "part \"tiny-00002-of-00002.gguf\" is missing");
  // One tensor in two parts.
  std::string twice = Part(1, 2);
  twice.replace(twice.find("blk.1"), 5, "blk.0");
  directory_.Write(NameOf(1, 2), twice);
  ExpectRefused(NameOf(0, 2), kInvalid, "is in two files");
}

TEST_F(GgufModelTest, NoModels) {
  directory_.Write("several/a.gguf", GgufBytes().File());
  directory_.Write("several/b.gguf", GgufBytes().File());
  directory_.Write("empty/README.md", "");
  directory_.Write("file", GgufBytes().File());
  directory_.Write("bad.gguf", "GGUX");
  ExpectRefused("several", absl::StatusCode::kInvalidArgument,
                "several: got 2 *.gguf files, such as \"a.gguf\" and \"b.gguf\", expected one");
  EXPECT_EQ(Find("several").code(), absl::StatusCode::kInvalidArgument);
  for (const char* name : {"missing.gguf", "missing", "empty", "file"}) {
    SCOPED_TRACE(name);
    ExpectRefused(name, absl::StatusCode::kNotFound, name);
    EXPECT_EQ(Find(name).code(), absl::StatusCode::kNotFound);
  }
  ExpectRefused("bad.gguf", absl::StatusCode::kInvalidArgument, "bad.gguf: got no \"GGUF\"");
  std::filesystem::create_symlink("/dev/null", directory_.At("out.gguf"));
  EXPECT_FALSE(Find("out.gguf").ok());
  EXPECT_NE(Find("out.gguf").code(), absl::StatusCode::kNotFound);
}

TEST_F(GgufModelTest, OtherTensorsAreListedAndNotRead) {
  GgufBytes bytes;
  uint64_t at = 64;
  const auto add = [&](const std::string& name, std::vector<uint64_t> dims, uint32_t type,
                       uint64_t size) {
    bytes.tensors.push_back({name, std::move(dims), type, at});
    at += size;
  };
  add("norm.weight", {8}, 0, 32);
  add("embd.weight", {8, 2}, 1, 32);
  add("embd.bias", {2}, 1, 32);
  add("q8.weight", {32, 1}, 9, 64);
  add("q82.weight", {32, 1}, 9, 64);
  add("new.weight", {5}, 99, 32);
  add("flat.bias", {32}, 2, 32);
  add("heads.weight", {32, 1, 2}, 2, 64);
  add("b.scale", {32, 1}, 2, 32);
  bytes.data.resize(at);
  directory_.Write("m.gguf", bytes.File());
  ExpectOneLinear("m.gguf");
  const auto checkpoint = Open("m.gguf");
  EXPECT_EQ(checkpoint->ignored_tensors(), 3);
  std::vector<std::string> unserved;
  for (const auto& [path, reason] : checkpoint->unserved()) {
    EXPECT_TRUE(absl::IsUnimplemented(reason)) << reason;
    unserved.push_back(path);
  }
  EXPECT_THAT(unserved, ::testing::ElementsAre("b", "flat.bias", "heads", "new", "q8", "q82"));
  EXPECT_EQ(checkpoint->note(),
            "GGUF of \"llama\"; not quantised: 2 of F16, 1 of F32; not readable: 2 of Q8_1 "
            "(\"q8.weight\"), 1 of type 99 (\"new.weight\"); no linears: 3 of Q4_0 (\"b.scale\")");
}

TEST_F(GgufModelTest, NoLinearAtAllSaysWhatThereIs) {
  GgufBytes bytes;
  bytes.tensors[0] = {"a.weight", {32}, 9, 0};
  bytes.data.resize(40);
  directory_.Write("m.gguf", bytes.File());
  ExpectRefused("m.gguf", absl::StatusCode::kUnimplemented,
                "m.gguf: weight \"a\": tensor \"a.weight\" of \"Q8_1\" is quantised, but format "
                "gguf expects codes in \"a.weight\" of Q4_0 or Q4_1 or ");
}

TEST_F(GgufModelTest, ExpertsOfOneTensorAreCut) {
  GgufBytes bytes;
  bytes.tensors = {{"blk.0.ffn_up_exps.weight", {32, 2, 3}, 2, 0},
                   {"blk.0.ffn_up_exps.bias", {2, 3}, 0, 128}};
  bytes.data = std::string(128 + 24, '\0');
  for (int i = 0; i < 6; ++i) {  // FP16 scales 1, 2, 4, ... of the rows of all experts
    bytes.data[i * 18 + 1] = static_cast<char>(0x3c + 4 * i);
  }
  directory_.Write("m.gguf", bytes.File());
  const auto checkpoint = Open("m.gguf");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->linears().size(), 3u);
  const LinearLocation& last = checkpoint->linears()[2];
  EXPECT_EQ(last.path, "blk.0.ffn_up_exps.experts.2");
  std::vector<uint8_t> scratch;
  const auto weight = checkpoint->Read(last, &scratch);
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->bias.size(), 2u);
  EXPECT_EQ(weight->Scale(0, 1), 32 * weight->Scale(0, 0) / 16);
  EXPECT_EQ(weight->Scale(0, 0), 16);
}

// The last expert of each type that is read is the same linear as its part of the tensor alone.
TEST_F(GgufModelTest, ExpertsOfEveryType) {
  size_t read = 0;
  for (uint32_t type = 0; type < 64; ++type) {
    GgufBytes bytes;
    bytes.data.resize(256 * 6 * 8);
    for (size_t i = 0; i < bytes.data.size(); ++i) bytes.data[i] = static_cast<char>(i * 37 % 61);
    bytes.tensors = {{"blk.0.ffn_down_exps.weight", {256, 2, 3}, type, 0}};
    directory_.Write("m.gguf", bytes.File());
    const auto stack = Open("m.gguf");
    if (!stack.ok()) continue;
    SCOPED_TRACE(type);
    ++read;
    ASSERT_EQ(stack->linears().size(), 3u);
    const LinearLocation& last = stack->linears()[2];
    std::vector<uint8_t> scratch;
    const auto got = stack->Read(last, &scratch);
    ASSERT_TRUE(got.ok()) << got.status();
    bytes.tensors = {{"a.weight", {256, 2}, type, 0}};
    bytes.data.erase(0, 2 * last.bytes);
    directory_.Write("m.gguf", bytes.File());
    const auto alone = Open("m.gguf");
    ASSERT_TRUE(alone.ok()) << alone.status();
    const auto expected = alone->Read(alone->linears()[0], &scratch);
    ASSERT_TRUE(expected.ok()) << expected.status();
    EXPECT_EQ(got->codes, expected->codes);
    EXPECT_EQ(got->scales, expected->scales);
    EXPECT_EQ(got->zeros, expected->zeros);
    EXPECT_EQ(got->table, expected->table);
  }
  // Two types have the number 42.
  EXPECT_EQ(read + 1, kGgufFormat.code_dtypes.size());
}

// "PATH.scale" multiplies the weight; that of all experts has a number for each.
TEST_F(GgufModelTest, ScalesBesideWeights) {
  GgufBytes bytes;
  bytes.tensors = {{"a.weight", {32, 2}, 2, 0},
                   {"a.scale", {1}, 0, 64},
                   {"a.input_scale", {1}, 0, 96},
                   {"blk.0.ffn_up_exps.weight", {32, 2, 3}, 2, 128},
                   {"blk.0.ffn_up_exps.scale", {3}, 0, 256}};
  bytes.data = std::string(256 + 12, '\0');
  const auto put = [&](size_t at, float value) {
    std::memcpy(bytes.data.data() + at, &value, sizeof(value));
  };
  put(64, 0.25f);
  for (int i = 0; i < 3; ++i) put(256 + 4 * i, static_cast<float>(i + 2));
  directory_.Write("m.gguf", bytes.File());
  const auto checkpoint = Open("m.gguf");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->linears().size(), 4u);
  EXPECT_EQ(checkpoint->ignored_tensors(), 0);
  std::vector<uint8_t> scratch;
  for (int i = 0; i < 4; ++i) {
    const auto weight = checkpoint->Read(checkpoint->linears()[i], &scratch);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->outer, std::vector<float>{i == 0 ? 0.25f : static_cast<float>(i + 1)});
  }
}

TEST_F(GgufModelTest, ABadBlockIsNamed) {
  GgufBytes bytes;
  bytes.data[18 + 1] = '\x7c';  // FP16 infinity, of the second row
  directory_.Write("m.gguf", bytes.File());
  const auto checkpoint = Open("m.gguf");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<uint8_t> scratch;
  const absl::Status status = checkpoint->Read(checkpoint->linears()[0], &scratch).status();
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("m.gguf: weight \"a\": tensor \"weight\": got a scale that is no "
                              "number in block 0 of column 1")));
}

}  // namespace
}  // namespace awqd::model
