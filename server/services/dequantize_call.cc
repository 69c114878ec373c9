// Dequantize (one block, one message) and DequantizeStream (row blocks, one at a time).
//
// A chunk is computed only after the one before it was written, so a client that reads slowly costs
// one chunk of memory.
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "kernels/base/status.h"
#include "server/services/flow.h"
#include "server/services/services.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"
#include "server/wire/validate.h"

namespace awqd::services {
namespace {

// What both methods do until blocks run: check, find the weight, resolve the ranges. The call is
// shared between gRPC, until OnDone, and what is still to come back.
class DequantizeBase : public Flow, public transport::Reactor {
 public:
  DequantizeBase(const Env& env, absl::string_view method, transport::ServerCall* call)
      : Flow(env, method, call) {}

  // Takes the bytes out of `message` and calls OnJob once, or Settle.
  void Start(transport::ServerCall* call, grpc::ByteBuffer* message) {
    self_ = shared_from_this();
    call->SetReactor(this);
    Try([&]() -> absl::Status {
      AWQD_RETURN_IF_ERROR(StillWanted());
      return Open(message, &request_, [this] { return OnMessage(); });
    });
  }
  void OnCancel() override { Cancel(); }
  void OnDone() override { const std::shared_ptr<Flow> last = std::move(self_); }

 protected:
  using BlockDone = std::function<absl::Status(const engine::Payload& result)>;

  ~DequantizeBase() = default;

  absl::Status OnMessage() {
    AWQD_RETURN_IF_ERROR(wire::CheckRequest(request_));
    AWQD_RETURN_IF_ERROR(OpenShared());
    return WithWeights<OneWeight>(request_,
                                  [this](WeightPtr weight) { return OnWeight(std::move(weight)); });
  }

  // What the answer will hold at a time counts until the call ends.
  absl::Status Reserve(int64_t rows) {
    return lease_.Grow(
        wire::EncodedBytes(rows * job_.work.cols, job_.work.out_dtype, job_.encoding), "output");
  }

  // The ranges are resolved: job_.work is the whole answer.
  virtual absl::Status OnJob() = 0;
  // Opens, or refuses, the shared memory that the request names.
  virtual absl::Status OpenShared() = 0;
  // Answers the call. Called once.
  virtual void Finish(const absl::Status& status) = 0;

  // Runs `rows` rows of the job from `row_begin` on, then `done` on a worker thread.
  absl::Status SubmitBlock(int64_t row_begin, int64_t rows, BlockDone done) {
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

  v1::DequantizeRequest request_;
  wire::DequantizeJob job_;

 private:
  absl::Status OnWeight(WeightPtr weight) {
    AWQD_ASSIGN_OR_RETURN(job_, wire::BuildDequantize(request_, weight->shape));
    job_.work.weight = std::move(weight);
    if (request_.has_packed()) request_.clear_packed();
    log_.tokens = job_.work.rows;
    return OnJob();
  }

  // Times of all blocks are added up.
  void Add(const engine::ExecutionReport& block, int64_t bytes) {
    const int64_t queue_us = report_.queue_us + block.queue_us;
    const int64_t compute_us = report_.compute_us + block.compute_us;
    report_ = block;
    report_.queue_us = queue_us;
    report_.compute_us = compute_us;
    log_.bytes_out += bytes;
  }

  void Log(const absl::Status& status) override {
    LogOf(request_.request_id(), OneWeight::Name(request_), status);
  }
  void End(const absl::Status& status) override {
    job_.work.weight = nullptr;
    Finish(status);
  }

  std::shared_ptr<Flow> self_;  // gRPC's share
};

// The answer in one message, or in shared memory.
class DequantizeCall final : public DequantizeBase {
 public:
  DequantizeCall(const Env& env, transport::UnaryCall* call)
      : DequantizeBase(env, "Dequantize", call), call_(call) {}

 private:
  absl::Status OnJob() override {
    AWQD_RETURN_IF_ERROR(
        wire::CheckFits(request_, job_, env_.options.transport.max_send_message_bytes));
    AWQD_RETURN_IF_ERROR(Reserve(job_.work.rows));
    return SubmitBlock(job_.work.row_begin, job_.work.rows, [this](const engine::Payload& result) {
      if (!shared_out_) return Answer(result, nullptr);
      if (slot_.cancelled()) return absl::CancelledError("the client cancelled the call");
      auto then = [this, self = shared_from_this(), result](const absl::Status& written) {
        Try([&]() -> absl::Status {
          AWQD_RETURN_IF_ERROR(written);
          return Answer(result, &request_.output_shared_memory());
        });
      };
      env_.shared_memory->Write(std::move(shared_out_), result, std::move(then));
      return absl::OkStatus();
    });
  }

  // `written`: where the result is, unless it is to be sent.
  absl::Status Answer(const engine::Payload& result, const v1::SharedMemory* written) {
    v1::DequantizeResponse response;
    wire::FillExecution(report_, response.mutable_execution());
    response.set_request_id(request_.request_id());
    answer_ = wire::Encode(
        response, v1::DequantizeResponse::kOutputFieldNumber,
        {result, job_.work.out_dtype, {{job_.work.rows, job_.work.cols}}, job_.encoding, written},
        &env_.engine->staging());
    Settle(absl::OkStatus());
    return absl::OkStatus();
  }
  void Finish(const absl::Status& status) override {
    status.ok() ? call_->Answer(answer_) : call_->Finish(wire::ToGrpc(status));
  }

  absl::Status OpenShared() override {
    if (!request_.has_output_shared_memory()) return absl::OkStatus();
    AWQD_ASSIGN_OR_RETURN(shared_out_, env_.shared_memory->Open(request_.output_shared_memory(),
                                                                SharedMemory::Access::kWrite,
                                                                "output_shared_memory"));
    return absl::OkStatus();
  }

  transport::UnaryCall* const call_;
  grpc::ByteBuffer answer_;
  SharedRange shared_out_;
};

class DequantizeStream final : public DequantizeBase {
 public:
  DequantizeStream(const Env& env, transport::WriteCall* call)
      : DequantizeBase(env, "DequantizeStream", call), call_(call) {}

  void OnWriteDone(bool ok) override {
    Try([&]() -> absl::Status {
      if (!ok) return absl::CancelledError("the client is gone");
      if (next_row_ < EndRow()) return SubmitNext();
      Settle(absl::OkStatus());
      return absl::OkStatus();
    });
  }

 private:
  int64_t EndRow() const { return job_.work.row_begin + job_.work.rows; }

  absl::Status OnJob() override {
    AWQD_ASSIGN_OR_RETURN(rows_per_chunk_,
                          wire::RowsPerChunk(job_, env_.options.chunk_bytes,
                                             env_.options.transport.max_send_message_bytes));
    next_row_ = job_.work.row_begin;
    AWQD_RETURN_IF_ERROR(Reserve(std::min(rows_per_chunk_, job_.work.rows)));
    return SubmitNext();
  }

  // An empty answer is still one chunk, which carries shape and Execution.
  absl::Status SubmitNext() {
    const int64_t begin = next_row_;
    const int64_t rows = std::min(rows_per_chunk_, EndRow() - begin);
    return SubmitBlock(begin, rows, [this, begin, rows](const engine::Payload& result) {
      next_row_ = begin + rows;
      call_->StartWrite(Chunk(begin, rows, result));
      return absl::OkStatus();
    });
  }

  grpc::ByteBuffer Chunk(int64_t begin, int64_t rows, const engine::Payload& result) {
    v1::DequantizeChunk chunk;
    chunk.mutable_rows()->set_begin(begin);
    chunk.mutable_rows()->set_end(begin + rows);
    chunk.mutable_columns()->set_begin(job_.work.col_begin);
    chunk.mutable_columns()->set_end(job_.work.col_begin + job_.work.cols);
    chunk.set_total_rows(job_.work.rows);
    chunk.set_total_columns(job_.work.cols);
    chunk.set_request_id(request_.request_id());
    if (next_row_ >= EndRow()) wire::FillExecution(report_, chunk.mutable_execution());
    return wire::Encode(chunk, v1::DequantizeChunk::kOutputFieldNumber,
                        {result, job_.work.out_dtype, {{rows, job_.work.cols}}, job_.encoding},
                        &env_.engine->staging());
  }

  void Finish(const absl::Status& status) override {
    call_->FinishIn(env_.gate->LastWords(), wire::ToGrpc(status));
  }

  absl::Status OpenShared() override {
    if (!request_.has_output_shared_memory()) return absl::OkStatus();
    return wire::FieldError("output_shared_memory", "a range",
                            "none: Dequantize writes an answer of any size there");
  }

  transport::WriteCall* const call_;
  int64_t rows_per_chunk_ = 1;
  int64_t next_row_ = 0;
};

}  // namespace

void StartDequantizeCall(const Env& env, transport::UnaryCall* call) {
  std::make_shared<DequantizeCall>(env, call)->Start(call, call->request());
}

void StartDequantizeStream(const Env& env, transport::WriteCall* call) {
  std::make_shared<DequantizeStream>(env, call)->Start(call, call->request());
}

}  // namespace awqd::services
