// A name stands for a folder: a plain one, one of a Hub cache, or one beside the repository.
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
  fs::rename(repository_ + "/models--org--name/snapshots", directory_.At("snapshots"));
  const auto says = AllOf(HasSubstr("models--org--name/refs/main"),
                          HasSubstr("complete the download with: hf download org/name"));
  EXPECT_THAT(MessageOf(Folders(), "org--name", kNotFound), says);
  EXPECT_THAT(Folders().Warnings(), ElementsAre(says));
  EXPECT_THAT(*Folders().ListModels(), IsEmpty());
  fs::rename(directory_.At("snapshots"), repository_ + "/models--org--name/snapshots");
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
  fs::remove_all(hub + "/snapshots");
  EXPECT_THAT(MessageOf(ModelFolders("", {{"x", hub}}), "x", kNotFound),
              HasSubstr(absl::StrCat("x/snapshots/", kHubHash, "/config.json")));
}

// As `hf download --revision` leaves it: no refs/main.
TEST_F(ModelFoldersTest, ADownloadOfAnotherRevisionIsServed) {
  WriteHub("models--org--name");
  const std::string hub = repository_ + "/models--org--name";
  fs::remove_all(hub + "/refs");
  const auto found = Folders().Locate("org--name");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, absl::StrCat("models--org--name/snapshots/", kHubHash));
  EXPECT_THAT(Folders().Warnings(), IsEmpty());
  const auto named = ModelFolders("", {{"x", hub}}).Locate("x");
  ASSERT_TRUE(named.ok()) << named.status();
  fs::copy(hub + "/snapshots/" + kHubHash, hub + "/snapshots/" + std::string(40, 'e'),
           fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  EXPECT_THAT(MessageOf(Folders(), "org--name", kInvalid),
              HasSubstr("got 2 snapshots and no refs/main"));
}

TEST_F(ModelFoldersTest, ANamedFolderMayBeASnapshot) {
  WriteHub("models--org--name");
  const std::string hub = repository_ + "/models--org--name";
  for (const char* end : {"", "/"}) {
    const ModelFolders folders("", {{"x", absl::StrCat(hub, "/snapshots/", kHubHash, end)}});
    const auto found = folders.Locate("x");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->path, absl::StrCat("x/snapshots/", kHubHash));
    EXPECT_TRUE(found->root->OpenFile(found->path + "/config.json").ok());
  }
  // A folder in it, as repositories of many GGUF files have.
  fs::create_directory(hub + "/snapshots/" + kHubHash + "/Q4");
  fs::create_symlink("../../../blobs", hub + "/snapshots/" + kHubHash + "/Q4/b");
  fs::create_symlink("../config.json", hub + "/snapshots/" + kHubHash + "/Q4/config.json");
  const ModelFolders inner("", {{"x", absl::StrCat(hub, "/snapshots/", kHubHash, "/Q4")}});
  const auto found = inner.Locate("x");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, absl::StrCat("x/snapshots/", kHubHash, "/Q4"));
  const std::string none = absl::StrCat(hub, "/snapshots/", std::string(40, 'b'));
  EXPECT_THAT(MessageOf(ModelFolders("", {{"x", none}}), "x", kNotFound),
              HasSubstr("/config.json"));
}

TEST_F(ModelFoldersTest, ANamedFileOfGgufIsAModelWithItsOtherParts) {
  directory_.Write("elsewhere/a.gguf", "GGUF");
  directory_.Write("elsewhere/b-00001-of-00002.gguf", "GGUF");
  directory_.Write("elsewhere/b-00002-of-00002.gguf", "GGUF");
  const ModelFolders folders("", {{"x", directory_.At("elsewhere/a.gguf")},
                                  {"y", directory_.At("elsewhere/b-00001-of-00002.gguf")},
                                  {"z", directory_.At("elsewhere/b-00002-of-00002.gguf")},
                                  {"none", directory_.At("elsewhere/none.gguf")}});
  const auto one = folders.Locate("x");
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->path, "x/a.gguf");
  const auto parts = folders.Locate("y");
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_EQ(parts->path, "y/b-00001-of-00002.gguf");
  EXPECT_TRUE(parts->root->OpenFile("y/b-00002-of-00002.gguf").ok());
  EXPECT_THAT(MessageOf(folders, "z", kNotFound),
              HasSubstr("is a part of the model \"z/b-00001-of-00002.gguf\""));
  EXPECT_THAT(MessageOf(folders, "none", kNotFound), HasSubstr("none/none.gguf"));
  EXPECT_THAT(folders.Inspect("y").files, HasSubstr("b-00002-of-00002.gguf"));
}

// A file of safetensors is a model where it has layers that ComfyUI quantised.
TEST_F(ModelFoldersTest, ANamedFileOfComfyUi) {
  using ::awqd::testing::SafetensorsOf;
  const std::string file = SafetensorsOf(
      {{"a.weight", {"F8_E4M3", {1, 2}, "ab"}}, {"a.scale_weight", {"F32", {}, "abcd"}}});
  directory_.Write("elsewhere/a.safetensors", file);
  directory_.Write("elsewhere/dense.safetensors",
                   SafetensorsOf({{"a.weight", {"BF16", {1, 2}, "abcd"}}}));
  directory_.Write("repository/b.safetensors", file);
  directory_.Write("repository/dense.safetensors",
                   SafetensorsOf({{"a.weight", {"BF16", {1, 2}, "abcd"}}}));
  const ModelFolders folders = Folders({{"x", directory_.At("elsewhere/a.safetensors")},
                                        {"dense", directory_.At("elsewhere/dense.safetensors")},
                                        {"none", directory_.At("elsewhere/none.safetensors")}});
  const auto found = folders.Locate("x");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, "x/a.safetensors");
  EXPECT_THAT(folders.Inspect("x").files, HasSubstr("x/a.safetensors"));
  EXPECT_THAT(MessageOf(folders, "dense", kNotFound),
              HasSubstr("dense/dense.safetensors: got no layers that ComfyUI quantised"));
  EXPECT_THAT(MessageOf(folders, "none", kNotFound), HasSubstr("none/none.safetensors"));
  const absl::Status ok;
  EXPECT_THAT(*Folders().ListModels(), ElementsAre(Pair("b.safetensors", ok)));
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

TEST_F(ModelFoldersTest, ARepositoryThatIsAModelIsAnError) {
  EXPECT_EQ(Folders().CheckRepository(true), absl::OkStatus());
  const auto says = AllOf(HasSubstr("is itself a model: give the folder above it"),
                          HasSubstr("--model NAME=" + repository_));
  directory_.Write("repository/config.json", "{}");
  WriteModel("repository/1_Pooling");
  const absl::Status status = Folders().CheckRepository(true);
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_THAT(std::string(status.message()), says);
  // A model of a Hub cache, instead of the cache.
  WriteHub("models--org--name");
  const std::string hub = repository_ + "/models--org--name";
  EXPECT_THAT(std::string(ModelFolders(hub).CheckRepository(true).message()),
              HasSubstr("is itself a model"));
}

TEST_F(ModelFoldersTest, ARepositoryWithoutAModelIsAnErrorUnlessItMayBeEmpty) {
  directory_.Write("repository/lost+found/x", "");
  const absl::Status status = Folders().CheckRepository(false);
  EXPECT_EQ(status.code(), kNotFound);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(repository_), HasSubstr("hf download"), HasSubstr("--model NAME=DIR"),
                    HasSubstr("--watch_repository")));
  EXPECT_EQ(Folders().CheckRepository(true), absl::OkStatus());
  WriteModel("elsewhere/m");
  EXPECT_EQ(Folders({{"x", directory_.At("elsewhere/m")}}).CheckRepository(false),
            absl::OkStatus());
  WriteModel("repository/m");
  EXPECT_EQ(Folders().CheckRepository(false), absl::OkStatus());
}

TEST_F(ModelFoldersTest, FoldersThatAreNoModelsAreOneWarningEach) {
  WriteModel("repository/bad name");
  WriteModel("repository/.hidden");
  directory_.Write("repository/.git/HEAD", "");
  fs::create_directory(repository_ + "/lost+found");
  directory_.Write("repository/org/name/config.json", "{}");
  directory_.Write("repository/notes.txt", "");
  directory_.Write("repository/results/y.npy", "");
  directory_.Write("repository/weights/model.safetensors", "");
  directory_.Write("repository/models--.x/refs/main", kHubHash);
  WriteModel("repository/good");
  EXPECT_THAT(Folders().Warnings(),
              ElementsAre(AllOf(HasSubstr("folder \".hidden\""), HasSubstr("rename it to 1 to")),
                          AllOf(HasSubstr("folder \"bad name\""), HasSubstr("rename it to 1 to")),
                          AllOf(HasSubstr("folder \"models--.x\": no model can have the name"),
                                HasSubstr("give it as --model NAME=DIR")),
                          AllOf(HasSubstr("folder \"org\": no config.json in it"),
                                HasSubstr("--model NAME=DIR")),
                          HasSubstr("folder \"weights\": no config.json in it")));
}

// A load tells what a file without settings is; a list does not read it.
TEST_F(ModelFoldersTest, AFileWithoutSettingsIsNamedByItsFamily) {
  directory_.Write("repository/one.safetensors",
                   awqd::testing::SafetensorsOf({{"l.up.Qidxs", {"I8", {1, 2}, "ab"}}}));
  bool seen = true;
  const absl::Status status = Folders().Locate("one.safetensors", &seen).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a quantisation of QuIP#"));
  EXPECT_FALSE(seen);
  EXPECT_EQ(Folders().Locate("one.safetensors").status().code(), kNotFound);
  EXPECT_THAT(*Folders().ListModels(), IsEmpty());
}

TEST_F(ModelFoldersTest, ManyWarningsAreCounted) {
  for (int i = 0; i < 30; ++i) fs::create_directory(absl::StrCat(repository_, "/f", i));
  const std::vector<std::string> warnings = Folders().Warnings();
  ASSERT_EQ(warnings.size(), 21u);
  EXPECT_EQ(warnings.back(), "and 10 more folders that are no models");
}

}  // namespace
}  // namespace awqd::repository
