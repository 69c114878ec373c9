// Reads what a bench wants to know from a serialised QuantizedMatmulResponse, without its tensor.
#pragma once

#include <optional>

#include "awqd/v1/inference.pb.h"
#include "grpcpp/support/byte_buffer.h"

namespace awqd::bench {

struct ResponseFacts {
  int64_t output_bytes = 0;  // of field `output`, its header included
  v1::Execution execution;
};

// nullopt when the bytes are no such message. The tensor is skipped, not copied. `response` is
// left as it was.
std::optional<ResponseFacts> ReadResponse(grpc::ByteBuffer& response);

}  // namespace awqd::bench
