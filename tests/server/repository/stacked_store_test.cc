// The model store's stacks: found by path, explained if missing, partitioned with their experts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/server/repository/model_store_fixture.h"

namespace awqd::repository {
namespace {

using ::awqd::testing::AllExperts;
using ::awqd::testing::AwqExpert;
using ::awqd::testing::AwqLinear;
using ::awqd::testing::Merge;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;

// "m" has a weight that is not an expert, "l.experts.*.up" of 12 experts, "l.experts.*.down"
// without expert 1, and "l.experts.*.gate", where expert 1 has another shape.
class StackedStoreTest : public ModelStoreTest {
 protected:
  void SetUp() override {
    ModelStoreTest::SetUp();
    TestTensors tensors = AwqLinear("l.attention", 64, 16, 32);
    for (int i = 0; i < 12; ++i) {
      tensors = Merge(tensors, AwqExpert(absl::StrCat("l.experts.", i, ".up"), i));
    }
    for (int i : {0, 2}) {
      tensors = Merge(tensors, AwqExpert(absl::StrCat("l.experts.", i, ".down"), i));
    }
    tensors = Merge(tensors, AwqLinear("l.experts.0.gate", 64, 16, 32));
    tensors = Merge(tensors, AwqLinear("l.experts.1.gate", 64, 32, 32));
    directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
  }
  std::string WhyNoStack(absl::string_view path) {
    const auto stack = store_->FindStack("m", path);
    EXPECT_EQ(stack.status().code(), kNotFound) << stack.status();
    return std::string(stack.status().message());
  }
  std::string WhyNoWeight(absl::string_view path) {
    const auto weight = store_->FindWeight("m", path);
    EXPECT_EQ(weight.status().code(), kNotFound) << weight.status();
    return std::string(weight.status().message());
  }
};

TEST_F(StackedStoreTest, ExpertsAreWeightsAndAStack) {
  const auto model = store_->Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->weights.size(), 17u);
  EXPECT_THAT((*model)->stacks,
              ElementsAre(Key("l.experts.*.down"), Key("l.experts.*.gate"), Key("l.experts.*.up")));
  const auto stack = store_->FindStack("m", "l.experts.*.up");
  ASSERT_TRUE(stack.ok()) << stack.status();
  ASSERT_EQ((*stack)->experts.size(), 12u);
  for (int i = 0; i < 12; ++i) {
    const auto weight = store_->FindWeight("m", absl::StrCat("l.experts.", i, ".up"));
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ((*stack)->experts[i], *weight);
  }
  EXPECT_EQ(device_->UsedBytes(), (*model)->device_bytes) << "a stack takes no memory of its own";
}

TEST_F(StackedStoreTest, MemoryIsFreedWithTheStack) {
  ASSERT_TRUE(store_->Load("m").ok());
  auto stack = store_->FindStack("m", "l.experts.*.up");
  ASSERT_TRUE(stack.ok()) << stack.status();
  EXPECT_TRUE(store_->Unload("m").ok());
  EXPECT_EQ(device_->UsedBytes(), (*stack)->bytes());
  stack = absl::CancelledError("");
  EXPECT_EQ(device_->UsedBytes(), 0);
}

TEST_F(StackedStoreTest, ABadStackFailsWhereItIsUsed) {
  ASSERT_TRUE(store_->Load("m").ok());
  const absl::Status missing = store_->FindStack("m", "l.experts.*.down").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(missing.message(),
            "model \"m\": stack \"l.experts.*.down\": expert 1 is missing, got 2 experts up to "
            "number 2");
  const absl::Status differs = store_->FindStack("m", "l.experts.*.gate").status();
  EXPECT_EQ(differs.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      differs.message(),
      "model \"m\": stack \"l.experts.*.gate\": expert 1: N: got 32, expected 16, as expert 0 "
      "has");
  EXPECT_TRUE(store_->FindWeight("m", "l.experts.2.down").ok());
  EXPECT_TRUE(store_->FindWeight("m", "l.experts.1.gate").ok());
}

TEST_F(StackedStoreTest, APathThatIsNoStack) {
  EXPECT_EQ(store_->FindStack("m", "l.experts.*.up").status().code(), kNotFound);  // not loaded
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_EQ(WhyNoStack("l.experts.*.upp\n"),
            "model \"m\": no stack \"l.experts.*.upp\\n\" among 3; there are \"l.experts.*.up\", "
            "\"l.experts.*.down\", \"l.experts.*.gate\"");
  EXPECT_EQ(WhyNoStack("l.experts.3.up"),
            "model \"m\": got the path of one weight, \"l.experts.3.up\", expected a stack such as "
            "\"l.experts.*.up\"");
  EXPECT_THAT(WhyNoStack("l.attention"),
              HasSubstr("got the path of one weight, \"l.attention\", expected a stack; there are "
                        "\"l.experts.*."));
  EXPECT_EQ(store_->FindStack("none", "x").status().code(), kNotFound);
  EXPECT_EQ(store_->FindStack("../m", "x").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StackedStoreTest, AStackWhereAWeightIsWanted) {
  ASSERT_TRUE(store_->Load("m").ok());
  EXPECT_THAT(WhyNoWeight("l.experts.*.up"),
              HasSubstr("model \"m\": got \"l.experts.*.up\", a stack of 12 experts that "
                        "GroupedQuantizedMatmul takes, expected one weight such as "
                        "\"l.experts.0.up\", "));
  const std::string bad = WhyNoWeight("l.experts.*.down");
  EXPECT_THAT(bad, HasSubstr("got the path of a stack, expected one weight such as "
                             "\"l.experts.0.down\", "));
  EXPECT_THAT(bad, HasSubstr("; stack \"l.experts.*.down\": expert 1 is missing"));
}

TEST_F(StackedStoreTest, AModelWithoutStacks) {
  WriteModel("dense");
  const auto model = store_->Load("dense");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE((*model)->stacks.empty());
  EXPECT_EQ(store_->FindStack("dense", "l.experts.*.up").status().message(),
            "model \"dense\": no stack \"l.experts.*.up\" among 0; the model has none");
  EXPECT_EQ(store_->FindStack("dense", "layers.0.up").status().message(),
            "model \"dense\": got the path of one weight, \"layers.0.up\", expected a stack; the "
            "model has none");
}

TEST_F(StackedStoreTest, SlicedTensorsMakeTheSameStack) {
  std::vector<TestTensors> experts;
  for (int i = 0; i < 12; ++i) experts.push_back(AwqExpert("l.experts.up", i));
  directory_.Write("sliced/config.json", awqd::testing::AwqConfig());
  directory_.Write("sliced/model.safetensors", SafetensorsOf(AllExperts(experts)));
  ASSERT_TRUE(store_->Load("m").ok());
  const auto model = store_->Load("sliced");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->weights.size(), 12u);
  EXPECT_EQ((*model)->ignored_tensors, 0);
  const auto sliced = store_->FindStack("sliced", "l.experts.*.up");
  const auto flat = store_->FindStack("m", "l.experts.*.up");
  ASSERT_TRUE(sliced.ok() && flat.ok()) << sliced.status() << flat.status();
  ASSERT_EQ((*sliced)->experts.size(), (*flat)->experts.size());
  for (size_t i = 0; i < (*flat)->experts.size(); ++i) {
    const DeviceWeight& a = *(*sliced)->experts[i]->parts.front().weight;
    const DeviceWeight& b = *(*flat)->experts[i]->parts.front().weight;
    ASSERT_EQ(a.bytes(), b.bytes());
    EXPECT_EQ(std::memcmp(a.storage.data(), b.storage.data(), a.bytes()), 0) << "expert " << i;
  }
}

TEST_F(StackedStoreTest, ColumnsOfExpertsAreCutAlike) {
  std::vector<std::unique_ptr<Device>> own;
  std::vector<Device*> devices;
  for (int i = 0; i < 2; ++i) {
    auto device = OpenDevice(absl::StrCat("cpu:", i), {.cpu_threads = 1});
    ASSERT_TRUE(device.ok()) << device.status();
    own.push_back(*std::move(device));
    devices.push_back(own.back().get());
  }
  for (model::Sharding sharding : {model::Sharding::kColumns, model::Sharding::kReplicas}) {
    ModelStore store(directory_.path(), devices, sharding);
    ASSERT_TRUE(store.Load("m").ok());
    const auto stack = store.FindStack("m", "l.experts.*.up");
    ASSERT_TRUE(stack.ok()) << stack.status();
    EXPECT_EQ((*stack)->partitioned(), sharding == model::Sharding::kColumns);
    EXPECT_EQ((*stack)->devices(), "cpu:0,cpu:1");
    for (const auto& expert : (*stack)->experts) {
      EXPECT_EQ(expert->parts[1].col_begin, sharding == model::Sharding::kColumns ? 8 : 0);
    }
  }
}

TEST_F(StackedStoreTest, ExpertsAreSpreadAndOtherWeightsAreEverywhere) {
  std::vector<std::unique_ptr<Device>> own;
  std::vector<Device*> devices;
  for (int i = 0; i < 3; ++i) {
    own.push_back(*OpenDevice(absl::StrCat("cpu:", i), {.cpu_threads = 1}));
    devices.push_back(own.back().get());
  }
  ModelStore store(directory_.path(), devices, model::Sharding::kExperts);
  const auto model = store.Load("m");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto stack = store.FindStack("m", "l.experts.*.up");
  ASSERT_TRUE(stack.ok()) << stack.status();
  EXPECT_TRUE((*stack)->expert_parallel());
  EXPECT_EQ((*stack)->devices(), "cpu:0,cpu:1,cpu:2");
  for (const auto& share : (*stack)->shards) EXPECT_EQ(share->experts.size(), 4u);
  for (int i = 0; i < 12; ++i) {
    const auto expert = store.FindWeight("m", absl::StrCat("l.experts.", i, ".up"));
    ASSERT_TRUE(expert.ok());
    EXPECT_EQ((*expert)->devices(), absl::StrCat("cpu:", i % 3));
  }
  EXPECT_EQ((*store.FindWeight("m", "l.attention"))->devices(), "cpu:0,cpu:1,cpu:2");
  EXPECT_EQ((*model)->device_bytes,
            devices[0]->UsedBytes() + devices[1]->UsedBytes() + devices[2]->UsedBytes());
}

}  // namespace
}  // namespace awqd::repository
