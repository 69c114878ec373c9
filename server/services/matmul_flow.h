// MatmulFlow: one product from message to answer, whether it came alone or on a stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/services/env.h"
#include "server/services/task_slot.h"
#include "server/services/weights.h"
#include "server/transport/byte_budget.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/raw_message.h"
#include "server/wire/validate.h"

namespace awqd::services {

// Holds its share of Env::in_flight until it is destroyed: its owner keeps it until the answer
// was sent.
class MatmulFlow : public std::enable_shared_from_this<MatmulFlow> {
 public:
  // Called exactly once, on any thread, possibly before Start returns. `answer` is a
  // QuantizedMatmulResponse when the status is OK.
  using Done = std::function<void(const absl::Status&, grpc::ByteBuffer answer)>;

  // `method` names the flow in the log.
  MatmulFlow(const Env& env, absl::string_view method, absl::Time deadline, Done done);

  // Takes the bytes out of `message`. Never blocks.
  void Start(grpc::ByteBuffer* message);

  // Withdraws what has not started; `done` is still called.
  void Cancel() { slot_.Cancel(); }

  // From `done` on. Empty when the client sent none, or one that is too long to be echoed.
  absl::string_view request_id() const;
  // What the request and its answer hold, or will. Thread-safe.
  int64_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }

 private:
  absl::Status Begin(grpc::ByteBuffer* message);
  absl::Status Open(grpc::ByteBuffer* message);
  absl::Status OpenShared();
  absl::Status Submit(WeightPtr weight);
  absl::StatusOr<engine::Payload> Stage(const wire::MatmulJob& job);
  void OnResult(const absl::Status& status, const engine::Payload& result,
                const engine::ExecutionReport& report);
  void Answer(const absl::Status& status, const engine::Payload& result);
  void Settle(const absl::Status& status, grpc::ByteBuffer answer = {});
  void Log(const absl::Status& status) const;
  // Leaves of the request what the answer and the log say of it.
  void ForgetRequest();

  // Of activations that are not in parsed_.request.
  std::optional<int64_t> cut_bytes() const;

  const Env& env_;
  const absl::string_view method_;
  const absl::Time deadline_;
  const absl::Time started_ = absl::Now();
  Done done_;
  TaskSlot slot_;
  std::atomic<bool> settled_{false};
  std::atomic<int64_t> held_bytes_{0};

  transport::ByteLease lease_;
  wire::RawMessage message_;  // until its payload was staged
  wire::MatmulMessage parsed_;
  SharedRange shared_x_;    // until it was staged
  SharedRange shared_out_;  // until the answer was written there
  int64_t tokens_ = 0;
  std::vector<int64_t> output_shape_;
  DType output_dtype_ = DType::kFp16;
  v1::Encoding encoding_ = v1::RAW;
  engine::ExecutionReport report_;
  int64_t bytes_out_ = 0;
};

}  // namespace awqd::services
