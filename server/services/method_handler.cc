// A request of one method, from message to answer, in whichever protocol it came: admit, parse,
// validate, find the weights, stage the payload, submit, encode the answer.
#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/status.h"
#include "server/services/methods.h"
#include "server/services/request_handler.h"
#include "server/transport/call_loop.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"

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

// --- Jobs: each function checks a valid request against its weights, and makes the job ---

int64_t MaxSendBytes(const Env& env) { return env.options.transport.max_send_message_bytes; }

bool AreRounded(v1::DType activations) {
  return activations == v1::INT8 || activations == v1::FP8_E4M3;
}

// --int8_activations: floating activations of a request that does not say how become INT8.
void ApplyInt8Default(const model::PlacedWeight& weight, v1::QuantizedMatmulRequest* request) {
  if (request->activation_quantization() != v1::ACTIVATIONS_AS_SENT) return;
  const bool has_kernels = absl::c_all_of(weight.parts, [](const model::WeightPart& part) {
    return !part.weight->plan.quantized.empty();
  });
  if (AreRounded(request->activations().dtype()) || !has_kernels) return;
  request->set_activation_quantization(v1::INT8_PER_TOKEN);
}

// --fp8_activations: they become E4M3 where the checkpoint declares it.
template <typename Request, typename Weights>
void ApplyFp8Default(const Env& env, const Weights& weights, Request* request) {
  if (!env.options.fp8_activations ||
      request->activation_quantization() != v1::ACTIVATIONS_AS_SENT ||
      AreRounded(request->activations().dtype())) {
    return;
  }
  bool declares = false;
  if constexpr (requires { weights.activations(); }) {
    declares = IsFloat8(weights.activations().how);
  } else {
    declares = wire::DeclaresFloat8(weights);
  }
  if (declares) request->set_activation_quantization(v1::FP8_AS_DECLARED);
}

absl::StatusOr<wire::MatmulJob> BuildJob(const Env& env, v1::QuantizedMatmulRequest* request,
                                         WeightPtr weight, std::optional<int64_t> cut_bytes) {
  ApplyFp8Default(env, *weight, request);
  if (env.options.int8_activations) ApplyInt8Default(*weight, request);
  AWQD_ASSIGN_OR_RETURN(wire::MatmulJob job,
                        wire::BuildMatmul(request, weight->shape, MaxSendBytes(env), cut_bytes,
                                          weight->activations()));
  job.work.weight = std::move(weight);
  return job;
}
absl::StatusOr<GroupedMatmulMethod::Job> BuildJob(const Env& env,
                                                  v1::GroupedQuantizedMatmulRequest* request,
                                                  StackPtr stack,
                                                  std::optional<int64_t> cut_bytes) {
  ApplyFp8Default(env, *stack, request);
  return wire::BuildGroupedMatmul(request, std::move(stack), MaxSendBytes(env), cut_bytes);
}
absl::StatusOr<GatedMlpMethod::Job> BuildJob(const Env& env, v1::GatedMlpRequest* request,
                                             wire::MlpStacks projections,
                                             std::optional<int64_t> cut_bytes) {
  ApplyFp8Default(env, projections, request);
  return wire::BuildGatedMlp(request, std::move(projections), MaxSendBytes(env), cut_bytes);
}
absl::StatusOr<wire::DequantizeJob> BuildJob(const Env&, v1::DequantizeRequest* request,
                                             WeightPtr weight, std::optional<int64_t>) {
  AWQD_ASSIGN_OR_RETURN(wire::DequantizeJob job, wire::BuildDequantize(*request, weight->shape));
  job.work.weight = std::move(weight);
  return job;
}
template <typename KvRequest>
auto BuildJob(const Env& env, KvRequest* request, NoWeight::Weights, std::optional<int64_t>) {
  return wire::BuildKv(request, MaxSendBytes(env));
}

// --- The steps, each of which continues with the next ---

template <typename Method>
class MethodHandler : public RequestHandler {
 public:
  using Request = typename Method::Request;
  using Lookup = typename Method::Lookup;
  using Weights = typename Method::Weights;
  using Job = typename Method::Job;

  MethodHandler(const Env& env, absl::string_view name, transport::RequestContext call,
                std::unique_ptr<Codec<Request>> codec, Done done)
      : RequestHandler(env, name, std::move(call)),
        codec_(std::move(codec)),
        done_(std::move(done)) {}

  absl::string_view request_id() const override {
    const std::string& id = parsed_.request.request_id();
    if (static_cast<int64_t>(id.size()) > wire::kMaxRequestIdBytes) return "";
    return id;
  }

 protected:
  // Checks what holds for any weight.
  virtual absl::Status Validate() const {
    if constexpr (kHasActivations<Request>) {
      return wire::CheckRequest(parsed_.request, cut_bytes());
    } else {
      return wire::CheckRequest(parsed_.request);
    }
  }

  // Stages the payloads of a job, and submits it. The weights are found by now.
  virtual absl::Status RunJob(Job job) {
    if constexpr (kDequantizes) {
      AWQD_RETURN_IF_ERROR(wire::CheckFits(parsed_.request, job, MaxSendBytes(env_)));
    }
    // Beside the answer, the work holds copies of the request's bias, scales, ids and router
    // weights.
    AWQD_RETURN_IF_ERROR(lease_.Grow(job.work.bytes(), "request, in the work"));
    AWQD_RETURN_IF_ERROR(lease_.Grow(job.answer.bytes, "output"));
    AWQD_RETURN_IF_ERROR(UseDeviceMemory(&job));
    for (typename Job::Input& input : job.inputs) {
      if ((job.work.*input.payload).device() != nullptr) continue;
      AWQD_ASSIGN_OR_RETURN(job.work.*input.payload, StageInput(input));
      input.bytes = std::string();  // frees its memory
    }
    UpdateHeldBytes();
    engine::SubmitOptions options = {.deadline = deadline_};
    if constexpr (requires { parsed_.request.priority(); }) {
      options.priority = parsed_.request.priority();
    }
    // The thread of the loop that submits a product may run it.
    options.caller_runs = !kDequantizes && transport::CallLoop::WillRunQueued();
    message_.Free();
    ForgetRequest();
    form_ = std::move(job.answer);
    auto done = [this, self = shared_from_this()](
                    const absl::Status& status, const engine::Payload& result,
                    const engine::ExecutionReport& report) { OnResult(status, result, report); };
    return Submit(std::make_unique<typename Method::Work>(std::move(job.work)), options,
                  std::move(done));
  }

  void SendEnd(const absl::Status& status) override {
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

  // Frees the request except for what the answer repeats. Field by field: a client fills unknown
  // fields and a long id with as much as it likes.
  void ForgetRequest() {
    Request& all = parsed_.request;
    Request kept;  // a new message, because a cleared one keeps its memory
    if (!request_id().empty()) kept.set_request_id(std::move(*all.mutable_request_id()));
    if constexpr (kMayNameOutput<Request>) {
      if (const v1::SharedMemory* output = OutputRange(all)) {
        v1::SharedMemory* range = kept.mutable_output_shared_memory();
        range->set_name(output->name());
        range->set_offset(output->offset());
        range->set_region(output->region());
      }
    }
    all.Swap(&kept);
  }

  const Request& request() const { return parsed_.request; }

 private:
  static constexpr bool kDequantizes = std::is_same_v<Method, DequantizeMethod>;

  absl::Status EncodeError(const absl::Status& status) const override {
    return codec_->EncodeError(status);
  }

  // Bytes of the activations, where they are not in parsed_.request.
  std::optional<int64_t> cut_bytes() const {
    if (parsed_.cut) return parsed_.cut->size;
    if constexpr (kHasActivations<Request>) {
      const v1::Tensor& x = parsed_.request.activations();
      if (x.has_shared_memory()) return x.shared_memory().size();
    }
    return std::nullopt;
  }

  // --- Parse and validate ---

  absl::Status Begin(grpc::ByteBuffer* message, const transport::Drain* drain) override {
    AWQD_RETURN_IF_ERROR(CheckStillWanted());
    absl::Status admitted = AdmitMessage(message, codec_->type(), codec_->payload());
    if (admitted.ok() && drain != nullptr && !drain->open()) {
      admitted = absl::UnavailableError(transport::Drain::UnavailableStatus().error_message());
    }
    if (!admitted.ok()) {
      parsed_.request.set_request_id(codec_->PeekId(message_.pieces()));
      KeepNames(parsed_.request.request_id(), {});
      return admitted;
    }
    UpdateHeldBytes();
    if (!is_large()) return ParseAndValidate();
    return env_.parsings->Run(Later([this] { return ParseAndValidate(); }));
  }

  absl::Status ParseAndValidate() {
    const absl::Status decoded = codec_->Decode(message_, scan_, &parsed_);
    KeepNames(parsed_.request.request_id(), Lookup::Name(parsed_.request));
    AWQD_RETURN_IF_ERROR(decoded);
    deadline_ = std::min(deadline_, started_ + parsed_.timeout);
    if (parsed_.copied_bytes > 0) {
      AWQD_RETURN_IF_ERROR(lease_.Grow(parsed_.copied_bytes, "inputs"));
      UpdateHeldBytes();
    }
    if (!parsed_.cut) {
      message_.Free();
      lease_.ShrinkTo(std::max(message_.size(), scan_.parsed_bytes) + parsed_.copied_bytes);
      UpdateHeldBytes();
    }
    AWQD_RETURN_IF_ERROR(Validate());
    AWQD_RETURN_IF_ERROR(OpenSharedMemory());
    return FindWeights();
  }

  absl::Status OpenSharedMemory() {
    const Request& request = parsed_.request;
    const std::string owner = OwnerName(identity_);
    if constexpr (kHasActivations<Request>) {
      if (request.activations().has_shared_memory()) {
        AWQD_ASSIGN_OR_RETURN(
            shared_input_, codec_->Open(env_, owner, request.activations().shared_memory(),
                                        SharedMemory::Access::kRead, "activations.shared_memory"));
      }
    }
    if (const v1::SharedMemory* output = OutputRange(request)) {
      AWQD_ASSIGN_OR_RETURN(
          shared_output_,
          codec_->Open(env_, owner, *output, SharedMemory::Access::kWrite, "output_shared_memory"));
    }
    return absl::OkStatus();
  }

  void CloseSharedMemory() {
    shared_input_ = SharedRange();
    shared_output_ = SharedRange();
  }

  // --- Find the weights ---

  // Continues with UseWeights: at once with loaded weights, on another thread with inline ones and
  // those of an unloaded model.
  absl::Status FindWeights() {
    if constexpr (requires { parsed_.request.packed(); }) {
      if (parsed_.request.has_packed()) return PackWeights(parsed_.request.packed());
    }
    absl::StatusOr<Weights> weights = Lookup::Find(env_, parsed_.request);
    if (weights.ok()) return UseWeights(*std::move(weights));
    const std::string model(Lookup::Name(parsed_.request).model);
    if (!env_.models->IsUnloadedIdle(model)) return weights.status();
    return env_.on_demand->Request(model,
                                   [this, self = shared_from_this()](const absl::Status& loaded) {
                                     RunGuarded([&] { return OnLoaded(loaded); });
                                   });
  }

  absl::Status OnLoaded(const absl::Status& loaded) {
    AWQD_RETURN_IF_ERROR(loaded);
    AWQD_RETURN_IF_ERROR(CheckStillWanted());
    AWQD_ASSIGN_OR_RETURN(Weights weights, Lookup::Find(env_, parsed_.request));
    return UseWeights(std::move(weights));
  }

  // Inline weights are packed only if the call is still wanted when its turn has come: packing
  // takes long, and a call that ended while it waited would take the time of those behind it.
  template <typename Packed>
  absl::Status PackWeights(const Packed& packed) {
    AWQD_RETURN_IF_ERROR(wire::CheckPacked(packed, env_.options.max_inline_weight_bytes));
    return env_.packings->Run(Later([this, &packed]() -> absl::Status {
      AWQD_ASSIGN_OR_RETURN(const wire::PackedSize size,
                            wire::MeasurePacked(packed, env_.engine->device().info()));
      AWQD_RETURN_IF_ERROR(wire::CheckPrepared(size, env_.options.max_inline_weight_bytes));
      // The decoded and the prepared weights are counted before there are any.
      AWQD_RETURN_IF_ERROR(lease_.Grow(size.decoded + size.prepared + size.plans,
                                       "packed, once it is decoded and prepared"));
      AWQD_ASSIGN_OR_RETURN(Weights weights, Lookup::Pack(env_, packed));
      lease_.ShrinkTo(lease_.bytes() - size.decoded);
      return UseWeights(std::move(weights));
    }));
  }

  // --- Build and stage the job ---

  absl::Status UseWeights(Weights weights) {
    AWQD_RETURN_IF_ERROR(CheckStillWanted());
    AWQD_RETURN_IF_ERROR(codec_->CheckFound());
    AWQD_ASSIGN_OR_RETURN(Job job,
                          BuildJob(env_, &parsed_.request, std::move(weights), cut_bytes()));
    log_.tokens = CountRows(job.work);
    return RunJob(std::move(job));
  }

  // Has the work read and write memory of GPUs where it is, if it can. Else that is copied, as
  // other shared memory is.
  absl::Status UseDeviceMemory(Job* job) {
    engine::Work& work = job->work;
    if (!(shared_input_.on_device() || shared_output_.on_device()) || !work.accesses_devices()) {
      return absl::OkStatus();
    }
    if (shared_output_.on_device()) {
      const engine::Payload& room = shared_output_.device_memory();
      work.output = room.Slice(0, work.result_bytes());
      work.ready = shared_output_.region()->ready();
      work.finished = shared_output_.region()->finished();
      work.marks = shared_output_.marks();
      work.early = work.marks != nullptr || shared_output_.region()->early_answers();
    }
    if (!shared_input_.on_device()) return absl::OkStatus();
    // Kernels write results while others of their blocks read activations.
    if (work.output.Overlaps(shared_input_.device_memory())) {
      return wire::FieldError("output_shared_memory", "a range that overlaps the activations",
                              "one apart from them");
    }
    for (const typename Job::Input& input : job->inputs) {
      if (input.outside_request) job->work.*input.payload = shared_input_.device_memory();
    }
    if (shared_input_.region()->ready() != nullptr) work.ready = shared_input_.region()->ready();
    work.waits_for = shared_input_.waits_for();
    if (work.finished == nullptr) work.finished = shared_input_.region()->finished();
    shared_input_ = SharedRange();
    return absl::OkStatus();
  }

  absl::StatusOr<engine::Payload> StageInput(const typename Job::Input& input) {
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

  // --- Encode the answer ---

  void OnResult(const absl::Status& status, const engine::Payload& result,
                const engine::ExecutionReport& report) {
    if (ended()) return;
    report_ = report;
    log_.bytes_out = result.size();
    if (status.ok() && deadline_ <= absl::Now()) {
      return SendAnswer(absl::DeadlineExceededError("the deadline passed while it was computed"),
                        {});
    }
    if (result.device() != nullptr) shared_output_ = SharedRange();  // it is there
    if (!status.ok() || !shared_output_) return SendAnswer(status, result);
    // Memory that nobody waits for may have been put to another use.
    if (slot_.cancelled()) {
      return SendAnswer(absl::CancelledError("the client cancelled the call"), {});
    }
    env_.shared_memory->Write(std::move(shared_output_), result,
                              [this, self = shared_from_this(), result](
                                  const absl::Status& written) { SendAnswer(written, result); });
  }

  void SendAnswer(const absl::Status& status, const engine::Payload& result) {
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

  const std::unique_ptr<Codec<Request>> codec_;
  Done done_;
  wire::ParsedRequest<Request> parsed_;
  SharedRange shared_input_;   // until it was staged
  SharedRange shared_output_;  // until the answer was written there
  wire::AnswerForm form_;
  grpc::ByteBuffer answer_;
};

// --- DequantizeStream ---

class DequantizeStreamHandler final : public MethodHandler<DequantizeMethod> {
 public:
  DequantizeStreamHandler(const Env& env, transport::WriteCall* call, Done done)
      : MethodHandler(env, "DequantizeStream", call->request_context(),
                      std::make_unique<ApiCodec<DequantizeMethod>>(), std::move(done)),
        call_(call) {}

  void OnWritten(bool ok) override {
    RunGuarded([&]() -> absl::Status {
      if (!ok) return absl::CancelledError("the client is gone");
      if (next_row_ < end_row()) return SubmitChunk();
      EndRequest(absl::OkStatus());
      return absl::OkStatus();
    });
  }

 private:
  absl::Status Validate() const override {
    AWQD_RETURN_IF_ERROR(MethodHandler::Validate());
    if (!request().has_output_shared_memory()) return absl::OkStatus();
    return wire::FieldError("output_shared_memory", "a range",
                            "none: Dequantize writes an answer of any size there");
  }

  int64_t end_row() const { return job_.work.row_begin + job_.work.rows; }

  absl::Status RunJob(Job job) override {
    job_ = std::move(job);
    AWQD_ASSIGN_OR_RETURN(rows_per_chunk_,
                          wire::RowsPerChunk(job_, env_.options.chunk_bytes,
                                             env_.options.transport.max_send_message_bytes));
    const int64_t rows = std::min(rows_per_chunk_, job_.work.rows);
    AWQD_RETURN_IF_ERROR(lease_.Grow(
        wire::EncodedBytes(rows * job_.work.cols, job_.answer.dtype, job_.answer.encoding),
        "output"));
    ForgetRequest();
    next_row_ = job_.work.row_begin;
    return SubmitChunk();
  }

  // An empty answer is still one chunk, which carries shape and Execution.
  absl::Status SubmitChunk() {
    AWQD_RETURN_IF_ERROR(CheckStillWanted());
    auto chunk = std::make_unique<engine::DequantizeWork>(job_.work);
    chunk->row_begin = next_row_;
    chunk->rows = std::min(rows_per_chunk_, end_row() - next_row_);
    auto done = [this, self = shared_from_this(), rows = chunk->rows](
                    const absl::Status& status, const engine::Payload& result,
                    const engine::ExecutionReport& report) {
      if (ended()) return;
      RunGuarded([&]() -> absl::Status {
        AWQD_RETURN_IF_ERROR(status);
        AddReport(report, result.size());
        const int64_t begin = next_row_;
        next_row_ += rows;
        call_->StartWrite(EncodeChunk(begin, rows, result));
        return absl::OkStatus();
      });
    };
    return Submit(std::move(chunk), {.deadline = deadline_}, std::move(done));
  }

  // Times of all chunks are added up.
  void AddReport(const engine::ExecutionReport& chunk, int64_t bytes) {
    const int64_t queue_us = report_.queue_us + chunk.queue_us;
    const int64_t compute_us = report_.compute_us + chunk.compute_us;
    report_ = chunk;
    report_.queue_us = queue_us;
    report_.compute_us = compute_us;
    log_.bytes_out += bytes;
  }

  grpc::ByteBuffer EncodeChunk(int64_t begin, int64_t rows, const engine::Payload& result) {
    v1::DequantizeChunk chunk;
    chunk.mutable_rows()->set_begin(begin);
    chunk.mutable_rows()->set_end(begin + rows);
    chunk.mutable_columns()->set_begin(job_.work.col_begin);
    chunk.mutable_columns()->set_end(job_.work.col_begin + job_.work.cols);
    chunk.set_total_rows(job_.work.rows);
    chunk.set_total_columns(job_.work.cols);
    chunk.set_request_id(std::string(request_id()));
    if (next_row_ >= end_row()) wire::FillExecution(report_, chunk.mutable_execution());
    const wire::AnswerForm form = {job_.answer.dtype, {rows, job_.work.cols}, job_.answer.encoding};
    return wire::Encode(chunk, v1::DequantizeChunk::kOutputFieldNumber, {result, &form},
                        &env_.engine->staging());
  }

  void SendEnd(const absl::Status& status) override {
    job_.work.weight = nullptr;
    MethodHandler::SendEnd(status);
  }

  transport::WriteCall* const call_;
  Job job_;  // of all rows
  int64_t rows_per_chunk_ = 1;
  int64_t next_row_ = 0;
};

}  // namespace

template <typename Method>
std::shared_ptr<RequestHandler> HandlerOf<Method>::Make(
    const Env& env, absl::string_view name, transport::RequestContext call,
    std::unique_ptr<Codec<typename Method::Request>> codec, RequestHandler::Done done) {
  return std::make_shared<MethodHandler<Method>>(env, name, std::move(call), std::move(codec),
                                                 std::move(done));
}
template <typename Method>
absl::StatusOr<wire::AnswerForm> HandlerOf<Method>::Check(const Env& env,
                                                          typename Method::Request request,
                                                          int64_t input_bytes) {
  if constexpr (kHasActivations<typename Method::Request>) {
    AWQD_RETURN_IF_ERROR(wire::CheckRequest(request, input_bytes));
  } else {
    AWQD_RETURN_IF_ERROR(wire::CheckRequest(request));
  }
  AWQD_ASSIGN_OR_RETURN(auto weights, Method::Lookup::Find(env, request));
  AWQD_ASSIGN_OR_RETURN(typename Method::Job job,
                        BuildJob(env, &request, std::move(weights), input_bytes));
  return std::move(job.answer);
}
template struct HandlerOf<MatmulMethod>;
template struct HandlerOf<GroupedMatmulMethod>;
template struct HandlerOf<GatedMlpMethod>;
template struct HandlerOf<DequantizeMethod>;
template struct HandlerOf<QuantizeKvMethod>;
template struct HandlerOf<DequantizeKvMethod>;

std::shared_ptr<RequestHandler> MakeDequantizeStreamHandler(const Env& env,
                                                            transport::WriteCall* call,
                                                            RequestHandler::Done done) {
  return std::make_shared<DequantizeStreamHandler>(env, call, std::move(done));
}

}  // namespace awqd::services
