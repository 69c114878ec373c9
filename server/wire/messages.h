// Whole messages: parsed from what gRPC received, and parts that several answers share.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "awqd/v1/tensor.pb.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/engine/engine.h"

namespace awqd::wire {

// For services whose messages are small. INVALID_ARGUMENT naming the message, when the request is
// none; RESOURCE_EXHAUSTED, before it is parsed, over 64 KiB. Frees the request's bytes.
absl::Status Parse(grpc::ByteBuffer* request, google::protobuf::Message* out);

// What ParseMatmul and ParseWhole refused, for clients.
absl::Status DoesNotParse(int64_t bytes, const google::protobuf::Message& expected);

void FillExecution(const engine::ExecutionReport& report, v1::Execution* out);

}  // namespace awqd::wire
