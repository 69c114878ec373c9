// A Hub cache's names and revisions, and folders that are roots of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "kernels/checkpoint/model_folder.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::model {
namespace {

using ::testing::HasSubstr;

constexpr char kHash[] = "0123456789abcdef0123456789abcdef01234567";
constexpr char kFolder[] = "models--org--name";

TEST(HubCache, NamesBothWays) {
  EXPECT_EQ(HubModelName("models--org--name"), "org--name");
  EXPECT_EQ(HubModelName("models--gpt2"), "gpt2");
  EXPECT_EQ(HubModelName("models--"), std::nullopt);
  EXPECT_EQ(HubModelName("model--org--name"), std::nullopt);
  EXPECT_EQ(HubModelName("datasets--org--name"), std::nullopt);
  EXPECT_EQ(HubFolder("org--name"), "models--org--name");
  EXPECT_EQ(HubId("org--name--2"), "org/name--2");
  EXPECT_EQ(HubId("gpt2"), "gpt2");
  EXPECT_TRUE(IsOtherHubFolder("datasets--a--b"));
  EXPECT_TRUE(IsOtherHubFolder("spaces--a--b"));
  EXPECT_FALSE(IsOtherHubFolder("models--a--b"));
  EXPECT_EQ(NameOfHubId("org/name"), "org--name");
  EXPECT_EQ(NameOfHubId("org--name"), "org--name");
  for (const char* other : {"gpt2", "a/b/c", "/a", "a/", "", "../a/b"}) {
    EXPECT_EQ(NameOfHubId(other), other);
  }
}

TEST(HubCache, PathsIntoASnapshot) {
  const std::string cache = "/c/hub/models--org--name";
  EXPECT_EQ(FolderOfSnapshot(cache + "/snapshots/" + kHash), cache);
  EXPECT_EQ(FolderOfSnapshot(cache + "/snapshots/" + kHash + "/Q4/a.gguf"), cache);
  for (const std::string& other : {cache, cache + "/snapshots", cache + "/snapshots/main",
                                   cache + "/snapshots/" + kHash + "x", cache + "/" + kHash}) {
    EXPECT_EQ(FolderOfSnapshot(other), std::nullopt) << other;
  }
}

class HubCacheTest : public ::testing::TestWithParam<RepositoryRoot::Resolve> {
 protected:
  absl::StatusOr<std::string> SnapshotOf(const std::string& ref) {
    directory_.Write("models--org--name/refs/main", ref);
    const auto root = RepositoryRoot::Open(directory_.path(), GetParam());
    EXPECT_TRUE(root.ok()) << root.status();
    return FindSnapshot(*root, kFolder);
  }
  awqd::testing::TempDirectory directory_;
};

TEST_P(HubCacheTest, TheRevisionIsTheOneOfMain) {
  const std::string expected = std::string("models--org--name/snapshots/") + kHash;
  EXPECT_EQ(*SnapshotOf(kHash), expected);
  EXPECT_EQ(*SnapshotOf(std::string(kHash) + "\n"), expected);
  EXPECT_TRUE(SnapshotOf(std::string(64, 'a')).ok());
}

TEST_P(HubCacheTest, NothingButACommitHashIsARevision) {
  const std::string hash = kHash;
  for (const std::string& ref :
       {std::string(), std::string("main"), std::string("../../.."), hash + "/../..", hash + "g",
        hash.substr(1), std::string(65, 'a'), hash + " " + hash, std::string(40, '\0'),
        "/" + hash.substr(1), std::string(1 << 20, 'a')}) {
    const absl::Status status = SnapshotOf(ref).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << ref.substr(0, 80);
    EXPECT_THAT(std::string(status.message()), HasSubstr("expected a commit hash"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("models--org--name/refs/main"));
    EXPECT_LT(status.message().size(), 300u);
  }
}

// As `hf download --revision` leaves a cache: the revision's ref, or none, and its snapshot.
TEST_P(HubCacheTest, WithoutMainTheOnlySnapshotCounts) {
  const auto find = [&] {
    return FindSnapshot(*RepositoryRoot::Open(directory_.path(), GetParam()), kFolder);
  };
  directory_.Write("models--org--name/refs/v1.0", kHash);
  EXPECT_EQ(find().status().code(), absl::StatusCode::kNotFound);
  directory_.Write("models--org--name/snapshots/.tmp", "");
  EXPECT_EQ(find().status().code(), absl::StatusCode::kNotFound);
  directory_.Write(std::string("models--org--name/snapshots/") + kHash + "/config.json", "{}");
  EXPECT_EQ(*find(), std::string("models--org--name/snapshots/") + kHash);
  directory_.Write("models--org--name/snapshots/" + std::string(40, 'b') + "/config.json", "{}");
  EXPECT_EQ(find().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(find().status().message()),
              HasSubstr("\"models--org--name\": got 2 snapshots and no refs/main"));
  directory_.Write("models--org--name/refs/main", std::string(40, 'b'));
  EXPECT_EQ(*find(), "models--org--name/snapshots/" + std::string(40, 'b'));
}

TEST_P(HubCacheTest, ARevisionOutOfTheRootIsRefused) {
  directory_.Write("outside", kHash);
  directory_.Write("root/models--org--name/refs/other", kHash);
  std::filesystem::create_symlink("../../../outside",
                                  directory_.At("root/models--org--name/refs/main"));
  const auto root = RepositoryRoot::Open(directory_.At("root"), GetParam());
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_EQ(FindSnapshot(*root, kFolder).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FindSnapshot(*root, "models--org--none").status().code(), absl::StatusCode::kNotFound);
}

TEST_P(HubCacheTest, AFolderThatIsARootHasItsFilesUnderItsName) {
  directory_.Write("m/config.json", "{}");
  directory_.Write("outside.json", "{}");
  std::filesystem::create_symlink("../outside.json", directory_.At("m/up.json"));
  std::filesystem::create_symlink("config.json", directory_.At("m/link.json"));
  const auto root = RepositoryRoot::OpenFolder(directory_.At("m"), "name", GetParam());
  ASSERT_TRUE(root.ok()) << root.status();
  const auto file = root->OpenFile("name/config.json");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->name(), "name/config.json");
  EXPECT_TRUE(root->OpenFile("name/link.json").ok());
  EXPECT_THAT(*root->ListDirectory("name"),
              ::testing::ElementsAre("config.json", "link.json", "up.json"));
  const auto up = root->OpenFile("name/up.json");
  EXPECT_EQ(up.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(up.status().message()), HasSubstr("name/up.json"));
  for (const char* path : {"m/config.json", "config.json", "namesake/config.json", "."}) {
    EXPECT_EQ(root->OpenFile(path).status().code(), absl::StatusCode::kNotFound) << path;
  }
  EXPECT_EQ(root->OpenFile("name/../outside.json").status().code(),
            absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Both, HubCacheTest,
                         ::testing::Values(RepositoryRoot::Resolve::kKernel,
                                           RepositoryRoot::Resolve::kCanonicalise),
                         [](const auto& info) {
                           return info.param == RepositoryRoot::Resolve::kKernel ? "Kernel"
                                                                                 : "Canonicalise";
                         });

}  // namespace
}  // namespace awqd::model
