// The model store on three devices: replicas, columns, a device for each model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"
#include "server/repository/model_store.h"
#include "tests/server/repository/model_store_fixture.h"

namespace awqd::repository {
namespace {

using ::testing::HasSubstr;

// Three devices with memory limits of the test.
class ShardedStoreTest : public ModelStoreTest {
 protected:
  void SetUp() override {
    ModelStoreTest::SetUp();
    for (int i = 0; i < 3; ++i) {
      auto device = OpenDevice(absl::StrCat("cpu:", i), {.cpu_threads = 1});
      ASSERT_TRUE(device.ok()) << device.status();
      own_.push_back(*std::move(device));
      devices_.push_back(own_.back().get());
    }
  }
  std::unique_ptr<ModelStore> Store(model::Sharding sharding) {
    return std::make_unique<ModelStore>(directory_.path(), devices_, sharding);
  }
  int64_t Used() const {
    int64_t used = 0;
    for (const Device* device : devices_) used += device->UsedBytes();
    return used;
  }

  std::vector<std::unique_ptr<Device>> own_;
  std::vector<Device*> devices_;
};

TEST_F(ShardedStoreTest, ReplicasAreWholeOnEveryDevice) {
  const auto store = Store(model::Sharding::kReplicas);
  const auto model = store->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto weight = store->FindWeight("m", "layers.0.up");
  ASSERT_TRUE(weight.ok());
  EXPECT_FALSE((*weight)->partitioned());
  EXPECT_EQ((*weight)->devices(), "cpu:0,cpu:1,cpu:2");
  for (const Device* device : devices_) {
    EXPECT_EQ(device->UsedBytes(), (*model)->device_bytes / 3);
    EXPECT_EQ(store->device_bytes(device), device->UsedBytes());
  }
  EXPECT_TRUE(store->Unload("m").ok());
  EXPECT_EQ(store->device_bytes(devices_[1]), 0);
}

TEST_F(ShardedStoreTest, ColumnsAreSharedOut) {
  const auto store = Store(model::Sharding::kColumns);
  const auto model = store->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto weight = store->FindWeight("m", "layers.0.up");
  ASSERT_TRUE(weight.ok());
  EXPECT_TRUE((*weight)->partitioned());
  EXPECT_EQ((*weight)->shape.n, 128);
  EXPECT_EQ(Used(), (*model)->device_bytes);
  for (const Device* device : devices_) {
    EXPECT_EQ(store->device_bytes(device), device->UsedBytes());
    EXPECT_GT(device->UsedBytes(), Used() / 4);
  }
}

TEST_F(ShardedStoreTest, ModelsLiveOnTheEmptiestDevice) {
  const auto store = Store(model::Sharding::kModels);
  devices_[0]->SetBudget(1 << 20);
  devices_[1]->SetBudget(1 << 22);
  devices_[2]->SetBudget(1 << 21);
  const auto model = store->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(devices_[1]->UsedBytes(), (*model)->device_bytes);
  EXPECT_EQ(Used(), (*model)->device_bytes);
}

// Any device may run out, after any number of weights.
TEST_F(ShardedStoreTest, ALoadThatFailsOnOneDeviceFreesAll) {
  for (model::Sharding sharding : {model::Sharding::kReplicas, model::Sharding::kColumns}) {
    const auto store = Store(sharding);
    const auto first = store->Load("m");
    ASSERT_TRUE(first.ok()) << first.status();
    const int64_t used = Used();
    for (Device* device : devices_) {
      const int64_t on_device = device->UsedBytes();
      for (int64_t room : {int64_t{1}, on_device / 2 + 600, on_device - 1}) {
        device->SetBudget(on_device + room);
        const auto second = store->Load("m");
        EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted) << second.status();
        EXPECT_THAT(std::string(second.status().message()), HasSubstr(device->info().id));
        EXPECT_EQ(std::string(second.status().message()).find("--shard=") != std::string::npos,
                  sharding == model::Sharding::kReplicas);
        EXPECT_EQ(Used(), used);
        EXPECT_EQ(*store->Find("m"), *first);
      }
      device->SetBudget(0);
    }
    EXPECT_TRUE(store->Load("m").ok());
    EXPECT_TRUE(store->Unload("m").ok());
  }
  EXPECT_EQ(Used(), 0);
}

TEST_F(ShardedStoreTest, ColumnsFitWhereReplicasDoNot) {
  const int64_t whole = [&] {
    const auto model = store_->Load("m");
    return (*model)->device_bytes;
  }();
  for (Device* device : devices_) device->SetBudget(whole / 2);
  EXPECT_EQ(Store(model::Sharding::kReplicas)->Load("m").status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Used(), 0);
  const auto store = Store(model::Sharding::kColumns);
  EXPECT_TRUE(store->Load("m").ok());
  for (Device* device : devices_) device->SetBudget(10);
  const auto status = store->Load("m").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("bytes on cpu:0, got 0 free"));
}

}  // namespace
}  // namespace awqd::repository
