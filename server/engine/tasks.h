// EngineTask: a queued request with its completion. Knows how to run itself on a lane.
#pragma once

#include <string>
#include <utility>

#include "server/batching/policy.h"
#include "server/batching/task.h"
#include "server/engine/engine.h"
#include "server/engine/lane.h"

namespace awqd {

class EngineTask : public Task {
 public:
  explicit EngineTask(TaskDone done) : done_(std::move(done)) {}

  // Runs on the lane; reports the row that ran.
  virtual absl::Status Run(Lane& lane, const TokenPolicy& policy, std::string* out,
                           const KernelRow** ran) = 0;

  void Fail(const absl::Status& status) override { done_(status, "", ExecutionReport()); }
  void Complete(const absl::Status& status, std::string out, const ExecutionReport& report) {
    done_(status, std::move(out), report);
  }

 private:
  const TaskDone done_;
};

class MatmulTask final : public EngineTask {
 public:
  MatmulTask(MatmulWork work, TaskDone done)
      : EngineTask(std::move(done)), work_(std::move(work)) {}

  int64_t tokens() const override { return work_.tokens; }
  int64_t bytes() const override { return static_cast<int64_t>(work_.x.size()); }

  absl::Status Run(Lane& lane, const TokenPolicy& policy, std::string* out,
                   const KernelRow** ran) override {
    const Path by_policy = policy.UseFused(work_.tokens) ? Path::kFused : Path::kDequantize;
    return lane.Matmul(work_, work_.path.value_or(by_policy), out, ran);
  }

 private:
  const MatmulWork work_;
};

class DequantizeTask final : public EngineTask {
 public:
  DequantizeTask(DequantizeWork work, TaskDone done)
      : EngineTask(std::move(done)), work_(std::move(work)) {}

  int64_t tokens() const override { return 0; }
  int64_t bytes() const override { return 0; }

  absl::Status Run(Lane& lane, const TokenPolicy&, std::string* out,
                   const KernelRow** ran) override {
    return lane.Dequantize(work_, out, ran);
  }

 private:
  const DequantizeWork work_;
};

}  // namespace awqd
