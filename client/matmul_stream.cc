// One bidirectional call: requests out, answers in as they complete.
#include "client/matmul_stream.h"

#include <optional>
#include <string>
#include <utility>

#include "client/convert.h"
#include "grpcpp/grpcpp.h"

namespace awqd::client {
namespace {

class StreamOverGrpc : public MatmulStream {
 public:
  StreamOverGrpc(v1::QuantizedInference::Stub& stub, const CallOptions& options) {
    Prepare(context_, options);
    stream_ = stub.QuantizedMatmulStream(&context_);
  }
  ~StreamOverGrpc() override {
    if (finished_) return;
    context_.TryCancel();
    // gRPC wants a stream read to its end and finished before it goes.
    v1::QuantizedMatmulResponse unread;
    while (stream_->Read(&unread)) {
    }
    stream_->Finish().IgnoreError();
  }

  absl::Status Send(MatmulCall call) override {
    const v1::QuantizedMatmulRequest request = ToRequest(std::move(call));
    if (absl::Status status = CheckSize(request); !status.ok()) return status;
    if (stream_->Write(request)) return absl::OkStatus();
    return absl::UnavailableError("the stream has ended; Receive tells why");
  }

  absl::Status CloseSend() override {
    if (stream_->WritesDone()) return absl::OkStatus();
    return absl::UnavailableError("the stream has ended; Receive tells why");
  }

  absl::StatusOr<std::optional<Answer>> Receive() override {
    v1::QuantizedMatmulResponse response;
    if (finished_ || !stream_->Read(&response)) return End();
    if (response.has_error()) {
      return Answer{response.request_id(),
                    absl::Status(static_cast<absl::StatusCode>(response.error().code()),
                                 response.error().message())};
    }
    std::string id = response.request_id();
    return Answer{std::move(id), ToResult(std::move(response))};
  }

  void Cancel() override { context_.TryCancel(); }

 private:
  absl::StatusOr<std::optional<Answer>> End() {
    if (!finished_) {
      finished_ = true;
      final_ = FromGrpc(stream_->Finish());
    }
    if (!final_.ok()) return final_;
    return std::nullopt;
  }

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::QuantizedMatmulRequest, v1::QuantizedMatmulResponse>>
      stream_;
  bool finished_ = false;
  absl::Status final_;
};

}  // namespace

std::unique_ptr<MatmulStream> OpenMatmulStream(v1::QuantizedInference::Stub& stub,
                                               const CallOptions& options) {
  return std::make_unique<StreamOverGrpc>(stub, options);
}

}  // namespace awqd::client
