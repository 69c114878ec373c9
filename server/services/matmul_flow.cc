// Admit, parse, check, find the weight, stage the payload, submit, encode the answer.
#include "server/services/matmul_flow.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/transport/call_loop.h"
#include "server/transport/guard.h"
#include "server/wire/messages.h"
#include "server/wire/status.h"

namespace awqd::services {

MatmulFlow::MatmulFlow(const Env& env, absl::string_view method, absl::Time deadline, Done done)
    : env_(env), method_(method), deadline_(deadline), done_(std::move(done)) {}

void MatmulFlow::Start(grpc::ByteBuffer* message) {
  const auto self = shared_from_this();  // the answer may come, and the call end, before we return
  const absl::Status status = transport::Guarded([&] { return Begin(message); });
  if (status.ok()) return;
  message->Clear();  // when it was not even looked at
  Settle(status);
}

// Memory is asked for before anything is parsed or copied: gRPC holds the message by now, but
// nothing more has been spent on it.
absl::Status MatmulFlow::Open(grpc::ByteBuffer* message) {
  const auto bytes = static_cast<int64_t>(message->Length());
  absl::StatusOr<transport::ByteLease> lease = env_.in_flight->Take(bytes, "request");
  message_.Take(message);
  if (!lease.ok()) {
    parsed_.request.set_request_id(wire::PeekRequestId(message_.pieces()));
    return lease.status();
  }
  lease_ = *std::move(lease);
  held_bytes_ = bytes;
  if (!wire::ParseMatmul(message_.pieces(), &parsed_)) {
    parsed_.request.Clear();
    return wire::DoesNotParse(bytes, parsed_.request);
  }
  if (!parsed_.cut) message_.Free();
  return absl::OkStatus();
}

std::optional<int64_t> MatmulFlow::cut_bytes() const {
  if (parsed_.cut) return parsed_.cut->size;
  const v1::Tensor& x = parsed_.request.activations();
  return x.has_shared_memory() ? std::make_optional(x.shared_memory().size()) : std::nullopt;
}

absl::Status MatmulFlow::OpenShared() {
  const v1::QuantizedMatmulRequest& request = parsed_.request;
  if (request.activations().has_shared_memory()) {
    AWQD_ASSIGN_OR_RETURN(shared_x_, env_.shared_memory->Open(request.activations().shared_memory(),
                                                              SharedMemory::Access::kRead,
                                                              "activations.shared_memory"));
  }
  if (request.has_output_shared_memory()) {
    AWQD_ASSIGN_OR_RETURN(shared_out_, env_.shared_memory->Open(request.output_shared_memory(),
                                                                SharedMemory::Access::kWrite,
                                                                "output_shared_memory"));
  }
  return absl::OkStatus();
}

absl::Status MatmulFlow::Begin(grpc::ByteBuffer* message) {
  AWQD_RETURN_IF_ERROR(StillWanted(slot_, deadline_));
  AWQD_RETURN_IF_ERROR(Open(message));
  // On a stream that was there before; a call of its own is turned away before it starts.
  if (!env_.gate->open())
    return absl::UnavailableError(transport::CallGate::Draining().error_message());
  const v1::QuantizedMatmulRequest& request = parsed_.request;
  AWQD_RETURN_IF_ERROR(wire::CheckRequest(request, cut_bytes()));
  AWQD_RETURN_IF_ERROR(OpenShared());
  if (request.has_weight()) {
    AWQD_ASSIGN_OR_RETURN(WeightPtr weight, FindWeight(env_, request.weight()));
    return Submit(std::move(weight));
  }
  auto wanted = [self = shared_from_this()] { return StillWanted(self->slot_, self->deadline_); };
  auto then = [self = shared_from_this()](absl::StatusOr<WeightPtr> weight) {
    const absl::Status status = transport::Guarded([&]() -> absl::Status {
      AWQD_RETURN_IF_ERROR(weight.status());
      return self->Submit(*std::move(weight));
    });
    if (!status.ok()) self->Settle(status);
  };
  return PackWeight(env_, request.packed(), std::move(wanted), std::move(then));
}

absl::StatusOr<engine::Payload> MatmulFlow::Stage(const wire::MatmulJob& job) {
  engine::StagingPool& staging = env_.engine->staging();
  // What was sent was counted when it came.
  if (shared_x_) AWQD_RETURN_IF_ERROR(lease_.Grow(job.x_bytes, "activations"));
  AWQD_ASSIGN_OR_RETURN(engine::Payload x, staging.Get(job.x_bytes));
  if (shared_x_) {
    AWQD_RETURN_IF_ERROR(shared_x_.Read(x.data()));
    shared_x_ = SharedRange();
  } else if (parsed_.cut) {
    wire::CopyRange(message_.pieces(), *parsed_.cut, x.data());
  } else {
    job.x.copy(x.data(), job.x.size());
  }
  staging.CountCopy(job.x_bytes);
  return x;
}

absl::Status MatmulFlow::Submit(WeightPtr weight) {
  AWQD_RETURN_IF_ERROR(StillWanted(slot_, deadline_));
  AWQD_ASSIGN_OR_RETURN(
      wire::MatmulJob job,
      wire::BuildMatmul(&parsed_.request, weight->shape,
                        env_.options.transport.max_send_message_bytes, cut_bytes()));
  AWQD_RETURN_IF_ERROR(lease_.Grow(job.answer_bytes, "output"));
  AWQD_ASSIGN_OR_RETURN(job.work.x, Stage(job));
  held_bytes_ = lease_.bytes();
  const engine::SubmitOptions options = {.priority = parsed_.request.priority(),
                                         .deadline = deadline_,
                                         .caller_runs = transport::CallLoop::WillRunQueued()};
  message_.Free();
  ForgetRequest();
  job.work.weight = std::move(weight);
  tokens_ = job.work.rows;
  output_shape_ = std::move(job.output_shape);
  output_dtype_ = job.work.out_dtype;
  encoding_ = job.encoding;
  auto done = [self = shared_from_this()](const absl::Status& status, const engine::Payload& result,
                                          const engine::ExecutionReport& report) {
    self->OnResult(status, result, report);
  };
  AWQD_ASSIGN_OR_RETURN(
      engine::TaskHandle handle,
      env_.engine->Submit(std::make_unique<engine::MatmulWork>(std::move(job.work)), options,
                          std::move(done)));
  slot_.Set(std::move(handle));
  return absl::OkStatus();
}

void MatmulFlow::OnResult(const absl::Status& status, const engine::Payload& result,
                          const engine::ExecutionReport& report) {
  if (settled_.load()) return;
  report_ = report;
  bytes_out_ = result.size();
  if (!status.ok() || !shared_out_) return Answer(status, result);
  // Memory that nobody waits for may have been put to another use.
  if (slot_.cancelled()) return Answer(absl::CancelledError("the client cancelled the call"), {});
  env_.shared_memory->Write(std::move(shared_out_), result,
                            [self = shared_from_this(), result](const absl::Status& written) {
                              self->Answer(written, result);
                            });
}

void MatmulFlow::Answer(const absl::Status& status, const engine::Payload& result) {
  grpc::ByteBuffer answer;
  const absl::Status settled = transport::Guarded([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(status);
    v1::QuantizedMatmulResponse response;
    wire::FillExecution(report_, response.mutable_execution());
    response.set_request_id(parsed_.request.request_id());
    const v1::SharedMemory* written = parsed_.request.has_output_shared_memory()
                                          ? &parsed_.request.output_shared_memory()
                                          : nullptr;
    answer = wire::Encode(response, v1::QuantizedMatmulResponse::kOutputFieldNumber,
                          {result, output_dtype_, output_shape_, encoding_, written},
                          &env_.engine->staging());
    return absl::OkStatus();
  });
  // The request itself is gone; the answer counts until it was sent.
  lease_.ShrinkTo(static_cast<int64_t>(answer.Length()));
  held_bytes_ = lease_.bytes();
  Settle(settled, std::move(answer));
}

absl::string_view MatmulFlow::request_id() const {
  const std::string& id = parsed_.request.request_id();
  if (static_cast<int64_t>(id.size()) > wire::kMaxRequestIdBytes) return "";
  return id;
}

void MatmulFlow::Log(const absl::Status& status) const {
  obs::LogRequest({.method = method_,
                   .request_id = parsed_.request.request_id(),
                   .model = parsed_.request.weight().model(),
                   .weight = parsed_.request.weight().weight(),
                   .tokens = tokens_,
                   .queue_us = report_.queue_us,
                   .compute_us = report_.compute_us,
                   .total_us = absl::ToInt64Microseconds(absl::Now() - started_),
                   .bytes_in = message_.size(),
                   .bytes_out = bytes_out_},
                  status);
}

// Field by field: a client fills unknown fields and a long id with as much as it likes.
void MatmulFlow::ForgetRequest() {
  v1::QuantizedMatmulRequest& all = parsed_.request;
  v1::QuantizedMatmulRequest kept;  // a new message, because a cleared one keeps its memory
  if (!request_id().empty()) kept.set_request_id(std::move(*all.mutable_request_id()));
  if (all.has_weight() && obs::LogsRequests()) {
    kept.mutable_weight()->set_model(all.weight().model());
    kept.mutable_weight()->set_weight(all.weight().weight());
  }
  if (all.has_output_shared_memory()) {
    v1::SharedMemory* range = kept.mutable_output_shared_memory();
    range->set_name(all.output_shared_memory().name());
    range->set_offset(all.output_shared_memory().offset());
  }
  all.Swap(&kept);
}

void MatmulFlow::Settle(const absl::Status& status, grpc::ByteBuffer answer) {
  if (settled_.exchange(true)) return;
  const absl::Status visible = wire::ForClient(status);
  if (obs::LogsRequests()) Log(visible);
  if (!status.ok()) {
    // Its answer may wait for long, on a stream that nobody reads.
    ForgetRequest();
    message_.Free();
    shared_x_ = SharedRange();
    shared_out_ = SharedRange();
    lease_.ShrinkTo(0);
    held_bytes_ = 0;
  }
  // Moved out first: what it captures (the call, this flow) must not outlive the answer.
  const Done done = std::move(done_);
  done(visible, std::move(answer));
}

}  // namespace awqd::services
