// Several CPU devices behind one engine, each of which can break.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"
#include "server/engine/matmul_work.h"
#include "server/model/placed_weight.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {

// A LocalEngine over a device that can break.
class BreakableEngine final : public Engine {
 public:
  BreakableEngine(int index, bool host_addressable, const EngineOptions& options)
      : device_(*OpenDevice(absl::StrCat("cpu:", index), {.cpu_threads = 1}), host_addressable),
        engine_(*MakeLocalEngine(&device_, options)) {}

  testing::WrappedDevice& wrapped() { return device_; }

  using Engine::Submit;
  absl::StatusOr<TaskHandle> Submit(std::unique_ptr<Work>* work, const SubmitOptions& options,
                                    TaskDone done) override {
    return engine_->Submit(work, options, std::move(done));
  }
  absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> Prepare(const HostWeight& weight,
                                                                     const Device*) override {
    Device* const devices[] = {&device_};
    return model::PlaceWeight(weight, devices, model::Placing::kWhole);
  }
  absl::Status WarmUp(const std::shared_ptr<const model::PlacedWeight>& weight) override {
    return engine_->WarmUp(weight);
  }
  StagingPool& staging() override { return engine_->staging(); }
  void Hurry() override { engine_->Hurry(); }
  void Drain() override { engine_->Drain(); }
  const Device& device() const override { return device_; }
  int64_t token_threshold() const override { return engine_->token_threshold(); }
  int64_t queued_tasks() const override { return engine_->queued_tasks(); }

 private:
  testing::WrappedDevice device_;
  std::unique_ptr<Engine> engine_;
};

// Some devices behind one engine.
class Machine {
 public:
  struct Answer {
    absl::Status status;
    std::string bytes;
    ExecutionReport report;
  };

  explicit Machine(int devices, bool host_addressable = true, const EngineOptions& options = {}) {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int i = 0; i < devices; ++i) {
      auto member = std::make_unique<BreakableEngine>(i, host_addressable, options);
      members_.push_back(member.get());
      devices_.push_back(&member->wrapped());
      engines.push_back(std::move(member));
    }
    engine_ = MakeRoutingEngine(std::move(engines));
  }

  std::shared_ptr<const model::PlacedWeight> Place(const HostWeight& weight, bool cut) {
    return Place(weight, cut ? model::Placing::kColumns : model::Placing::kWhole);
  }
  std::shared_ptr<const model::PlacedWeight> Place(const HostWeight& weight,
                                                   model::Placing placing) {
    auto placed = model::PlaceWeight(weight, devices_, placing);
    EXPECT_TRUE(placed.ok()) << placed.status();
    return *std::move(placed);
  }
  // Places experts as --shard=experts does.
  std::shared_ptr<const model::WeightStack> Spread(const std::vector<HostWeight>& experts) {
    std::map<int64_t, std::shared_ptr<const model::PlacedWeight>> placed;
    for (const HostWeight& expert : experts) {
      const auto number = static_cast<int64_t>(placed.size());
      Device* const home[] = {devices_[number % devices_.size()]};
      placed.emplace(number, *model::PlaceWeight(expert, home, model::Placing::kWhole));
    }
    return *model::MakeStack("experts.*.proj", placed, /*spread=*/true);
  }
  std::shared_ptr<const model::WeightStack> Stack(const std::vector<HostWeight>& experts,
                                                  model::Placing placing) {
    std::map<int64_t, std::shared_ptr<const model::PlacedWeight>> placed;
    for (const HostWeight& expert : experts) {
      placed.emplace(static_cast<int64_t>(placed.size()), Place(expert, placing));
    }
    return *model::MakeStack("experts.*.proj", placed);
  }
  MatmulWork Product(std::shared_ptr<const model::PlacedWeight> weight,
                     const std::vector<uint8_t>& x, DType dtype) {
    MatmulWork work;
    work.rows = static_cast<int64_t>(x.size()) / SizeOf(dtype) / weight->shape.k;
    work.weight = std::move(weight);
    work.x_dtype = work.out_dtype = dtype;
    work.x = *engine_->staging().Get(static_cast<int64_t>(x.size()));
    if (!x.empty()) std::memcpy(work.x.data(), x.data(), x.size());
    return work;
  }
  template <typename AnyWork>
  std::future<Answer> Submit(AnyWork work, const SubmitOptions& options = {}) {
    auto promise = std::make_shared<std::promise<Answer>>();
    auto submitted = engine_->Submit(
        std::make_unique<AnyWork>(std::move(work)), options,
        [promise](const absl::Status& status, const Payload& bytes, const ExecutionReport& report) {
          promise->set_value({status, std::string(bytes.view()), report});
        });
    if (!submitted.ok()) promise->set_value({submitted.status(), "", {}});
    return promise->get_future();
  }
  template <typename AnyWork>
  Answer Run(AnyWork work) {
    return Submit(std::move(work)).get();
  }
  BreakableEngine& member(size_t index) { return *members_[index]; }
  Engine& engine() { return *engine_; }

 private:
  std::vector<BreakableEngine*> members_;
  std::vector<Device*> devices_;
  std::unique_ptr<Engine> engine_;
};

// The parameter says whether host and devices share memory.
class SeveralDevicesTest : public ::testing::TestWithParam<bool> {};

}  // namespace awqd::engine
