// Goes where the generated parser would, and so no further than the messages that it knows.
#include "server/wire/field_scan.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "awqd/v1/inference.pb.h"
#include "inference/grpc_service.pb.h"

namespace awqd::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// A varint has at most so many bytes.
constexpr int64_t kVarintBytes = 10;
// The memory of a packed varint: the parser doubles its array until the values fit.
constexpr int64_t kBytesOfValue = 2 * static_cast<int64_t>(sizeof(int64_t));

bool IsVarint(const FieldDescriptor& field) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED64:
    case FieldDescriptor::TYPE_SFIXED32:
    case FieldDescriptor::TYPE_DOUBLE:
    case FieldDescriptor::TYPE_FLOAT:
      return false;
    default:
      return true;
  }
}

// The object that the parser makes from a message within the message, and the one that it makes
// from an unknown number. Each may have two bytes on the wire.
constexpr int64_t kBytesOfMessage = 128;
constexpr int64_t kBytesOfUnknown = 32;

class FieldScanner {
 public:
  FieldScanner(Pieces pieces, PayloadPlace payload) : reader_(pieces), payload_(payload) {}

  bool Scan(const Descriptor& type, int64_t end) {
    while (reader_.position() < end) {
      Field field;
      if (++fields_ > kMaxFields || !reader_.Next(end, &field)) return false;
      if (!ScanField(type, field)) return false;
    }
    return true;
  }

  FieldScan TakeResult() { return std::move(found_); }

 private:
  bool ScanField(const Descriptor& type, const Field& field) {
    const FieldDescriptor* known = type.FindFieldByNumber(static_cast<int>(field.number));
    if (known == nullptr) found_.parsed_bytes += kBytesOfUnknown;
    if (field.bytes < 0) return reader_.SkipContents(field);
    if (known != nullptr && known->message_type() != nullptr) {
      found_.parsed_bytes += kBytesOfMessage;
      const bool around_payload = ++depth_ == 1 && known->number() == payload_.message;
      in_payload_message_ |= around_payload;
      const bool fine = Scan(*known->message_type(), field.end);
      in_payload_message_ &= !around_payload;
      --depth_;
      if (!fine && !found_.crowded_field.empty()) {
        found_.crowded_field = absl::StrCat(known->name(), ".", found_.crowded_field);
      }
      return fine;
    }
    if (known != nullptr && known->is_packable()) return ScanPacked(type, *known, field);
    if (!IsPayload(field)) found_.parsed_bytes += field.bytes;
    return reader_.SkipContents(field);
  }

  bool IsPayload(const Field& field) const {
    if (static_cast<int>(field.number) != payload_.field) return false;
    return payload_.message == 0 ? depth_ == 0 : depth_ == 1 && in_payload_message_;
  }

  bool ScanPacked(const Descriptor& type, const FieldDescriptor& known, const Field& field) {
    const bool payload = &type == v1::IntValues::descriptor() ||
                         &type == v1::FloatValues::descriptor() ||
                         &type == inference::InferTensorContents::descriptor();
    if (!IsVarint(known)) {
      found_.parsed_bytes += field.bytes;
      return reader_.SkipContents(field);
    }
    const bool crowded = !payload && field.bytes > kVarintBytes * (kMaxFields - fields_);
    int64_t values = 0;
    if (!crowded) {
      if (!reader_.SkipCounting(field, &values)) return false;
      if (!payload) fields_ += static_cast<int>(values);
    }
    if (crowded || fields_ > kMaxFields) {
      found_.crowded_field = known.name();
      found_.crowded_bytes = field.bytes;
      return false;
    }
    found_.parsed_bytes += values * kBytesOfValue;
    return true;
  }

  FieldReader reader_;
  const PayloadPlace payload_;
  int fields_ = 0;
  int depth_ = 0;
  bool in_payload_message_ = false;
  FieldScan found_;
};

}  // namespace

int64_t SizeOfAll(Pieces pieces) {
  int64_t size = 0;
  for (absl::string_view piece : pieces) size += static_cast<int64_t>(piece.size());
  return size;
}

FieldScan ScanFields(Pieces pieces, const Descriptor& type, PayloadPlace payload) {
  FieldScanner scanner(pieces, payload);
  const bool passes = scanner.Scan(type, SizeOfAll(pieces));
  FieldScan found = scanner.TakeResult();
  found.passes = passes;
  return found;
}

}  // namespace awqd::wire
