// RoutingEngine: work runs on the device of its weight.
#include <gtest/gtest.h>

#include <cstring>
#include <future>

#include "kernels/kernels.h"
#include "server/engine/engine.h"
#include "server/engine/matmul_work.h"

namespace awqd::engine {
namespace {

class RoutingEngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int i = 0; i < 2; ++i) {
      auto device = OpenDevice("cpu", {.cpu_threads = 1});
      ASSERT_TRUE(device.ok()) << device.status();
      devices_[i] = *std::move(device);
      auto weight = PrepareWeight(Weight(), *devices_[i]);
      ASSERT_TRUE(weight.ok()) << weight.status();
      weights_[i] = model::MakeWhole(*std::move(weight));
      auto engine = MakeLocalEngine(devices_[i].get(), {});
      ASSERT_TRUE(engine.ok()) << engine.status();
      members_[i] = engine->get();
      engines.push_back(*std::move(engine));
    }
    engine_ = MakeRoutingEngine(std::move(engines));
  }

  static HostWeight Weight() {
    HostWeight w;
    w.k = 16;
    w.n = 8;
    w.codes.assign(16 * 4, 0x21);
    w.zeros.assign(8, 0);
    w.scales.assign(16, 0);
    return w;
  }

  absl::Status Run(int on) {
    MatmulWork work;
    work.weight = weights_[on];
    work.rows = 1;
    work.x = *engine_->staging().Get(32);
    std::memset(work.x.data(), 0, 32);
    std::promise<absl::Status> promise;
    auto submitted = engine_->Submit(std::make_unique<MatmulWork>(std::move(work)), {},
                                     [&](const absl::Status& status, const Payload&,
                                         const ExecutionReport&) { promise.set_value(status); });
    return submitted.ok() ? promise.get_future().get() : submitted.status();
  }

  std::unique_ptr<Device> devices_[2];
  std::shared_ptr<const model::PlacedWeight> weights_[2];
  Engine* members_[2] = {};
  std::unique_ptr<Engine> engine_;
};

TEST_F(RoutingEngineTest, WorkRunsWhereItsWeightLives) {
  EXPECT_TRUE(Run(0).ok());
  EXPECT_TRUE(Run(1).ok());
  members_[1]->Drain();
  EXPECT_TRUE(Run(0).ok());
  EXPECT_EQ(Run(1).code(), absl::StatusCode::kUnavailable);
  DequantizeWork block;
  block.weight = weights_[1];
  block.rows = block.cols = 1;
  EXPECT_EQ(engine_
                ->Submit(std::make_unique<DequantizeWork>(block), {},
                         [](const absl::Status&, const Payload&, const ExecutionReport&) {
                           FAIL() << "refused work is not answered";
                         })
                .status()
                .code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(RoutingEngineTest, ListsEveryDeviceAndDrainsAll) {
  const std::vector<const Device*> devices = engine_->devices();
  ASSERT_EQ(devices.size(), 2u);
  EXPECT_EQ(devices[0], devices_[0].get());
  EXPECT_EQ(devices[1], devices_[1].get());
  EXPECT_TRUE(engine_->WarmUp(weights_[1]).ok());
  EXPECT_EQ(engine_->queued_tasks(), 0);
  engine_->Drain();
  EXPECT_EQ(Run(0).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Run(1).code(), absl::StatusCode::kUnavailable);
}

TEST_F(RoutingEngineTest, InlineWeightsGoToTheEmptiestDevice) {
  devices_[0]->SetBudget(1);
  auto weight = engine_->Prepare(Weight());
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ((*weight)->parts[0].weight->device, devices_[1].get());
}

}  // namespace
}  // namespace awqd::engine
