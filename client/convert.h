// From the client's structs to requests and calls, from grpc::Status to absl::Status.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/inference.pb.h"
#include "client/awqd_client.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/status.h"

namespace awqd::client {

// Sets what a call takes from `options`: its deadline and whether it waits for a server.
void Prepare(grpc::ClientContext& context, const CallOptions& options);

// INVALID_ARGUMENT for a request of 2 GiB or more: Protocol Buffers count a message's bytes in an
// int, and gRPC ends the process when it cannot serialise a message.
absl::Status CheckSize(const google::protobuf::MessageLite& request);

// Code and message unchanged; the details as kErrorDetailsPayload.
absl::Status FromGrpc(const grpc::Status& status);
absl::Status FromProto(const v1::RequestError& error);
// The same of a call on a channel that takes messages up to `max_receive_bytes`: an answer that is
// longer is told in those words, where gRPC's could mean the server's limits as well.
absl::Status FromGrpc(const grpc::Status& status, int64_t max_receive_bytes);
// The same of a call that has one answer. DEADLINE_EXCEEDED for an answer whose status came before
// the deadline of `context` and its message did not: gRPC calls that UNIMPLEMENTED.
absl::Status FromGrpc(const grpc::ClientContext& context, const grpc::Status& status,
                      int64_t max_receive_bytes);

v1::QuantizedMatmulRequest ToRequest(MatmulCall call);
v1::GroupedQuantizedMatmulRequest ToRequest(GroupedMatmulCall call);
v1::GatedMlpRequest ToRequest(GatedMlpCall call);
v1::DequantizeRequest ToRequest(const DequantizeCall& call);

v1::QuantizeKvRequest ToRequest(QuantizeKvCall call);
v1::DequantizeKvRequest ToRequest(DequantizeKvCall call);
absl::StatusOr<QuantizeKvResult> ToResult(v1::QuantizeKvResponse response);

// INTERNAL when the server's tensor is malformed. One that lies in shared memory has no bytes.
absl::StatusOr<Tensor> ToOutput(v1::Tensor proto);
template <typename Response>
absl::StatusOr<MatmulResult> ToResult(Response response) {
  absl::StatusOr<Tensor> output = ToOutput(std::move(*response.mutable_output()));
  if (!output.ok()) return output.status();
  return MatmulResult{*std::move(output), response.execution(), response.request_id()};
}

// Bytes of the answer when the call alone tells (ranges with both ends, or an inline weight),
// otherwise -1.
int64_t KnownAnswerBytes(const DequantizeCall& call);

// Checks the messages (chunks) of one streamed answer: each must continue the one before and agree
// with it about the whole.
class ChunkOrder {
 public:
  // The block that the chunk carries. INTERNAL when it does not fit.
  absl::StatusOr<DequantizeBlock> Accept(v1::DequantizeChunk chunk);
  // INTERNAL when rows are missing at the end of the stream.
  absl::Status Finish() const;

 private:
  bool started_ = false;
  int64_t first_row_ = 0;  // of the answer, within the weight
  int64_t next_row_ = 0;   // expected, within the answer
  int64_t total_rows_ = 0;
  int64_t total_columns_ = 0;
  DType dtype_ = v1::DTYPE_UNSPECIFIED;
};

// The metadata awqd-weight, "MODEL/WEIGHT": a load balancer that hashes it sends all calls of a
// weight to one server. "" for a name that metadata cannot hold: one of more than 512 bytes, or one
// that is not printable ASCII.
std::string WeightKey(absl::string_view model, absl::string_view weight);

// The key of a request; "" also for one that names no weight.
template <typename Request>
std::string WeightKeyOf(const Request& request) {
  if constexpr (requires { request.weight().weight(); }) {
    return WeightKey(request.weight().model(), request.weight().weight());
  } else if constexpr (requires { request.mlp().path(); }) {
    return WeightKey(request.mlp().model(), request.mlp().path());
  } else {
    return "";
  }
}

// Adds a key that is not "" to a call that has not begun.
void AddWeightKey(const std::string& key, grpc::ClientContext& context);

}  // namespace awqd::client
