// DequantizeStream: row blocks, one at a time.
//
// A chunk is computed only after the one before it was written, so a client that reads slowly costs
// one chunk of memory.
#include <algorithm>
#include <memory>
#include <utility>

#include "kernels/base/status.h"
#include "server/services/methods.h"
#include "server/services/services.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "server/wire/validation.h"

namespace awqd::services {
namespace {

using Request = v1::DequantizeRequest;

// Shared between gRPC, until OnDone, and what is still to come back.
class DequantizeStream final : public DequantizeSteps, public transport::Reactor {
 public:
  DequantizeStream(const Env& env, transport::WriteCall* call)
      : DequantizeSteps(env, "DequantizeStream", call,
                        std::make_unique<ApiCodec<Request, v1::DequantizeResponse>>()),
        call_(call) {}

  void Run() {
    self_ = shared_from_this();
    call_->SetReactor(this);
    Start(call_->request());
  }
  void OnCancel() override { Cancel(); }
  void OnDone() override { const std::shared_ptr<Flow> last = std::move(self_); }

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

  void Finish(const absl::Status& status) override { call_->FinishOnceRead(wire::ToGrpc(status)); }

  absl::Status OpenShared() override {
    if (!request_.has_output_shared_memory()) return absl::OkStatus();
    return wire::FieldError("output_shared_memory", "a range",
                            "none: Dequantize writes an answer of any size there");
  }

  transport::WriteCall* const call_;
  std::shared_ptr<Flow> self_;  // gRPC's share
  int64_t rows_per_chunk_ = 1;
  int64_t next_row_ = 0;
};

}  // namespace

void StartDequantizeStream(const Env& env, transport::WriteCall* call) {
  std::make_shared<DequantizeStream>(env, call)->Run();
}

}  // namespace awqd::services
