// Encoding reference: protobuf.dev/programming-guides/encoding. Fields may come in any order, so
// the payload goes last: the head is one slice.
#include "server/wire/raw_message.h"

#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "kernels/base/status.h"
#include "server/wire/matmul_wire.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"

namespace awqd::wire {
namespace {

using google::protobuf::io::CodedOutputStream;

// These messages hold a name or nothing. What a parser makes of one may be many times its size, and
// nothing counts it.
constexpr size_t kMaxBytes = 64 << 10;

constexpr uint32_t kLengthDelimited = 2;

uint32_t Tag(int field) { return static_cast<uint32_t>(field) << 3 | kLengthDelimited; }

// Tag and length of a field of so many bytes.
size_t HeadSize(int field, size_t bytes) {
  return CodedOutputStream::VarintSize32(Tag(field)) +
         CodedOutputStream::VarintSize32(static_cast<uint32_t>(bytes));
}
uint8_t* WriteHead(int field, size_t bytes, uint8_t* next) {
  next = CodedOutputStream::WriteVarint32ToArray(Tag(field), next);
  return CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(bytes), next);
}

void DropPayload(void* payload) { delete static_cast<engine::Payload*>(payload); }

// A slice that shares the payload's memory.
grpc::Slice ShareAsSlice(const engine::Payload& payload) {
  return grpc::Slice(payload.data(), static_cast<size_t>(payload.size()), DropPayload,
                     new engine::Payload(payload));
}

grpc::Slice NewSlice(size_t bytes) {
  return grpc::Slice(grpc_slice_malloc(bytes), grpc::Slice::STEAL_REF);
}

// The one user of a slice that was just made may write to it.
uint8_t* Writable(grpc::Slice& slice) { return const_cast<uint8_t*>(slice.begin()); }

}  // namespace

void RawMessage::TakeSlices(grpc::ByteBuffer* buffer) {
  if (!buffer->Valid()) return;
  buffer_.Swap(buffer);
  grpc::Slice single;
  if (buffer_.TrySingleSlice(&single).ok()) {
    slices_.push_back(std::move(single));
  } else {
    std::vector<grpc::Slice> slices;
    if (!buffer_.Dump(&slices).ok()) return;
    slices_.assign(std::make_move_iterator(slices.begin()), std::make_move_iterator(slices.end()));
  }
  pieces_.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) {
    pieces_.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
    size_ += static_cast<int64_t>(slice.size());
  }
}

absl::Status Parse(grpc::ByteBuffer* request, google::protobuf::Message* out) {
  if (const size_t bytes = request->Length(); bytes > kMaxBytes) {
    request->Clear();
    return WithField(absl::ResourceExhaustedError(
                         absl::StrCat("request: got ", bytes, " bytes, expected at most ",
                                      kMaxBytes, " for a ", out->GetTypeName())),
                     "request");
  }
  RawMessage raw;
  raw.TakeSlices(request);
  AWQD_ASSIGN_OR_RETURN(const FieldScan scan, CheckFields(raw.pieces(), *out->GetDescriptor()));
  if (ParseScanned(raw.pieces(), scan, out)) return absl::OkStatus();
  out->Clear();
  return DoesNotParse(raw.size(), *out->GetDescriptor());
}

absl::StatusOr<FieldScan> CheckFields(Pieces pieces, const google::protobuf::Descriptor& type,
                                      PayloadPlace payload) {
  FieldScan scan = ScanFields(pieces, type, payload);
  if (scan.passes) return scan;
  if (scan.crowded_field.empty()) return DoesNotParse(SizeOfAll(pieces), type);
  return FieldError(
      scan.crowded_field, absl::StrCat(scan.crowded_bytes, " bytes of values"),
      absl::StrCat("fewer: a request has at most ", kMaxFields, " fields, such values among them"));
}

absl::Status DoesNotParse(int64_t bytes, const google::protobuf::Descriptor& expected) {
  return FieldError("request", absl::StrCat(bytes, " bytes that do not parse"),
                    absl::StrCat("a serialized ", expected.full_name(), ", of at most ", kMaxFields,
                                 " fields and without groups"));
}

grpc::ByteBuffer Encode(const google::protobuf::MessageLite& message) {
  grpc::Slice slice = NewSlice(message.ByteSizeLong());
  (void)message.SerializeWithCachedSizesToArray(Writable(slice));
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer EncodeInside(const Envelope& envelope, const google::protobuf::MessageLite& inner,
                              int raw_field, const engine::Payload* raw,
                              engine::StagingPool* staging) {
  const auto raw_size = raw != nullptr ? static_cast<uint32_t>(raw->size()) : 0;
  size_t inner_size = inner.ByteSizeLong();
  if (raw != nullptr) inner_size += HeadSize(raw_field, raw_size) + raw_size;
  size_t head_size = inner_size - raw_size;
  if (envelope.message != nullptr) head_size += envelope.message->ByteSizeLong();
  if (envelope.field != 0) head_size += HeadSize(envelope.field, inner_size);
  const bool in_place = raw_size >= kSendInPlaceBytes;
  grpc::Slice head = NewSlice(head_size + (in_place ? 0 : raw_size));
  uint8_t* next = Writable(head);
  if (envelope.message != nullptr) next = envelope.message->SerializeWithCachedSizesToArray(next);
  if (envelope.field != 0) next = WriteHead(envelope.field, inner_size, next);
  next = inner.SerializeWithCachedSizesToArray(next);
  if (raw != nullptr) next = WriteHead(raw_field, raw_size, next);
  if (in_place) {
    const grpc::Slice slices[] = {head, ShareAsSlice(*raw)};
    return grpc::ByteBuffer(slices, 2);
  }
  if (raw_size > 0) std::memcpy(next, raw->data(), raw_size);
  staging->CountCopy(raw_size);
  return grpc::ByteBuffer(&head, 1);
}

grpc::ByteBuffer Encode(const google::protobuf::MessageLite& message, int field,
                        const Answer& answer, engine::StagingPool* staging) {
  v1::Tensor tensor;
  FillTensor(answer.result.view(), answer.form->dtype, answer.form->shape, answer.form->encoding,
             &tensor);
  if (answer.written != nullptr) {
    *tensor.mutable_shared_memory() = *answer.written;
    tensor.mutable_shared_memory()->set_size(answer.result.size());
  }
  return EncodeInside({&message, field}, tensor, v1::Tensor::kRawFieldNumber,
                      answer.is_raw() ? &answer.result : nullptr, staging);
}

void FillExecution(const engine::ExecutionReport& report, v1::Execution* out) {
  out->set_path(report.path == Path::kFused ? v1::FUSED : v1::DEQUANTIZE);
  out->set_kernel(report.kernel);
  out->set_device(report.device);
  out->set_batch_tokens(report.batch_tokens);
  out->set_batch_requests(report.batch_requests);
  out->set_queue_us(report.queue_us);
  out->set_compute_us(report.compute_us);
}

}  // namespace awqd::wire
