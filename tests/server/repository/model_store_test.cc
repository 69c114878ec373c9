// The model store serves, finds and lists models: names, versions, memory.
#include "server/repository/model_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "tests/server/repository/model_store_fixture.h"

namespace awqd::repository {
namespace {

using ::awqd::testing::AwqLinear;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST_F(ModelStoreTest, LoadFindUnload) {
  EXPECT_EQ(store_->Find("m").status().code(), kNotFound);
  EXPECT_EQ(StatusOf("m").state, ModelState::kUnloaded);
  const auto model = store_->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->version, 1);
  EXPECT_EQ((*model)->quant_method, "awq");
  EXPECT_EQ((*model)->weights.size(), 2u);
  EXPECT_GT((*model)->device_bytes, 64 * 128 / 2);
  EXPECT_EQ(device_->UsedBytes(), (*model)->device_bytes);
  EXPECT_EQ(store_->device_bytes(device_.get()), (*model)->device_bytes);
  EXPECT_EQ(*store_->Find("m"), *model);
  EXPECT_EQ(StatusOf("m").state, ModelState::kReady);
  EXPECT_TRUE(store_->FindWeight("m", "layers.0.up").ok());
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_EQ(store_->Unload("m").code(), kNotFound);
  EXPECT_EQ(store_->Find("m").status().code(), kNotFound);
  EXPECT_EQ(StatusOf("m").state, ModelState::kUnloaded);
  EXPECT_EQ(store_->device_bytes(device_.get()), 0);
}

TEST_F(ModelStoreTest, TellsWhatIsServedAndCountsOverReloads) {
  EXPECT_TRUE(store_->ListServed().empty());
  ASSERT_TRUE(store_->Load("m").ok());
  ASSERT_EQ(store_->ListServed().size(), 1u);
  EXPECT_EQ(store_->ListServed()[0].state, ModelState::kReady);
  (*store_->FindWeight("m", "layers.0.up"))->statistics->tokens += 5;
  ASSERT_TRUE(store_->Load("m").ok());
  (*store_->FindWeight("m", "layers.0.up"))->statistics->tokens += 6;
  EXPECT_EQ(store_->ListServed()[0].statistics->tokens, 11)
      << "the new version's weights count with the old";
  EXPECT_FALSE(store_->Load("absent").ok());
  EXPECT_EQ(store_->loads().data().total(), 2);
  EXPECT_EQ(store_->failed_loads().data().total(), 1);
  ASSERT_TRUE(store_->Unload("m").ok());
  EXPECT_TRUE(store_->ListServed().empty());
}

TEST_F(ModelStoreTest, MemoryIsFreedWhenTheLastUserLetsGo) {
  auto weight = [&] {
    EXPECT_TRUE(store_->Load("m").ok());
    return *store_->FindWeight("m", "layers.0.up");
  }();
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_EQ(device_->UsedBytes(), weight->bytes());
  weight.reset();
  EXPECT_EQ(device_->UsedBytes(), 0);
}

TEST_F(ModelStoreTest, ReloadSwapsAndOldVersionLives) {
  const auto first = store_->Load("m");
  WriteModel("m", 0x65);
  const auto second = store_->Load("m");
  ASSERT_TRUE(first.ok() && second.ok()) << second.status();
  EXPECT_EQ((*second)->version, 2);
  EXPECT_EQ(*store_->Find("m"), *second);
  EXPECT_EQ((*first)->version, 1);
  EXPECT_EQ(device_->UsedBytes(), (*first)->device_bytes + (*second)->device_bytes);
}

// Any number of invented names, and any problem of the repository.
TEST_F(ModelStoreTest, InventedNamesLeaveNothingBehindWhereThereIsNoRepository) {
  directory_.Write("file", "");
  for (const std::string& repository : {directory_.path(), directory_.At("file")}) {
    ModelStore store(repository, device_.get());
    for (int i = 0; i < 100; ++i) {
      const absl::Status status = store.Load(absl::StrCat("invented", i)).status();
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr(directory_.path())));
    }
    for (const ModelStatus& status : store.List()) EXPECT_EQ(status.name, "m");
  }
}

TEST_F(ModelStoreTest, NamesThatAreRefused) {
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("../m"),
        std::string("/etc"), std::string("m/"), std::string("m\0x", 3), std::string(" "),
        std::string("m m"), std::string(".hidden"), std::string("a\nb"), std::string(129, 'a'),
        std::string(4096, 'a'), std::string("m\xc3\xa9"), std::string("\\m"),
        std::string("%2e%2e")}) {
    EXPECT_EQ(CheckModelName(name).code(), kInvalid);
    EXPECT_EQ(store_->Load(name).status().code(), kInvalid);
    EXPECT_EQ(store_->Unload(name).code(), kInvalid);
    EXPECT_EQ(store_->Find(name).status().code(), kInvalid);
    EXPECT_EQ(store_->FindWeight(name, "w").status().code(), kInvalid);
    EXPECT_EQ(CheckModelName(name).message().find('\n'), absl::string_view::npos);
  }
  EXPECT_TRUE(CheckModelName(std::string(128, 'a')).ok());
  EXPECT_TRUE(CheckModelName("Qwen2.5-7B_Instruct-AWQ").ok());
}

TEST_F(ModelStoreTest, InventedNamesLeaveNothingBehind) {
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(store_->Load(absl::StrCat("none", i)).status().code(), kNotFound);
  }
  EXPECT_EQ(store_->List().size(), 1u);
}

TEST_F(ModelStoreTest, MissingWeightNamesSimilarOnes) {
  TestTensors tensors;
  for (int i = 0; i < 8; ++i) {
    tensors = Merge(tensors, AwqLinear(absl::StrCat("layers.", i, ".up"), 32, 8, 32));
    tensors = Merge(tensors, AwqLinear(absl::StrCat("layers.", i, ".down"), 32, 8, 32));
  }
  directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  ASSERT_TRUE(store_->Load("m").ok());
  const auto weight = store_->FindWeight("m", "layers.3.upp\n");
  EXPECT_EQ(weight.status().code(), kNotFound);
  EXPECT_THAT(std::string(weight.status().message()),
              HasSubstr("no weight \"layers.3.upp\\n\" among 16; there are \"layers.3.up\", "));
}

TEST_F(ModelStoreTest, DiscoverListsDirectoriesWithAConfig) {
  WriteModel("b");
  directory_.Write("goldens/cases.json", "{}");
  directory_.Write("file.txt", "");
  directory_.Write(".cache/config.json", "{}");
  directory_.Write("bad name/config.json", "{}");
  std::filesystem::create_symlink("b", directory_.At("alias"));
  std::filesystem::create_symlink("/etc", directory_.At("outside"));
  std::filesystem::create_symlink("nothing", directory_.At("dangling"));
  const auto found = store_->folders().ListModels();
  ASSERT_TRUE(found.ok()) << found.status();
  const absl::Status ok;
  EXPECT_THAT(*found, ElementsAre(Pair("alias", ok), Pair("b", ok), Pair("m", ok),
                                  Pair("outside", ::testing::Not(ok))));
  EXPECT_TRUE(store_->Load("alias").ok());
}

TEST_F(ModelStoreTest, ADirectoryThatCannotBeOpenedIsListedWithTheReason) {
  std::filesystem::create_directory_symlink(directory_.At("m"), directory_.At("outside"));
  const ModelStatus status = StatusOf("outside");
  EXPECT_EQ(status.state, ModelState::kFailed);
  EXPECT_THAT(status.message, HasSubstr("outside/config.json"));
  EXPECT_THAT(status.message, HasSubstr("leads out of the model repository"));
  EXPECT_EQ(StatusOf("m").state, ModelState::kUnloaded);
  EXPECT_EQ(store_->Load("outside").status().code(), kInvalid);
}

TEST_F(ModelStoreTest, ListsTheShareOfALoadInProgress) {
  std::vector<std::pair<ModelState, float>> seen;
  store_ =
      std::make_unique<ModelStore>(directory_.path(), std::vector<Device*>{device_.get()},
                                   model::Sharding::kReplicas, nullptr, [&](absl::string_view) {
                                     const ModelStatus status = StatusOf("m");
                                     seen.emplace_back(status.state, status.loaded_share);
                                   });
  EXPECT_EQ(StatusOf("m").loaded_share, 0.0f);
  ASSERT_TRUE(store_->Load("m").ok());
  ASSERT_GE(seen.size(), 2u) << "the first and the last that a bar shows";
  EXPECT_EQ(seen.front(), std::pair(ModelState::kLoading, 0.0f));
  EXPECT_EQ(seen.back(), std::pair(ModelState::kLoading, 1.0f));
  EXPECT_EQ(StatusOf("m").loaded_share, 1.0f);
  seen.clear();
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(seen.front(), std::pair(ModelState::kReady, 0.0f)) << "of the new version";
  EXPECT_EQ(StatusOf("m").loaded_share, 1.0f);
  ASSERT_TRUE(store_->Unload("m").ok());
  EXPECT_EQ(StatusOf("m").loaded_share, 0.0f);
  directory_.Write("m/model.safetensors", "broken");
  EXPECT_FALSE(store_->Load("m").ok());
  EXPECT_EQ(StatusOf("m").state, ModelState::kFailed);
  EXPECT_EQ(StatusOf("m").loaded_share, 0.0f);
}

TEST_F(ModelStoreTest, MissingRoot) {
  ModelStore store(directory_.At("later"), device_.get());
  EXPECT_EQ(store.folders().ListModels().status().code(), kNotFound);
  EXPECT_EQ(store.Load("m").status().code(), kNotFound);
  EXPECT_TRUE(store.List().empty());
  WriteModel("later/m");
  EXPECT_TRUE(store.Load("m").ok());
}

}  // namespace
}  // namespace awqd::repository
