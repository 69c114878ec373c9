// Inputs of the inference protocol -> tensors of awqd.v1.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "inference/grpc_service.pb.h"
#include "server/wire/local_message.h"
#include "server/wire/matmul_wire.h"

namespace awqd::wire::oip {

// A request as it was parsed: the contents of raw_input_contents(i) are the bytes raw[i], and the
// field is empty; or `raw` is empty and they are in the fields.
struct InferMessage {
  LocalMessage<inference::ModelInferRequest> request;
  WireRanges raw;

  int64_t raw_bytes(int i) const {
    return raw.empty() ? static_cast<int64_t>(request->raw_input_contents(i).size()) : raw[i].size;
  }
};

// Where the payloads of a ModelInferRequest lie.
inline constexpr PayloadPlace kRawInputs = {0, 7};

// Of a message that Sift let through. False when the bytes are no ModelInferRequest.
bool ParseInfer(Pieces pieces, InferMessage* out);

// An input that a model takes.
struct Slot {
  absl::string_view name;
  v1::Tensor* tensor;
  // The one that may stay where it is, in the message or in shared memory.
  bool payload = false;
};

// How the inputs came.
struct Inputs {
  std::optional<WireRange> cut;  // of the payload, which is left in the message
  int64_t copied_bytes = 0;      // of others, out of the message
  bool typed = false;            // the payload has contents
};

// Fills the tensors of the inputs that are there. A tensor in shared memory names its region, which
// is yet to be looked up. INVALID_ARGUMENT: an input that no slot has, or that comes twice, an
// element type that is none of awqd.v1, contents of another type than it, raw contents beside typed
// ones, or not one for each input. Shapes and sizes are checked with the request that they become.
absl::StatusOr<Inputs> TakeInputs(InferMessage* message, Pieces pieces,
                                  absl::Span<const Slot> slots);

}  // namespace awqd::wire::oip
