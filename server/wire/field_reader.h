// FieldReader: the fields of a message that lies in pieces, one after another, payloads unread.
//
// Encoding reference: protobuf.dev/programming-guides/encoding.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

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

// Costs the same for each field, whatever its size. What Next refuses, the generated parser refuses
// as well, but for groups.
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
    if (!Varint(5, &tag)) return false;
    tag &= 0xffffffffu;  // as the generated parser does
    if (tag >> 3 == 0) return false;
    field->number = static_cast<uint32_t>(tag >> 3);
    field->length_at = position_;
    field->bytes = -1;
    switch (tag & 7) {
      case kVarint:
        // A varint is read here, because its length is not known before.
        if (!Varint(10, &length)) return false;
        field->end = position_;
        break;
      case kFixed64:
        field->end = position_ + 8;
        break;
      case kFixed32:
        field->end = position_ + 4;
        break;
      case kBytes:
        if (!Varint(5, &length) || length > kMaxLength) return false;
        field->bytes = static_cast<int64_t>(length);
        field->end = position_ + field->bytes;
        break;
      default:
        return false;
    }
    return field->end <= limit;
  }

  // Goes behind the contents of what Next returned.
  bool Pass(const Field& field) {
    return Walk(field, [](absl::string_view) {});
  }

  // The same, and counts the varints among them by their last bytes: reads every byte.
  bool PassCounting(const Field& field, int64_t* varints) {
    return Walk(field, [varints](absl::string_view run) {
      *varints += std::count_if(run.begin(), run.end(),
                                [](char c) { return static_cast<uint8_t>(c) < 0x80; });
    });
  }

 private:
  template <typename See>
  bool Walk(const Field& field, See see) {
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
  bool Varint(int max_bytes, uint64_t* value) {
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

}  // namespace awqd::wire
