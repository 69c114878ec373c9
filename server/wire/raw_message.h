// Messages as gRPC has them: received ones in pieces, and answers whose payload is sent from where
// the device wrote it.
#pragma once

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/tensor.pb.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "server/engine/engine.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/validation.h"

namespace awqd::wire {

// The slices of one received message. Stays where it is: short slices hold their bytes themselves.
class RawMessage {
 public:
  RawMessage() = default;
  RawMessage(const RawMessage&) = delete;
  RawMessage& operator=(const RawMessage&) = delete;

  // Takes the bytes out of `buffer`. Called once.
  void TakeSlices(grpc::ByteBuffer* buffer);

  Pieces pieces() const { return pieces_; }
  int64_t size() const { return size_; }
  // Gives the memory back; pieces are then gone. The size stays.
  void Free() {
    pieces_.clear();
    slices_.clear();
    buffer_.Clear();
  }

 private:
  // Gone after the slices, so that the memory goes back within a call of gRPC's: a slice of 1.51.1
  // that gives memory back to a used-up quota on its own crashes (a null ExecCtx).
  grpc::ByteBuffer buffer_;
  absl::InlinedVector<grpc::Slice, 4> slices_;
  absl::InlinedVector<absl::string_view, 4> pieces_;
  int64_t size_ = 0;
};

// Parses a message of a service whose messages are small. INVALID_ARGUMENT naming the message, when
// the request is none; RESOURCE_EXHAUSTED, before it is parsed, over 64 KiB. Frees the request's
// bytes.
absl::Status Parse(grpc::ByteBuffer* request, google::protobuf::Message* out);

// The scan of a message that passes, or why it is refused: INVALID_ARGUMENT about "request", or
// about the shape that has too many dimensions.
absl::StatusOr<FieldScan> CheckFields(Pieces pieces, const google::protobuf::Descriptor& type,
                                      PayloadPlace payload = {});

// INVALID_ARGUMENT for a message of so many bytes that the parser refused.
absl::Status DoesNotParse(int64_t bytes, const google::protobuf::Descriptor& expected);

// From this size on a payload is sent from where it lies. Smaller ones are copied into the message,
// which costs less than a slice of their own, and gives the buffer that they share with the rest of
// their batch back at once.
inline constexpr int64_t kSendInPlaceBytes = 64 << 10;

// `message` on the wire.
grpc::ByteBuffer Encode(const google::protobuf::MessageLite& message);

// A result, and how it is encoded. `form` and `written` outlive it.
struct Answer {
  engine::Payload result;
  const AnswerForm* form = nullptr;
  // Where the result was written to, so that it is not sent; null: it is sent.
  const v1::SharedMemory* written = nullptr;

  // Whether the bytes are sent as they are.
  bool is_raw() const { return form->encoding != v1::VALUES && written == nullptr; }
};

// The bytes around a message: first `message`, unless it is null, then a field `field` that holds
// the inner message, unless it is 0.
struct Envelope {
  const google::protobuf::MessageLite* message = nullptr;
  int field = 0;
};

// `inner` on the wire, with the bytes of `raw`, unless that is null, as its last field `raw_field`,
// which `inner` leaves unset. A large payload is kept until gRPC has sent it; copies are counted in
// `staging`.
grpc::ByteBuffer EncodeInside(const Envelope& envelope, const google::protobuf::MessageLite& inner,
                              int raw_field, const engine::Payload* raw,
                              engine::StagingPool* staging);

// `message` on the wire, with the answer as its tensor field `field`, which `message` leaves unset.
// Copies and large payloads as above.
grpc::ByteBuffer Encode(const google::protobuf::MessageLite& message, int field,
                        const Answer& answer, engine::StagingPool* staging);

void FillExecution(const engine::ExecutionReport& report, v1::Execution* out);

}  // namespace awqd::wire
