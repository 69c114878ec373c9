// Loads and unloads by the server and by clients at the same time: which one wins, and the status
// of the other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>

#include "tests/server/repository/model_store_fixture.h"

namespace awqd::repository {
namespace {

using ::testing::HasSubstr;

class UpkeepTest : public ModelStoreTest {
 protected:
  using Loaded = absl::StatusOr<std::shared_ptr<const model::Model>>;

  // The server's load of "m", held just before it is served until Release.
  void BeginRefresh() {
    store_->set_before_serving([this](const model::Model&) -> absl::Status {
      if (held_) return absl::OkStatus();
      held_ = true;
      begun_.set_value();
      return release_.get_future().get();
    });
    refresh_ = std::async(std::launch::async, [this] { return store_->Reconcile("m"); });
    begun_.get_future().wait();
  }
  void Release(const absl::Status& status = absl::OkStatus()) { release_.set_value(status); }

  std::atomic<bool> held_{false};
  std::promise<void> begun_;
  std::promise<absl::Status> release_;
  std::future<Loaded> refresh_;
};

TEST_F(UpkeepTest, AClientsLoadTakesWhatTheServerIsLoading) {
  BeginRefresh();
  auto client = std::async(std::launch::async, [&] { return store_->Load("m"); });
  EXPECT_EQ(store_->Reconcile("m").status().code(), absl::StatusCode::kAlreadyExists);
  Release();
  const auto model = client.get();
  ASSERT_TRUE(model.ok()) << model.status();
  const auto refreshed = refresh_.get();
  ASSERT_TRUE(refreshed.ok()) << refreshed.status();
  // It is version 2 if the client came too late to wait for version 1.
  EXPECT_TRUE(*model == *refreshed || (*model)->version == 2);
}

TEST_F(UpkeepTest, AClientsLoadGoesOnWhereTheServersFails) {
  BeginRefresh();
  auto client = std::async(std::launch::async, [&] { return store_->Load("m"); });
  Release(absl::InternalError("the server's load fails"));
  EXPECT_FALSE(refresh_.get().ok());
  const auto model = client.get();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->version, 1);
}

TEST_F(UpkeepTest, AClientsUnloadWinsOverALoadOfTheServer) {
  BeginRefresh();
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Unload("m"))) << "once";
  Release();
  const auto refreshed = refresh_.get();
  EXPECT_TRUE(absl::IsAborted(refreshed.status()));
  EXPECT_THAT(std::string(refreshed.status().message()), HasSubstr("a client unloaded it while"));
  EXPECT_TRUE(absl::IsNotFound(store_->Find("m").status()));
  EXPECT_EQ(device_->UsedBytes(), 0) << "what was loaded is freed";
  EXPECT_TRUE(absl::IsAborted(store_->Reconcile("m").status())) << "later loads too";
  EXPECT_EQ(StatusOf("m").state, ModelState::kUnloaded);
  EXPECT_TRUE(store_->Load("m").ok());
  EXPECT_TRUE(store_->Reconcile("m").ok()) << "a client has loaded it since";
}

TEST_F(UpkeepTest, AClientsUnloadTakesBothVersionsOfAReload) {
  ASSERT_TRUE(store_->Load("m").ok());
  BeginRefresh();
  EXPECT_TRUE(store_->Unload("m").ok());
  Release();
  EXPECT_TRUE(absl::IsAborted(refresh_.get().status()));
  EXPECT_EQ(device_->UsedBytes(), 0);
}

TEST_F(UpkeepTest, AClientsLoadOverridesAnUnload) {
  BeginRefresh();
  EXPECT_TRUE(store_->Unload("m").ok());
  auto client = std::async(std::launch::async, [&] { return store_->Load("m"); });
  Release();
  EXPECT_TRUE(absl::IsAborted(refresh_.get().status()));
  EXPECT_TRUE(client.get().ok());
  EXPECT_TRUE(store_->Find("m").ok());
}

TEST_F(UpkeepTest, AReloadThatFailsChangesNothing) {
  const auto first = store_->Load("m");
  ASSERT_TRUE(first.ok());
  directory_.Write("m/model.safetensors", "broken");
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Reconcile("m").status()));
  EXPECT_EQ(*store_->Find("m"), *first);
  EXPECT_EQ(StatusOf("m").tried, store_->folders().Inspect("m").files);
}

TEST_F(UpkeepTest, WhatWasTriedTellsOfLaterChanges) {
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(StatusOf("m").tried, store_->folders().Inspect("m").files);
  WriteModel("m", 0x33);
  EXPECT_NE(StatusOf("m").tried, store_->folders().Inspect("m").files);
}

TEST_F(UpkeepTest, DropsOnlyTheVersionThatWasSeen) {
  ASSERT_TRUE(store_->Load("m").ok());
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_FALSE(store_->UnloadRemoved("m", 1)) << "a client has loaded another";
  EXPECT_TRUE(store_->UnloadRemoved("m", 2));
  EXPECT_TRUE(absl::IsNotFound(store_->Find("m").status()));
  EXPECT_FALSE(store_->UnloadRemoved("none", 0));
  directory_.Write("bad/config.json", "{");
  EXPECT_FALSE(store_->Reconcile("bad").ok());
  EXPECT_EQ(StatusOf("bad").state, ModelState::kFailed);
  std::filesystem::remove_all(directory_.At("bad"));
  EXPECT_FALSE(store_->UnloadRemoved("bad", 0)) << "nothing was served";
  EXPECT_EQ(StatusOf("bad").name, "") << "and nothing is left of it";
}

TEST_F(UpkeepTest, DropsNothingThatIsBeingLoaded) {
  ASSERT_TRUE(store_->Load("m").ok());
  BeginRefresh();
  EXPECT_FALSE(store_->UnloadRemoved("m", 1));
  EXPECT_FALSE(store_->UnloadIdle("m", 1, 0));
  Release();
  EXPECT_TRUE(refresh_.get().ok());
}

TEST_F(UpkeepTest, SleepsUntilItIsUsed) {
  const auto first = store_->Load("m");
  ASSERT_TRUE(first.ok());
  (*first)->weights.begin()->second->statistics->requests = 5;
  EXPECT_FALSE(store_->UnloadIdle("m", 1, 4)) << "it was used meanwhile";
  EXPECT_FALSE(store_->UnloadIdle("m", 2, 5)) << "another version";
  EXPECT_FALSE(store_->UnloadIdle("none", 1, 5));
  EXPECT_TRUE(store_->UnloadIdle("m", 1, 5));
  EXPECT_TRUE(store_->IsUnloadedIdle("m"));
  EXPECT_TRUE(absl::IsUnavailable(store_->Find("m").status()));
  EXPECT_EQ(StatusOf("m").state, ModelState::kUnloaded);
  EXPECT_THAT(StatusOf("m").message, HasSubstr("the next request"));
  const auto second = store_->LoadOnDemand("m");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ((*second)->version, 2);
  EXPECT_EQ(*store_->LoadOnDemand("m"), *second) << "nothing to do";
  EXPECT_FALSE(store_->IsUnloadedIdle("m"));
  EXPECT_TRUE(absl::IsNotFound(store_->LoadOnDemand("none").status()));
}

TEST_F(UpkeepTest, AnUnloadOfWhatSleepsIsOne) {
  ASSERT_TRUE(store_->Load("m").ok());
  ASSERT_TRUE(store_->UnloadIdle("m", 1, 0));
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->LoadOnDemand("m").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Unload("m")));
}

TEST_F(UpkeepTest, SleepsOnOnlyForWantOfMemory) {
  const auto model = store_->Load("m");
  ASSERT_TRUE(model.ok());
  ASSERT_TRUE(store_->UnloadIdle("m", 1, 0));
  device_->SetBudget(64);
  EXPECT_TRUE(absl::IsResourceExhausted(store_->LoadOnDemand("m").status()));
  EXPECT_TRUE(store_->IsUnloadedIdle("m"));
  device_->SetBudget(int64_t{1} << 30);
  directory_.Write("m/model.safetensors", "broken");
  EXPECT_TRUE(absl::IsInvalidArgument(store_->LoadOnDemand("m").status()));
  EXPECT_FALSE(store_->IsUnloadedIdle("m"));
  EXPECT_THAT(std::string(store_->LoadOnDemand("m").status().message()),
              HasSubstr("its last load failed"));
}

TEST_F(UpkeepTest, ManyWakeItOnce) {
  ASSERT_TRUE(store_->Load("m").ok());
  ASSERT_TRUE(store_->UnloadIdle("m", 1, 0));
  std::vector<std::future<Loaded>> users;
  for (int i = 0; i < 4; ++i) {
    users.push_back(std::async(std::launch::async, [&] { return store_->LoadOnDemand("m"); }));
  }
  for (auto& user : users) {
    const auto model = user.get();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->version, 2);
  }
}

}  // namespace
}  // namespace awqd::repository
