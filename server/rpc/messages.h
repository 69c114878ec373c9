// Whole messages of raw methods, for the services whose messages are small, and one error of all.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "server/rpc/call.h"

namespace awqd {

// INVALID_ARGUMENT naming the message, when the request is none; RESOURCE_EXHAUSTED, before it is
// parsed, over 64 KiB. Frees the request's bytes.
absl::Status Parse(grpc::ByteBuffer* request, google::protobuf::Message* out);

// What ParseMatmul and ParseWhole refused, for clients.
absl::Status DoesNotParse(int64_t bytes, const google::protobuf::Message& expected);

// Ends the call with the message, or with the error as clients may see it.
void Reply(UnaryCall* call, const absl::Status& status,
           const google::protobuf::MessageLite& message);

}  // namespace awqd
