// Whole messages of raw methods, for the services whose messages are small.
#pragma once

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "server/rpc/call.h"

namespace awqd {

// INVALID_ARGUMENT naming the message, when the request is none; RESOURCE_EXHAUSTED, before it is
// parsed, over 64 KiB. Frees the request's bytes.
absl::Status Parse(grpc::ByteBuffer* request, google::protobuf::MessageLite* out);

// Ends the call with the message, or with the error as clients may see it.
void Reply(UnaryCall* call, const absl::Status& status,
           const google::protobuf::MessageLite& message);

}  // namespace awqd
