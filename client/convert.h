// From the client's structs to requests and calls, from grpc::Status to absl::Status.
#pragma once

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

// INVALID_ARGUMENT for a request that gRPC cannot serialise and would end the process for: Protocol
// Buffers count a message's bytes in an int.
absl::Status CheckSize(const google::protobuf::MessageLite& request);

// Code and message unchanged; the details as kErrorDetailsPayload.
absl::Status FromGrpc(const grpc::Status& status);

v1::QuantizedMatmulRequest ToRequest(MatmulCall call);
v1::DequantizeRequest ToRequest(const DequantizeCall& call);

// INTERNAL when the server's tensor is malformed. One that lies in shared memory has no bytes.
absl::StatusOr<Tensor> ToOutput(v1::Tensor proto);
absl::StatusOr<MatmulResult> ToResult(v1::QuantizedMatmulResponse response);

// Bytes of the answer when the call alone tells (ranges with both ends, or an inline weight),
// otherwise -1.
int64_t KnownAnswerBytes(const DequantizeCall& call);

// Follows the chunks of one answer: each must continue the one before and agree with its totals.
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

}  // namespace awqd::client
