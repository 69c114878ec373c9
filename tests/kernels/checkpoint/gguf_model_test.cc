// Entries of a repository that are GGUF files, or hold one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/gguf.h"
#include "tests/kernels/checkpoint/gguf_bytes.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::model {
namespace {

using ::awqd::testing::AwqConfig;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::GgufBytes;
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
  add("iq.weight", {32, 1}, 20, 32);
  add("iq2.weight", {32, 1}, 20, 32);
  add("new.weight", {5}, 99, 32);
  add("flat.weight", {32}, 2, 32);
  add("heads.weight", {32, 1, 2}, 2, 64);
  add("a.scale", {32, 1}, 2, 32);
  bytes.data.resize(at);
  directory_.Write("m.gguf", bytes.File());
  ExpectOneLinear("m.gguf");
  const auto checkpoint = Open("m.gguf");
  EXPECT_EQ(checkpoint->ignored_tensors(), 9);
  EXPECT_EQ(checkpoint->note(),
            "GGUF of \"llama\"; not quantised: 2 of F16, 1 of F32; not readable: 2 of IQ4_NL "
            "(\"iq.weight\"), 1 of type 99 (\"new.weight\"); no linears: 3 of Q4_0 (\"a.scale\")");
}

TEST_F(GgufModelTest, NoLinearAtAllSaysWhatThereIs) {
  GgufBytes bytes;
  bytes.tensors[0].type = 20;
  directory_.Write("m.gguf", bytes.File());
  ExpectRefused(
      "m.gguf", absl::StatusCode::kInvalidArgument,
      "m.gguf: got no quantised linear among 1 tensors, expected some \"weight\" (GGUF of "
      "\"llama\"; not readable: 1 of IQ4_NL (\"a.weight\"))");
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
