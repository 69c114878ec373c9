// Admit, decode, check, find the weight, submit a block, encode it.
#include "server/services/methods.h"

#include <algorithm>
#include <utility>

#include "kernels/base/status.h"
#include "server/wire/raw_message.h"
#include "server/wire/tensor.h"

namespace awqd::services {

absl::string_view DequantizeSteps::request_id() const {
  const std::string& id = request_.request_id();
  if (static_cast<int64_t>(id.size()) > wire::kMaxRequestIdBytes) return "";
  return id;
}

absl::Status DequantizeSteps::Begin(grpc::ByteBuffer* message, const transport::CallGate* gate) {
  AWQD_RETURN_IF_ERROR(StillWanted());
  absl::Status admitted = Admit(message, codec_->type(), codec_->payload());
  if (admitted.ok() && gate != nullptr && !gate->open()) {
    admitted = absl::UnavailableError(transport::CallGate::Draining().error_message());
  }
  if (!admitted.ok()) {
    request_.set_request_id(codec_->PeekId(message_.pieces()));
    return admitted;
  }
  NoteHeld();
  return Parse([this] { return OnMessage(); });
}

absl::Status DequantizeSteps::OnMessage() {
  wire::ProductMessage<v1::DequantizeRequest> parsed;
  const absl::Status decoded = codec_->Decode(message_, &parsed);
  request_.Swap(&parsed.request);
  message_.Free();
  AWQD_RETURN_IF_ERROR(decoded);
  deadline_ = std::min(deadline_, started_ + parsed.timeout);
  lease_.ShrinkTo(std::max(message_.size(), parsed_bytes_));
  NoteHeld();
  AWQD_RETURN_IF_ERROR(wire::CheckRequest(request_));
  AWQD_RETURN_IF_ERROR(OpenShared());
  return WithWeights<OneWeight>(request_,
                                [this](WeightPtr weight) { return OnWeight(std::move(weight)); });
}

absl::Status DequantizeSteps::OnWeight(WeightPtr weight) {
  AWQD_RETURN_IF_ERROR(codec_->CheckFound());
  AWQD_ASSIGN_OR_RETURN(job_, wire::BuildDequantize(request_, weight->shape));
  job_.work.weight = std::move(weight);
  if (request_.has_packed()) request_.clear_packed();
  log_.tokens = job_.work.rows;
  return OnJob();
}

absl::Status DequantizeSteps::Reserve(int64_t rows) {
  AWQD_RETURN_IF_ERROR(lease_.Grow(
      wire::EncodedBytes(rows * job_.work.cols, job_.work.out_dtype, job_.encoding), "output"));
  NoteHeld();
  return absl::OkStatus();
}

absl::Status DequantizeSteps::SubmitBlock(int64_t row_begin, int64_t rows, BlockDone done) {
  AWQD_RETURN_IF_ERROR(StillWanted());
  auto block = std::make_unique<engine::DequantizeWork>(job_.work);
  block->row_begin = row_begin;
  block->rows = rows;
  auto on_result = [this, self = shared_from_this(), done = std::move(done)](
                       const absl::Status& status, const engine::Payload& result,
                       const engine::ExecutionReport& report) {
    if (settled()) return;
    Try([&]() -> absl::Status {
      AWQD_RETURN_IF_ERROR(status);
      Add(report, result.size());
      return done(result);
    });
  };
  return Submit(std::move(block), {.deadline = deadline_}, std::move(on_result));
}

// Times of all blocks are added up.
void DequantizeSteps::Add(const engine::ExecutionReport& block, int64_t bytes) {
  const int64_t queue_us = report_.queue_us + block.queue_us;
  const int64_t compute_us = report_.compute_us + block.compute_us;
  report_ = block;
  report_.queue_us = queue_us;
  report_.compute_us = compute_us;
  log_.bytes_out += bytes;
}

void DequantizeSteps::End(const absl::Status& status) {
  job_.work.weight = nullptr;
  if (!status.ok()) {
    lease_.ShrinkTo(0);
    NoteHeld();
  }
  Finish(status);
}

absl::Status DequantizeFlow::OnJob() {
  AWQD_RETURN_IF_ERROR(
      wire::CheckFits(request_, job_, env_.options.transport.max_send_message_bytes));
  AWQD_RETURN_IF_ERROR(Reserve(job_.work.rows));
  return SubmitBlock(job_.work.row_begin, job_.work.rows,
                     [this](const engine::Payload& result) { return OnResult(result); });
}

absl::Status DequantizeFlow::OnResult(const engine::Payload& result) {
  if (!shared_out_) return Answer(result, nullptr);
  // Memory that nobody waits for may have been put to another use.
  if (slot_.cancelled()) return absl::CancelledError("the client cancelled the call");
  auto then = [this, self = shared_from_this(), result](const absl::Status& written) {
    Try([&]() -> absl::Status {
      AWQD_RETURN_IF_ERROR(written);
      return Answer(result, &request_.output_shared_memory());
    });
  };
  env_.shared_memory->Write(std::move(shared_out_), result, std::move(then));
  return absl::OkStatus();
}

absl::Status DequantizeFlow::Answer(const engine::Payload& result,
                                    const v1::SharedMemory* written) {
  answer_ = codec_->Encode(
      request_.request_id(), report_,
      {result, job_.work.out_dtype, {{job_.work.rows, job_.work.cols}}, job_.encoding, written},
      &env_.engine->staging());
  lease_.ShrinkTo(static_cast<int64_t>(answer_.Length()));
  NoteHeld();
  Settle(absl::OkStatus());
  return absl::OkStatus();
}

absl::Status DequantizeFlow::OpenShared() {
  if (!request_.has_output_shared_memory()) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(
      shared_out_, env_.shared_memory->Open(request_.output_shared_memory(),
                                            SharedMemory::Access::kWrite, "output_shared_memory"));
  return absl::OkStatus();
}

void DequantizeFlow::Finish(const absl::Status& status) {
  if (!status.ok()) shared_out_ = SharedRange();
  // Moved out first: what it captures (the call, this flow) must not outlive the answer.
  const Done done = std::move(done_);
  done(status, std::move(answer_));
}

}  // namespace awqd::services
