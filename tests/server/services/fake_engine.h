// FakeEngine: an engine whose answers the test chooses, for driving handlers through every order of
// events.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/mutex.h"
#include "kernels/kernels.h"
#include "server/engine/engine.h"
#include "server/engine/matmul_work.h"

namespace awqd::services {

class FakeEngine final : public engine::Engine {
 public:
  FakeEngine() {
    absl::StatusOr<std::unique_ptr<Device>> device = OpenDevice("cpu", {.cpu_threads = 1});
    device_ = *std::move(device);
    staging_ = std::make_unique<engine::StagingPool>(device_.get(), int64_t{64} << 20);
  }

  // --- Controlled by the test ---

  // False, the default, answers with zeros inside Submit; true keeps tasks until Answer.
  void Hold(bool hold) {
    MutexLock lock(&mu_);
    hold_ = hold;
  }
  // Makes RunQueued answer held tasks.
  void CallersRun(bool callers_run) {
    MutexLock lock(&mu_);
    callers_run_ = callers_run;
  }
  // Submit returns this instead of accepting.
  void Refuse(absl::Status status) {
    MutexLock lock(&mu_);
    refuse_ = std::move(status);
  }
  // The answer to accepted tasks.
  void Fail(absl::Status status) {
    MutexLock lock(&mu_);
    fail_ = std::move(status);
  }
  // Keeps Prepare from returning.
  void HoldPrepare(bool hold) {
    MutexLock lock(&mu_);
    hold_prepare_ = hold;
    changed_.NotifyAll();
  }
  // Number of calls of Prepare.
  int prepares() const {
    MutexLock lock(&mu_);
    return prepares_;
  }
  // Makes results parts of a buffer with this many bytes more, as the results of a batch are.
  void ShareResults(int64_t others) {
    MutexLock lock(&mu_);
    others_ = others;
  }
  // Answers the held task at `index`.
  void Answer(size_t index = 0) {
    Held held;
    absl::Status status;
    {
      MutexLock lock(&mu_);
      status = TakeHeld(index, &held);
    }
    Complete(held, status);
  }
  size_t held() const {
    MutexLock lock(&mu_);
    return held_.size();
  }
  int cancels() const {
    MutexLock lock(&mu_);
    return cancels_;
  }
  int submitted() const {
    MutexLock lock(&mu_);
    return submitted_;
  }
  // Number of calls of RunQueued so far.
  int run_queued() const {
    MutexLock lock(&mu_);
    return run_queued_;
  }
  engine::MatmulWork last_matmul() const {
    MutexLock lock(&mu_);
    return last_matmul_;
  }
  engine::SubmitOptions last_options() const {
    MutexLock lock(&mu_);
    return last_options_;
  }

  // --- Engine ---

  using engine::Engine::Submit;
  absl::StatusOr<engine::TaskHandle> Submit(std::unique_ptr<engine::Work>* work,
                                            const engine::SubmitOptions& options,
                                            engine::TaskDone done) override {
    const int64_t bytes = (*work)->result_bytes(), load = (*work)->load();
    {
      MutexLock lock(&mu_);
      if (auto* matmul = dynamic_cast<engine::MatmulWork*>(work->get())) last_matmul_ = *matmul;
      last_options_ = options;
    }
    return Take(bytes, load, work, std::move(done));
  }
  absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> Prepare(const HostWeight& weight,
                                                                     const Device*) override {
    {
      MutexLock lock(&mu_);
      ++prepares_;
      while (hold_prepare_) changed_.Wait(&mu_);
    }
    Device* const devices[] = {device_.get()};
    return model::PlaceWeight(weight, devices, model::Placing::kWhole);
  }
  // Answers one held task whose caller was to run it.
  bool RunQueued() override {
    Held held;
    absl::Status status;
    bool more = false;
    {
      MutexLock lock(&mu_);
      ++run_queued_;
      if (!callers_run_ || held_.empty()) return false;
      status = TakeHeld(0, &held);
      more = !held_.empty();
    }
    Complete(held, status);
    return more;
  }
  bool callers_run() const override { return true; }
  engine::StagingPool& staging() override { return *staging_; }
  void Drain() override {}
  const Device& device() const override { return *device_; }
  int64_t token_threshold() const override { return 256; }
  int64_t queued_tasks() const override { return static_cast<int64_t>(held()); }

  Device* mutable_device() { return device_.get(); }

 private:
  struct Held {
    int64_t bytes = 0;
    int64_t tokens = 0;
    engine::TaskDone done;
    std::shared_ptr<bool> cancelled;     // guarded by mu_
    std::unique_ptr<engine::Work> work;  // kept as in a queue
  };

  // Removes a held task, and returns the status to answer it with.
  absl::Status TakeHeld(size_t index, Held* held) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    *held = std::move(held_[index]);
    held_.erase(held_.begin() + static_cast<int64_t>(index));
    return *held->cancelled ? absl::CancelledError("cancelled while queued") : fail_;
  }

  absl::StatusOr<engine::TaskHandle> Take(int64_t bytes, int64_t tokens,
                                          std::unique_ptr<engine::Work>* work,
                                          engine::TaskDone done) {
    Held held{bytes, tokens, std::move(done), std::make_shared<bool>(false)};
    std::shared_ptr<bool> cancelled = held.cancelled;
    absl::Status status;
    {
      MutexLock lock(&mu_);
      if (!refuse_.ok()) return refuse_;
      ++submitted_;
      status = fail_;
      held.work = std::move(*work);
      if (hold_) {
        held_.push_back(std::move(held));
        return Handle(cancelled);
      }
    }
    Complete(held, status);
    return Handle(cancelled);
  }

  engine::TaskHandle Handle(std::shared_ptr<bool> cancelled) {
    return engine::TaskHandle([this, cancelled] {
      MutexLock lock(&mu_);
      *cancelled = true;
      ++cancels_;
    });
  }

  void Complete(const Held& held, const absl::Status& status) {
    const engine::ExecutionReport report = {.kernel = "fake",
                                            .device = "cpu",
                                            .batch_tokens = held.tokens,
                                            .batch_requests = 1,
                                            .queue_us = 3,
                                            .compute_us = 4};
    engine::Payload result;
    if (status.ok()) {
      result = staging_->Get(held.bytes + Others())->Slice(0, held.bytes);
      std::memset(result.data(), 0, held.bytes);
    }
    held.done(status, std::move(result), report);
  }

  int64_t Others() const {
    MutexLock lock(&mu_);
    return others_;
  }

  mutable Mutex mu_;
  CondVar changed_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<engine::StagingPool> staging_;
  bool hold_ = false;
  int64_t others_ = 0;
  bool callers_run_ = false;
  int run_queued_ = 0;
  absl::Status refuse_;
  absl::Status fail_;
  std::deque<Held> held_;
  engine::MatmulWork last_matmul_;
  engine::SubmitOptions last_options_;
  int cancels_ = 0;
  int submitted_ = 0;
  bool hold_prepare_ = false;
  int prepares_ = 0;
};

}  // namespace awqd::services
