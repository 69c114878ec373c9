// ModelStoreTest: a store on one CPU device, over a temporary repository with the model "m".
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "kernels/kernels.h"
#include "server/repository/model_store.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd::repository {

inline constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
inline constexpr absl::StatusCode kNotFound = absl::StatusCode::kNotFound;

class ModelStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = OpenDevice("cpu", {.cpu_threads = 2});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    store_ = std::make_unique<ModelStore>(directory_.path(), device_.get());
    WriteModel("m");
  }
  void WriteModel(const std::string& name, char fill = 0x21) {
    const awqd::testing::TestTensors tensors =
        awqd::testing::Merge(awqd::testing::AwqLinear("layers.0.up", 64, 128, 32, fill),
                             awqd::testing::AwqLinear("layers.0.down", 128, 64, 32, fill));
    directory_.Write(name + "/config.json", awqd::testing::AwqConfig());
    directory_.Write(name + "/model.safetensors", awqd::testing::SafetensorsOf(tensors));
  }
  ModelStatus StatusOf(const std::string& name) {
    for (ModelStatus& status : store_->List()) {
      if (status.name == name) return status;
    }
    return {};
  }

  awqd::testing::TempDirectory directory_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<ModelStore> store_;
};

}  // namespace awqd::repository
