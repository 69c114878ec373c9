// The two kinds of queued requests, each with its completion.
#pragma once

#include <string>
#include <utility>

#include "server/batching/task.h"
#include "server/engine/engine.h"

namespace awqd {

class EngineTask : public Task {
 public:
  explicit EngineTask(TaskDone done) : done_(std::move(done)) {}

  void Fail(const absl::Status& status) override { done_(status, "", ExecutionReport()); }

  // Bytes of the result, and where it goes before Complete hands it on.
  virtual int64_t result_bytes() const = 0;
  std::string out;

  void Complete(const absl::Status& status, const ExecutionReport& report) {
    done_(status, std::move(out), report);
  }

 private:
  const TaskDone done_;
};

class MatmulTask final : public EngineTask {
 public:
  MatmulTask(MatmulWork work, TaskDone done)
      : EngineTask(std::move(done)), work_(std::move(work)) {}

  const MatmulWork& work() const { return work_; }
  int64_t tokens() const override { return work_.tokens; }
  int64_t bytes() const override { return static_cast<int64_t>(work_.x.size()); }
  int64_t result_bytes() const override {
    return work_.tokens * work_.weight->shape.n * SizeOf(work_.out_dtype);
  }

  // Same weight, element types and asked-for path. A bias of the request's own keeps it alone.
  BatchKey key() const override {
    if (!work_.bias.empty()) return {};
    const uint32_t path = work_.path.has_value() ? 1 + static_cast<uint32_t>(*work_.path) : 0;
    return {work_.weight.get(), path << 16 | static_cast<uint32_t>(work_.x_dtype) << 8 |
                                    static_cast<uint32_t>(work_.out_dtype)};
  }

 private:
  const MatmulWork work_;
};

class DequantizeTask final : public EngineTask {
 public:
  DequantizeTask(DequantizeWork work, TaskDone done)
      : EngineTask(std::move(done)), work_(std::move(work)) {}

  const DequantizeWork& work() const { return work_; }
  int64_t tokens() const override { return 0; }
  int64_t bytes() const override { return 0; }
  int64_t result_bytes() const override {
    return work_.rows * work_.cols * SizeOf(work_.out_dtype);
  }

 private:
  const DequantizeWork work_;
};

}  // namespace awqd
