// Inputs of the inference protocol -> tensors of awqd.v1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/arena.h"
#include "inference/grpc_service.pb.h"
#include "server/wire/matmul_wire.h"

namespace awqd::wire::oip {

// A message and, in the same object, memory for its strings, fields and messages. One whose parts
// fit allocates nothing and destroys nothing; more comes from the heap.
template <typename Message, size_t kBytes = 2048>
class LocalMessage {
 public:
  LocalMessage() = default;
  LocalMessage(const LocalMessage&) = delete;
  LocalMessage& operator=(const LocalMessage&) = delete;

  Message& operator*() { return message_; }

 private:
#if defined(AWQD_THREAD_SANITIZER)
  // Map fields of Protocol Buffers 3.21 have members for ThreadSanitizer that its library, which
  // was compiled without, takes for the arena.
  Message message_;
#else
  alignas(std::max_align_t) char block_[kBytes];
  google::protobuf::Arena arena_{block_, kBytes};  // starts in the block
  Message& message_ = *Message::default_instance().New(&arena_);
#endif
};

// Where the payloads of a ModelInferRequest lie.
inline constexpr PayloadPlace kRawInputs = {0, 7};

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

// Fills the tensors of the inputs that are there. `raw`: the entries of raw_input_contents where
// they were left in the message; empty: they are in the request. A tensor in shared memory names
// its region, which is yet to be looked up. INVALID_ARGUMENT: an input that no slot has, or that
// comes twice, an element type that is none of awqd.v1, contents of another type than it, raw
// contents beside typed ones, or not one for each input. Shapes and sizes are checked with the
// request that they become.
absl::StatusOr<Inputs> TakeInputs(inference::ModelInferRequest* request, const WireRanges& raw,
                                  Pieces pieces, absl::Span<const Slot> slots);

}  // namespace awqd::wire::oip
