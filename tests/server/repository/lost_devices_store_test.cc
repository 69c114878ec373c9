// The model store when a device fails: the state of models, and the device of a reload.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/model.h"
#include "tests/server/repository/model_store_fixture.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::repository {
namespace {

using ::awqd::testing::WrappedDevice;
using ::testing::HasSubstr;

// Two devices that can break, and the models "m" and "n".
class LostDevicesStoreTest : public ModelStoreTest {
 protected:
  void SetUp() override {
    ModelStoreTest::SetUp();
    WriteModel("n");
    for (int i = 0; i < 2; ++i) {
      own_.push_back(std::make_unique<WrappedDevice>(
          *OpenDevice(absl::StrCat("cpu:", i), {.cpu_threads = 1}), true));
      devices_.push_back(own_.back().get());
    }
  }
  void TearDown() override { store_ = nullptr; }  // before its devices
  void Start(model::Sharding sharding) {
    store_ = std::make_unique<ModelStore>(directory_.path(), devices_, sharding);
  }
  std::string DevicesOf(const std::string& model) {
    return (*store_->FindWeight(model, "layers.0.up"))->devices();
  }

  std::vector<std::unique_ptr<WrappedDevice>> own_;
  std::vector<Device*> devices_;
};

TEST_F(LostDevicesStoreTest, ReplicasServeWithoutIt) {
  Start(model::Sharding::kReplicas);
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(StatusOf("m").message, "");
  own_[1]->Break();
  EXPECT_EQ(StatusOf("m").state, ModelState::kReady);
  EXPECT_EQ(StatusOf("m").message, "failed: cpu:1; the model serves without");
  EXPECT_TRUE(store_->AnyServedWhole());
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(DevicesOf("m"), "cpu:0");
  EXPECT_EQ(StatusOf("m").message, "");
  own_[1]->Repair();
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(DevicesOf("m"), "cpu:0,cpu:1");
}

TEST_F(LostDevicesStoreTest, ColumnsAreLostUntilAReload) {
  Start(model::Sharding::kColumns);
  ASSERT_TRUE(store_->Load("m").ok());
  own_[0]->Break();
  const ModelStatus lost = StatusOf("m");
  EXPECT_EQ(lost.state, ModelState::kFailed);
  EXPECT_EQ(lost.message,
            "failed: cpu:0, and with it 2 weights; loading the model again puts it on the devices "
            "that are left");
  EXPECT_NE(lost.model, nullptr);
  EXPECT_FALSE(store_->AnyServedWhole());
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(DevicesOf("m"), "cpu:1");
  EXPECT_EQ(StatusOf("m").state, ModelState::kReady);
  EXPECT_TRUE(store_->AnyServedWhole());
}

TEST_F(LostDevicesStoreTest, ModelsOnOtherDevicesAreWhole) {
  Start(model::Sharding::kModels);
  own_[0]->SetBudget(1 << 20);
  own_[1]->SetBudget(1 << 19);
  ASSERT_TRUE(store_->Load("m").ok());
  own_[0]->SetBudget(1 << 18);
  ASSERT_TRUE(store_->Load("n").ok());
  ASSERT_EQ(DevicesOf("m") + DevicesOf("n"), "cpu:0cpu:1");
  own_[0]->Break();
  EXPECT_EQ(StatusOf("m").state, ModelState::kFailed);
  EXPECT_EQ(StatusOf("n").state, ModelState::kReady);
  EXPECT_EQ(StatusOf("n").message, "");
  EXPECT_TRUE(store_->AnyServedWhole());
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(DevicesOf("m"), "cpu:1");
}

TEST_F(LostDevicesStoreTest, WithoutAnyDeviceNothingLoads) {
  Start(model::Sharding::kReplicas);
  EXPECT_TRUE(store_->AnyServedWhole()) << "nothing is served";
  for (const auto& device : own_) device->Break();
  EXPECT_EQ(store_->Load("m").status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace awqd::repository
