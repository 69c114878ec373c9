// The changes of a folder that a watch of it finds.
#include "kernels/checkpoint/folder_snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <string>

#include "absl/time/clock.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/hub_files.h"

namespace awqd::model {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class FolderStateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_.Write("m/config.json", "{}");
    directory_.Write("m/model.safetensors", "tensors");
    directory_.Write("m/README.md", "words");
  }
  FolderState Look(const std::string& path = "m") const {
    const auto root = RepositoryRoot::Open(directory_.path());
    EXPECT_TRUE(root.ok()) << root.status();
    return ReadFolderState(*root, path);
  }

  awqd::testing::TempDirectory directory_;
};

TEST_F(FolderStateTest, IsTheSameWhereNothingChanges) {
  EXPECT_TRUE(Look().SameAs(Look()));
  EXPECT_TRUE(Look().there);
  EXPECT_LE(Look().changed, absl::Now());
  EXPECT_GT(Look().changed, absl::Now() - absl::Minutes(10));
}

TEST_F(FolderStateTest, SeesEveryKindOfChangeOfAFile) {
  const FolderState before = Look();
  directory_.Write("m/model.safetensors", "tensors and more");
  const FolderState longer = Look();
  EXPECT_NE(longer.files, before.files) << "its size";
  fs::last_write_time(directory_.At("m/model.safetensors"),
                      fs::file_time_type::clock::now() - std::chrono::hours(1));
  const FolderState older = Look();
  EXPECT_NE(older.files, longer.files) << "its time, set back";
  directory_.Write("new.safetensors", "tensors and more");
  fs::rename(directory_.At("new.safetensors"), directory_.At("m/model.safetensors"));
  EXPECT_NE(Look().files, older.files) << "another file in its place";
  fs::remove(directory_.At("m/config.json"));
  EXPECT_THAT(Look().files, Not(HasSubstr("config.json")));
}

TEST_F(FolderStateTest, WhatIsNotOfTheModelOnlyCountsAsBeingWritten) {
  const FolderState before = Look();
  directory_.Write("m/README.md", "other words");
  EXPECT_EQ(Look().files, before.files);
  EXPECT_FALSE(Look().SameAs(before));
  const FolderState then = Look();
  directory_.Write("m/.cache/huggingface/download/abc.incomplete", "half");
  EXPECT_EQ(Look().files, then.files);
  EXPECT_FALSE(Look().SameAs(then)) << "a download of hf into a folder";
}

TEST_F(FolderStateTest, SeesALinkThatIsMadeToLeadElsewhere) {
  directory_.Write("v2/config.json", "{}");
  fs::create_symlink("m", directory_.At("current"));
  const FolderState before = Look("current");
  EXPECT_TRUE(Look("current").SameAs(before));
  fs::remove(directory_.At("current"));
  fs::create_symlink("v2", directory_.At("current"));
  EXPECT_NE(Look("current").files, before.files);
}

TEST_F(FolderStateTest, SeesADownloadIntoACacheOfTheHub) {
  awqd::testing::MakeHubDownload(directory_.At("m"), directory_.path(), "models--a--b");
  const std::string snapshot = std::string("models--a--b/snapshots/") + awqd::testing::kHubHash;
  const FolderState before = Look(snapshot);
  EXPECT_THAT(before.files, HasSubstr("model.safetensors"));
  directory_.Write("models--a--b/blobs/abc.incomplete", "half");
  EXPECT_EQ(Look(snapshot).files, before.files);
  EXPECT_FALSE(Look(snapshot).SameAs(before));
}

TEST_F(FolderStateTest, AFileThatCannotBeOpenedIsPartOfIt) {
  fs::create_symlink("/etc/hostname", directory_.At("m/extra.json"));
  const FolderState before = Look();
  EXPECT_THAT(before.files, HasSubstr("leads out of"));
  fs::remove(directory_.At("m/extra.json"));
  EXPECT_NE(Look().files, before.files);
}

TEST_F(FolderStateTest, AFileMayBeAModelAndLinksInCirclesEnd) {
  directory_.Write("a.gguf", "GGUF");
  EXPECT_THAT(Look("a.gguf").files, HasSubstr("a.gguf "));
  directory_.Write("b-00001-of-00002.gguf", "GGUF");
  const FolderState first = Look("b-00001-of-00002.gguf");
  directory_.Write("b-00002-of-00002.gguf", "GGUF");
  EXPECT_FALSE(Look("b-00001-of-00002.gguf").SameAs(first));
  fs::create_directory_symlink(".", directory_.At("m/again"));
  EXPECT_THAT(Look().others, HasSubstr("m/again/again/README.md"));
}

}  // namespace
}  // namespace awqd::model
