// Which folder a name stands for: a plain one, one of a Hub cache, one beside the repository.
#include "server/repository/model_folders.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/hub_files.h"

namespace awqd::repository {
namespace {

using ::awqd::testing::kHubHash;
using ::awqd::testing::MakeHubDownload;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
namespace fs = std::filesystem;

class ModelFoldersTest : public ::testing::Test {
 protected:
  ModelFoldersTest() { fs::create_directories(repository_); }
  void WriteModel(const std::string& folder) const {
    directory_.Write(folder + "/config.json", "{}");
  }
  void WriteHub(const std::string& folder) const {
    WriteModel("staging");
    MakeHubDownload(directory_.At("staging"), repository_, folder);
  }
  ModelFolders Folders(std::vector<NamedFolder> named = {}) const {
    return ModelFolders(repository_, std::move(named));
  }
  static std::string MessageOf(const ModelFolders& folders, const std::string& name,
                               absl::StatusCode code) {
    const absl::Status status = folders.Locate(name).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }

  awqd::testing::TempDirectory directory_;
  const std::string repository_ = directory_.At("repository");
};

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

TEST_F(ModelFoldersTest, AHubCacheIsARepository) {
  WriteHub("models--org--name");
  WriteHub("models--single");
  WriteModel("repository/plain");
  WriteModel("repository/datasets--org--data/snapshots/1");
  directory_.Write("repository/CACHEDIR.TAG", "");
  WriteModel("repository/.locks/models--org--name");
  const absl::Status ok;
  EXPECT_THAT(*Folders().ListModels(),
              ElementsAre(Pair("org--name", ok), Pair("plain", ok), Pair("single", ok)));
  const auto found = Folders().Locate("org--name");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, absl::StrCat("models--org--name/snapshots/", kHubHash));
  EXPECT_TRUE(found->root->OpenFile(found->path + "/config.json").ok());
  EXPECT_THAT(Folders().Warnings(), IsEmpty());
  EXPECT_EQ(Folders().Locate("models--org--name").status().code(), kNotFound);
}

TEST_F(ModelFoldersTest, BlobsOutsideTheCacheAreNotFollowed) {
  WriteHub("models--org--name");
  fs::rename(repository_ + "/models--org--name/blobs", directory_.At("blobs"));
  fs::create_symlink("../../blobs", repository_ + "/models--org--name/blobs");
  EXPECT_THAT(MessageOf(Folders(), "org--name", kInvalid),
              HasSubstr("leads out of the model repository"));
  EXPECT_THAT(*Folders().ListModels(),
              Contains(Pair("org--name", ::testing::Not(absl::OkStatus()))))
      << "listed, with the reason";
}

TEST_F(ModelFoldersTest, ADownloadWithoutItsRevisionSaysHowToCompleteIt) {
  WriteHub("models--org--name");
  fs::remove(repository_ + "/models--org--name/refs/main");
  const auto says = AllOf(HasSubstr("models--org--name/refs/main"),
                          HasSubstr("complete the download with: hf download org/name"));
  EXPECT_THAT(MessageOf(Folders(), "org--name", kNotFound), says);
  EXPECT_THAT(Folders().Warnings(), ElementsAre(says));
  EXPECT_THAT(*Folders().ListModels(), IsEmpty());
  std::ofstream(repository_ + "/models--org--name/refs/main") << std::string(40, 'b');
  EXPECT_THAT(MessageOf(Folders(), "org--name", kNotFound),
              HasSubstr(absl::StrCat("snapshots/", std::string(40, 'b'), "/config.json")));
  std::ofstream(repository_ + "/models--org--name/refs/main") << "../../plain";
  EXPECT_THAT(MessageOf(Folders(), "org--name", kInvalid), HasSubstr("expected a commit hash"));
}

TEST_F(ModelFoldersTest, NamedFoldersStandBesideTheRepositoryOrAlone) {
  WriteModel("elsewhere/m");
  WriteModel("repository/plain");
  const std::vector<NamedFolder> named = {{"x", directory_.At("elsewhere/m")}};
  const absl::Status ok;
  EXPECT_THAT(*Folders(named).ListModels(), ElementsAre(Pair("plain", ok), Pair("x", ok)));
  const ModelFolders alone("", named);
  EXPECT_THAT(*alone.ListModels(), ElementsAre(Pair("x", ok)));
  EXPECT_THAT(alone.Warnings(), IsEmpty());
  const auto found = alone.Locate("x");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(found->root->OpenFile(found->path + "/config.json").ok());
  EXPECT_EQ(alone.Locate("plain").status().code(), kNotFound);
  EXPECT_EQ(alone.Locate("m").status().code(), kNotFound);
  EXPECT_EQ(alone.Locate("../m").status().code(), kInvalid);
  const ModelFolders later(directory_.At("none"), named);
  EXPECT_TRUE(later.Locate("x").ok()) << "needs no repository";
}

TEST_F(ModelFoldersTest, ANamedFolderIsItsOwnRoot) {
  WriteModel("elsewhere/m");
  directory_.Write("elsewhere/config.json", "{}");
  fs::remove(directory_.At("elsewhere/m/config.json"));
  fs::create_symlink("../config.json", directory_.At("elsewhere/m/config.json"));
  const ModelFolders folders("", {{"x", directory_.At("elsewhere/m")}});
  EXPECT_THAT(MessageOf(folders, "x", kInvalid),
              AllOf(HasSubstr(absl::StrCat("--model x=", directory_.At("elsewhere/m"), ": ")),
                    HasSubstr("leads out of")));
  EXPECT_THAT(*folders.ListModels(), ElementsAre(Pair("x", ::testing::Not(absl::OkStatus()))));
  const ModelFolders absent("", {{"x", directory_.At("none")}});
  EXPECT_THAT(MessageOf(absent, "x", kNotFound), HasSubstr("/none"));
}

TEST_F(ModelFoldersTest, ANamedFolderMayBeOneOfAHubCache) {
  WriteHub("models--org--name");
  const std::string hub = repository_ + "/models--org--name";
  const auto found = ModelFolders("", {{"x", hub}}).Locate("x");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(found->root->OpenFile(found->path + "/config.json").ok());
  // Its blobs are outside of the snapshot.
  const ModelFolders snapshot("", {{"x", absl::StrCat(hub, "/snapshots/", kHubHash)}});
  EXPECT_THAT(MessageOf(snapshot, "x", kInvalid),
              HasSubstr("give the folder models--ORG--NAME above it"));
  fs::remove_all(hub + "/snapshots");
  EXPECT_THAT(MessageOf(ModelFolders("", {{"x", hub}}), "x", kNotFound),
              HasSubstr(absl::StrCat("x/snapshots/", kHubHash, "/config.json")));
}

TEST_F(ModelFoldersTest, ANamedHubFolderWithABadRevisionSaysSo) {
  WriteHub("models--org--name");
  std::ofstream(repository_ + "/models--org--name/refs/main") << "main";
  const ModelFolders folders("", {{"x", repository_ + "/models--org--name"}});
  EXPECT_THAT(MessageOf(folders, "x", kInvalid),
              AllOf(HasSubstr("x/refs/main"), HasSubstr("expected a commit hash")));
}

TEST_F(ModelFoldersTest, ANameThatStandsForTwoFoldersIsRefusedNamingBoth) {
  WriteHub("models--org--name");
  WriteModel("repository/org--name");
  EXPECT_THAT(MessageOf(Folders(), "org--name", kInvalid),
              AllOf(HasSubstr("folder \"org--name\""), HasSubstr("folder \"models--org--name\"")));
  WriteModel("repository/x");
  WriteModel("elsewhere");
  const ModelFolders named = Folders({{"x", directory_.At("elsewhere")}});
  EXPECT_THAT(MessageOf(named, "x", kInvalid),
              AllOf(HasSubstr(absl::StrCat("--model x=", directory_.At("elsewhere"))),
                    HasSubstr("folder \"x\"")));
  EXPECT_THAT(*named.ListModels(), Contains(Pair("x", ::testing::Not(absl::OkStatus()))));
}

TEST_F(ModelFoldersTest, ARepositoryThatIsAModelIsOneWarning) {
  directory_.Write("repository/config.json", "{}");
  directory_.Write("repository/1_Pooling/pooling.json", "{}");
  EXPECT_THAT(Folders().Warnings(),
              ElementsAre(AllOf(HasSubstr("is itself a model: give the folder above it"),
                                HasSubstr("--model NAME=" + repository_))));
}

TEST_F(ModelFoldersTest, FoldersThatAreNoModelsAreOneWarningEach) {
  WriteModel("repository/bad name");
  WriteModel("repository/.hidden");
  directory_.Write("repository/.git/HEAD", "");
  directory_.Write("repository/org/name/config.json", "{}");
  directory_.Write("repository/notes.txt", "");
  directory_.Write("repository/models--.x/refs/main", kHubHash);
  WriteModel("repository/good");
  EXPECT_THAT(Folders().Warnings(),
              ElementsAre(AllOf(HasSubstr("folder \".hidden\""), HasSubstr("rename it to 1 to")),
                          AllOf(HasSubstr("folder \"bad name\""), HasSubstr("rename it to 1 to")),
                          AllOf(HasSubstr("folder \"models--.x\": no model can have the name"),
                                HasSubstr("give it as --model NAME=DIR")),
                          AllOf(HasSubstr("folder \"org\": no config.json in it"),
                                HasSubstr("--model NAME=DIR"))));
}

TEST_F(ModelFoldersTest, ManyWarningsAreCounted) {
  for (int i = 0; i < 30; ++i) fs::create_directory(absl::StrCat(repository_, "/f", i));
  const std::vector<std::string> warnings = Folders().Warnings();
  ASSERT_EQ(warnings.size(), 21u);
  EXPECT_EQ(warnings.back(), "and 10 more folders that are no models");
}

}  // namespace
}  // namespace awqd::repository
