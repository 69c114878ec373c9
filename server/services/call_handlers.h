// A stream of requests with one answer each: many flows on one call.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/services/env.h"
#include "server/services/request_flow.h"
#include "server/transport/call_kinds.h"

namespace awqd::services {

// How a protocol has requests on a stream.
struct StreamProtocol {
  // The flow of a message. Takes nothing out of it.
  std::function<std::shared_ptr<RequestFlow>(const grpc::ByteBuffer& message,
                                             RequestFlow::Done done)>
      make_flow;
  // The answer to a request that failed; the stream goes on.
  std::function<grpc::ByteBuffer(absl::string_view request_id, const absl::Status& status)> error;
  // Whether answers come in the order of their requests, or as they are there.
  bool in_order = false;
};

// Owns itself until gRPC is done with the call. `env` outlives it.
void StartRequestStream(const Env& env, transport::StreamCall* call, StreamProtocol protocol);

}  // namespace awqd::services
