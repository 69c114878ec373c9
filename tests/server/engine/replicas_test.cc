// Replicas: the device that a request goes to, with engines that the test controls.
#include <gtest/gtest.h>

#include "tests/server/engine/puppets.h"

namespace awqd::engine {
namespace {

class ReplicasTest : public Puppets {
 protected:
  std::vector<size_t> Accepted() const {
    std::vector<size_t> out;
    for (const PuppetEngine* puppet : puppets_) out.push_back(puppet->accepted());
    return out;
  }
};

TEST_F(ReplicasTest, EqualsTakeTurns) {
  Start(3);
  const auto weight = Replicas(8);
  for (int i = 0; i < 9; ++i) ASSERT_TRUE(Submit(Product(weight, 1)).ok());
  EXPECT_EQ(Accepted(), (std::vector<size_t>{3, 3, 3}));
  for (size_t device = 0; device < 3; ++device) {
    EXPECT_EQ(puppets_[device]->held(0).matmul().part, device);
  }
}

TEST_F(ReplicasTest, IdleDevicesTakeTurnsToo) {
  Start(2);
  const auto weight = Replicas(8);
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(Submit(Product(weight, 1)).ok());
    for (auto* puppet : puppets_) {
      if (puppet->waiting() > 0) puppet->Answer(puppet->accepted() - 1, absl::OkStatus());
    }
  }
  EXPECT_EQ(Accepted(), (std::vector<size_t>{3, 3}));
}

TEST_F(ReplicasTest, TheDeviceWithFewestTokensQueuedOrRunning) {
  Start(2);
  const auto weight = Replicas(8);
  ASSERT_TRUE(Submit(Product(weight, 10)).ok());
  const size_t busy = puppets_[0]->accepted() == 1 ? 0 : 1, idle = 1 - busy;
  puppets_[busy]->Start(0);  // a running request counts like a queued one
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Submit(Product(weight, 2)).ok());
  EXPECT_EQ(puppets_[busy]->accepted(), 1u);
  EXPECT_EQ(puppets_[idle]->accepted(), 5u);
  puppets_[busy]->Answer(0, absl::OkStatus());
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Submit(Product(weight, 2)).ok());
  EXPECT_EQ(puppets_[busy]->accepted(), 5u) << "0 tokens against 10";
  EXPECT_EQ(puppets_[idle]->accepted(), 5u);
}

TEST_F(ReplicasTest, ADequantizeCountsItsRows) {
  Start(2);
  const auto weight = Replicas(8);
  DequantizeWork block;
  block.weight = weight;
  block.rows = 16;
  block.cols = 8;
  ASSERT_TRUE(Submit(block).ok());
  const size_t busy = puppets_[0]->accepted() == 1 ? 0 : 1;
  for (int i = 0; i < 15; ++i) ASSERT_TRUE(Submit(Product(weight, 1)).ok());
  EXPECT_EQ(puppets_[busy]->accepted(), 1u);
  EXPECT_EQ(puppets_[busy]->held(0).dequantize().part, busy);
}

TEST_F(ReplicasTest, CancelledAndFailedWorkCountsNoLonger) {
  Start(2);
  const auto weight = Replicas(8);
  const auto handle = Submit(Product(weight, 100));
  ASSERT_TRUE(handle.ok());
  const size_t first = puppets_[0]->accepted() == 1 ? 0 : 1;
  ASSERT_TRUE(Submit(Product(weight, 50)).ok());
  handle->Cancel();
  EXPECT_EQ(answer(0).status.code(), absl::StatusCode::kCancelled);
  ASSERT_TRUE(Submit(Product(weight, 10)).ok());
  EXPECT_EQ(puppets_[first]->accepted(), 2u);
  puppets_[first]->Answer(1, absl::InternalError("fault"));
  EXPECT_EQ(answer(2).status.code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(Submit(Product(weight, 10)).ok());
  EXPECT_EQ(puppets_[first]->accepted(), 3u);
}

TEST_F(ReplicasTest, AFullOrBrokenDeviceHandsOnToTheNext) {
  Start(2);
  const auto weight = Replicas(8);
  for (const absl::Status& refusal :
       {absl::ResourceExhaustedError("queue full"), absl::FailedPreconditionError("broken")}) {
    puppets_[0]->Refuse(refusal);
    puppets_[1]->Refuse(absl::OkStatus());
    const size_t before = puppets_[1]->accepted();
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(Submit(Product(weight, 1)).ok());
    EXPECT_EQ(puppets_[0]->accepted(), 0u);
    EXPECT_EQ(puppets_[1]->accepted(), before + 4);
    puppets_[1]->Refuse(refusal);
    EXPECT_EQ(Submit(Product(weight, 1)).status(), refusal);
    EXPECT_EQ(answers_.back()->times, 0) << "refused work is not answered";
  }
  puppets_[0]->Refuse(absl::UnavailableError("draining"));
  puppets_[1]->Refuse(absl::UnavailableError("draining"));
  EXPECT_EQ(Submit(Product(weight, 1)).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ReplicasTest, ADeadDeviceComesLast) {
  Start(3);
  const auto weight = Replicas(8);
  puppets_[1]->puppet_device()->Break();
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(Submit(Product(weight, 1)).ok());
  EXPECT_EQ(Accepted(), (std::vector<size_t>{4, 0, 4}));
}

TEST_F(ReplicasTest, AWeightOfOneDeviceStaysThere) {
  Start(3);
  const auto weight = model::MakeWhole(ShapeOn(puppets_[2]->puppet_device(), 8));
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Submit(Product(weight, 1)).ok());
  EXPECT_EQ(Accepted(), (std::vector<size_t>{0, 0, 4}));
}

TEST_F(ReplicasTest, InlineWeightsGoWhereLeastIsToDoAndThereIsRoom) {
  Start(2);
  HostWeight inline_weight;
  inline_weight.n = 8;
  puppets_[0]->puppet_device()->SetBudget(1000);
  puppets_[1]->puppet_device()->SetBudget(2000);
  const auto device_of = [&] {
    return (*engine_->Prepare(inline_weight))->parts[0].weight->device;
  };
  EXPECT_EQ(device_of(), puppets_[1]->puppet_device()) << "the emptiest of equals";
  ASSERT_TRUE(Submit(Product(model::MakeWhole(ShapeOn(puppets_[1]->puppet_device(), 8)), 1)).ok());
  EXPECT_EQ(device_of(), puppets_[0]->puppet_device()) << "the other one has work";
  puppets_[0]->Refuse(absl::ResourceExhaustedError("no room"));
  EXPECT_EQ(device_of(), puppets_[1]->puppet_device());
  puppets_[1]->Refuse(absl::UnimplementedError("no kernel"));
  EXPECT_EQ(engine_->Prepare(inline_weight).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace awqd::engine
