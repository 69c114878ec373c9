// Field scan: the fields of a message that lies in pieces, and what the message will cost to parse.
//
// The generated parser makes an object of dozens of bytes from a field of two, and a number of
// eight bytes from a packed value of one. So each message is scanned before it is parsed. The scan
// steps over payloads without reading them.
// Encoding reference: protobuf.dev/programming-guides/encoding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/descriptor.h"

namespace awqd::wire {

// A message as gRPC received it: contiguous once the pieces are put together.
using Pieces = absl::Span<const absl::string_view>;

// A field behind its tag and, if it has one, its length.
struct Field {
  uint32_t number = 0;
  int64_t length_at = 0;  // of the length, when it has one
  int64_t bytes = -1;     // of the contents; -1 without a length
  int64_t end = 0;        // of the contents
};

// Reads one field after another. Costs the same for each field, whatever its size. The generated
// parser refuses all that Next refuses, except groups.
class FieldReader {
 public:
  static constexpr uint32_t kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;
  static constexpr int kMaxLength = 0x7fffffff;

  explicit FieldReader(Pieces pieces) : pieces_(pieces) { SkipEmpty(); }

  int64_t position() const { return position_; }

  // The next field, whose contents end at `limit` at the latest. False at the end of the pieces, at
  // a group, and at what is no field.
  bool Next(int64_t limit, Field* field) {
    uint64_t tag = 0, length = 0;
    if (!ReadVarint(5, &tag)) return false;
    tag &= 0xffffffffu;  // as the generated parser does
    if (tag >> 3 == 0) return false;
    field->number = static_cast<uint32_t>(tag >> 3);
    field->length_at = position_;
    field->bytes = -1;
    switch (tag & 7) {
      case kVarint:
        // A varint is read here, because its length is not known before.
        if (!ReadVarint(10, &length)) return false;
        field->end = position_;
        break;
      case kFixed64:
        field->end = position_ + 8;
        break;
      case kFixed32:
        field->end = position_ + 4;
        break;
      case kBytes:
        if (!ReadVarint(5, &length) || length > kMaxLength) return false;
        field->bytes = static_cast<int64_t>(length);
        field->end = position_ + field->bytes;
        break;
      default:
        return false;
    }
    return field->end <= limit;
  }

  // Goes behind the contents of the field that Next returned.
  bool SkipContents(const Field& field) {
    return VisitContents(field, [](absl::string_view) {});
  }

  // The same. Counts the varints of the contents by their last bytes, so it reads every byte.
  bool SkipCounting(const Field& field, int64_t* varints) {
    return VisitContents(field, [varints](absl::string_view run) {
      *varints += std::count_if(run.begin(), run.end(),
                                [](char c) { return static_cast<uint8_t>(c) < 0x80; });
    });
  }

 private:
  template <typename See>
  bool VisitContents(const Field& field, See see) {
    for (int64_t left = field.end - position_; left > 0;) {
      if (piece_ == pieces_.size()) return false;
      const auto here = static_cast<int64_t>(pieces_[piece_].size() - offset_);
      const int64_t step = std::min(left, here);
      see(pieces_[piece_].substr(offset_, static_cast<size_t>(step)));
      Advance(step);
      left -= step;
    }
    return true;
  }
  bool ReadVarint(int max_bytes, uint64_t* value) {
    *value = 0;
    for (int i = 0; i < max_bytes; ++i) {
      if (piece_ == pieces_.size()) return false;
      const auto byte = static_cast<uint8_t>(pieces_[piece_][offset_]);
      Advance(1);
      *value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if (byte < 0x80) return true;
    }
    return false;
  }
  void Advance(int64_t bytes) {
    offset_ += bytes;
    position_ += bytes;
    if (offset_ < pieces_[piece_].size()) return;
    ++piece_;
    offset_ = 0;
    SkipEmpty();
  }
  void SkipEmpty() {
    while (piece_ < pieces_.size() && pieces_[piece_].empty()) ++piece_;
  }

  const Pieces pieces_;
  size_t piece_ = 0;
  size_t offset_ = 0;
  int64_t position_ = 0;
};

// The most fields of a message, with those of the messages in it. A message with more is refused,
// and so is any group, which proto3 does not have. Each packed value is a field too, but all values
// of an IntValues, FloatValues or InferTensorContents are one.
inline constexpr int kMaxFields = 4096;

// Bytes of all pieces together.
int64_t SizeOfAll(Pieces pieces);

// Where the payload of a message is, which is not parsed: `field` of its message field `message`,
// or its own `field` where `message` is 0. Both are 0: the message has no payload.
struct PayloadPlace {
  int message = 0;
  int field = 0;
};
// activations.raw of every request for products.
inline constexpr PayloadPlace kActivationsRaw = {3, 3};

struct FieldScan {
  // False: the message is refused, or it is plainly no message of its type.
  bool passes = false;
  // About the bytes of the parsed message: its strings, and its packed values as the parser keeps
  // them.
  int64_t parsed_bytes = 0;
  // The field with too many packed values, as "activations.shape", and how many bytes these have.
  // Empty: something else was wrong.
  std::string crowded_field;
  int64_t crowded_bytes = 0;
};

// `payload` is cut out before the message is parsed (matmul_wire.h), so its bytes do not count.
FieldScan ScanFields(Pieces pieces, const google::protobuf::Descriptor& type,
                     PayloadPlace payload = {});

}  // namespace awqd::wire
