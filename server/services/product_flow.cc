// Admit, parse, check, find the weights, stage the payload, submit, encode the answer.
#include "server/services/product_flow.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "kernels/base/status.h"
#include "server/obs/call_record.h"
#include "server/transport/call_loop.h"
#include "server/wire/raw_message.h"

namespace awqd::services {

absl::StatusOr<wire::MatmulJob> MatmulMethod::Build(Request* request, WeightPtr weight,
                                                    int64_t max_send,
                                                    std::optional<int64_t> cut_bytes) {
  AWQD_ASSIGN_OR_RETURN(wire::MatmulJob job, wire::BuildMatmul(request, weight->shape, max_send,
                                                               cut_bytes, weight->activations()));
  job.work.weight = std::move(weight);
  return job;
}

void MatmulMethod::TakeAsInt8(const model::PlacedWeight& weight, Request* request) {
  if (request->activation_quantization() != v1::ACTIVATIONS_AS_SENT) return;
  const bool has_kernels = absl::c_all_of(weight.parts, [](const model::WeightPart& part) {
    return !part.weight->plan.quantized.empty();
  });
  if (request->activations().dtype() == v1::INT8 || !has_kernels) return;
  request->set_activation_quantization(v1::INT8_PER_TOKEN);
}

template <typename Method>
ProductFlow<Method>::ProductFlow(const Env& env, absl::string_view method,
                                 transport::ServerCall* call, std::unique_ptr<Codec<Request>> codec,
                                 Done done)
    : RequestFlow(env, method, call), codec_(std::move(codec)), done_(std::move(done)) {}

template <typename Method>
std::optional<int64_t> ProductFlow<Method>::cut_bytes() const {
  if (parsed_.cut) return parsed_.cut->size;
  const v1::Tensor& x = parsed_.request.activations();
  return x.has_shared_memory() ? std::make_optional(x.shared_memory().size()) : std::nullopt;
}

template <typename Method>
absl::Status ProductFlow<Method>::OpenShared() {
  const Request& request = parsed_.request;
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

template <typename Method>
absl::Status ProductFlow<Method>::Begin(grpc::ByteBuffer* message,
                                        const transport::CallGate* gate) {
  AWQD_RETURN_IF_ERROR(StillWanted());
  absl::Status admitted = Admit(message, codec_->type(), codec_->payload());
  if (admitted.ok() && gate != nullptr && !gate->open()) {
    admitted = absl::UnavailableError(transport::CallGate::Draining().error_message());
  }
  if (!admitted.ok()) {
    parsed_.request.set_request_id(codec_->PeekId(message_.pieces()));
    return admitted;
  }
  NoteHeld();
  return Parse([this] { return OnMessage(); });
}

template <typename Method>
absl::Status ProductFlow<Method>::OnMessage() {
  AWQD_RETURN_IF_ERROR(codec_->Decode(message_, &parsed_));
  deadline_ = std::min(deadline_, started_ + parsed_.timeout);
  if (parsed_.copied_bytes > 0) {
    AWQD_RETURN_IF_ERROR(lease_.Grow(parsed_.copied_bytes, "inputs"));
    NoteHeld();
  }
  if (!parsed_.cut) {
    message_.Free();
    lease_.ShrinkTo(std::max(message_.size(), parsed_bytes_) + parsed_.copied_bytes);
    NoteHeld();
  }
  const Request& request = parsed_.request;
  AWQD_RETURN_IF_ERROR(wire::CheckRequest(request, cut_bytes()));
  AWQD_RETURN_IF_ERROR(OpenShared());
  return WithWeights<Source>(
      request, [this](typename Source::Weights weights) { return OnWeights(std::move(weights)); });
}

template <typename Method>
absl::StatusOr<engine::Payload> ProductFlow<Method>::Stage(const Job& job) {
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

template <typename Method>
absl::Status ProductFlow<Method>::OnWeights(typename Source::Weights weights) {
  AWQD_RETURN_IF_ERROR(StillWanted());
  AWQD_RETURN_IF_ERROR(codec_->CheckFound());
  if constexpr (requires { Method::TakeAsInt8; }) {
    if (env_.options.int8_activations) Method::TakeAsInt8(*weights, &parsed_.request);
  }
  AWQD_ASSIGN_OR_RETURN(Job job,
                        Method::Build(&parsed_.request, std::move(weights),
                                      env_.options.transport.max_send_message_bytes, cut_bytes()));
  // Beside the answer, what the request's bias, scales, ids and router weights are in the work.
  AWQD_RETURN_IF_ERROR(lease_.Grow(job.work.bytes(), "request, in the work"));
  AWQD_RETURN_IF_ERROR(lease_.Grow(job.answer_bytes, "output"));
  AWQD_ASSIGN_OR_RETURN(job.work.x, Stage(job));
  NoteHeld();
  const engine::SubmitOptions options = {.priority = parsed_.request.priority(),
                                         .deadline = deadline_,
                                         .caller_runs = transport::CallLoop::WillRunQueued()};
  message_.Free();
  ForgetRequest();
  log_.tokens = job.work.rows;
  output_shape_ = std::move(job.output_shape);
  output_dtype_ = job.work.out_dtype;
  encoding_ = job.encoding;
  auto done = [this, self = shared_from_this()](
                  const absl::Status& status, const engine::Payload& result,
                  const engine::ExecutionReport& report) { OnResult(status, result, report); };
  return Submit(std::make_unique<typename Method::Work>(std::move(job.work)), options,
                std::move(done));
}

template <typename Method>
void ProductFlow<Method>::OnResult(const absl::Status& status, const engine::Payload& result,
                                   const engine::ExecutionReport& report) {
  if (settled()) return;
  report_ = report;
  log_.bytes_out = result.size();
  if (!status.ok() || !shared_out_) return Answer(status, result);
  // Memory that nobody waits for may have been put to another use.
  if (slot_.cancelled()) return Answer(absl::CancelledError("the client cancelled the call"), {});
  env_.shared_memory->Write(std::move(shared_out_), result,
                            [this, self = shared_from_this(), result](const absl::Status& written) {
                              Answer(written, result);
                            });
}

template <typename Method>
void ProductFlow<Method>::Answer(const absl::Status& status, const engine::Payload& result) {
  int64_t extra = 0;
  const absl::Status settled = transport::Guarded([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(status);
    const v1::SharedMemory* written = parsed_.request.has_output_shared_memory()
                                          ? &parsed_.request.output_shared_memory()
                                          : nullptr;
    wire::Answer answer = {result, output_dtype_, output_shape_, encoding_, written};
    if (answer.is_raw()) {
      AWQD_ASSIGN_OR_RETURN(answer.result, ToBeSent(result, &extra));
    }
    answer_ =
        codec_->Encode(parsed_.request.request_id(), report_, answer, &env_.engine->staging());
    return absl::OkStatus();
  });
  // The request itself is gone; the answer counts until it was sent.
  lease_.ShrinkTo(static_cast<int64_t>(answer_.Length()) + extra);
  NoteHeld();
  Settle(settled);
}

template <typename Method>
absl::string_view ProductFlow<Method>::request_id() const {
  const std::string& id = parsed_.request.request_id();
  if (static_cast<int64_t>(id.size()) > wire::kMaxRequestIdBytes) return "";
  return id;
}

// Field by field: a client fills unknown fields and a long id with as much as it likes.
template <typename Method>
void ProductFlow<Method>::ForgetRequest() {
  Request& all = parsed_.request;
  Request kept;  // a new message, because a cleared one keeps its memory
  if (!request_id().empty()) kept.set_request_id(std::move(*all.mutable_request_id()));
  if (obs::LogsRequests()) Source::KeepName(all, &kept);
  if (all.has_output_shared_memory()) {
    v1::SharedMemory* range = kept.mutable_output_shared_memory();
    range->set_name(all.output_shared_memory().name());
    range->set_offset(all.output_shared_memory().offset());
  }
  all.Swap(&kept);
}

template <typename Method>
void ProductFlow<Method>::End(const absl::Status& status) {
  if (!status.ok()) {
    // Its answer may wait for long, on a stream that nobody reads.
    ForgetRequest();
    shared_x_ = SharedRange();
    shared_out_ = SharedRange();
    lease_.ShrinkTo(0);
    NoteHeld();
  }
  // Moved out first: what it captures (the call, this flow) must not outlive the answer.
  const Done done = std::move(done_);
  done(status, std::move(answer_));
}

template class ProductFlow<MatmulMethod>;
template class ProductFlow<GroupedMatmulMethod>;
template class ProductFlow<GatedMlpMethod>;

}  // namespace awqd::services
