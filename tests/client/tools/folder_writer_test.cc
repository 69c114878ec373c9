// The folders that a FolderWriter writes, and that an unfinished one leaves nothing behind.
#include "client/tools/folder_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "client/tools/model.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::tools {
namespace {

namespace fs = std::filesystem;
using ::awqd::testing::TempDirectory;
using ::testing::HasSubstr;

NewTensor Bytes(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
                int64_t count) {
  return MadeTensor(name, dtype, std::move(shape),
                    std::vector<uint8_t>(count, static_cast<uint8_t>(name[0])));
}

class FolderWriterTest : public ::testing::Test {
 protected:
  std::unique_ptr<FolderWriter> Make() const {
    auto out = FolderWriter::Create(folder_.At("m"), nullptr);
    EXPECT_TRUE(out.ok()) << out.status();
    return *std::move(out);
  }
  std::string Refusal() const {
    return std::string(FolderWriter::Create(folder_.At("m"), nullptr).status().message());
  }
  TempDirectory folder_;
};

TEST_F(FolderWriterTest, EveryTensorIsAligned) {
  const auto out = Make();
  out->BeginShard("model.safetensors", 5 * SafetensorsWriter::HeaderBytes("x"));
  ASSERT_TRUE(out->AddTensor(Bytes("a", "U8", {3}, 3)).ok());
  ASSERT_TRUE(out->AddTensor(Bytes("b", "F16", {5}, 10)).ok());
  ASSERT_TRUE(out->AddTensor(Bytes("c", "F32", {4}, 16)).ok());
  ASSERT_TRUE(out->AddTensor(Bytes("d", "F32", {3}, 12)).ok());
  ASSERT_TRUE(out->AddTensor(Bytes("e", "I64", {0, 7}, 0)).ok());
  EXPECT_THAT(std::string(out->AddTensor(Bytes("a", "U8", {3}, 3)).message()),
              HasSubstr("occurs twice"));
  ASSERT_TRUE(out->EndShard().ok());
  ASSERT_TRUE(out->WriteText("config.json", "{}").ok());
  EXPECT_FALSE(fs::exists(folder_.At("m")));
  ASSERT_TRUE(out->Commit().ok());
  EXPECT_FALSE(fs::exists(folder_.At("m.partial")));
  const auto folder = model::OpenModelFolder(folder_.At("m"));
  ASSERT_TRUE(folder.ok()) << folder.status();
  const auto tensors = Tensors::Open(*folder);  // the strict reader accepts it
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->all().size(), 5u);
  const std::map<std::string, int64_t> sizes = {{"a", 1}, {"b", 2}, {"c", 4}, {"d", 4}, {"e", 8}};
  for (const auto& [name, place] : tensors->all()) {
    EXPECT_EQ(place.info->begin % sizes.at(std::string(name)), 0) << name;
    std::vector<uint8_t> bytes(place.info->bytes());
    ASSERT_TRUE(place.file->Read(*place.info, absl::MakeSpan(bytes)).ok());
    for (const uint8_t byte : bytes) ASSERT_EQ(byte, name[0]);
  }
  std::ifstream file(folder_.At("m/model.safetensors"), std::ios::binary);
  uint64_t header = 1;
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  EXPECT_EQ(header % 8, 0u);
}

TEST_F(FolderWriterTest, NothingIsLeftWithoutCommit) {
  {
    const auto out = Make();
    out->BeginShard("a.safetensors", 1000);
    ASSERT_TRUE(out->AddTensor(Bytes("a", "U8", {8}, 8)).ok());
    EXPECT_TRUE(fs::exists(folder_.At("m.partial/a.safetensors")));
  }
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(FolderWriterTest, SaysWhyItCannotWrite) {
  {
    const auto out = Make();
    EXPECT_THAT(Refusal(), HasSubstr("m.partial: another run is writing it"));
    ASSERT_TRUE(out->Commit().ok());
  }
  EXPECT_THAT(Refusal(), HasSubstr("m exists"));
  fs::remove(folder_.At("m"));
  fs::create_directory(folder_.At("m.partial"));
  EXPECT_THAT(Refusal(), HasSubstr("left by a run that was killed"));
  EXPECT_TRUE(fs::exists(folder_.At("m.partial")));  // it may belong to another run
  EXPECT_THAT(std::string(FolderWriter::Create(folder_.At("x/m"), nullptr).status().message()),
              HasSubstr("cannot make"));
}

TEST_F(FolderWriterTest, DoesNotReplaceAFolderThatCameMeanwhile) {
  const auto out = Make();
  folder_.Write("m/theirs", "x");
  EXPECT_THAT(std::string(out->Commit().message()), HasSubstr("File exists"));
  EXPECT_TRUE(fs::exists(folder_.At("m/theirs")));
}

TEST_F(FolderWriterTest, AShardWithoutATensorIsNoFile) {
  const auto out = Make();
  out->BeginShard("empty.safetensors", 0);
  ASSERT_TRUE(out->EndShard().ok());
  EXPECT_EQ(out->shards(), 0);
  EXPECT_TRUE(fs::is_empty(folder_.At("m.partial")));
}

}  // namespace
}  // namespace awqd::tools
