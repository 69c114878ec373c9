// RoutingEngine: one look at a weight's device per request.
#include "server/engine/routing_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd {
namespace {

class RoutingEngine final : public Engine {
 public:
  explicit RoutingEngine(std::vector<std::unique_ptr<Engine>> engines)
      : engines_(std::move(engines)) {}

  absl::StatusOr<TaskHandle> Submit(MatmulWork work, const SubmitOptions& options,
                                    TaskDone done) override {
    Engine& engine = Of(*work.weight);
    return engine.Submit(std::move(work), options, std::move(done));
  }
  absl::StatusOr<TaskHandle> Submit(DequantizeWork work, const SubmitOptions& options,
                                    TaskDone done) override {
    Engine& engine = Of(*work.weight);
    return engine.Submit(std::move(work), options, std::move(done));
  }
  absl::StatusOr<std::shared_ptr<const DeviceWeight>> Prepare(
      const CanonicalWeight& weight) override {
    const auto emptiest =
        std::max_element(engines_.begin(), engines_.end(), [](const auto& a, const auto& b) {
          return a->device().FreeBytes() < b->device().FreeBytes();
        });
    return (*emptiest)->Prepare(weight);
  }
  absl::Status WarmUp(const std::shared_ptr<const DeviceWeight>& weight) override {
    return Of(*weight).WarmUp(weight);
  }
  void Hurry() override {
    for (auto& engine : engines_) engine->Hurry();
  }
  void Drain() override {
    for (auto& engine : engines_) engine->Drain();
  }
  // Pinned memory is portable between GPUs; only memory of the CPU's pool would be slow for them.
  StagingPool& staging() override {
    for (const auto& engine : engines_) {
      if (!engine->device().host_addressable()) return engine->staging();
    }
    return engines_.front()->staging();
  }
  const Device& device() const override { return engines_.front()->device(); }
  std::vector<const Device*> devices() const override {
    std::vector<const Device*> out;
    for (const auto& engine : engines_) out.push_back(&engine->device());
    return out;
  }
  int64_t token_threshold() const override { return engines_.front()->token_threshold(); }
  int64_t TokenThreshold(const DeviceWeight& weight) const override {
    return Of(weight).TokenThreshold(weight);
  }
  int64_t queued_tasks() const override {
    int64_t tasks = 0;
    for (const auto& engine : engines_) tasks += engine->queued_tasks();
    return tasks;
  }

 private:
  // Every weight was prepared on one of these devices.
  Engine& Of(const DeviceWeight& weight) const {
    for (const auto& engine : engines_) {
      if (&engine->device() == weight.device) return *engine;
    }
    return *engines_.front();
  }

  const std::vector<std::unique_ptr<Engine>> engines_;
};

}  // namespace

std::unique_ptr<Engine> MakeRoutingEngine(std::vector<std::unique_ptr<Engine>> engines) {
  if (engines.size() == 1) return std::move(engines.front());
  return std::make_unique<RoutingEngine>(std::move(engines));
}

}  // namespace awqd
