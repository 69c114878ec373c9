// The QuantizedInference service: its methods, its stream of products, and DequantizeStream.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/services/call_handlers.h"
#include "server/services/env.h"
#include "server/services/method_handler.h"
#include "server/transport/call_loop.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

using security::Need;
using transport::StreamCall, transport::UnaryCall, transport::WriteCall;

std::string MethodPath(absl::string_view method) {
  return absl::StrCat("awqd.v1.QuantizedInference/", method);
}

template <typename Method>
void ServeUnary(const Env& env, absl::string_view method, int slots, transport::CallLoop* loop) {
  loop->Serve<UnaryCall>(MethodPath(method), Need::kInfer, slots, [&env, method](UnaryCall* call) {
    UnaryHandler<UnaryCall>::Start(call, [&](RequestHandler::Done done) {
      return std::make_shared<MethodHandler<Method>>(
          env, method, call, std::make_unique<ApiCodec<Method>>(), std::move(done));
    });
  });
}

// Answers carry the request's id and are sent as soon as they are there.
void HandleMatmulStream(const Env& env, StreamCall* call) {
  StreamProtocol protocol;
  protocol.make_handler = [&env, call](const grpc::ByteBuffer&, RequestHandler::Done done) {
    return std::make_shared<MethodHandler<MatmulMethod>>(env, "QuantizedMatmulStream", call,
                                                         std::make_unique<ApiCodec<MatmulMethod>>(),
                                                         std::move(done));
  };
  protocol.encode_error = [](absl::string_view request_id, const absl::Status& status) {
    v1::QuantizedMatmulResponse response;
    response.set_request_id(std::string(request_id));
    wire::ToProto(status, response.mutable_error());
    return wire::Encode(response);
  };
  HandleStream(env, call, std::move(protocol));
}

// Answers in chunks of rows. A chunk is computed only after the one before was written, so a client
// that reads slowly costs one chunk of memory.
class DequantizeStreamHandler final : public MethodHandler<DequantizeStreamMethod> {
 public:
  DequantizeStreamHandler(const Env& env, WriteCall* call, Done done)
      : MethodHandler(env, "DequantizeStream", call,
                      std::make_unique<ApiCodec<DequantizeStreamMethod>>(), std::move(done)),
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

  WriteCall* const call_;
  Job job_;  // of all rows
  int64_t rows_per_chunk_ = 1;
  int64_t next_row_ = 0;
};

void HandleDequantizeStream(const Env& env, WriteCall* call) {
  UnaryHandler<WriteCall>::Start(call, [&](RequestHandler::Done done) {
    return std::make_shared<DequantizeStreamHandler>(env, call, std::move(done));
  });
}

}  // namespace

void ServeInference(const Env& env, transport::CallLoop* loop) {
  // A burst of callers waits less when it need not be asked for one by one.
  constexpr int kMany = 64, kSome = 8;
  ServeUnary<MatmulMethod>(env, "QuantizedMatmul", kMany, loop);
  ServeUnary<GroupedMatmulMethod>(env, "GroupedQuantizedMatmul", kMany, loop);
  ServeUnary<GatedMlpMethod>(env, "GatedMlp", kMany, loop);
  loop->Serve<StreamCall>(MethodPath("QuantizedMatmulStream"), Need::kInfer, kSome,
                          [&env](StreamCall* call) { HandleMatmulStream(env, call); });
  ServeUnary<DequantizeMethod>(env, "Dequantize", kSome, loop);
  ServeUnary<QuantizeKvMethod>(env, "QuantizeKv", kSome, loop);
  ServeUnary<DequantizeKvMethod>(env, "DequantizeKv", kSome, loop);
  loop->Serve<WriteCall>(MethodPath("DequantizeStream"), Need::kInfer, kSome,
                         [&env](WriteCall* call) { HandleDequantizeStream(env, call); });
}

}  // namespace awqd::services
