// Admit, parse, validate, find the weights, stage the payload, submit, encode the answer.
#include "server/services/method_handler.h"

#include <algorithm>
#include <utility>

#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/transport/call_loop.h"
#include "server/wire/raw_message.h"

namespace awqd::services {
namespace {

template <typename Request>
inline constexpr bool kMayNameOutput = requires(const Request& request) {
  request.output_shared_memory();
};

// The rows of activations, of a weight, or of a block of keys: for the log.
template <typename Work>
int64_t CountRows(const Work& work) {
  if constexpr (requires { work.rows; }) {
    return work.rows;
  } else {
    return work.shape.tokens;
  }
}

// The range of shared memory that the answer goes to; null: it is sent.
template <typename Request>
const v1::SharedMemory* OutputRange(const Request& request) {
  if constexpr (kMayNameOutput<Request>) {
    if (request.has_output_shared_memory()) return &request.output_shared_memory();
  }
  return nullptr;
}

}  // namespace

template <typename Method>
MethodHandler<Method>::MethodHandler(const Env& env, absl::string_view method,
                                     transport::ServerCall* call,
                                     std::unique_ptr<Codec<Request>> codec, Done done)
    : RequestHandler(env, method, call), codec_(std::move(codec)), done_(std::move(done)) {}

template <typename Method>
absl::string_view MethodHandler<Method>::request_id() const {
  const std::string& id = parsed_.request.request_id();
  if (static_cast<int64_t>(id.size()) > wire::kMaxRequestIdBytes) return "";
  return id;
}

template <typename Method>
std::optional<int64_t> MethodHandler<Method>::cut_bytes() const {
  if (parsed_.cut) return parsed_.cut->size;
  if constexpr (kHasActivations<Request>) {
    const v1::Tensor& x = parsed_.request.activations();
    if (x.has_shared_memory()) return x.shared_memory().size();
  }
  return std::nullopt;
}

// --- Parse and validate ---

template <typename Method>
absl::Status MethodHandler<Method>::Begin(grpc::ByteBuffer* message, const transport::Drain* gate) {
  AWQD_RETURN_IF_ERROR(CheckStillWanted());
  absl::Status admitted = AdmitMessage(message, codec_->type(), codec_->payload());
  if (admitted.ok() && gate != nullptr && !gate->open()) {
    admitted = absl::UnavailableError(transport::Drain::UnavailableStatus().error_message());
  }
  if (!admitted.ok()) {
    parsed_.request.set_request_id(codec_->PeekId(message_.pieces()));
    return admitted;
  }
  UpdateHeldBytes();
  return RunParse([this] { return ParseAndValidate(); });
}

template <typename Method>
absl::Status MethodHandler<Method>::ParseAndValidate() {
  AWQD_RETURN_IF_ERROR(codec_->Decode(message_, &parsed_));
  deadline_ = std::min(deadline_, started_ + parsed_.timeout);
  if (parsed_.copied_bytes > 0) {
    AWQD_RETURN_IF_ERROR(lease_.Grow(parsed_.copied_bytes, "inputs"));
    UpdateHeldBytes();
  }
  if (!parsed_.cut) {
    message_.Free();
    lease_.ShrinkTo(std::max(message_.size(), parsed_bytes_) + parsed_.copied_bytes);
    UpdateHeldBytes();
  }
  AWQD_RETURN_IF_ERROR(Method::Validate(parsed_.request, cut_bytes()));
  AWQD_RETURN_IF_ERROR(OpenSharedMemory());
  return FindWeights();
}

template <typename Method>
absl::Status MethodHandler<Method>::OpenSharedMemory() {
  const Request& request = parsed_.request;
  if constexpr (kHasActivations<Request>) {
    if (request.activations().has_shared_memory()) {
      AWQD_ASSIGN_OR_RETURN(
          shared_input_,
          env_.shared_memory->Open(request.activations().shared_memory(),
                                   SharedMemory::Access::kRead, "activations.shared_memory"));
    }
  }
  if (const v1::SharedMemory* output = OutputRange(request)) {
    AWQD_ASSIGN_OR_RETURN(
        shared_output_,
        env_.shared_memory->Open(*output, SharedMemory::Access::kWrite, "output_shared_memory"));
  }
  return absl::OkStatus();
}

template <typename Method>
void MethodHandler<Method>::CloseSharedMemory() {
  shared_input_ = SharedRange();
  shared_output_ = SharedRange();
}

// --- Find the weights ---

template <typename Method>
absl::Status MethodHandler<Method>::FindWeights() {
  if constexpr (requires { parsed_.request.packed(); }) {
    if (parsed_.request.has_packed()) return PackWeights(parsed_.request.packed());
  }
  absl::StatusOr<Weights> weights = Lookup::Find(env_, parsed_.request);
  if (weights.ok()) return UseWeights(*std::move(weights));
  const std::string model = Lookup::Name(parsed_.request).model;
  if (!env_.models->IsUnloadedIdle(model)) return weights.status();
  return env_.on_demand->Request(model,
                                 [this, self = shared_from_this()](const absl::Status& loaded) {
                                   RunGuarded([&] { return OnLoaded(loaded); });
                                 });
}

template <typename Method>
absl::Status MethodHandler<Method>::OnLoaded(const absl::Status& loaded) {
  AWQD_RETURN_IF_ERROR(loaded);
  AWQD_RETURN_IF_ERROR(CheckStillWanted());
  AWQD_ASSIGN_OR_RETURN(Weights weights, Lookup::Find(env_, parsed_.request));
  return UseWeights(std::move(weights));
}

// Inline weights are packed only if the call is still wanted when its turn has come: packing takes
// long, and a call that ended while it waited would take the time of those behind it.
template <typename Method>
template <typename Packed>
absl::Status MethodHandler<Method>::PackWeights(const Packed& packed) {
  AWQD_RETURN_IF_ERROR(Lookup::Check(env_, packed));
  return env_.packings->Run([this, self = shared_from_this(), &packed] {
    RunGuarded([&]() -> absl::Status {
      AWQD_RETURN_IF_ERROR(CheckStillWanted());
      AWQD_ASSIGN_OR_RETURN(const wire::PackedSize size,
                            wire::MeasurePacked(packed, env_.engine->device().info()));
      AWQD_RETURN_IF_ERROR(AdmitPacked(size));
      AWQD_ASSIGN_OR_RETURN(Weights weights, Lookup::Pack(env_, packed));
      lease_.ShrinkTo(lease_.bytes() - size.decoded);
      return UseWeights(std::move(weights));
    });
  });
}

// --- Build, stage and submit the job ---

template <typename Method>
absl::Status MethodHandler<Method>::UseWeights(Weights weights) {
  AWQD_RETURN_IF_ERROR(CheckStillWanted());
  AWQD_RETURN_IF_ERROR(codec_->CheckFound());
  AWQD_ASSIGN_OR_RETURN(Job job,
                        Method::Build(env_, &parsed_.request, std::move(weights), cut_bytes()));
  log_.tokens = CountRows(job.work);
  return RunJob(std::move(job));
}

template <typename Method>
absl::StatusOr<engine::Payload> MethodHandler<Method>::StageInput(
    const typename Job::Input& input) {
  engine::StagingPool& staging = env_.engine->staging();
  // The bytes of a message were counted when it came; those in shared memory were not.
  if (input.outside_request && shared_input_) {
    AWQD_RETURN_IF_ERROR(lease_.Grow(input.size, "activations"));
  }
  AWQD_ASSIGN_OR_RETURN(engine::Payload payload, staging.Get(input.size));
  if (!input.outside_request) {
    input.bytes.copy(payload.data(), input.bytes.size());
  } else if (shared_input_) {
    AWQD_RETURN_IF_ERROR(shared_input_.Read(payload.data()));
    shared_input_ = SharedRange();
  } else {
    wire::CopyRange(message_.pieces(), *parsed_.cut, payload.data());
  }
  staging.CountCopy(input.size);
  return payload;
}

template <typename Method>
absl::Status MethodHandler<Method>::RunJob(Job job) {
  // Beside the answer, the work holds copies of the request's bias, scales, ids and router weights.
  AWQD_RETURN_IF_ERROR(lease_.Grow(job.work.bytes(), "request, in the work"));
  AWQD_RETURN_IF_ERROR(lease_.Grow(job.answer.bytes, "output"));
  for (typename Job::Input& input : job.inputs) {
    AWQD_ASSIGN_OR_RETURN(job.work.*input.payload, StageInput(input));
    input.bytes = std::string();  // frees its memory
  }
  UpdateHeldBytes();
  engine::SubmitOptions options = {.deadline = deadline_};
  if constexpr (requires { parsed_.request.priority(); }) {
    options.priority = parsed_.request.priority();
  }
  options.caller_runs = Method::kCallerRuns && transport::CallLoop::WillRunQueued();
  message_.Free();
  ForgetRequest();
  form_ = std::move(job.answer);
  auto done = [this, self = shared_from_this()](
                  const absl::Status& status, const engine::Payload& result,
                  const engine::ExecutionReport& report) { OnResult(status, result, report); };
  return Submit(std::make_unique<typename Method::Work>(std::move(job.work)), options,
                std::move(done));
}

// Field by field: a client fills unknown fields and a long id with as much as it likes.
template <typename Method>
void MethodHandler<Method>::ForgetRequest() {
  Request& all = parsed_.request;
  Request kept;  // a new message, because a cleared one keeps its memory
  if (!request_id().empty()) kept.set_request_id(std::move(*all.mutable_request_id()));
  if (obs::LogsRequests()) Lookup::KeepName(all, &kept);
  if constexpr (kMayNameOutput<Request>) {
    if (const v1::SharedMemory* output = OutputRange(all)) {
      v1::SharedMemory* range = kept.mutable_output_shared_memory();
      range->set_name(output->name());
      range->set_offset(output->offset());
    }
  }
  all.Swap(&kept);
}

// --- Encode the answer ---

template <typename Method>
void MethodHandler<Method>::OnResult(const absl::Status& status, const engine::Payload& result,
                                     const engine::ExecutionReport& report) {
  if (ended()) return;
  report_ = report;
  log_.bytes_out = result.size();
  if (!status.ok() || !shared_output_) return SendAnswer(status, result);
  // Memory that nobody waits for may have been put to another use.
  if (slot_.cancelled()) {
    return SendAnswer(absl::CancelledError("the client cancelled the call"), {});
  }
  env_.shared_memory->Write(std::move(shared_output_), result,
                            [this, self = shared_from_this(), result](const absl::Status& written) {
                              SendAnswer(written, result);
                            });
}

template <typename Method>
void MethodHandler<Method>::SendAnswer(const absl::Status& status, const engine::Payload& result) {
  int64_t extra = 0;
  const absl::Status encoded = CatchExceptions([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(status);
    wire::Answer answer = {result, &form_, OutputRange(parsed_.request)};
    if (answer.is_raw()) {
      AWQD_ASSIGN_OR_RETURN(answer.result, PrepareToSend(result, &extra));
    }
    answer_ =
        codec_->Encode(parsed_.request.request_id(), report_, answer, &env_.engine->staging());
    return absl::OkStatus();
  });
  // The request itself is gone; the answer counts until it was sent.
  lease_.ShrinkTo(static_cast<int64_t>(answer_.Length()) + extra);
  UpdateHeldBytes();
  EndRequest(encoded);
}

template <typename Method>
void MethodHandler<Method>::SendEnd(const absl::Status& status) {
  if (!status.ok()) {
    // Its answer may wait for long, on a stream that nobody reads.
    ForgetRequest();
    CloseSharedMemory();
    lease_.ShrinkTo(0);
    UpdateHeldBytes();
  }
  // Moved out first: what it captures (the call, this handler) must not outlive the answer.
  const Done done = std::move(done_);
  done(status, std::move(answer_));
}

template class MethodHandler<MatmulMethod>;
template class MethodHandler<GroupedMatmulMethod>;
template class MethodHandler<GatedMlpMethod>;
template class MethodHandler<DequantizeMethod>;
template class MethodHandler<DequantizeStreamMethod>;
template class MethodHandler<QuantizeKvMethod>;
template class MethodHandler<DequantizeKvMethod>;

}  // namespace awqd::services
