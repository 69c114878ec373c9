// Files written in pieces: an independent parser finds the right bytes, and a file is complete or
// absent.
#include "client/files/tensor_file.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "client/files/npy.h"
#include "client/remove_on_signal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::client {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class TensorFileTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return directory_.At(name); }
  size_t Files() const {
    return std::distance(fs::directory_iterator(directory_.path()), fs::directory_iterator());
  }
  static std::string Read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }

  const testing::TempDirectory directory_;
};

TEST_F(TensorFileTest, WritesSafetensors) {
  auto writer = TensorFileWriter::Create(Path("a.safetensors"), "a \"q\".b", v1::BF16, {2, 3});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append("012345").ok());
  EXPECT_FALSE(fs::exists(Path("a.safetensors")));
  ASSERT_TRUE((*writer)->Append("6789ab").ok());
  ASSERT_TRUE((*writer)->Commit().ok());

  const std::string file = Read(Path("a.safetensors"));
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  ASSERT_EQ(file.size(), 8 + length + 12);
  EXPECT_EQ((8 + length) % 8, 0u);
  EXPECT_EQ(file[8], '{');
  const auto header = nlohmann::json::parse(file.substr(8, length));
  EXPECT_EQ(header.at("a \"q\".b"),
            (nlohmann::json{{"dtype", "BF16"}, {"shape", {2, 3}}, {"data_offsets", {0, 12}}}));
  EXPECT_TRUE(header.at("__metadata__").is_object());
  EXPECT_EQ(file.substr(8 + length), "0123456789ab");
  EXPECT_EQ(Files(), 1u);
}

TEST_F(TensorFileTest, WritesNpy) {
  auto writer = TensorFileWriter::Create(Path("a.npy"), "", v1::FP16, {1, 2});
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append("abcd").ok());
  ASSERT_TRUE((*writer)->Commit().ok());
  const auto array = ReadNpy(Path("a.npy"));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_EQ(array->bytes, "abcd");
}

TEST_F(TensorFileTest, KeepsTheOldFileUntilCommit) {
  std::ofstream(Path("a.npy")) << "old";
  {
    auto writer = TensorFileWriter::Create(Path("a.npy"), "", v1::FP16, {2});
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->Append("ab").ok());
    EXPECT_THAT((*writer)->Commit().message(), HasSubstr("2 bytes of the tensor were not written"));
    EXPECT_FALSE((*writer)->Append("abc").ok());
  }
  EXPECT_EQ(Read(Path("a.npy")), "old");
  EXPECT_EQ(Files(), 1u);
}

TEST_F(TensorFileTest, RefusesByName) {
  EXPECT_THAT(TensorFileFormatOf("a.npy", v1::BF16).status().message(), HasSubstr(".safetensors"));
  EXPECT_THAT(TensorFileFormatOf("a.txt", v1::FP16).status().message(), HasSubstr("a.txt"));
  EXPECT_EQ(TensorFileWriter::Create(Path("no/a.npy"), "", v1::FP16, {1}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(TensorFileWriter::Create(Path("a.npy"), "", v1::FP32, {int64_t{1} << 62}).ok());
}

TEST_F(TensorFileTest, SignalLeavesNothingBehind) {
  for (const int signal_number : {SIGHUP, SIGINT, SIGTERM}) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      RemoveFilesOnSignals();
      auto writer = TensorFileWriter::Create(Path("a.npy"), "", v1::FP16, {2});
      (*writer)->Append("ab").IgnoreError();
      if (Files() != 1) _exit(1);
      raise(signal_number);
      _exit(2);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal_number) << status;
    EXPECT_EQ(Files(), 0u) << signal_number;
  }
}

}  // namespace
}  // namespace awqd::client
