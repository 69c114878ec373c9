// Field scan: the fields of a message that lies in pieces, what the message will cost to parse, and
// where its payloads are. In-place parsing: parses a request in pieces, and leaves its activations
// where they are.
//
// The generated parser makes an object of dozens of bytes from a field of two, and a number of
// eight bytes from a packed value of one. So each message is scanned before it is parsed. The scan
// steps over payloads without reading them.
//
// A request is a few header fields and one payload, activations.raw, which may be megabytes. The
// generated parser would copy it into a string. So the field scan notes the place of the payload;
// then an empty field is put in its stead, the lengths around it are mended, and the generated
// parser reads what is left. So every rule of Protocol Buffers holds (unknown fields, repeated and
// merged occurrences, the last member of a oneof, UTF-8) without being written down again.
// Encoding reference: protobuf.dev/programming-guides/encoding.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "awqd/v1/inference.pb.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

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
// Messages in each other, of which the API has at most 8: a type that holds itself must not let a
// client choose how deep the scan goes.
inline constexpr int kMaxDepth = 16;

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

// Bytes [begin, begin + size) of a message.
struct WireRange {
  int64_t begin = 0;
  int64_t size = 0;
};
using WireRanges = absl::InlinedVector<WireRange, 4>;

// Bytes [begin, end) of a message become a varint: 0, until SetVarint.
struct Edit {
  int64_t begin = 0;
  int64_t end = 0;
  std::array<char, 5> varint{};
  size_t varint_size = 1;

  void SetVarint(uint64_t value);
  int64_t saved() const { return end - begin - static_cast<int64_t>(varint_size); }
};

struct FieldScan {
  // False: the message is refused, or it is plainly no message of its type.
  bool passes = false;
  // About the bytes of the parsed message: its strings, and its packed values as the parser keeps
  // them.
  int64_t parsed_bytes = 0;
  // The payloads, in their order, and the edits that leave empty fields in their stead and mend the
  // lengths around them. Both are empty where there are too many for a sane client.
  WireRanges payloads;
  absl::InlinedVector<Edit, 4> edits;
  // The field with too many packed values, as "activations.shape", and how many bytes these have.
  // Empty: something else was wrong.
  std::string crowded_field;
  int64_t crowded_bytes = 0;
};

// `payload` is cut out before the message is parsed (matmul_wire.h), so its bytes do not count.
FieldScan ScanFields(Pieces pieces, const google::protobuf::Descriptor& type,
                     PayloadPlace payload = {});

// A request as it was parsed. When `cut` is set, activations().contents_case() is kRaw, the
// contents are the bytes of that range of the message, and the field itself is empty. Otherwise the
// request is as the generated parser made it.
template <typename Request>
struct ParsedRequest {
  Request request;
  std::optional<WireRange> cut;
  // Bytes of payloads that were copied out of the message into the request (another protocol).
  int64_t copied_bytes = 0;
  // How long the request may wait, from its arrival on.
  absl::Duration timeout = absl::InfiniteDuration();
};

// Parses a message that passed ScanFields, without the payloads that the scan has found. False when
// the bytes are no message of that type.
bool ParseScanned(Pieces pieces, const FieldScan& scan, google::protobuf::Message* out);

template <typename Request>
bool ParseScanned(Pieces pieces, const FieldScan& scan, ParsedRequest<Request>* out) {
  if (!ParseScanned(pieces, scan, &out->request)) return false;
  if constexpr (requires { out->request.activations(); }) {
    static_assert(int{Request::kActivationsFieldNumber} == kActivationsRaw.message &&
                  int{v1::Tensor::kRawFieldNumber} == kActivationsRaw.field);
    // Another member of the oneof may have come after it.
    const bool is_raw = out->request.activations().contents_case() == v1::Tensor::kRaw;
    if (is_raw && !scan.payloads.empty()) out->cut = scan.payloads.back();
  }
  return true;
}

// The bytes of the last string `field` of a message that will be parsed, and judged, later; empty
// when there is none of at most `max_bytes`, or the message is not plain.
std::string PeekBytes(Pieces pieces, int field, int64_t max_bytes);

// The same of a message that will not be parsed; empty too when it is not UTF-8.
std::string PeekString(Pieces pieces, int field, int64_t max_bytes);

// The most bytes of an id that is peeked at.
inline constexpr int64_t kMaxPeekedIdBytes = 256;

// Copies a range, which must lie within the pieces, to `out`.
void CopyRange(Pieces pieces, const WireRange& range, char* out);

}  // namespace awqd::wire
