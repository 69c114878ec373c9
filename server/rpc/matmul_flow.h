// MatmulFlow: one product from request to response, whether it came alone or on a stream.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "awqd/v1/inference.pb.h"
#include "server/obs/logging.h"
#include "server/rpc/call_state.h"
#include "server/rpc/rpc_env.h"
#include "server/rpc/validate.h"
#include "server/rpc/weights.h"

namespace awqd {

class MatmulFlow : public std::enable_shared_from_this<MatmulFlow> {
 public:
  // Called exactly once, on any thread, possibly before Start returns. The response is filled when
  // the status is OK.
  using Done = std::function<void(const absl::Status&)>;

  // `request` (whose payload is moved out) and `response` live until `done` has been called;
  // `method` names the flow in the log.
  MatmulFlow(const RpcEnv& env, absl::string_view method, v1::QuantizedMatmulRequest* request,
             v1::QuantizedMatmulResponse* response, absl::Time deadline, Done done);

  // Never blocks.
  void Start();

  // Withdraws what has not started; `done` is still called.
  void Cancel() { slot_.Cancel(); }

 private:
  absl::Status Begin();
  absl::Status Submit(WeightPtr weight);
  void OnResult(const absl::Status& status, const Payload& result, const ExecutionReport& report);
  void Settle(const absl::Status& status);

  const RpcEnv& env_;
  v1::QuantizedMatmulRequest* const request_;
  v1::QuantizedMatmulResponse* const response_;
  const absl::Time deadline_;
  const absl::Time started_ = absl::Now();
  Done done_;
  TaskSlot slot_;
  std::atomic<bool> settled_{false};

  std::vector<int64_t> output_shape_;
  DType output_dtype_ = DType::kFp16;
  v1::Encoding encoding_ = v1::RAW;
  RequestLog log_;
};

}  // namespace awqd
