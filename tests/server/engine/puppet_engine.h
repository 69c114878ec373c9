// PuppetEngine: the engine of one device whose tasks the test holds and answers, and weights that
// have only a shape.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"
#include "server/engine/matmul_work.h"
#include "tests/testing/wrapped_device.h"

namespace awqd::engine {

// A weight of n columns without contents.
inline std::shared_ptr<const DeviceWeight> ShapeOn(Device* device, int64_t n) {
  auto out = std::make_shared<DeviceWeight>();
  out->shape = {.k = 16, .n = n};
  out->device = device;
  return out;
}

class PuppetEngine final : public Engine {
 public:
  struct Held {
    std::shared_ptr<const Work> work;
    SubmitOptions options;
    TaskDone done;  // null once answered
    bool started = false;

    const MatmulWork& matmul() const { return dynamic_cast<const MatmulWork&>(*work); }
    const DequantizeWork& dequantize() const { return dynamic_cast<const DequantizeWork&>(*work); }
  };

  explicit PuppetEngine(int index)
      : device_(*OpenDevice(absl::StrCat("cpu:", index), {.cpu_threads = 1}), true),
        staging_(&device_, 1 << 20) {}

  // --- Controlled by the test ---

  // Makes Submit return this status instead of accepting; OK accepts again.
  void Refuse(absl::Status status) { refuse_ = std::move(status); }
  // Makes Submit answer with this status before it returns; nullopt holds tasks.
  void AnswerAtOnce(std::optional<absl::Status> status) { at_once_ = std::move(status); }
  // From now on the task can no longer be cancelled.
  void Start(size_t index) {
    MutexLock lock(&mu_);
    held_[index].started = true;
  }
  // Every byte of a result is `fill`.
  void Answer(size_t index, const absl::Status& status, char fill = 0,
              ExecutionReport report = {}) {
    TaskDone done;
    int64_t bytes = 0;
    {
      MutexLock lock(&mu_);
      done = std::exchange(held_[index].done, nullptr);
      bytes = held_[index].work->result_bytes();
    }
    ASSERT_TRUE(done) << "answered before";
    Payload result;
    if (status.ok()) {
      result = *staging_.Get(bytes);
      std::memset(result.data(), fill, bytes);
    }
    done(status, std::move(result), report);
  }
  const Held& held(size_t index) const {
    MutexLock lock(&mu_);
    return held_[index];
  }
  size_t accepted() const {
    MutexLock lock(&mu_);
    return held_.size();
  }
  // The number of tasks that are accepted, but neither answered nor cancelled.
  size_t waiting() const {
    MutexLock lock(&mu_);
    size_t count = 0;
    for (const Held& held : held_) count += held.done != nullptr;
    return count;
  }
  int drains() const { return drains_; }
  testing::WrappedDevice* puppet_device() { return &device_; }

  // --- Engine ---

  using Engine::Submit;
  absl::StatusOr<TaskHandle> Submit(std::unique_ptr<Work>* work, const SubmitOptions& options,
                                    TaskDone done) override {
    if (!refuse_.ok()) return refuse_;
    size_t index;
    {
      MutexLock lock(&mu_);
      index = held_.size();
      held_.push_back({std::move(*work), options, std::move(done)});
    }
    if (at_once_.has_value()) Answer(index, *at_once_);
    return TaskHandle([this, index] { CancelTask(index); });
  }
  absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> Prepare(const HostWeight& weight,
                                                                     const Device*) override {
    if (!refuse_.ok()) return refuse_;
    return model::MakeWhole(ShapeOn(&device_, weight.n));
  }
  StagingPool& staging() override { return staging_; }
  void Drain() override { ++drains_; }
  const Device& device() const override { return device_; }
  int64_t token_threshold() const override { return 256; }
  int64_t queued_tasks() const override { return static_cast<int64_t>(waiting()); }

 private:
  void CancelTask(size_t index) {
    TaskDone done;
    {
      MutexLock lock(&mu_);
      if (held_[index].started) return;
      done = std::exchange(held_[index].done, nullptr);
    }
    if (done) done(absl::CancelledError("cancelled while queued"), Payload(), {});
  }

  testing::WrappedDevice device_;
  StagingPool staging_;
  absl::Status refuse_;
  std::optional<absl::Status> at_once_;
  int drains_ = 0;
  mutable Mutex mu_;
  std::vector<Held> held_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::engine
