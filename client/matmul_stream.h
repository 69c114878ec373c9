// MatmulStream over gRPC's synchronous stub.
#pragma once

#include <memory>

#include "absl/time/time.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "client/awqd_client.h"

namespace awqd::client {

// Opens one, with exactly the timeout of `options`. `stub` must outlive it.
std::unique_ptr<MatmulStream> OpenMatmulStream(v1::QuantizedInference::Stub& stub,
                                               const CallOptions& options);

}  // namespace awqd::client
