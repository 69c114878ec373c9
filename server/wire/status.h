// Errors on their way out: absl::Status -> grpc::Status, with google.rpc details for programs.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/inference.pb.h"
#include "grpcpp/support/status.h"

namespace awqd::wire {

// INVALID_ARGUMENT "<field>: got <got>, expected <expected>"; the field also travels as a
// google.rpc.BadRequest. `field` is a path of proto field names, "activations.shape".
absl::Status FieldError(absl::string_view field, absl::string_view got, absl::string_view expected);

// Marks a status made elsewhere with the request field that it is about.
absl::Status WithField(absl::Status status, absl::string_view field);

// The field that FieldError or WithField put in, or empty.
std::string FieldOf(const absl::Status& status);

grpc::StatusCode GrpcCode(absl::StatusCode code);

// The status as the client may see it: messages are cut to kMaxErrorBytes, because all trailers of
// a call must fit in 8 KiB. INTERNAL is replaced by an error id; the original text goes to the log
// with the same id (the one under kErrorIdPayload, when the status carries it, or a new one).
// Idempotent on its own results.
absl::Status ForClient(const absl::Status& status);

// ForClient with google.rpc.Status details in grpc-status-details-bin: the field, and when to try
// again (kernels/base/retry_delay.h).
grpc::Status ToGrpc(const absl::Status& status);

// ForClient, with the same details, for a request that failed on a stream which stays open.
void ToProto(const absl::Status& status, v1::RequestError* error);

inline constexpr size_t kMaxErrorBytes = 1024;

}  // namespace awqd::wire
