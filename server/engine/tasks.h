// The two kinds of queued requests, each with its completion.
#pragma once

#include <utility>

#include "server/batching/task.h"
#include "server/engine/engine.h"

namespace awqd {

class EngineTask : public Task {
 public:
  explicit EngineTask(TaskDone done) : done_(std::move(done)) {}

  void Fail(const absl::Status& status) override { done_(status, Payload(), ExecutionReport()); }

  virtual int64_t result_bytes() const = 0;

  void Complete(const absl::Status& status, Payload result, const ExecutionReport& report) {
    FreePayload();
    done_(status, std::move(result), report);
  }

 private:
  // Before the answer, so that who hears it finds the memory free.
  virtual void FreePayload() {}

  const TaskDone done_;
};

class MatmulTask final : public EngineTask {
 public:
  MatmulTask(MatmulWork work, TaskDone done)
      : EngineTask(std::move(done)), work_(std::move(work)) {}

  const MatmulWork& work() const { return work_; }
  int64_t tokens() const override { return work_.tokens; }
  int64_t bytes() const override { return work_.x.size(); }
  int64_t result_bytes() const override {
    return work_.tokens * work_.here().shape.n * SizeOf(work_.out_dtype);
  }

  // Multiplications. Decoding the weight first costs as much as some tokens more.
  int64_t cost() const override {
    constexpr int64_t kDecode = 32;
    const WeightShape& shape = work_.here().shape;
    const int64_t rows = work_.tokens + (work_.path == Path::kDequantize ? kDecode : 0);
    const double cost = static_cast<double>(rows) * static_cast<double>(shape.k * shape.n);
    return cost < 1e18 ? static_cast<int64_t>(cost) : kUnknownCost;
  }

  // Same weight, element types and asked-for path. A bias of the request's own keeps it alone.
  BatchKey key() const override {
    if (!work_.bias.empty()) return {};
    const uint32_t path = work_.path.has_value() ? 1 + static_cast<uint32_t>(*work_.path) : 0;
    return {&work_.here(), path << 16 | static_cast<uint32_t>(work_.x_dtype) << 8 |
                               static_cast<uint32_t>(work_.out_dtype)};
  }

 private:
  void FreePayload() override { work_.x = Payload(); }

  MatmulWork work_;
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
