// Check, find the weight, submit, fill the response.
#include "server/rpc/matmul_flow.h"

#include <utility>

#include "kernels/base/status.h"
#include "server/rpc/guard.h"
#include "server/rpc/status_grpc.h"
#include "server/rpc/tensor.h"

namespace awqd {

MatmulFlow::MatmulFlow(const RpcEnv& env, absl::string_view method,
                       v1::QuantizedMatmulRequest* request, v1::QuantizedMatmulResponse* response,
                       absl::Time deadline, Done done)
    : env_(env),
      request_(request),
      response_(response),
      deadline_(deadline),
      done_(std::move(done)) {
  log_.method = method;
  log_.request_id = request->request_id();
  log_.model = request->weight().model();
  log_.weight = request->weight().weight();
  log_.bytes_in = static_cast<int64_t>(request->ByteSizeLong());
  if (request->request_id().size() <= kMaxRequestIdBytes) {
    response->set_request_id(request->request_id());
  }
}

void MatmulFlow::Start() {
  const auto self = shared_from_this();  // the answer may come, and the call end, before we return
  if (absl::Status status = Guarded([&] { return Begin(); }); !status.ok()) Settle(status);
}

absl::Status MatmulFlow::Begin() {
  AWQD_RETURN_IF_ERROR(StillWanted(slot_, deadline_));
  // On a stream that was there before; a call of its own is turned away before it starts.
  if (!env_.gate->open()) return absl::UnavailableError(CallGate::Draining().error_message());
  AWQD_RETURN_IF_ERROR(CheckRequest(*request_));
  if (request_->has_weight()) {
    AWQD_ASSIGN_OR_RETURN(WeightPtr weight, FindWeight(env_, request_->weight()));
    return Submit(std::move(weight));
  }
  auto then = [self = shared_from_this()](absl::StatusOr<WeightPtr> weight) {
    const absl::Status status = Guarded([&]() -> absl::Status {
      AWQD_RETURN_IF_ERROR(weight.status());
      return self->Submit(*std::move(weight));
    });
    if (!status.ok()) self->Settle(status);
  };
  return PackWeight(env_, request_->packed(), std::move(then));
}

absl::Status MatmulFlow::Submit(WeightPtr weight) {
  AWQD_RETURN_IF_ERROR(StillWanted(slot_, deadline_));
  AWQD_ASSIGN_OR_RETURN(MatmulJob job,
                        BuildMatmul(request_, weight->shape, env_.limits.max_send_message_bytes));
  AWQD_ASSIGN_OR_RETURN(job.work.x, env_.engine->staging().Get(job.x.size()));
  job.x.copy(job.work.x.data(), job.x.size());
  const SubmitOptions options = {.priority = request_->priority(), .deadline = deadline_};
  request_->Clear();  // an inline weight is packed by now; its bytes need not wait in the queue
  job.work.weight = std::move(weight);
  output_shape_ = std::move(job.output_shape);
  output_dtype_ = job.work.out_dtype;
  encoding_ = job.encoding;
  log_.tokens = job.work.tokens;
  auto done = [self = shared_from_this()](const absl::Status& status, const Payload& result,
                                          const ExecutionReport& report) {
    self->OnResult(status, result, report);
  };
  AWQD_ASSIGN_OR_RETURN(TaskHandle handle,
                        env_.engine->Submit(std::move(job.work), options, std::move(done)));
  slot_.Set(std::move(handle));
  return absl::OkStatus();
}

void MatmulFlow::OnResult(const absl::Status& status, const Payload& result,
                          const ExecutionReport& report) {
  if (settled_.load()) return;
  log_.queue_us = report.queue_us;
  log_.compute_us = report.compute_us;
  log_.bytes_out = result.size();
  Settle(Guarded([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(status);
    FillTensor(std::string(result.view()), output_dtype_, output_shape_, encoding_,
               response_->mutable_output());
    FillExecution(report, response_->mutable_execution());
    return absl::OkStatus();
  }));
}

void MatmulFlow::Settle(const absl::Status& status) {
  if (settled_.exchange(true)) return;
  const absl::Status visible = ForClient(status);
  log_.total_us = absl::ToInt64Microseconds(absl::Now() - started_);
  LogRequest(log_, visible);
  // Moved out first: what it captures (the call, this flow) must not outlive the answer.
  const Done done = std::move(done_);
  done(visible);
}

}  // namespace awqd
