// The reconciler follows folders that appear, change, go bad and go, at times that the test says.
#include "server/repository/reconciler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "kernels/kernels.h"
#include "server/obs/logging.h"
#include "server/repository/idle_models.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::repository {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kSettle = absl::Seconds(10);

class ReconcilerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = OpenDevice("cpu", {.cpu_threads = 1});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    fs::create_directories(directory_.At("r"));
    Watch(directory_.At("r"));
  }
  void Watch(const std::string& repository, std::vector<std::string> only = {}) {
    store_ = std::make_unique<ModelStore>(repository, device_.get());
    watch_ = std::make_unique<Reconciler>(kSettle, only, store_.get());
    Look();  // the first, which takes files' own times for what they are
  }
  void WriteModel(const std::string& name, int64_t columns = 16) {
    directory_.Write("r/" + name + "/config.json", testing::AwqConfig());
    directory_.Write("r/" + name + "/model.safetensors",
                     testing::SafetensorsOf(testing::AwqLinear("up", 64, columns, 32)));
  }
  // A look `after` the one before; what it logs is in log_.
  Reconciler::Result Look(absl::Duration after = absl::ZeroDuration()) {
    now_ += after;
    ::testing::internal::CaptureStderr();
    obs::SetUpLogging(obs::LogLevel::kInfo, obs::LogFormat::kText);
    const Reconciler::Result result = watch_->Reconcile(now_);
    obs::FlushLog(absl::Seconds(20));
    log_ = ::testing::internal::GetCapturedStderr();
    return result;
  }
  // The version that is served; 0: none.
  int64_t Version(const std::string& name) const {
    const auto model = store_->Find(name);
    return model.ok() ? (*model)->version : 0;
  }
  std::string Message(const std::string& name) const {
    for (const ModelStatus& status : store_->List()) {
      if (status.name == name) return status.message;
    }
    return "";
  }
  // Polls until a change is found, and until it has been unchanged long enough to be loaded.
  void Settle() {
    Look(absl::Seconds(1));
    Look(kSettle);
  }

  testing::TempDirectory directory_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<ModelStore> store_;
  std::unique_ptr<Reconciler> watch_;
  absl::Time now_ = absl::Now();
  std::string log_;
};

TEST_F(ReconcilerTest, LoadsAFolderOnceItHasStoodStill) {
  WriteModel("m");
  EXPECT_EQ(Look(absl::Seconds(1)).waiting, 1);
  EXPECT_EQ(Look(kSettle - absl::Milliseconds(1)).waiting, 1);
  EXPECT_EQ(Version("m"), 0);
  EXPECT_EQ(Look(absl::Milliseconds(1)).loaded, 1);
  EXPECT_EQ(Version("m"), 1);
  EXPECT_THAT(log_, HasSubstr("loaded model=m version=1"));
  const Reconciler::Result again = Look(absl::Hours(1));
  EXPECT_EQ(again.loaded + again.failed + again.waiting, 0);
  EXPECT_EQ(Version("m"), 1);
}

TEST_F(ReconcilerTest, NeverLoadsWhileSomethingIsWritten) {
  WriteModel("m");
  Look(absl::Seconds(1));
  for (int i = 0; i < 5; ++i) {
    Look(kSettle - absl::Seconds(1));
    directory_.Write("r/m/.model-2.safetensors.tmp", std::string(static_cast<size_t>(i), 'x'));
    EXPECT_EQ(Look(absl::Seconds(1)).waiting, 1) << i;
  }
  EXPECT_EQ(Version("m"), 0);
  fs::remove(directory_.At("r/m/.model-2.safetensors.tmp"));
  Settle();
  EXPECT_EQ(Version("m"), 1);
}

TEST_F(ReconcilerTest, WhatLiesThereForLongLoadsAtTheFirstLook) {
  WriteModel("m");
  now_ = absl::Now() + absl::Hours(1);
  watch_ = std::make_unique<Reconciler>(kSettle, std::vector<std::string>(), store_.get());
  EXPECT_EQ(Look().loaded, 1);
  now_ = absl::Now();
  WriteModel("n");
  watch_ = std::make_unique<Reconciler>(kSettle, std::vector<std::string>(), store_.get());
  EXPECT_EQ(Look().waiting, 1) << "it was written just now";
}

TEST_F(ReconcilerTest, ReloadsWhatChanges) {
  WriteModel("m");
  Settle();
  WriteModel("m", 32);
  Look(absl::Seconds(1));
  EXPECT_EQ(Version("m"), 1) << "served on meanwhile";
  Look(kSettle);
  EXPECT_EQ(Version("m"), 2);
  EXPECT_EQ((*store_->FindWeight("m", "up"))->shape.n, 32);
  directory_.Write("r/m/README.md", "no part of it");
  Settle();
  EXPECT_EQ(Version("m"), 2);
}

TEST_F(ReconcilerTest, FollowsALinkThatIsFlipped) {
  WriteModel("v1");
  WriteModel("v2", 32);
  fs::rename(directory_.At("r/v1"), directory_.At("r/.v1"));
  fs::rename(directory_.At("r/v2"), directory_.At("r/.v2"));
  fs::create_symlink(".v1", directory_.At("r/m"));
  Settle();
  EXPECT_EQ((*store_->FindWeight("m", "up"))->shape.n, 16);
  fs::create_symlink(".v2", directory_.At("r/.next"));
  fs::rename(directory_.At("r/.next"), directory_.At("r/m"));
  Settle();
  EXPECT_EQ((*store_->FindWeight("m", "up"))->shape.n, 32);
}

TEST_F(ReconcilerTest, UnloadsWhatHasBeenGoneForLong) {
  WriteModel("m");
  WriteModel("n");
  Settle();
  fs::rename(directory_.At("r/m"), directory_.At("m"));
  Look(absl::Seconds(1));
  EXPECT_EQ(Version("m"), 1) << "somebody may be putting another in its place";
  fs::rename(directory_.At("m"), directory_.At("r/m"));
  Settle();
  EXPECT_EQ(Version("m"), 1) << "the same files";
  fs::remove_all(directory_.At("r/m"));
  Settle();
  EXPECT_EQ(Version("m"), 0);
  EXPECT_EQ(Version("n"), 1);
  EXPECT_THAT(log_, HasSubstr("unloaded model=m why=\"its folder is gone\""));
  fs::remove_all(directory_.At("r/n"));
  Settle();
  EXPECT_EQ(Version("n"), 0) << "the last one too";
  EXPECT_EQ(device_->UsedBytes(), 0);
  WriteModel("m");
  Settle();
  EXPECT_EQ(Version("m"), 2) << "it may come again";
}

TEST_F(ReconcilerTest, ReportsABadOneOnceAndTriesAgainAfterAChange) {
  WriteModel("m");
  directory_.Write("r/m/model.safetensors", "half");
  Look(absl::Seconds(1));
  EXPECT_EQ(Look(kSettle).failed, 1);
  EXPECT_THAT(log_, AllOf(HasSubstr("model cannot be loaded model=m"), HasSubstr(" W ")));
  EXPECT_THAT(Message("m"), HasSubstr("m/model.safetensors"));
  const Reconciler::Result again = Look(absl::Hours(1));
  EXPECT_EQ(again.failed + again.waiting, 0);
  EXPECT_EQ(log_, "");
  WriteModel("m");
  Settle();
  EXPECT_EQ(Version("m"), 1);
  EXPECT_EQ(Message("m"), "");
}

TEST_F(ReconcilerTest, ABadChangeLeavesTheVersionBefore) {
  WriteModel("m");
  Settle();
  directory_.Write("r/m/model.safetensors", "half");
  Settle();
  EXPECT_EQ(Version("m"), 1);
  EXPECT_THAT(log_, HasSubstr("the version before is served on"));
  fs::remove_all(directory_.At("r/m"));
  Settle();
  EXPECT_EQ(Version("m"), 0);
}

TEST_F(ReconcilerTest, TriesAgainWhatThereWasNoRoomFor) {
  WriteModel("m");
  device_->SetBudget(64);
  Look(absl::Seconds(1));
  EXPECT_EQ(Look(kSettle).failed, 1);
  EXPECT_EQ(Look(absl::Seconds(59)).failed, 0);
  EXPECT_EQ(Look(absl::Seconds(1)).failed, 1);
  device_->SetBudget(int64_t{1} << 30);
  EXPECT_EQ(Look(absl::Minutes(1)).loaded, 1);
}

TEST_F(ReconcilerTest, WhatAClientUnloadsStaysUnloaded) {
  WriteModel("m");
  Settle();
  ASSERT_TRUE(store_->Unload("m").ok());
  Settle();
  EXPECT_EQ(Version("m"), 0);
  WriteModel("m", 32);
  Settle();
  EXPECT_EQ(Version("m"), 0) << "whatever its files do";
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(Look(absl::Hours(1)).loaded, 0) << "the client has loaded what is there";
  WriteModel("m", 16);
  Settle();
  EXPECT_EQ(Version("m"), 3) << "and it is followed again";
}

TEST_F(ReconcilerTest, AClientNeedNotWaitForFilesToStandStill) {
  WriteModel("m");
  Look(absl::Seconds(1));
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(Look(kSettle).loaded, 0) << "it is not loaded twice";
  EXPECT_EQ(Version("m"), 1);
}

TEST_F(ReconcilerTest, LoadsOnlyWhatItIsToldAndFollowsWhatClientsLoad) {
  WriteModel("a");
  WriteModel("b");
  Watch(directory_.At("r"), {"a"});
  Settle();
  EXPECT_EQ(Version("a"), 1);
  EXPECT_EQ(Version("b"), 0);
  ASSERT_TRUE(store_->Load("b").ok());
  WriteModel("b", 32);
  Settle();
  EXPECT_EQ(Version("b"), 2);
}

TEST_F(ReconcilerTest, ARepositoryThatIsNotThereUnloadsNothing) {
  WriteModel("m");
  Settle();
  fs::rename(directory_.At("r"), directory_.At("away"));
  Settle();
  EXPECT_EQ(Version("m"), 1);
  EXPECT_EQ(log_, "") << "it was reported at the look before";
  fs::create_directories(directory_.At("r"));  // like a directory where nothing is mounted
  Look(absl::Seconds(1));
  EXPECT_THAT(log_, HasSubstr("not mounted?"));
  Look(absl::Hours(1));
  EXPECT_EQ(Version("m"), 1);
  fs::remove(directory_.At("r"));
  fs::rename(directory_.At("away"), directory_.At("r"));
  Settle();
  EXPECT_EQ(Version("m"), 1);
  EXPECT_THAT(log_, Not(HasSubstr(" W ")));
}

TEST_F(ReconcilerTest, LeavesAModelAloneThatWasUnloadedWhileIdle) {
  WriteModel("m");
  Settle();
  ASSERT_TRUE(store_->UnloadIdle("m", 1, 0));
  WriteModel("m", 32);
  Settle();
  EXPECT_TRUE(store_->IsUnloadedIdle("m"));
  ASSERT_TRUE(store_->LoadOnDemand("m").ok());
  EXPECT_EQ((*store_->FindWeight("m", "up"))->shape.n, 32) << "what is there when it is used";
  EXPECT_EQ(Look(kSettle).loaded, 0);
  ASSERT_TRUE(store_->UnloadIdle("m", 2, 0));
  fs::remove_all(directory_.At("r/m"));
  Settle();
  EXPECT_FALSE(store_->IsUnloadedIdle("m"));
}

TEST_F(ReconcilerTest, UnloadsIdleModelsButNoPinnedOnes) {
  for (const char* name : {"m", "n", "pinned"}) {
    WriteModel(name);
    ASSERT_TRUE(store_->Load(name).ok());
  }
  IdleUnloader idle(absl::Minutes(5), {"pinned"}, store_.get());
  EXPECT_EQ(idle.interval(), absl::Seconds(1));
  idle.UnloadIdleModels(now_);
  idle.UnloadIdleModels(now_ + absl::Minutes(4));
  (*store_->FindWeight("n", "up"))->statistics->requests += 1;
  idle.UnloadIdleModels(now_ + absl::Minutes(4.5));
  EXPECT_EQ(Version("m"), 1);
  idle.UnloadIdleModels(now_ + absl::Minutes(5));
  EXPECT_TRUE(store_->IsUnloadedIdle("m"));
  EXPECT_EQ(Version("n"), 1) << "it was used half a minute ago";
  ASSERT_TRUE(store_->LoadOnDemand("m").ok());
  idle.UnloadIdleModels(now_ + absl::Minutes(9.5));
  EXPECT_EQ(Version("m"), 2) << "since it was loaded there was no look";
  EXPECT_TRUE(store_->IsUnloadedIdle("n"));
  idle.UnloadIdleModels(now_ + absl::Hours(24));
  EXPECT_TRUE(store_->IsUnloadedIdle("m"));
  EXPECT_EQ(Version("pinned"), 1);
}

}  // namespace
}  // namespace awqd::repository
